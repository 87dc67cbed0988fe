"""What runs recorded: a table with a row a run, and long tables that name a run by its number.

They come from run folders (``folders``), which training writes to ``results/runs/<experiment>/``, or from the archive
``results/data/<experiment>/`` that ``Results.keep`` makes of them: small enough to be committed, and enough for
``steadymoe report``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from steadymoe.bench.report import folders, paper
from steadymoe.bench.report.folders import ARM_KEYS, FACTS, MAY_LACK, RUNS
from steadymoe.bench.runs import record, run_folder
from steadymoe.bench.runs.run_folder import Damaged
from steadymoe.bench.statistics import collapse
from steadymoe.bench.support import files
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import all_visible
from steadymoe.bench.training import columns

# The file of an archive that binds its tables together: file name → checksum. It is written last.
CHECKSUMS = "checksums.json"
# The tables of an archive, the type of each column, and the bounds of counts: any other number may be as large as
# ``record.LARGEST``, or infinite.
_COLUMNS: dict[str, dict[str, type]] = {
    "runs": {"run": int, **RUNS},
    "steps": {"run": int, "step": int, "metric": str, "value": float},
    "histograms": {"run": int, "metric": str, "bin": int, "count": int},
    "evaluations": {"run": int, "prompt": str, "score": float},
}
_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64()}
SCHEMAS = {
    table: pa.schema([pa.field(name, _TYPES[kind], name in MAY_LACK) for name, kind in types.items()])
    for table, types in _COLUMNS.items()
}
_BOUNDS: dict[str, tuple[float, float]] = dict.fromkeys(("run", "step", "bin"), (0, run_folder.MAX_COUNT))
_BOUNDS |= dict.fromkeys(("steps", "updates_per_rollout"), (1, run_folder.MAX_COUNT)) | {"seed": (0, 2**63 - 1)}
# What no two rows of a table share.
_UNIQUE = {"runs": ["arm", "seed"], "steps": ["run", "step", "metric"], "histograms": ["run", "metric", "bin"]}
_LONGEST_ARM = 10_000


@dataclass(frozen=True, eq=False)
class Results:
    """What runs recorded. A run has a number: the index ``run`` of ``runs``, and a column of the other tables."""

    runs: pd.DataFrame
    """``folders.RUNS``, and ``folder`` of those that are not archived; loaded ones also have the verdict of the rule of
    collapse (``collapse.JUDGED``) and the last evaluation (``columns.OUTCOMES``)."""
    steps: pd.DataFrame
    """run, step, metric, value (``folders.steps``)."""
    histograms: pd.DataFrame
    """run, metric, bin, count: over all steps."""
    evaluations: pd.DataFrame
    """run, prompt, score: the last held-out evaluation."""

    @classmethod
    def load(cls, results: Path, experiment: str, foreign: bool = False) -> "Results":
        """Return what the ended runs of an experiment recorded; empty tables for an unknown one.

        They come from ``runs/`` if a run has ended there, else from the archive in ``data/``. Runs of other trainers,
        whose ``origin`` names the trainer, are left out unless ``foreign``: boards and scores must never hold one by
        accident. Raises Damaged if a table cannot be read.
        """
        ended, folder = folders.ended_runs(results, experiment), results / "data" / experiment
        ended = ended if foreign else ended[ended["origin"] == ""]
        is_kept = ended.empty and experiment in folders.experiments(results) and folder.is_dir()
        found = _kept(folder) if is_kept else cls.of_folders(ended)
        found = found if foreign else found.where(found.runs["origin"] == "")
        if found.runs.empty:
            return found
        outcomes = found.steps[found.steps["metric"].isin(columns.OUTCOMES)].sort_values("step", kind="stable")
        last = outcomes.groupby(["run", "metric"])["value"].last().unstack()
        return replace(found, runs=collapse.judged(found.runs, found.steps).join(last))

    @classmethod
    def of_folders(cls, runs: pd.DataFrame) -> "Results":
        """Return what ``runs`` (rows of ``folders.read_runs``) recorded."""
        steps, evaluations = (folders.read(runs, name) for name in ("steps", "evaluations"))
        long = folders.steps(runs, steps, evaluations)
        return cls(runs, long, folders.histograms(steps), folders.last_evaluation(runs, evaluations))

    @property
    def long(self) -> dict[str, pd.DataFrame]:
        """The tables with a column ``run``, by name."""
        return {"steps": self.steps, "histograms": self.histograms, "evaluations": self.evaluations}

    @cached_property
    def joined(self) -> dict[str, pd.DataFrame]:
        """The tables of ``long``, each row with ``FACTS`` of its run and its cold start, ``start``."""
        return {name: table.join(self.runs[[*FACTS, "start"]], on="run") for name, table in self.long.items()}

    def wide(self, *metrics: str) -> pd.DataFrame:
        """Return a row for each run and step: ``step``, each of ``metrics`` (all without any), and ``FACTS``."""
        chosen = self.steps[self.steps["metric"].isin(metrics)] if metrics else self.steps
        wide = chosen.pivot(index=["run", "step"], columns="metric", values="value").rename_axis(columns=None)
        return wide.reindex(columns=[*(metrics or wide)]).reset_index("step").join(self.runs[FACTS])

    def where(self, is_kept: pd.Series) -> "Results":
        """Return the runs for which ``is_kept``, indexed like ``runs``, is true, and their rows."""
        if is_kept.all():
            return self  # with what is joined already
        runs = self.runs[is_kept]
        return Results(runs, **{name: table[table["run"].isin(runs.index)] for name, table in self.long.items()})

    def of(self, arms: Sequence[str] | None) -> "Results":
        """Return the runs of some arms, by name or algorithm; None means all. Raises UserError for an unknown arm."""
        if arms is None:
            return self
        names = self.runs[["arm", "algorithm"]].astype(str)
        names["shown"] = [paper.shown(*each) for each in names.to_numpy().tolist()]
        if unknown := [name for name in arms if not (names == name).any(axis=None)]:
            raise UserError(f"there is no arm {unknown[0]!r}; choose from {', '.join(sorted(set(names['arm'])))}")
        return self.where(names["arm"].isin(names.loc[names.isin(arms).any(axis=1), "arm"]))

    def one_trainer(self) -> "Results":
        """Return the arms that may be ranked together: the suite's own, or another trainer's where the suite has none.

        Runs of two trainers share neither a start nor a stream of random numbers.
        """
        trainers = self.runs["origin"].str.partition(" ")[0]  # without its version
        return self.where(trainers == trainers.min())  # the suite's own origin is empty, and comes first

    def with_archived(self, experiment: str, to: Path) -> "Results":
        """Return these runs, and those of the archive in ``to`` whose like, by arm and seed, is not here.

        Raises Damaged if the archive cannot be read.
        """
        folder = files.refuse_links(to / "data" / experiment, to)
        if not (folder / "runs.parquet").exists():
            return self
        old, keys = _kept(folder), [*ARM_KEYS[1:], "seed"]
        here = pd.MultiIndex.from_frame(self.runs[keys].astype(str))
        others = old.where(pd.Series(~pd.MultiIndex.from_frame(old.runs[keys].astype(str)).isin(here), old.runs.index))
        if others.runs.empty:
            return self
        whole = concatenated([self, others])
        return replace(whole, runs=whole.runs.assign(arm=folders.renamed(whole.runs)))

    def keep(self, experiment: str, to: Path) -> list[Path]:
        """Write the tables to ``to/data/<experiment>/``, in place of older files; return the files.

        Of the steps only the metrics of ``columns.kept``, and the runs' own, are kept.
        """
        kept, folder = columns.kept(), files.folder(to, "data", experiment)
        is_kept = self.steps["metric"].map(lambda name: name in kept or columns.is_own(name)).astype(bool)
        tables = {"runs": self.runs.reset_index(), **self.long, "steps": self.steps[is_kept]}
        paths = {folder / f"{name}.parquet": name for name in tables}
        for path in [*paths, folder / CHECKSUMS]:
            files.replaceable(path)
        for path, name in paths.items():
            table = pa.Table.from_pandas(tables[name], SCHEMAS[name], preserve_index=False)
            files.write(path, partial(pq.write_table, table, compression="zstd"))
        return [*paths, bind(folder)]


def concatenated(parts: Sequence[Results]) -> Results:
    """Return the runs of all ``parts`` together, numbered anew."""
    runs: list[pd.DataFrame] = []
    long: dict[str, list[pd.DataFrame]] = {name: [] for name in parts[0].long}
    for its in parts:
        first = runs[-1].index.max() + 1 if runs else 0
        runs.append(its.runs.set_axis(its.runs.index + first))
        for name, table in its.long.items():
            long[name].append(table.assign(run=table["run"] + first))
    filled = {name: [table for table in tables if len(table)] or tables[:1] for name, tables in long.items()}
    return Results(pd.concat(runs), **{name: pd.concat(tables, ignore_index=True) for name, tables in filled.items()})


# Archives


def bind(folder: Path) -> Path:
    """Write the checksums of an archive's tables, which belong together, and return the file."""
    checksums = {path.name: run_folder.checksum(path) for path in sorted(folder.glob("*.parquet"))}
    files.write_json(folder / CHECKSUMS, checksums)
    return folder / CHECKSUMS


def _kept(folder: Path) -> Results:
    """Return what an archive holds. Raises Damaged unless it is complete and matches its checksums."""
    if (checksums := run_folder.read(folder / CHECKSUMS)) is None:
        raise Damaged(f"{folder} lacks {CHECKSUMS}")
    for path in (folder / f"{name}.parquet" for name in SCHEMAS):
        try:
            is_whole = run_folder.checksum(path) == checksums.get(path.name)
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error}") from error
        if not is_whole:
            raise Damaged(
                f"{path} does not match {CHECKSUMS}: it is damaged, or from another archive than the files next to it; "
                "archive the experiment again"
            )
    tables = {name: _read(folder, name) for name in SCHEMAS}
    if why := _wrong(tables):
        raise Damaged(f"{folder}: {why}")
    return Results(**tables | {"runs": tables["runs"].set_index("run")})


def _read(folder: Path, name: str) -> pd.DataFrame:
    """Return a table of an archive. Raises Damaged if it cannot be read, or is not as ``SCHEMAS`` has it."""
    path = folder / f"{name}.parquet"
    try:
        table = all_visible(files.read_parquet(path))
        return pa.Table.from_pandas(table, SCHEMAS[name], preserve_index=False).to_pandas()
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise Damaged(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _wrong(tables: Mapping[str, pd.DataFrame]) -> str | None:
    """Return what no archive holds, although it has the types of ``SCHEMAS``; None if nothing is wrong."""
    runs, steps = tables["runs"], tables["steps"]
    for name, table in tables.items():
        for column in map(str, table.select_dtypes("number")):
            low, high = _BOUNDS.get(column, (-record.LARGEST, record.LARGEST))
            values = table[column].dropna()
            if not (values.between(low, high) | np.isinf(values)).all():
                return f"{name}: {column} must lie between {low:g} and {high:g}"
        if not set(table["run"]) <= set(runs["run"]):
            return f"{name} has a run that is missing from runs"
        if name in _UNIQUE and table.duplicated(_UNIQUE[name]).any():
            return f"{name}: no two rows may have the same {', '.join(_UNIQUE[name])}"
    finite = steps["metric"].isin(["reward", *columns.OUTCOMES, *collapse.FINITE])
    rules = set(runs["collapse_rule"])
    numbers = [*steps["value"][finite], *tables["evaluations"]["score"]]
    wrong = {
        "runs: no two may have one number": runs["run"].duplicated().any(),
        "runs has an unfinished run": not set(runs["status"]) <= set(run_folder.ENDED),
        "runs: the name of an arm is too long": runs["arm"].str.len().max() > _LONGEST_ARM,
        "runs has a run without a reward": not set(runs["run"]) <= set(steps["run"][steps["metric"] == "reward"]),
        "runs: collapse_rule must be a rule": not all(run_folder.rule(_object(each)) for each in rules),
        "runs: config must be JSON": not all(map(_object, runs["config"].unique())),
        "rewards must be finite": not np.isfinite(np.asarray(numbers, float)).all(),
    }
    return next((why for why, is_so in wrong.items() if is_so), None)


def _object(text: str) -> dict:
    """Return the object in a text of JSON; empty for anything else."""
    try:
        found = files.parse_json(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
