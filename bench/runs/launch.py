"""Hand checked runs to a launcher of Hydra. A job gets the path of its run's checked config and composes nothing."""

import copy
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.types import HydraContext
from omegaconf import DictConfig

from steadymoe import conf
from steadymoe.bench.runs import overrides
from steadymoe.bench.runs.compose import ConfigError, Run
from steadymoe.bench.support import external, processes

# How often a sweep is relaunched by itself after one of its workers was killed.
_RELAUNCHES = 3
_LAUNCHER = "STEADYMOE_LAUNCHER"
_SECONDS_BETWEEN_LOOKS = 0.5


class _Jobs:
    """What launchers want from Hydra, without its composing: the config of a job, and callbacks that do nothing."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Return the config of one job: that of the sweep, and the job's path as its only override."""
        config = copy.deepcopy(master_config)
        config.hydra.overrides.task = sweep_overrides
        return config

    def on_job_start(self, **_: Any) -> None:
        """Do nothing."""

    on_job_end = on_job_start


def launch(runs: Sequence[Run], args: Sequence[str], multirun: bool) -> None:
    """Execute ``runs`` by the launcher that ``args`` choose, or one run in this process.

    If a worker is killed, joblib ends the others too; the sweep is then launched again, up to three times. Raises one
    of ``lost_job_errors()`` if a cluster has lost a job.
    """
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    os.environ[_LAUNCHER] = str(os.getpid())
    jobs: Any = _Jobs()
    context = HydraContext(config_loader=jobs, callbacks=jobs)
    config = overrides.settings(args)
    if not overrides.is_sweep(config.hydra, multirun):
        (run,) = runs
        _ = run_job(lambda _: execute(run), config, "hydra.run.dir", None, context).return_value
        return
    sweeps = Path(config.hydra.sweep.dir).absolute()
    sweeps.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="jobs-", dir=sweeps))
    paths = [folder / f"{number}.json" for number in range(len(runs))]
    for path, run in zip(paths, runs, strict=True):
        run.save(path)
    for left in range(_RELAUNCHES, -1, -1):
        try:
            _launch(paths, config, context)
            break
        except TerminatedWorkerError:
            further = "the sweep continues" if left else "too many times; rerun the command to resume"
            print(f"steadymoe: a worker was killed (out of memory?); {further}", file=sys.stderr)
    shutil.rmtree(folder)  # not after an error: a cluster may still begin jobs


def _launch(paths: Sequence[Path], config: DictConfig, context: HydraContext) -> None:
    launcher = Plugins.instance().instantiate_launcher(context, _job, config)
    batch = config.hydra.sweeper.max_batch_size or len(paths)
    for first in range(0, len(paths), batch):
        tasks = [[str(path)] for path in paths[first : first + batch]]
        for job in launcher.launch(tasks, initial_job_idx=first):
            _ = job.return_value  # raises what the job raised


def _job(_: DictConfig) -> str:
    _stop_with_launcher()
    hydra_config = HydraConfig.get()
    os.chdir(hydra_config.runtime.cwd)  # a Ray cluster's workers begin elsewhere, and results_dir may be relative
    external.make_importable()
    (path,) = hydra_config.overrides.task
    with processes.interruptible():
        return execute(Run.load(Path(path)))


def execute(run: Run) -> str:
    """Make one run in this process and return its status: ``runs.execute``, which imports torch and transformers."""
    from steadymoe.bench.runs import execute as of_run

    return of_run.execute(run)


def show(flags: Sequence[str]) -> None:
    """Let Hydra print what ``flags`` (``--help``, ``--cfg job``, …) ask for. It reads them from ``sys.argv`` alone."""
    overrides.add_rows()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # without it Hydra prints an error and exits
    sys.argv = ["steadymoe run", *flags]
    hydra.main(config_path=str(conf.ROOT.resolve()), config_name="config", version_base="1.3")(lambda _: None)()


def refuse_absent_cluster(args: Sequence[str]) -> None:
    """Raise ConfigError if ``args`` ask for Slurm and this machine has no Slurm."""
    if "hydra/launcher=submitit_slurm" in args and shutil.which("srun") is None:
        raise ConfigError("hydra/launcher=submitit_slurm: there is no srun here; run it where Slurm's commands are")


def lost_job_errors() -> tuple[type[Exception], ...]:
    """Return the errors by which submitit and Ray, if they are imported, report a job that did not reach its end."""
    errors = {"submitit.core.utils": ("UncompletedJobError", "FailedSubmissionError"), "ray.exceptions": ("RayError",)}
    return tuple(
        getattr(sys.modules[module], name) for module in errors if module in sys.modules for name in errors[module]
    )


def _stop_with_launcher() -> None:
    """Exit as soon as the launcher is gone, if the launcher started this process.

    A run then loses only the steps since its checkpoint. A process that a cluster's daemon started has another parent
    and goes on.
    """
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or os.getppid() != int(launcher):
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os._exit(1)  # safe at any moment: no file on disk is ever half written

    threading.Thread(target=watch, daemon=True).start()
