"""What reward costs: steps, gradient updates, samples, tokens or seconds to reach it, and arms head to head."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from steadymoe.bench.stats import DIFFERENCE, Estimate, over_seeds

# Columns of ``costs``.
COSTS = ("step", "updates", "samples", "tokens", "seconds")
# Stages that a training run needs; probes and evaluations only measure it.
_SECONDS = ("rollout_seconds", "old_policy_seconds", "update_seconds")


@dataclass(frozen=True)
class Reached:
    """What a run spent until it first reached a reward, or in all if it never did."""

    cost: float
    reached: bool


@dataclass(frozen=True)
class Ratio:
    """How many times as much one arm needs as another; above 1 the other is the cheaper."""

    estimate: Estimate
    """Geometric mean over seeds; n counts those in which at least one of the two reached the reward."""
    bound: Literal["", "at least", "at most"]
    """What the estimate is, where in some seeds one of the two had not reached the reward when it ended."""
    neither: int
    """Seeds in which neither reached it; they are left out."""

    def __str__(self) -> str:
        shown = {"": "", "at least": "≥ ", "at most": "≤ "}[self.bound] + str(self.estimate)
        return f"{shown} (n = {self.estimate.n})"


def costs(steps: pd.DataFrame, updates_per_rollout: int, responses: int) -> pd.DataFrame:
    """What a run has spent after every step, from its ``steps`` table: the columns ``COSTS``, cumulative.

    ``samples`` and ``tokens`` are all that was sampled, dropped groups included; ``responses`` is that of each
    prompt. ``seconds`` are those of sampling, the old policy's forward and the updates, without measuring.
    """
    steps = steps.sort_values("step").reset_index(drop=True)
    return pd.DataFrame(
        {
            "step": steps["step"],
            "updates": steps["step"] * updates_per_rollout,
            "samples": steps["prompts_sampled"].cumsum() * responses,
            "tokens": steps["tokens_sampled"].cumsum(),
            "seconds": steps[list(_SECONDS)].sum(axis=1).cumsum(),
        }
    )


def cost_to_reward(reward: pd.Series, cost: pd.Series, target: float, window: int = 5) -> Reached:
    """The cost at the first step at which reward, averaged over the last ``window`` steps, is at least ``target``.

    ``reward`` and ``cost`` are in the order of the steps. A run that never gets there is right-censored at its whole
    cost. A run shorter than the window is averaged over what it has.
    """
    average = reward.rolling(min(window, len(reward))).mean().to_numpy()
    there = np.flatnonzero(average >= target)
    return Reached(float(cost.iloc[there[0] if len(there) else -1]), bool(len(there)))


def cost_ratio(a: dict[Any, Reached], b: dict[Any, Reached], level: float = 0.95) -> Ratio:
    """Cost of a over cost of b, seed by seed, as a geometric mean with the interval of ``stats.over_seeds``.

    Where one of the two never reached the reward its whole cost is entered, so the ratio is at least (a never did)
    or at most (b never did) what is shown, and ``bound`` says so; if both happen, in different seeds, there is no
    estimate. Seeds in which neither did say nothing and are counted in ``neither``.
    """
    shared = sorted(a.keys() & b.keys())
    told = [seed for seed in shared if a[seed].reached or b[seed].reached]
    neither = len(shared) - len(told)
    a_failed = any(not a[seed].reached for seed in told)
    b_failed = any(not b[seed].reached for seed in told)
    if a_failed and b_failed:
        return Ratio(Estimate(np.nan, np.nan, np.nan, len(told)), "", neither)
    ratio = over_seeds([a[seed].cost / b[seed].cost for seed in told], level=level, log=True)
    return Ratio(ratio, "at least" if a_failed else "at most" if b_failed else "", neither)


def win_rate(a: pd.DataFrame, b: pd.DataFrame, level: float = 0.95) -> Estimate:
    """Share of held-out prompts that a answers better less the share that b does, −1 to 1: mean over shared seeds.

    ``a`` and ``b`` are ``evaluations`` tables of one step each with a column seed: seed, prompt, score. A prompt that
    stands several times counts once, with its mean score. Raises ValueError where a seed's prompts differ.
    """
    scores = [frame.groupby(["seed", "prompt"])["score"].mean() for frame in (a, b)]
    seeds = sorted(set(a["seed"]) & set(b["seed"]))
    balances = []
    for seed in seeds:
        ours, theirs = (score.loc[seed] for score in scores)
        if not ours.index.equals(theirs.index):
            raise ValueError(f"the held-out prompts of seed {seed} differ between the arms")
        balances.append(float(np.sign(ours - theirs).mean()))
    return over_seeds(balances, level=level, bounds=DIFFERENCE)
