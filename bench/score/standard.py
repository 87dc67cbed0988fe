"""The standard ``steadymoe-1``: the parts of a score, each with its runs and the outcome that decides it.

The numbers of a part stand in ``conf/experiment/standard_<part>.yaml``. They are frozen: a part with other numbers is
another version, and scores of two versions are never mixed (``baselines.refuse_other_settings``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from steadymoe.bench.config import identity
from steadymoe.bench.score import arms
from steadymoe.bench.score.recorded import Arm, Audited, Recorded
from steadymoe.bench.statistics.estimates import Bounds

VERSION = "steadymoe-1"
# Algorithms that run on the scorer's machine too, so that differences are paired by seed, with their labels.
ANCHORS = {"grpo": "GRPO", "gspo": "GSPO"}
FROZEN = ("algorithm=grpo", "optimizer.learning_rate=0.0")


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a score."""

    name: str
    question: str
    outcome: str
    """The number of a run or a checkpoint that decides it."""
    kind: Literal["runs", "audits"]
    seeds: tuple[int, ...]
    quick_seeds: tuple[int, ...]
    arms: Sequence[Arm | Audited]
    """The arms of the reference study that are recorded at this setting."""
    measure: Callable[[Recorded, Arm | Audited], pd.Series]
    """The outcome by seed."""
    source: str
    """The experiment of the reference study that holds the anchors."""
    bounds: Bounds | None = None
    """The range of the outcome; None if it is unbounded."""
    overrides: tuple[str, ...] = ()
    """Further overrides of its runs; none in the standard."""

    @property
    def difference_bounds(self) -> Bounds | None:
        """The range of a difference of two outcomes."""
        return None if self.bounds is None else (self.bounds[0] - self.bounds[1], self.bounds[1] - self.bounds[0])

    @property
    def experiment(self) -> str:
        """The file of ``conf/experiment`` with its numbers."""
        return f"standard_{self.name}"

    @property
    def folder(self) -> str:
        """The experiment name of its runs."""
        return f"{VERSION}-{self.name}"


def _mean_reward(recorded: Recorded, arm: Arm | Audited) -> pd.Series:
    assert isinstance(arm, Arm)  # of a part of runs
    return recorded.mean_reward(arm)


def _usefulness(recorded: Recorded, loss: Arm | Audited) -> pd.Series:
    assert isinstance(loss, Audited)  # of a part of audits
    return recorded.gradient(loss, "usefulness", arms.DRIFT)


# The audits that are recorded for the standard: the anchors and the core algorithms.
_GRADIENTS = f"{VERSION}-gradient"
_CORE = [Audited(name.upper(), _GRADIENTS, name) for name in ("grpo", "gspo", "reinforce", "vespo", "cispo", "sapo")]
STABILITY = Part(
    "stability",
    "how much is learned on stale data, sixteen updates on one rollout",
    "mean reward",
    "runs",
    tuple(range(10)),
    (0, 1, 2),
    (
        *(arms.GRPO, arms.GSPO, *arms.OTHERS.values(), *arms.CONTROLS),
        *(arms.PAPERS, arms.PAPERS_R2, arms.GSPO_R2, arms.WIDE, arms.NARROW),
    ),
    _mean_reward,
    "study",
    (0.0, 1.0),
)
GRADIENT = Part(
    "gradient",
    "how much of a mini-batch's gradient points where fresh samples point, in units of its noise",
    "usefulness",
    "audits",
    tuple(range(305, 315)),
    (305,),
    (*_CORE, *(arms.AUDITED[label] for label in ("grpo-paper", "gspo-grpo_band", "grpo-gspo_band"))),
    _usefulness,
    _GRADIENTS,
)
PARTS = (STABILITY, GRADIENT)


def changed_setting(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Return the first field fixed by the standard that two configs differ in, as ``key: theirs -> ours``, or None.

    An algorithm chooses its own section of the config, except ``algorithm.sampling``: dynamic sampling draws more
    rollouts for the same number of updates.
    """
    before, after = identity.flatten(theirs), identity.flatten(ours)
    for key in before | after:
        fixed = not key.startswith("algorithm.") or key.startswith("algorithm.sampling.")
        if fixed and identity.changes_numbers(key) and before.get(key) != after.get(key):
            return f"{key}: {before.get(key)} -> {after.get(key)}"
    return None
