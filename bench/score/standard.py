"""The standard ``steadymoe-1``: the parts of a score, each with its runs and the number that decides it.

The numbers of a part stand in ``conf/experiment/standard_<part>.yaml``. They are frozen: a part with other numbers is
another version, and scores of two versions are never mixed (``kept.refuse_other_settings``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from steadymoe.bench.config import identity
from steadymoe.bench.score.arms import (
    AUDITED,
    CONTROLS,
    DRIFT,
    GRPO,
    GSPO,
    GSPO_R2,
    NARROW,
    OTHERS,
    PAPERS,
    PAPERS_R2,
    WIDE,
)
from steadymoe.bench.score.recorded import Arm, Audited, Recorded
from steadymoe.bench.statistics.estimates import Bounds

VERSION = "steadymoe-1"
# Algorithms that are run on the machine of whoever scores, so that differences can be taken seed by seed.
ANCHORS = ("grpo", "gspo")
FROZEN = ("algorithm=grpo", "optimizer.learning_rate=0.0")


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a score."""

    name: str
    asks: str
    """The question that it answers, for a page."""
    outcome: str
    """The number of a run or a checkpoint that decides it."""
    kind: Literal["runs", "audits"]
    seeds: tuple[int, ...]
    quick: tuple[int, ...]
    """The seeds of a first look."""
    recorded: Sequence[Arm | Audited]
    """The arms of the reference study that are recorded at this setting."""
    number: Callable[[Recorded, Arm | Audited], pd.Series]
    """The outcome by seed."""
    source: str
    """The experiment of the reference study whose records the anchors' numbers are."""
    bounds: Bounds | None = None
    """The ends of what the outcome can be; None if it has none."""
    words: tuple[str, ...] = ()
    """Further words of its runs; none in the standard."""

    @property
    def difference_bounds(self) -> Bounds | None:
        """The ends of what a difference of two outcomes can be."""
        return None if self.bounds is None else (self.bounds[0] - self.bounds[1], self.bounds[1] - self.bounds[0])

    @property
    def experiment(self) -> str:
        """The file of ``conf/experiment`` with its numbers."""
        return f"standard_{self.name}"

    @property
    def folder(self) -> str:
        """The name under which its runs are recorded."""
        return f"{VERSION}-{self.name}"


def _mean_reward(study: Recorded, arm: Arm | Audited) -> pd.Series:
    assert isinstance(arm, Arm)  # of a part of runs
    return study.mean_reward(arm)


def _usefulness(study: Recorded, loss: Arm | Audited) -> pd.Series:
    assert isinstance(loss, Audited)  # of a part of audits
    return study.gradient(loss, "usefulness", DRIFT)


# The audits that are recorded for the standard: the anchors and the core algorithms, with the numbers of their YAML.
_GRADIENTS = f"{VERSION}-gradient"
_AUDITED = {
    name: Audited(shown, _GRADIENTS, name)
    for name, shown in (
        *(("grpo", "GRPO"), ("gspo", "GSPO"), ("reinforce", "REINFORCE")),
        *(("vespo", "VESPO"), ("cispo", "CISPO"), ("sapo", "SAPO")),
    )
}
STABILITY = Part(
    "stability",
    "how much is learned on stale data, sixteen updates on one rollout",
    "mean reward",
    "runs",
    tuple(range(10)),
    (0, 1, 2),
    (
        *(GRPO, GSPO, *OTHERS.values(), *CONTROLS),
        *(PAPERS, PAPERS_R2, GSPO_R2, WIDE, NARROW),
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
    (*_AUDITED.values(), *(AUDITED[label] for label in ("grpo-paper", "gspo-grpo_band", "grpo-gspo_band"))),
    _usefulness,
    _GRADIENTS,
)
PARTS = (STABILITY, GRADIENT)


def changed_setting(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Return the first field that the standard fixes and that two configs differ in, ``key: theirs -> ours``, or None.

    An algorithm chooses its own section of the config, except ``algorithm.sampling``: dynamic sampling draws more
    rollouts for the same number of updates.
    """
    before, after = identity.flatten(theirs), identity.flatten(ours)
    for key in before | after:
        fixed = not key.startswith("algorithm.") or key.startswith("algorithm.sampling.")
        if fixed and identity.changes_numbers(key) and before.get(key) != after.get(key):
            return f"{key}: {before.get(key)} -> {after.get(key)}"
    return None
