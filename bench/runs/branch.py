"""A branch: a run that begins where another run, its trunk, was after some step.

``checkpoint_keep=20`` keeps the trunk's checkpoint of step 20; ``start_from=<folder of the trunk>@20`` begins there.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from steadymoe.bench.support import regular_files


@dataclass(frozen=True)
class Start:
    """The place where a branch begins."""

    trunk: Path
    """The folder of the run that it branches from."""
    step: int

    @property
    def checkpoint(self) -> Path:
        """The kept checkpoint."""
        return kept(self.trunk, self.step)

    @property
    def text(self) -> str:
        """What ``start_from`` holds."""
        return f"{self.trunk}@{self.step}"

    def axis(self, results: Path) -> str:
        """Return the start without its seed, relative to ``results`` if the trunk lies below it: one per arm."""
        below, whole = self.trunk, results.expanduser().resolve()
        if below.is_relative_to(whole):
            below = below.relative_to(whole)
        return re.sub(r"seed=\d+$", "seed=*", f"{below}") + f"@{self.step}"


def kept(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint that ``checkpoint_keep`` keeps in a run's folder."""
    return folder / f"checkpoint-{step}.safetensors"


def read(start_from: str) -> Start:
    """Return the place that ``start_from`` names, with an absolute path. Raises ValueError if it names none."""
    trunk, at, step = start_from.rpartition("@")
    if not (at and trunk and re.fullmatch("[1-9][0-9]{0,8}", step)):
        raise ValueError(f"start_from must be <folder of a run>@<step>; got {start_from!r}")
    return Start(Path(trunk).expanduser().resolve(), int(step))


def check(start: Start) -> None:
    """Raise ValueError, in one line, if there is no kept checkpoint where ``start`` says."""
    facts = start.trunk / "run.json"
    try:
        told = regular_files.read_json(facts)
        steps, command = int(told["config"]["steps"]), str(told["command"])
    except FileNotFoundError as error:
        raise ValueError(f"start_from: there is no run in {start.trunk}") from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"start_from: {facts} does not describe a run") from error
    if steps < start.step:
        raise ValueError(f"start_from: the run in {start.trunk} has {steps} steps, fewer than {start.step}")
    if not start.checkpoint.is_file():
        raise ValueError(
            f"start_from: no checkpoint of step {start.step} is kept in {start.trunk}; make one by adding "
            f"checkpoint_keep={start.step} --redo to its command, {shlex.quote(command)}"
        )
