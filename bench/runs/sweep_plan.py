"""The plan of an experiment: a list of its runs beside them, so that ``status`` also misses runs that never began.

``plan.json`` has the command of each run, ``sweeps.json`` the last command that asked for it together with others.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from steadymoe.bench.config.compose import Run
from steadymoe.bench.support import atomic_files

_PLAN, _SWEEPS = "plan.json", "sweeps.json"


def remember(runs: Sequence[Run], sweep: str | None = None) -> None:
    """Add ``runs`` to the plans of their experiments in ``results/runs/<experiment>/``; no entry is removed.

    ``sweep`` is the command that makes them all. A plan that cannot be read is kept beside the new one, as
    ``plan.json.damaged``.
    """
    for experiment in {run.config.experiment_name for run in runs}:
        ours = [run for run in runs if run.config.experiment_name == experiment]
        folder = Path(ours[0].config.results_dir).absolute() / "runs" / experiment
        folder.mkdir(parents=True, exist_ok=True)
        names = [str(run.folder.relative_to(folder)) for run in ours]
        with FileLock(folder / ".plan.lock"):
            _add(folder / _PLAN, dict(zip(names, (run.command for run in ours), strict=True)))
            if sweep is not None:
                _add(folder / _SWEEPS, dict.fromkeys(names, sweep))


def planned(experiment: Path) -> dict[str, str]:
    """Run folder → command, for every run that was ever requested below an experiment's folder."""
    return read_plan(experiment)[0]


def sweeps(experiment: Path) -> dict[str, str]:
    """Run folder → the last command that asked for this run and others; empty where the file cannot be read."""
    return _read(experiment / _SWEEPS)[0]


def read_plan(experiment: Path) -> tuple[dict[str, str], str | None]:
    """The plan (run folder → command), and why it cannot be read, or None. Names that leave the folder are dropped."""
    return _read(experiment / _PLAN)


def _add(file: Path, commands: dict[str, str]) -> None:
    before, why = _read(file)
    if why is not None:
        file.replace(file.with_name(f"{file.name}.damaged"))
    if (after := before | commands) != before:
        atomic_files.write_json(file, after)


def _read(file: Path) -> tuple[dict[str, str], str | None]:
    try:
        plan = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}, None
    except (OSError, ValueError, RecursionError) as error:
        return {}, " ".join(str(error).split())
    if not isinstance(plan, dict) or not all(isinstance(command, str) for command in plan.values()):
        return {}, "it is no list of runs and their commands"
    is_inside = {
        name: not Path(name).is_absolute() and ".." not in Path(name).parts and "\0" not in name for name in plan
    }
    return {name: command for name, command in plan.items() if is_inside[name]}, None
