"""What the runs of an experiment recorded, as a few tables: from its run folders, or kept without them.

``results/runs/<experiment>/`` is what training wrote. ``results/data/<experiment>/`` is what ``keep`` made of it: small
enough to be committed, and all that ``steadymoe report`` and ``steadymoe figures`` need.
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


def load(results: Path, experiment: str) -> dict[str, pd.DataFrame]:
    """The tables ``runs``, ``steps``, ``histograms`` and ``evaluations`` of ``collect``, of the runs that ended.

    The runs are judged by today's rule of a collapse (``collapse.judged``), beside the status that they recorded.
    From ``runs/`` where any has ended there, otherwise as they were kept in ``data/``; empty where neither is, and
    where ``experiment`` is none of ``experiments``. Raises Damaged where a table cannot be read.
    """
    is_there = experiment in experiments(results)
    runs = collect.runs(results, experiment) if is_there else collect.none()
    ended = runs[runs["status"].isin(record.ENDED)]
    folder = results / "data" / experiment
    if is_there and ended.empty and folder.is_dir():
        kept = {name: all_visible(_kept(folder / f"{name}.parquet")) for name in _TABLES}
        return kept | {"runs": collapse.judged(kept["runs"], kept["steps"])}
    steps = collect.steps(ended)
    return {
        "runs": ended if ended.empty else collapse.judged(ended, steps),
        "steps": steps,
        "histograms": collect.histograms(ended),
        "evaluations": collect.evaluations(ended),
    }


def _kept(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def experiments(results: Path) -> list[str]:
    """The names of those that are in ``runs/`` or in ``data/``."""
    folders = [*(results / "runs").glob("*"), *(results / "data").glob("*")]
    return sorted({folder.name for folder in folders if folder.is_dir()})


def keep(tables: dict[str, pd.DataFrame], experiment: str, to: Path) -> list[Path]:
    """Write what ``load`` found of an experiment to ``to/data/<experiment>/``, replacing earlier ones.

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
