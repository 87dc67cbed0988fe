"""What an experiment has asked for: a plan beside its runs, so that what never began is missed too.

Also what keeps a sweep's processes together: a worker whose launcher is gone stops at once.
"""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from steadymoe.bench.config.compose import ConfigError, Run
from steadymoe.bench.support import atomic_files

_LAUNCHER = "STEADYMOE_LAUNCHER"
_SECONDS_BETWEEN_LOOKS = 0.5


def remember(runs: Sequence[Run]) -> None:
    """Add ``runs`` to the plans of their experiments, ``results/runs/<experiment>/plan.json``; nothing is taken out.

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
    """The runs that were ever asked for below an experiment's folder, as run folder → command; none without a plan."""
    return read_plan(experiment)[0]


def read_plan(experiment: Path) -> tuple[dict[str, str], str | None]:
    """The same, and why the plan cannot be read where it cannot. A name that leaves the folder is no run's."""
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


def refuse_absent_cluster(words: Sequence[str]) -> None:
    """Raise ConfigError if ``words`` ask for Slurm where there is none."""
    if "hydra/launcher=submitit_slurm" in words and shutil.which("srun") is None:
        raise ConfigError("hydra/launcher=submitit_slurm: there is no srun here; run it where Slurm's commands are")


def lost() -> tuple[type[Exception], ...]:
    """The errors with which submitit and Ray, if they are in use, say that a job could not be brought to its end."""
    errors = {"submitit.core.utils": ("UncompletedJobError", "FailedSubmissionError"), "ray.exceptions": ("RayError",)}
    return tuple(
        getattr(sys.modules[module], name) for module in errors if module in sys.modules for name in errors[module]
    )


def begin() -> None:
    """Tell the processes that are started from here on who their launcher is."""
    os.environ[_LAUNCHER] = str(os.getpid())


def stop_with_launcher() -> None:
    """In a process that the launcher itself has started: exit as soon as it is gone.

    A run loses nothing by it but the steps since its checkpoint. Processes of a cluster's own daemons have another
    parent and go on.
    """
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or os.getppid() != int(launcher):
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os._exit(1)  # whatever the main thread is at: nothing on disk is ever half written

    threading.Thread(target=watch, daemon=True).start()
