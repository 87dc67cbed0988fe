"""The plan of an experiment: a list of its runs beside them, so that ``status`` also misses runs that never began."""

import json
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from steadymoe.bench.config.compose import Run
from steadymoe.bench.support import atomic_files


def remember(runs: Sequence[Run]) -> None:
    """Add ``runs`` to the plans of their experiments, ``results/runs/<experiment>/plan.json``; no entry is removed.

    A plan that cannot be read is kept beside the new one, as ``plan.json.damaged``.
    """
    for experiment in {run.config.experiment_name for run in runs}:
        ours = [run for run in runs if run.config.experiment_name == experiment]
        folder = Path(ours[0].config.results_dir).absolute() / "runs" / experiment
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".plan.lock"):
            before, why = read_plan(folder)
            if why is not None:
                (folder / "plan.json").replace(folder / "plan.json.damaged")
            plan = before | {str(run.folder.relative_to(folder)): run.command for run in ours}
            if plan != before:
                atomic_files.write_json(folder / "plan.json", plan)


def planned(experiment: Path) -> dict[str, str]:
    """Run folder → command, for every run that was ever requested below an experiment's folder."""
    return read_plan(experiment)[0]


def read_plan(experiment: Path) -> tuple[dict[str, str], str | None]:
    """The plan (run folder → command), and why it cannot be read, or None. Names that leave the folder are dropped."""
    try:
        plan = json.loads((experiment / "plan.json").read_text())
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
