"""Decide from a run's ``steps`` table whether and when the run collapsed.

The rule counts in gradient updates, so runs with different staleness are judged after the same amount of training.
"""

from __future__ import annotations  # `steadymoe status` reads a rule, and waits for neither numpy nor pandas

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

# Columns that every run has at every step. A run ends when one of these numbers is not finite.
FINITE = ("reward", "loss", "entropy", "grad_norm")
# A window and a patience are at least this many rollouts, because a single bad rollout is no collapse.
MIN_ROLLOUTS = 2
# The columns that ``judged`` adds to a table of runs.
JUDGED = {"collapsed_step": float, "collapsed_reason": str, "judged_until": int, "falling_since": float}


@dataclass(frozen=True)
class Rule:
    """The numbers of the rule: ``collapse`` of a run's config (``schema.CollapseConfig``)."""

    window_updates: int = 80
    reward_fraction: float = 0.5
    patience_updates: int = 160
    least_reward: float = 0.1
    entropy_fraction: float = 0.05
    grad_norm_factor: float = 100.0
    solved_reward: float = 0.9

    def rollouts(self, updates_per_rollout: int) -> tuple[int, int]:
        """Return how many rollouts the average reward covers, and how many a fall must last."""
        window, patience = (math.ceil(n / updates_per_rollout) for n in (self.window_updates, self.patience_updates))
        return max(MIN_ROLLOUTS, window), max(MIN_ROLLOUTS, patience)

    def text(self) -> str:
        """Return the rule as JSON; ``from_text`` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Rule:
        """Read the rule that ``text`` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Collapse:
    """The step, counted from 1, at which a run collapsed, and the reason."""

    step: int
    reason: str
    """``reward``, ``entropy``, ``gradient norm`` or ``not finite``."""


@dataclass(frozen=True)
class Judgement:
    """The verdict of the rule on one run."""

    collapse: Collapse | None
    until: int
    """The last step at which a collapse could begin and still be seen; 0 if the run is too short to be judged."""
    falling_since: int | None
    """The first step of a fall that lasts to the run's end but is too short to count; None without such a fall."""


def judge(steps: pd.DataFrame, rule: Rule, updates_per_rollout: int) -> Judgement:
    """Apply the rule to the run with the table ``steps``. A collapse is the first of these events:

    - *not finite*: reward, loss, entropy or gradient norm of a step is nan or infinite.
    - *reward*: the average reward of the last ``window`` steps stays below ``reward_fraction`` × its height for
      ``patience`` steps in a row. The height is the highest such average so far or the reward of the first step (the
      cold start's), whichever is higher. A height below ``least_reward`` cannot collapse: it may be luck.
    - *entropy*: entropy stays below ``entropy_fraction`` of its first value for ``patience`` steps in a row.
    - *gradient norm*: the norm stays above ``grad_norm_factor`` × the median of all earlier steps (at least
      ``patience`` of them) for ``patience`` steps in a row.

    Entropy and gradient norm are mere symptoms: entropy also falls when a task is learned, and a clipped gradient of
    any norm may do no harm. Their steps count only while the average reward of the last ``window`` steps lies below
    ``solved_reward`` and below the reward of the first step. The step of a collapse is the first step of its streak. If
    several events happen at the same step, the first in this list is named.
    """
    steps = steps.sort_values("step")
    return _judge(steps["step"].to_numpy(), steps[list(FINITE)].to_numpy(float), rule, updates_per_rollout)


def _judge(number: np.ndarray, finite: np.ndarray, rule: Rule, updates_per_rollout: int) -> Judgement:
    """Return the verdict of ``judge`` from the steps, ascending, and the columns ``FINITE``."""
    import numpy as np

    window, patience = rule.rollouts(updates_per_rollout)
    broken = ~np.isfinite(finite).all(axis=1)
    sound = finite[: broken.argmax()] if broken.any() else finite
    collapses = [Collapse(int(number[len(sound)]), "not finite")] if broken.any() else []
    falling = []
    for reason, seen in _falls(sound, rule, window, patience).items():
        total = seen.cumsum()
        streak = total - np.maximum.accumulate(np.where(seen, 0, total))  # true values in a row up to each place
        if (streak == patience).any():
            collapses.append(Collapse(int(number[np.argmax(streak == patience) - patience + 1]), reason))
        elif streak[-1]:
            falling.append(int(number[len(seen) - streak[-1]]))
    until = len(number) - patience + 1
    return Judgement(
        collapse=min(collapses, key=lambda collapse: collapse.step, default=None),
        until=until if until >= window else 0,
        falling_since=min(falling) if falling and not collapses else None,
    )


def _falls(sound: np.ndarray, rule: Rule, window: int, patience: int) -> dict[str, np.ndarray]:
    """Event of ``judge`` → for each step whether it counts towards the event, in the order of ``judge``'s list."""
    import numpy as np
    import pandas as pd

    if not len(sound):
        return {}
    of = dict(zip(FINITE, sound.T, strict=True))
    reward, entropy, norm = of["reward"], of["entropy"], of["grad_norm"]
    low = np.zeros(len(reward), dtype=bool)
    if len(reward) >= window:
        averages = np.convolve(reward, np.ones(window) / window, mode="valid")
        height = np.maximum(np.maximum.accumulate(averages), reward[0])
        low[window - 1 :] = (averages < rule.reward_fraction * height) & (height >= rule.least_reward)
    average = pd.Series(reward).rolling(window, min_periods=1).mean().to_numpy()
    in_vain = (average < reward[0]) & (average < rule.solved_reward)
    usual = pd.Series(norm).expanding(min_periods=patience).median().shift(1).to_numpy()
    # A median of 0, where most steps had no signal, is no norm to compare with.
    exploded = (norm > rule.grad_norm_factor * usual) & (usual > 0)
    return {
        "reward": low,
        "entropy": (entropy < rule.entropy_fraction * entropy[0]) & in_vain,
        "gradient norm": exploded & in_vain,
    }


def judged(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Judge every run again: ``runs`` with the columns collapsed_step, collapsed_reason, judged_until, falling_since.

    ``runs`` and ``steps`` are those of ``Results``. Each run is judged by the numbers of its own config (its
    column ``collapse_rule``). The event *not finite* is taken from the run's record, because long tables drop
    numbers that are not finite.
    """
    import numpy as np
    import pandas as pd

    chosen = steps[steps["metric"].isin(FINITE)]
    wide = chosen.pivot(index=["run", "step"], columns="metric", values="value")
    # A metric that was not archived cannot break a rule.
    wide = wide.reindex(columns=list(FINITE)).groupby(level="run").ffill().fillna(1.0)
    number, finite = wide.index.get_level_values("step").to_numpy(), wide.to_numpy(float, copy=True)
    places = wide.groupby(level="run").indices
    rows = []
    for name, run in zip(runs.index, runs.to_dict("records"), strict=True):
        its = places.get(name, np.empty(0, int))
        if run.get("diverged_reason") == "not finite":
            finite[its[number[its] == run["diverged_step"]], FINITE.index("reward")] = np.nan
        rule = Rule.from_text(run["collapse_rule"])
        judgement = _judge(number[its], finite[its], rule, int(run["updates_per_rollout"]))
        collapse = judgement.collapse or Collapse(0, "")
        rows.append((collapse.step or np.nan, collapse.reason, judgement.until, judgement.falling_since or np.nan))
    verdicts = pd.DataFrame(rows, columns=list(JUDGED), index=runs.index)
    return runs.drop(columns=list(JUDGED), errors="ignore").join(verdicts.astype(JUDGED))
