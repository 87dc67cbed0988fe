"""The records of an experiment as four tables, read from its run folders or from an archive of them.

Training writes ``results/runs/<experiment>/``. ``keep`` archives it as ``results/data/<experiment>/``: small enough to
be committed, and enough for ``steadymoe report`` and ``steadymoe figures``.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pandas as pd
import pyarrow as pa

from steadymoe.bench.measurement import columns
from steadymoe.bench.report import collect
from steadymoe.bench.runs import record
from steadymoe.bench.runs.lifecycle import Damaged
from steadymoe.bench.statistics import collapse
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.text import all_visible

# What follows the name of an archived arm that stands beside runs.
RECORDED = " (recorded)"
_MIGRATE = "python results/migrate.py brings it to today's"
_TABLES = ("runs", "steps", "histograms", "evaluations")


def load(results: Path, experiment: str, foreign: bool = False) -> dict[str, pd.DataFrame]:
    """The tables ``runs``, ``steps``, ``histograms`` and ``evaluations`` of ``collect``, for the runs that ended.

    Runs of other trainers, whose column ``origin`` names the trainer, are left out unless they are asked for
    (``foreign``): a claim, a board or a score must never hold one by accident.

    ``runs`` has the recorded status and the verdict of today's rule of collapse (``collapse.judged``). An arm comes
    from ``runs/`` if a run of it has ended there, else from the archive in ``data/``; beside runs, archived arms are
    called recorded. The tables are empty for an unknown ``experiment``. Raises Damaged if one cannot be read.
    """
    is_there = experiment in experiments(results)
    runs = collect.runs(results, experiment) if is_there else collect.none()
    ended = runs[runs["status"].isin(record.ENDED)]
    ended = ended if foreign else ended[_origins(ended) == ""]
    steps = collect.steps(ended)
    found = {
        "runs": ended if ended.empty else collapse.judged(ended, steps),
        "steps": steps,
        "histograms": collect.histograms(ended),
        "evaluations": collect.evaluations(ended),
    }
    folder = results / "data" / experiment
    if not is_there or not folder.is_dir():
        return found
    kept = {name: all_visible(read_kept(folder / f"{name}.parquet")) for name in _TABLES}
    if lacking := sorted({"origin", "collapse_rule"} - set(kept["runs"])):
        raise Damaged(f"{folder / 'runs.parquet'} lacks {lacking[0]}: it is of an earlier version; {_MIGRATE}")
    if not foreign:
        kept = _made_by(kept, "")
    kept["runs"] = collapse.judged(kept["runs"], kept["steps"])
    return kept if ended.empty else _joined(found, kept)


def one_trainer(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The arms of ``tables`` that may be ranked: the suite's own, or of another trainer where the suite made none.

    Runs of two trainers share neither a start nor a stream of random numbers, and are never ranked together.
    """
    return _made_by(tables, _origins(tables["runs"]).min())  # the suite's own origin is empty, and comes first


def _made_by(tables: Mapping[str, pd.DataFrame], origin: str) -> dict[str, pd.DataFrame]:
    """The rows of the arms that ``origin`` made; an arm has one trainer, for it is one of the arm's axes."""
    arms = set(tables["runs"].loc[_origins(tables["runs"]) == origin, "arm"])
    return {name: table[table["arm"].isin(arms)] for name, table in tables.items()}


def _origins(runs: pd.DataFrame) -> pd.Series:
    """The trainer of each run, empty for the suite's own."""
    return runs["origin"].fillna("")


def _joined(found: Mapping[str, pd.DataFrame], kept: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The arms of ``found``, and the arms of ``kept`` that are not among them: no arm mixes runs of both."""
    is_here = _arms_of(kept["runs"]).isin(set(_arms_of(found["runs"])))
    absent = kept["runs"].loc[~is_here, "arm"].unique()
    joined = {}
    for name in _TABLES:
        rows = kept[name][kept[name]["arm"].isin(absent)]
        parts = [found[name], rows.assign(arm=rows["arm"] + RECORDED)]
        joined[name] = pd.concat([part for part in parts if len(part)], ignore_index=True) if len(rows) else parts[0]
    return joined


def without_recorded(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of runs alone, where archived arms stand beside runs: other machines share no cold start with them."""
    return table[~table["arm"].str.endswith(RECORDED)]


def _arms_of(runs: pd.DataFrame) -> pd.Series:
    """What makes an arm of an experiment, for each run."""
    return runs[["algorithm", "model", "task", "axes"]].agg("\n".join, axis=1)


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
    taken = set(tables["runs"]["arm"])
    bare = {arm: arm.removesuffix(RECORDED) for arm in taken}
    bare = {arm: arm if name in taken else name for arm, name in bare.items()}  # two arms stay two
    tables = {name: table.assign(arm=table["arm"].map(bare)) for name, table in tables.items()}
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
