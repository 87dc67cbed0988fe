"""The records of an experiment as four tables, read from its run folders or from an archive of them.

Training writes ``results/runs/<experiment>/``. ``keep`` archives it as ``results/data/<experiment>/``: small enough to
be committed, and enough for ``steadymoe report`` and ``steadymoe figures``.
"""

from functools import partial
from pathlib import Path

import pandas as pd
import pyarrow as pa

from steadymoe.bench.measurement import columns
from steadymoe.bench.report import collect
from steadymoe.bench.runs import record
from steadymoe.bench.runs.damage import Damaged
from steadymoe.bench.statistics import collapse
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.text import all_visible

_TABLES = ("runs", "steps", "histograms", "evaluations")


def load(results: Path, experiment: str, foreign: bool = False) -> dict[str, pd.DataFrame]:
    """The tables ``runs``, ``steps``, ``histograms`` and ``evaluations`` of ``collect``, for the runs that ended.

    Runs of other trainers, whose column ``origin`` names the trainer, are left out unless they are asked for
    (``foreign``): a claim or a board must never hold one by accident.

    ``runs`` has the recorded status and the verdict of today's rule of collapse (``collapse.judged``). The tables come
    from ``runs/`` if a run has ended there, else from the archive in ``data/``; they are empty without either, and for
    an unknown ``experiment``. Raises Damaged if a table cannot be read.
    """
    is_there = experiment in experiments(results)
    runs = collect.runs(results, experiment) if is_there else collect.none()
    ended = runs[runs["status"].isin(record.ENDED)]
    folder = results / "data" / experiment
    if is_there and ended.empty and folder.is_dir():
        kept = {name: all_visible(read_kept(folder / f"{name}.parquet")) for name in _TABLES}
        if not foreign and "origin" in kept["runs"]:
            kept["runs"] = kept["runs"][kept["runs"]["origin"] == ""]
            ours = set(kept["runs"]["arm"])  # an arm has one trainer: it is one of the arm's axes
            kept |= {name: kept[name][kept[name]["arm"].isin(ours)] for name in _TABLES}
        return kept | {"runs": collapse.judged(kept["runs"], kept["steps"])}
    if not foreign and not ended.empty:
        ended = ended[ended["origin"] == ""]
    steps = collect.steps(ended)
    return {
        "runs": ended if ended.empty else collapse.judged(ended, steps),
        "steps": steps,
        "histograms": collect.histograms(ended),
        "evaluations": collect.evaluations(ended),
    }


def read_kept(path: Path) -> pd.DataFrame:
    """A table of an archive. Raises Damaged if it cannot be read."""
    try:
        return pd.read_parquet(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def experiments(results: Path) -> list[str]:
    """The names of the experiments below ``runs/`` and ``data/``, sorted."""
    folders = [*(results / "runs").glob("*"), *(results / "data").glob("*")]
    return sorted({folder.name for folder in folders if folder.is_dir()})


def keep(tables: dict[str, pd.DataFrame], experiment: str, to: Path) -> list[Path]:
    """Write the tables of ``load`` to ``to/data/<experiment>/``, in place of older files; return the files.

    Of the steps only the metrics that ``columns.kept`` names. Returned: the files written.
    """
    tables = dict(tables)
    tables["runs"] = tables["runs"].drop(columns=["folder", "axes_values", "numbers"], errors="ignore")
    tables["steps"] = tables["steps"][tables["steps"]["metric"].isin(columns.kept())]
    folder = to / "data" / experiment
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name in _TABLES:
        path = folder / f"{name}.parquet"
        table = tables[name].reset_index(drop=True)
        atomic_files.write(path, partial(table.to_parquet, index=False, compression="zstd"))
        files.append(path)
    return files
