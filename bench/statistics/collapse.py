"""The rule of collapse: it decides from a run's ``steps`` table whether and when the run collapsed.

The rule counts in gradient updates. Runs with different numbers of updates per rollout are therefore judged after the
same amount of training. ``false_alarm_rate`` says how often the rule is wrong.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from steadymoe.bench.statistics.estimates import Estimate

# Columns that every run has at every step. A run ends when one of these numbers is not finite.
FINITE = ("reward", "loss", "entropy", "grad_norm")
# A window and a patience are at least this many rollouts, because a single bad rollout is no collapse.
LEAST_ROLLOUTS = 2
# The columns that ``judged`` adds to a table of runs.
JUDGED = {"collapsed_step": float, "collapsed_reason": str, "judged_until": int, "falling_since": float}


@dataclass(frozen=True)
class Rule:
    """The numbers of the rule: ``collapse`` of a run's config. ``conf/config.yaml`` explains each number."""

    window_updates: int = 80
    reward_fraction: float = 0.5
    patience_updates: int = 160
    least_reward: float = 0.1
    entropy_fraction: float = 0.05
    grad_norm_factor: float = 100.0
    solved_reward: float = 0.9

    def window(self, updates_per_rollout: int) -> int:
        """The number of rollouts that the average reward covers."""
        return max(LEAST_ROLLOUTS, math.ceil(self.window_updates / updates_per_rollout))

    def patience(self, updates_per_rollout: int) -> int:
        """The number of rollouts that a fall must last."""
        return max(LEAST_ROLLOUTS, math.ceil(self.patience_updates / updates_per_rollout))

    def text(self) -> str:
        """The rule as JSON; ``from_text`` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Rule":
        """The rule that ``text`` wrote."""
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


def detect(steps: pd.DataFrame, rule: Rule, updates_per_rollout: int) -> Collapse | None:
    """The first collapse of a run, or None; ``steps`` is its table. See ``judge``."""
    return judge(steps, rule, updates_per_rollout).collapse


def judge(steps: pd.DataFrame, rule: Rule, updates_per_rollout: int) -> Judgement:
    """The verdict of the rule on the run with the table ``steps``. A collapse is the first of these events:

    - *not finite*: reward, loss, entropy or gradient norm of a step is nan or infinite.
    - *reward*: reward falls as ``collapsed_at`` says.
    - *entropy*: entropy stays below ``entropy_fraction`` of its first value for ``patience`` steps in a row.
    - *gradient norm*: the norm stays above ``grad_norm_factor`` × the median of all earlier steps (at least
      ``patience`` of them) for ``patience`` steps in a row.

    Entropy and gradient norm are mere symptoms: entropy also falls when a task is learned, and a clipped gradient of
    any norm may do no harm. Their steps count only while the average reward of the last ``window`` steps lies below
    ``solved_reward`` and below the reward of the first step (the cold start wrote the responses of the first step).
    If several events happen at the same step, the first in this list is named.
    """
    window, patience = rule.window(updates_per_rollout), rule.patience(updates_per_rollout)
    steps = steps.sort_values("step")
    number = steps["step"].to_numpy()
    broken = ~np.isfinite(steps[list(FINITE)].to_numpy(float)).all(axis=1)
    collapses = [Collapse(int(number[broken][0]), "not finite")] if broken.any() else []
    sound = steps[~broken.cumsum().astype(bool)]  # the steps before the first broken step
    falls = _falls(sound, rule, window, patience)
    for reason, seen in falls.items():
        first = _first_streak(seen, patience)
        if first is not None:
            collapses.append(Collapse(int(number[first]), reason))
    until = len(steps) - patience + 1
    at_the_end = [len(seen) - _last_streak(seen) for seen in falls.values() if len(seen) and seen[-1]]
    return Judgement(
        collapse=min(collapses, key=lambda collapse: collapse.step, default=None),
        until=until if until >= window else 0,
        falling_since=int(number[min(at_the_end)]) if at_the_end and not collapses else None,
    )


def _falls(sound: pd.DataFrame, rule: Rule, window: int, patience: int) -> dict[str, np.ndarray]:
    """Event of ``judge`` → for each step whether it counts towards the event, in the order of ``judge``'s list."""
    reward = sound["reward"].to_numpy(float)
    if not len(reward):
        return {}
    average = sound["reward"].rolling(window, min_periods=1).mean().to_numpy()
    in_vain = (average < reward[0]) & (average < rule.solved_reward)
    entropy, norm = sound["entropy"], sound["grad_norm"]
    usual = norm.expanding(min_periods=patience).median().shift(1)
    # A median of 0, where most steps had no signal, is no norm to compare with.
    exploded = (norm > rule.grad_norm_factor * usual) & (usual > 0)
    return {
        "reward": _fallen(reward, window, rule.reward_fraction, rule.least_reward),
        "entropy": (entropy < rule.entropy_fraction * entropy.iloc[0]).to_numpy() & in_vain,
        "gradient norm": exploded.to_numpy() & in_vain,
    }


def collapsed_at(
    rewards: Sequence[float], window: int, reward_fraction: float, patience: int, least_reward: float
) -> int | None:
    """The step, counted from 1, at which reward collapsed, or None.

    A collapse is a streak of ``patience`` steps whose average reward over the last ``window`` steps lies below
    ``reward_fraction`` × the height; the streak's first step is returned. The height is the highest average so far or
    the reward of the first step, whichever is higher. (The first step's reward is the cold start's reward; the first
    average already contains ``window`` − 1 steps after updates.) A reward whose height is below ``least_reward``
    cannot collapse: a few lucky answers are no height to fall from.
    """
    first = _first_streak(_fallen(np.asarray(rewards, dtype=float), window, reward_fraction, least_reward), patience)
    return None if first is None else first + 1


def _fallen(rewards: np.ndarray, window: int, fraction: float, least: float) -> np.ndarray:
    """For each step, whether the average reward lies below ``fraction`` × the height of ``collapsed_at``."""
    if len(rewards) < window:
        return np.zeros(len(rewards), dtype=bool)
    averages = np.convolve(rewards, np.ones(window) / window, mode="valid")
    best = np.maximum(np.maximum.accumulate(averages), rewards[0])
    return np.append(np.zeros(window - 1, dtype=bool), (averages < fraction * best) & (best >= least))


def _first_streak(seen: np.ndarray, length: int) -> int | None:
    """The index at which the first streak of ``length`` true values begins; None without such a streak."""
    run_length = 0
    for index, is_seen in enumerate(seen):
        run_length = run_length + 1 if is_seen else 0
        if run_length == length:
            return index - length + 1
    return None


def _last_streak(seen: np.ndarray) -> int:
    """The length of the streak of true values at the end."""
    return int(np.logical_and.accumulate(seen[::-1]).sum())


def judged(runs: pd.DataFrame, steps: pd.DataFrame, rule: Rule | None = None) -> pd.DataFrame:
    """``runs`` with today's verdict on each run, in the columns collapsed_step, collapsed_reason, judged_until,
    falling_since (``Judgement``). The verdict that a run recorded when it ended does not matter.

    ``runs`` and ``steps`` are the tables of ``archive``. ``rule`` judges all runs; without ``rule``
    the numbers of a run's own config do (its column ``collapse_rule``). The event *not
    finite* is taken from the run's record, because archived tables drop numbers that are not finite.
    """
    chosen = steps[steps["metric"].isin(FINITE)]
    wide = chosen.pivot_table("value", ["arm", "seed", "step"], "metric", aggfunc="first", observed=True)
    # A metric that was not archived cannot break a rule.
    wide = wide.reindex(columns=list(FINITE)).groupby(level=["arm", "seed"]).ffill().fillna(1.0)
    of_runs = {key: table.reset_index() for key, table in wide.groupby(level=["arm", "seed"])}
    none = pd.DataFrame(columns=["step", *FINITE], dtype=float)
    rows = []
    for run in runs.to_dict("records"):
        table = of_runs.get((run["arm"], run["seed"]), none)
        if run.get("diverged_reason") == "not finite":
            table.loc[table["step"] == run["diverged_step"], "reward"] = np.nan
        judgement = judge(table, rule or Rule.from_text(run["collapse_rule"]), int(run["updates_per_rollout"]))
        collapse = judgement.collapse or Collapse(0, "")
        rows.append((collapse.step or np.nan, collapse.reason, judgement.until, judgement.falling_since or np.nan))
    verdicts = pd.DataFrame(rows, columns=list(JUDGED), index=runs.index)
    return runs.drop(columns=list(JUDGED), errors="ignore").join(verdicts.astype(JUDGED))


def false_alarm_rate(stable: Iterable[pd.DataFrame], rule: Rule, updates_per_rollout: int) -> "Estimate":
    """The share of stable runs that ``detect`` calls collapsed, with Clopper and Pearson's interval.

    ``stable`` holds the ``steps`` tables of runs that are known to be stable for another reason: a learning rate of 0,
    or a held-out accuracy that ended near its best (the rule does not read held-out accuracy).
    """
    from steadymoe.bench.statistics import estimates  # scipy takes half a second to import, and a run needs none of it

    flagged = [detect(steps, rule, updates_per_rollout) is not None for steps in stable]
    return estimates.share(sum(flagged), len(flagged))
