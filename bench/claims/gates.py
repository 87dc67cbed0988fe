"""Which validity gates a claim needs, and where each of them stands.

The gates of the settings are measured on seeds that no claim uses (``testbed``). One more gate is measured on the
audited checkpoints themselves: the updates before the audited weights must keep the reward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from steadymoe.bench.claims import testbed
from steadymoe.bench.claims.testbed import State
from steadymoe.bench.score.recorded import NotRun, Recorded
from steadymoe.bench.statistics.estimates import POSITIVE, over_seeds


class Need(NamedTuple):
    """A gate of a setting, or of the audits of an experiment."""

    gate: str
    setting: str

    def __str__(self) -> str:
        return f"{self.gate} ({self.setting})"


@dataclass(frozen=True)
class Standing:
    """Where a gate stands."""

    need: Need
    state: State
    seen: str
    """What was measured, a phrase."""


_LEARNS = Need("V1", "learning")
# The gates of docs/protocol.md, "Gates".
STRESS = (_LEARNS, *(Need(gate, "stale") for gate in ("V2", "V3", "V5", "V7")))
STRESS_AND_TWIN = (*STRESS, Need("V2 dense", "stale"))
MISMATCH = (_LEARNS, *(Need(gate, "mismatch") for gate in ("V4", "V7")))
# The MoE effect is present at a setting if one of these realism gates is at least as large.
PRESENT = {"R5": 2.0, "R8": 0.5}
# The share of the reward that the updates before an audit keep.
LEAST_KEPT = 0.8


def standings(study: Recorded) -> dict[Need, Standing]:
    """Every gate of the standard settings."""
    found = [
        Standing(Need(each.gate, each.setting), each.state, f"{each.number}: {each.seen}")
        for each in testbed.results(study)
    ]
    return {each.need: each for each in found}


def keeps(study: Recorded, experiment: str, k: int) -> Standing:
    """Whether the reward of fresh samples after ``k`` updates is at least ``LEAST_KEPT`` of the reward before."""
    need = Need("reward kept", experiment)
    try:
        kept = over_seeds(study.kept(experiment, k).tolist(), bounds=POSITIVE)
    except NotRun:
        return Standing(need, "not measured", "its audits have not run")
    state: State = "passed" if kept.mean >= LEAST_KEPT else "failed"
    return Standing(need, state, f"{kept} of the reward after {k} updates, n = {kept.n}")


def moe_effect(study: Recorded, setting: str) -> Standing:
    """Whether an MoE differs from a dense model at a setting: in ratio variance (R5), or by routing's share (R8)."""
    need = Need("R5 ≥ {R5:g} or R8 ≥ {R8:g}".format(**PRESENT), setting)
    rows = [each for each in testbed.realism(study) if each.setting == setting and each.gate in PRESENT]
    measured = {each.gate: each.number for each in rows if each.number.n}
    if not measured:
        return Standing(need, "not measured", "neither was recorded")
    state: State = "passed" if any(number.mean >= PRESENT[gate] for gate, number in measured.items()) else "failed"
    return Standing(need, state, ", ".join(f"{gate} is {number}" for gate, number in measured.items()))


def blocking(needs: Sequence[Need], gates: Mapping[Need, Standing]) -> list[Standing]:
    """The needed gates that are not passed, failed gates first. Raises KeyError for an unknown one."""
    found = [gates[need] for need in needs if gates[need].state != "passed"]
    return sorted(found, key=lambda gate: gate.state != "failed")
