"""What ``steadymoe score`` is asked: the algorithm, and the commands and arms that its words mean for each part."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from steadymoe.bench.audit import request as audits
from steadymoe.bench.check import request as check
from steadymoe.bench.claims.study import Arm, Audited
from steadymoe.bench.config import compose, identity
from steadymoe.bench.scores.standard import ANCHORS, FROZEN, STABILITY, Part

FLAGS = ("--quick", "--dry", "--redo")
# The label of the scored algorithm in audits, and the names of the anchors among the recorded arms.
_YOURS = "yours"
SHOWN = {"grpo": "GRPO", "gspo": "GSPO"}


@dataclass(frozen=True)
class Asked:
    """What is scored, and how."""

    words: tuple[str, ...]
    """The words that name the algorithm and its numbers."""
    label: str
    """Its name in tables."""
    name: str
    """Its name in file names."""
    quick: bool
    redo: bool
    _planned: dict[str, list[Any]] = field(default_factory=dict, compare=False)

    @property
    def mine(self) -> str:
        """Its name in the tables of its own score."""
        return f"{self.label} (yours)"

    @property
    def anchors(self) -> tuple[str, ...]:
        """The algorithms that are run beside it."""
        return ANCHORS[:1] if self.quick else ANCHORS

    def seeds(self, part: Part) -> tuple[int, ...]:
        """The seeds that are run."""
        return part.quick if self.quick else part.seeds

    def commands(self, part: Part) -> list[list[str]]:
        """The words of each command that the part takes, the scored algorithm's first."""
        seeds = "seed=" + ",".join(map(str, self.seeds(part)))
        if part.kind == "audits":
            arm = f'+audit.arms.{_YOURS}="{" ".join(self.words)}"'
            losses = f"audit.algorithms=[{','.join(self.anchors)}]"
            name = f"experiment_name={self._audits(part)}"
            return [[f"experiment={part.experiment}", *part.words, arm, losses, name, seeds]]
        anchors = [name for name in self.anchors if self.words != (f"algorithm={name}",)]
        others = [(f"algorithm={','.join(anchors)}",)] if anchors else []
        each = [self.words, *others, *([] if self.quick else [FROZEN])]
        return [["-m", f"experiment={part.experiment}", *part.words, *words, seeds] for words in each]

    def runs(self, part: Part) -> list[list[compose.Run]]:
        """The runs of each command of a part of runs. They are planned once."""
        if part.name not in self._planned:
            commands = self.commands(part)
            self._planned[part.name] = [compose.plan(words[1:], multirun=True) for words in commands]
        return self._planned[part.name]

    def audits(self, part: Part) -> list[audits.Planned]:
        """The audits of a part of audits. They are planned once."""
        if part.name not in self._planned:
            self._planned[part.name] = [each for words in self.commands(part) for each in audits.plan(words)]
        return self._planned[part.name]

    def here(self, part: Part) -> list[Arm | Audited]:
        """The arms of this machine: the scored algorithm, the anchors and, of runs, the policy that never moves."""
        if part.kind == "audits":
            name = self._audits(part)
            return [Audited(self.mine, name, _YOURS), *(Audited(SHOWN[each], name, each) for each in self.anchors)]
        own, *others = self.runs(part)
        anchors = [_arm(SHOWN[name], part, runs[0]) for name, runs in self.anchor_runs(part).items()]
        frozen = [] if self.quick else [_arm("frozen", part, others[-1][0])]
        return [_arm(self.mine, part, own[0]), *anchors, *frozen]

    def anchor_runs(self, part: Part) -> dict[str, list[compose.Run]]:
        """The runs of each anchor in a part of runs; an anchor that is scored has its own runs."""
        own, *others = self.runs(part)
        beside = [run for runs in (others if self.quick else others[:-1]) for run in runs]
        return {name: [run for run in beside if run.choices["algorithm"] == name] or own for name in self.anchors}

    def _audits(self, part: Part) -> str:
        """The name under which the audits with the scored algorithm are recorded; a preset's @ is no letter of it."""
        return f"{part.folder}{'-quick' if self.quick else ''}-{self.name.replace('@', '-at-')}"


def read(words: Sequence[str]) -> Asked:
    """What the words ask for. Raises ConfigError."""
    named = tuple(word for word in words if word not in FLAGS)
    checked = check.read(list(named), "score")
    (run,) = compose.plan([f"experiment={STABILITY.experiment}", *STABILITY.words, *named, "seed=0"])
    axes = identity.axes_name({key: value for key, value in run.axes.items() if key.startswith("algorithm.")})
    label = f"{checked.name} {axes}" if axes else checked.name
    name = f"{checked.name}-{hashlib.sha256(axes.encode()).hexdigest()[:8]}" if axes else checked.name
    return Asked(named, label, name, "--quick" in words, "--redo" in words)


def _arm(label: str, part: Part, run: compose.Run) -> Arm:
    """The arm that a run of a part belongs to."""
    return Arm(label, part.folder, run.choices["algorithm"], run.axes)
