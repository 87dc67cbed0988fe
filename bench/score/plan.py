"""What a score needs to run: the commands, runs and audits of each part, and their arms."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from steadymoe.bench.audit import plan as audits
from steadymoe.bench.check import request as check
from steadymoe.bench.config import compose, identity
from steadymoe.bench.score.recorded import Arm, Audited
from steadymoe.bench.score.standard import ANCHORS, FROZEN, STABILITY, Part

# The label of the scored algorithm in audits.
_OWN = "yours"


@dataclass(frozen=True)
class Plan:
    """One algorithm to score, and everything that is run for it."""

    overrides: tuple[str, ...]
    """The overrides that choose the algorithm and its numbers."""
    name: str
    """Its name in file names."""
    label: str
    """Its name in messages."""
    quick: bool = False
    _cached: dict[str, list[Any]] = field(default_factory=dict, compare=False)

    @property
    def own_label(self) -> str:
        """Its name in the tables of its own score."""
        return f"{self.label} (yours)"

    @property
    def anchors(self) -> tuple[str, ...]:
        """The algorithms that are run next to it."""
        return tuple(ANCHORS)[:1] if self.quick else tuple(ANCHORS)

    def seeds(self, part: Part) -> tuple[int, ...]:
        """The seeds that are run."""
        return part.quick_seeds if self.quick else part.seeds

    def commands(self, part: Part) -> list[list[str]]:
        """The arguments of each `steadymoe run` or `steadymoe audit`, the scored algorithm's first."""
        seeds = "seed=" + ",".join(map(str, self.seeds(part)))
        fixed = [f"experiment={part.experiment}", *part.overrides]
        if part.kind == "audits":
            own = f'+audit.arms.{_OWN}="{" ".join(self.overrides)}"'
            losses = f"audit.algorithms=[{','.join(self.anchors)}]"
            return [[*fixed, own, losses, f"experiment_name={self._audit_name(part)}", seeds]]
        anchors = [name for name in self.anchors if self.overrides != (f"algorithm={name}",)]
        others = [(f"algorithm={','.join(anchors)}",)] if anchors else []
        controls = [] if self.quick else [FROZEN]
        return [["-m", *fixed, *overrides, seeds] for overrides in (self.overrides, *others, *controls)]

    def runs(self, part: Part) -> list[list[compose.Run]]:
        """The runs of each command of a part of runs. Composed once."""
        if part.name not in self._cached:
            commands = self.commands(part)
            self._cached[part.name] = [compose.plan(command[1:], multirun=True) for command in commands]
        return self._cached[part.name]

    def audits(self, part: Part) -> list[audits.PlannedAudit]:
        """The audits of a part of audits. Composed once."""
        if part.name not in self._cached:
            self._cached[part.name] = [audit for command in self.commands(part) for audit in audits.plan(command)]
        return self._cached[part.name]

    def arms(self, part: Part) -> list[Arm | Audited]:
        """The arms of this machine: the scored algorithm, the anchors and, of runs, the frozen policy."""
        if part.kind == "audits":
            name = self._audit_name(part)
            return [
                Audited(self.own_label, name, _OWN),
                *(Audited(ANCHORS[each], name, each) for each in self.anchors),
            ]
        own, *others = self.runs(part)
        anchors = [_arm(ANCHORS[name], part, runs[0]) for name, runs in self.anchor_runs(part).items()]
        frozen = [] if self.quick else [_arm("frozen", part, others[-1][0])]
        return [_arm(self.own_label, part, own[0]), *anchors, *frozen]

    def anchor_runs(self, part: Part) -> dict[str, list[compose.Run]]:
        """The runs of each anchor in a part of runs; an anchor that is itself scored has its own runs."""
        own, *others = self.runs(part)
        anchors = [run for runs in (others if self.quick else others[:-1]) for run in runs]
        return {name: [run for run in anchors if run.choices["algorithm"] == name] or own for name in self.anchors}

    def _audit_name(self, part: Part) -> str:
        """The experiment name of the audits; a preset's @ is no letter of a name."""
        return f"{part.folder}{'-quick' if self.quick else ''}-{self.name.replace('@', '-at-')}"


def read(overrides: Sequence[str], quick: bool = False) -> Plan:
    """Plan the score of the algorithm that the overrides choose. Raises ConfigError."""
    algorithm = check.read(list(overrides))
    (run,) = compose.plan([f"experiment={STABILITY.experiment}", *STABILITY.overrides, *overrides, "seed=0"])
    axes = identity.axes_name({key: value for key, value in run.axes.items() if key.startswith("algorithm.")})
    if not axes:
        return Plan(tuple(overrides), algorithm.name, algorithm.name, quick)
    name = f"{algorithm.name}-{hashlib.sha256(axes.encode()).hexdigest()[:8]}"
    return Plan(tuple(overrides), name, f"{algorithm.name} {axes}", quick)


def _arm(label: str, part: Part, run: compose.Run) -> Arm:
    """The arm that a run of a part belongs to."""
    return Arm(label, part.folder, run.choices["algorithm"], run.axes)
