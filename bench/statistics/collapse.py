"""When a run counts as collapsed: one declared rule on its ``steps`` table, and how often it is wrong.

The rule counts in gradient updates, so that runs of another staleness are judged after as much training.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.bench.statistics.estimates import Estimate, share

# Columns that every run has at every step; a number here that is not finite ends a run.
FINITE = ("reward", "loss", "entropy", "grad_norm")
# A window and a patience are at least this many rollouts, however many updates these have: one bad one is no collapse.
LEAST_ROLLOUTS = 2
# What ``judged`` adds to a table of runs.
JUDGED = {"collapsed_step": float, "collapsed_reason": str, "judged_until": int, "falling_since": float}


@dataclass(frozen=True)
class Rule:
    """The numbers of the rule: ``collapse`` of a run's config, where each is explained."""

    window_updates: int = 80
    reward_fraction: float = 0.5
    patience_updates: int = 160
    least_reward: float = 0.1
    entropy_fraction: float = 0.05
    grad_norm_factor: float = 100.0
    solved_reward: float = 0.9

    def window(self, updates_per_rollout: int) -> int:
        """Rollouts over which reward is averaged."""
        return max(LEAST_ROLLOUTS, math.ceil(self.window_updates / updates_per_rollout))

    def patience(self, updates_per_rollout: int) -> int:
        """Rollouts that a fall must last."""
        return max(LEAST_ROLLOUTS, math.ceil(self.patience_updates / updates_per_rollout))

    @classmethod
    def of(cls, numbers: Mapping[str, Any]) -> "Rule":
        """The rule of a recorded ``collapse`` section; what it lacks, being older, is as it is today."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: number for name, number in numbers.items() if name in known})

    def text(self) -> str:
        """As ``from_text`` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Rule":
        """What ``text`` wrote."""
        return cls.of(json.loads(text))


@dataclass(frozen=True)
class Collapse:
    """The step, from 1, at which a run collapsed, and by what."""

    step: int
    reason: str
    """``reward``, ``entropy``, ``gradient norm`` or ``not finite``."""


@dataclass(frozen=True)
class Judgement:
    """What the rule says of a run."""

    collapse: Collapse | None
    until: int
    """The last step at which a collapse could begin and still be seen; 0 for a run too short to be judged."""
    falling_since: int | None
    """Of a run that did not collapse: the step from which it has fallen at its end, too late to be judged."""


def detect(steps: pd.DataFrame, rule: Rule, updates_per_rollout: int) -> Collapse | None:
    """The first collapse of a run, or None; ``steps`` is its table. See ``judge``."""
    return judge(steps, rule, updates_per_rollout).collapse


def judge(steps: pd.DataFrame, rule: Rule, updates_per_rollout: int) -> Judgement:
    """What the rule says of a run whose table is ``steps``. A collapse is the first of these:

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
    window, patience = rule.window(updates_per_rollout), rule.patience(updates_per_rollout)
    steps = steps.sort_values("step")
    number = steps["step"].to_numpy()
    broken = ~np.isfinite(steps[list(FINITE)].to_numpy(float)).all(axis=1)
    found = [Collapse(int(number[broken][0]), "not finite")] if broken.any() else []
    sound = steps[~broken.cumsum().astype(bool)]  # what comes before
    falls = _falls(sound, rule, window, patience)
    for reason, seen in falls.items():
        first = _first_streak(seen, patience)
        if first is not None:
            found.append(Collapse(int(number[first]), reason))
    until = len(steps) - patience + 1
    at_the_end = [len(seen) - _last_streak(seen) for seen in falls.values() if len(seen) and seen[-1]]
    return Judgement(
        collapse=min(found, key=lambda collapse: collapse.step, default=None),
        until=until if until >= window else 0,
        falling_since=int(number[min(at_the_end)]) if at_the_end and not found else None,
    )


def _falls(sound: pd.DataFrame, rule: Rule, window: int, patience: int) -> dict[str, np.ndarray]:
    """By rule the steps at which it is broken, in the order of the list of ``judge``."""
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
    """The step, from 1, at which reward collapsed, or None.

    Reward, averaged over the last ``window`` steps, lies below ``reward_fraction`` of the height for ``patience``
    steps in a row; the first of them is the step of the collapse. The height is the highest such average so far or,
    where that is higher, the first step's reward, which is the cold start's: the first average already holds what
    ``window`` − 1 steps of updates have done. What was never as high as ``least_reward`` cannot collapse: a handful
    of lucky answers is no height to fall from.
    """
    first = _first_streak(_fallen(np.asarray(rewards, dtype=float), window, reward_fraction, least_reward), patience)
    return None if first is None else first + 1


def _fallen(rewards: np.ndarray, window: int, fraction: float, least: float) -> np.ndarray:
    """At which steps reward lies below its height, as ``collapsed_at`` has it."""
    if len(rewards) < window:
        return np.zeros(len(rewards), dtype=bool)
    averages = np.convolve(rewards, np.ones(window) / window, mode="valid")
    best = np.maximum(np.maximum.accumulate(averages), rewards[0])
    return np.append(np.zeros(window - 1, dtype=bool), (averages < fraction * best) & (best >= least))


def _first_streak(seen: np.ndarray, length: int) -> int | None:
    """Where the first ``length`` true values in a row begin."""
    run_length = 0
    for index, is_seen in enumerate(seen):
        run_length = run_length + 1 if is_seen else 0
        if run_length == length:
            return index - length + 1
    return None


def _last_streak(seen: np.ndarray) -> int:
    """How many values at the end are true."""
    return int(np.logical_and.accumulate(seen[::-1]).sum())


def judged(runs: pd.DataFrame, steps: pd.DataFrame, rule: Rule | None = None) -> pd.DataFrame:
    """``runs`` with what the rule says of each today, whatever was recorded when it ended.

    ``runs`` and ``steps`` are those of ``collect``, kept ones too. Each run is judged by the rule of its own config
    (``collapse_rule``; today's numbers where there is none) or by ``rule`` where one is given. Added: collapsed_step,
    collapsed_reason, judged_until and falling_since (``Judgement``). A number that was not finite is taken from the
    record: no column that kept data have says it.
    """
    chosen = steps[steps["metric"].isin(FINITE)]
    wide = chosen.pivot_table("value", ["arm", "seed", "step"], "metric", aggfunc="first", observed=True)
    # What was not kept cannot break a rule.
    wide = wide.reindex(columns=list(FINITE)).groupby(level=["arm", "seed"]).ffill().fillna(1.0)
    of_runs = {key: table.reset_index() for key, table in wide.groupby(level=["arm", "seed"])}
    none = pd.DataFrame(columns=["step", *FINITE], dtype=float)
    rows = []
    for run in runs.to_dict("records"):
        own = Rule.from_text(text) if isinstance(text := run.get("collapse_rule"), str) else Rule()
        table = of_runs.get((run["arm"], run["seed"]), none)
        if run.get("diverged_reason") == "not finite":
            table.loc[table["step"] == run["diverged_step"], "reward"] = np.nan
        found = judge(table, rule or own, int(run["updates_per_rollout"]))
        collapse = found.collapse or Collapse(0, "")
        rows.append((collapse.step or np.nan, collapse.reason, found.until, found.falling_since or np.nan))
    made = pd.DataFrame(rows, columns=list(JUDGED), index=runs.index)
    return runs.drop(columns=list(JUDGED), errors="ignore").join(made.astype(JUDGED))


def false_alarm_rate(stable: Iterable[pd.DataFrame], rule: Rule, updates_per_rollout: int) -> Estimate:
    """The share of runs known to be stable, given as ``steps`` tables, that ``detect`` takes for collapsed.

    With Clopper and Pearson's interval. What is known to be stable must be known from elsewhere: runs at a
    learning rate of 0, or runs whose held-out accuracy, which the detector does not see, ended near its best.
    """
    flagged = [detect(steps, rule, updates_per_rollout) is not None for steps in stable]
    return share(sum(flagged), len(flagged))
