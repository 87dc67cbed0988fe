"""When a run counts as collapsed: one declared rule on its ``steps`` table, and how often it is wrong."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from steadymoe.bench.stats import Estimate, share

# Columns that every run has at every step; a number here that is not finite ends a run.
FINITE = ("reward", "loss", "entropy", "grad_norm")


@dataclass(frozen=True)
class Collapse:
    """The step, from 1, at which a run collapsed, and by what."""

    step: int
    reason: str
    """``reward``, ``entropy``, ``gradient norm`` or ``not finite``."""


def detect(
    steps: pd.DataFrame,
    window: int,
    reward_fraction: float,
    patience: int,
    least_reward: float,
    entropy_fraction: float,
    grad_norm_factor: float,
    solved_reward: float,
) -> Collapse | None:
    """The first collapse of a run, or None; ``steps`` is its table, the numbers are ``collapse`` of its config.

    - *not finite*: reward, loss, entropy or gradient norm of a step is nan or infinite.
    - *reward*: ``collapsed_at``.
    - *entropy*: below ``entropy_fraction`` of the first step's for ``patience`` steps in a row.
    - *gradient norm*: above ``grad_norm_factor`` × the median of all earlier steps, at least ``patience`` of
      them, for ``patience`` steps in a row.

    The last two are symptoms: entropy also goes when a task is learned, and a clipped gradient of any norm may
    do no harm. Their steps count only while the run has nothing to show for it: reward, averaged over
    ``window`` steps, below both ``solved_reward`` and the first step's, whose responses are the cold start's.
    Of rules that strike at the same step the first of this list is named.
    """
    steps = steps.sort_values("step")
    number = steps["step"].to_numpy()
    broken = ~np.isfinite(steps[list(FINITE)].to_numpy(float)).all(axis=1)
    found = [Collapse(int(number[broken][0]), "not finite")] if broken.any() else []
    sound = steps[~broken.cumsum().astype(bool)]  # what comes before
    reward = sound["reward"].to_numpy(float)
    dropped = collapsed_at(reward.tolist(), window, reward_fraction, patience, least_reward)
    if dropped is not None:
        found.append(Collapse(int(number[dropped - 1]), "reward"))
    if len(sound):
        average = sound["reward"].rolling(window, min_periods=1).mean().to_numpy()
        in_vain = (average < reward[0]) & (average < solved_reward)
        entropy, norm = sound["entropy"], sound["grad_norm"]
        usual = norm.expanding(min_periods=patience).median().shift(1)
        # A median of 0, where most steps had no signal, is no norm to compare with.
        symptoms = {
            "entropy": entropy < entropy_fraction * entropy.iloc[0],
            "gradient norm": (norm > grad_norm_factor * usual) & (usual > 0),
        }
        for reason, seen in symptoms.items():
            first = _first_streak(seen.to_numpy() & in_vain, patience)
            if first is not None:
                found.append(Collapse(int(number[first]), reason))
    return min(found, key=lambda collapse: collapse.step, default=None)


def collapsed_at(
    rewards: Sequence[float], window: int, reward_fraction: float, patience: int, least_reward: float
) -> int | None:
    """The step, from 1, at which reward collapsed, or None.

    Reward, averaged over the last ``window`` steps, lies below ``reward_fraction`` of the height for ``patience``
    steps in a row; the first of them is the step of the collapse. The height is the highest such average so far or,
    where that is higher, the first step's reward, which is the cold start's: the first average already holds what
    ``window`` − 1 steps of updates have done. What was never as high as ``least_reward`` cannot collapse: a handful
    of lucky answers is no height to fall from.
    """
    if len(rewards) < window:
        return None
    averages = np.convolve(rewards, np.ones(window) / window, mode="valid")
    best = np.maximum(np.maximum.accumulate(averages), rewards[0])
    first = _first_streak((averages < reward_fraction * best) & (best >= least_reward), patience)
    return None if first is None else first + window


def _first_streak(seen: np.ndarray, length: int) -> int | None:
    """Where the first ``length`` true values in a row begin."""
    run_length = 0
    for index, is_seen in enumerate(seen):
        run_length = run_length + 1 if is_seen else 0
        if run_length == length:
            return index - length + 1
    return None


def false_alarm_rate(stable: Iterable[pd.DataFrame], **numbers: float) -> Estimate:
    """The share of runs known to be stable, given as ``steps`` tables, that ``detect`` takes for collapsed.

    With Clopper and Pearson's interval. What is known to be stable must be known from elsewhere: runs at a
    learning rate of 0, or runs whose held-out accuracy, which the detector does not see, ended near its best.
    """
    flagged = [detect(steps, **numbers) is not None for steps in stable]  # type: ignore[arg-type]
    return share(sum(flagged), len(flagged))
