"""What a score runs: the commands, runs and audits of an algorithm and of the anchors next to it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from steadymoe.bench.audit import plan as audits
from steadymoe.bench.check import command as check
from steadymoe.bench.runs import compose, identity
from steadymoe.bench.score.recorded import Arm, Audited
from steadymoe.bench.score.standard import ANCHORS, FROZEN, GRADIENT, STABILITY, Part

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

    @property
    def own_label(self) -> str:
        """Its name in the tables of its own score."""
        return f"{self.label} (yours)"

    @property
    def anchors(self) -> tuple[str, ...]:
        """The algorithms that are run next to it."""
        return tuple(ANCHORS)[:1] if self.quick else tuple(ANCHORS)

    def seeds(self, part: Part) -> tuple[int, ...]:
        """Return the seeds to run."""
        return part.quick_seeds if self.quick else part.seeds

    @property
    def run_commands(self) -> dict[str, list[str]]:
        """Arm → arguments of ``steadymoe run``: the scored algorithm, the anchors, the frozen policy."""
        arms = {self.own_label: self.overrides} | {ANCHORS[name]: (f"algorithm={name}",) for name in self.anchors}
        arms |= {} if self.quick else {"frozen": FROZEN}
        fixed = ["-m", f"experiment={STABILITY.experiment}", *STABILITY.overrides]
        return {arm: [*fixed, *overrides, self._seeds(STABILITY)] for arm, overrides in arms.items()}

    @cached_property
    def runs(self) -> dict[str, list[compose.Run]]:
        """Arm → its runs. An anchor that is itself scored has the runs of the scored algorithm."""
        return {arm: compose.plan(command[1:], multirun=True) for arm, command in self.run_commands.items()}

    @property
    def all_runs(self) -> list[compose.Run]:
        """Every run once."""
        return list({run.folder: run for runs in self.runs.values() for run in runs}.values())

    @property
    def audit_command(self) -> list[str]:
        """The arguments of ``steadymoe audit``, for all losses at once."""
        own = f'+audit.arms.{_OWN}="{" ".join(self.overrides)}"'
        losses = f"audit.algorithms=[{','.join(self.anchors)}]"
        fixed = [f"experiment={GRADIENT.experiment}", *GRADIENT.overrides]
        return [*fixed, own, losses, f"experiment_name={self._audit_name}", self._seeds(GRADIENT)]

    @cached_property
    def audits(self) -> list[audits.PlannedAudit]:
        """The audits, one for each seed."""
        return audits.plan(self.audit_command)

    def arms(self, part: Part) -> list[Arm | Audited]:
        """Return the arms of this machine: the scored algorithm, the anchors and, of runs, the frozen policy."""
        if part.one == "audit":
            losses = {self.own_label: _OWN} | {ANCHORS[name]: name for name in self.anchors}
            return [Audited(label, self._audit_name, loss) for label, loss in losses.items()]
        first = {label: runs[0] for label, runs in self.runs.items()}
        return [Arm(label, part.folder, run.choices["algorithm"], run.axes) for label, run in first.items()]

    @property
    def _audit_name(self) -> str:
        """The experiment name of the audits; the @ of a preset may not be part of it."""
        return f"{GRADIENT.folder}{'-quick' if self.quick else ''}-{self.name.replace('@', '-at-')}"

    def _seeds(self, part: Part) -> str:
        return "seed=" + ",".join(map(str, self.seeds(part)))


def read(overrides: Sequence[str], quick: bool = False) -> Plan:
    """Plan the score of the algorithm that the overrides choose. Raises ConfigError."""
    name = check.read(overrides).name
    (run,) = compose.plan([f"experiment={STABILITY.experiment}", *STABILITY.overrides, *overrides, "seed=0"])
    axes = identity.axes_name({key: value for key, value in run.axes.items() if key.startswith("algorithm.")})
    if not axes:
        return Plan(tuple(overrides), name, name, quick)
    return Plan(tuple(overrides), f"{name}-{hashlib.sha256(axes.encode()).hexdigest()[:8]}", f"{name} {axes}", quick)
