"""The pipeline from a config to a report, and its Python API.

``plan`` checks runs, ``run`` makes one, ``results`` reads what was recorded and ``figure`` draws it. The command line
calls the same functions of the folders below. Importing this package is cheap: torch and the rest are imported when
a function is called.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steadymoe.bench.report.figures import DataFigure
    from steadymoe.bench.report.results import Results
    from steadymoe.bench.runs.compose import Run

__all__ = ["figure", "plan", "results", "run"]


def plan(*overrides: str) -> "list[Run]":
    """Return the runs that Hydra overrides select, each checked. Writes and trains nothing.

    A word with several values (``"seed=0,1"``) or an experiment (``"experiment=quickstart"``) gives several runs, as
    ``steadymoe run -m`` does. A ``Run`` has its ``config``, its ``axes`` (what differs from the named configs), its
    ``folder``, its ``config_hash``, and the ``command`` that makes it again.

    Raises ConfigError, in one line, for a wrong word or a config that cannot work.
    """
    from steadymoe.bench.runs import compose
    from steadymoe.bench.runs.overrides import swept

    return compose.plan(overrides, multirun=bool(swept(overrides)))


def run(planned: "Run") -> str:
    """Execute or resume one run in this process and return its status.

    The status is ``finished``; ``collapsed`` (by the rule); ``diverged`` (a number was not finite); ``failed`` (what
    went wrong is ``error`` in the ``run.json`` of its folder); or ``running`` if another process is at it. A run that
    has ended is left as it is. Sets the number of torch's threads to the config's ``threads``. A relative
    ``results_dir`` starts at the current folder, so do not change it between ``plan`` and ``run``.

    Raises ConfigError where the run's folder holds a run of another config, or an ended run of other code.
    """
    from steadymoe.bench.runs import execute, run_folder

    run_folder.refuse_others([planned])
    run_folder.add_to_plan([planned])
    return execute.execute(planned)


def results(experiment: str, folder: str | Path = "results") -> "Results":
    """Return what the ended runs of an experiment recorded below ``folder``.

    Four tables: ``runs`` has a row for each run, with its number as index: arm, algorithm, model, task, seed, status,
    its settings, its last evaluation, and its ``folder`` with the tables of every update and layer (a run that was kept
    without its folder has none). An arm is the runs that differ in their seed alone. ``steps`` (run, step, metric,
    value), ``evaluations`` (run, prompt, score; the last one) and ``histograms`` (run, metric, bin, count) name a run
    by its number; docs/metrics.md defines the metrics.

    ``wide("reward", "entropy")`` returns a row for each run and step, with the run's facts and a column for each
    metric; ``of(["grpo"])`` the runs of some arms.

    Raises NothingToReport if no run of the experiment has ended, and Damaged where kept tables cannot be read.
    """
    from steadymoe.bench.report import report_page

    (recorded,) = report_page.ended(Path(folder), experiment).values()
    return recorded


def figure(name: str, recorded: "Results", arms: "Sequence[str] | None" = None) -> "DataFigure":
    """Return one figure, by its id or name (``steadymoe report --list``), from what ``results`` returned.

    ``arms`` chooses some by name or by algorithm. The figure is matplotlib's (``.savefig("overview.png")``), and its
    ``numbers`` are a table of every number that it shows.

    Raises CannotDraw for an unknown name, and where the tables lack what the figure shows.
    """
    from steadymoe.bench.report import figures, report_page

    (spec,) = figures.find([name])
    return report_page.figure_of(spec, recorded.of(arms))
