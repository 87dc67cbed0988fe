"""The folder of a run besides its record: its lock, what is refused there, where an old run goes, and the plan.

``plan.json`` of an experiment lists its planned runs, so that ``steadymoe status`` also shows those that never began.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from steadymoe.bench.runs import identity, provenance
from steadymoe.bench.support import atomic_files, regular_files
from steadymoe.bench.support.errors import ConfigError, UserError

if TYPE_CHECKING:
    from steadymoe.bench.runs.compose import Run

Fields = Mapping[str, type | tuple[type, ...]]
"""Dotted place in a file of facts → type."""

_PLAN = "plan.json"


class Damaged(UserError, ValueError):
    """A file on disk is damaged; the message is one line and names the file."""


def read(file: Path, fields: Fields) -> dict[str, Any] | None:
    """Return the facts in ``file``, or None without such a file. Raises Damaged unless they have all ``fields``."""
    try:
        facts = regular_files.read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise Damaged(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(facts, dict):
        raise Damaged(f"{file} must hold an object, got {type(facts).__name__}")
    wrong = next((place for place, kind in fields.items() if not is_a(at(facts, place), kind)), None)
    if wrong is not None:
        raise Damaged(f"{file} has no valid {wrong}")
    return facts


def is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Return whether ``value`` is of a type of JSON; true and false are not numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def at(facts: Any, place: str) -> Any:
    """Return the value at a dotted place; None without such a place."""
    for part in place.split("."):
        facts = facts.get(part) if isinstance(facts, dict) else None
    return facts


def refuse(run: "Run", before: Mapping[str, Any], may_redo: bool) -> None:
    """Raise ConfigError if the folder of ``run`` holds another config or, without ``may_redo``, was made by other code.

    ``before`` are the facts in its ``run.json``.
    """
    if before["config_hash"] != run.config_hash:
        found = identity.difference(before["config"], run.plain)
        raise ConfigError(
            f"{run.folder} holds results of another config (status {before['status']}; {found}); choose another "
            "experiment_name, or remove that folder"
        )
    if not may_redo and (code := provenance.difference(before).code) is not None:
        raise ConfigError(f"{run.folder} was made with {code}; add --redo, or choose another experiment_name")


def hold(folder: Path, seconds: float = 0) -> FileLock:
    """Return the folder's lock, for ``with``. Raises filelock.Timeout if another process has it for ``seconds``."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(atomic_files.replaceable(folder / ".lock"), timeout=seconds)


def is_held(folder: Path) -> bool:
    """Return whether a process holds the folder. Nothing is written."""
    lock = folder / ".lock"
    if lock.is_symlink() or not lock.is_file():
        return False  # FileLock would create the file, or empty what a link names
    try:
        with FileLock(lock, timeout=0):
            return False
    except (Timeout, OSError):  # OSError: no permission to take the lock, so the recorded status counts
        return True


def archive_old_run(folder: Path, results: Path, where: str) -> Path:
    """Move the content of ``folder``, except its lock, to a new folder below ``results/where``; return that folder."""
    below = folder.relative_to(results.absolute() / "runs")
    number, place = 1, regular_files.folder(results.absolute(), where, *below.parts)
    while (place / str(number)).exists():
        number += 1
    (place / str(number)).mkdir()
    for path in sorted(folder.iterdir(), key=lambda path: path.name != "run.json"):  # without it the rest is no run
        if path.name != ".lock":
            path.replace(place / str(number) / path.name)
    return place / str(number)


def add_to_plan(runs: Sequence["Run"], sweep: str | None = None) -> None:
    """Add ``runs`` to the plans of their experiments, ``results/runs/<experiment>/plan.json``; no entry is removed.

    A plan has a command for each run: the last ``sweep``, which makes all of ``runs``, or else the run's own. One that
    cannot be read is kept next to the new one, as ``plan.json.damaged``.
    """
    for experiment in {run.config.experiment_name for run in runs}:
        ours = [run for run in runs if run.config.experiment_name == experiment]
        folder = regular_files.folder(Path(ours[0].config.results_dir).absolute(), "runs", experiment)
        plan = folder / _PLAN
        with FileLock(atomic_files.replaceable(folder / ".plan.lock")):
            before, why = planned(folder)
            if why is not None:
                plan.replace(plan.with_name(f"{_PLAN}.damaged"))
            commands = {str(run.folder.relative_to(folder)): sweep or run.command for run in ours}
            after = before | commands if sweep else commands | before
            if after != before:
                atomic_files.write_json(plan, after)


def planned(experiment: Path) -> tuple[dict[str, str], str | None]:
    """Return run folder → command for every run ever planned below ``experiment``, and why the plan is unreadable.

    Names that lead out of the experiment's folder are dropped.
    """
    file = experiment / _PLAN
    try:
        commands = read(file, {}) or {}
    except Damaged as error:
        return {}, str(error)
    if not all(isinstance(command, str) for command in commands.values()):
        return {}, f"{file} is not a list of runs and their commands"
    inside = (name for name in commands if not Path(name).is_absolute() and ".." not in Path(name).parts)
    return {name: commands[name] for name in inside if "\0" not in name}, None
