"""What the runs of an experiment recorded, as tables: read from its run folders, or from an archive of them.

Training writes ``results/runs/<experiment>/``. ``Results.keep`` archives it as ``results/data/<experiment>/``: small
enough to be committed, and enough for ``steadymoe report``.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from steadymoe.bench.report import paper
from steadymoe.bench.runs import lifecycle, record
from steadymoe.bench.runs.identity import NO_NUMBERS, OFF, flatten, settings_hash, shortener
from steadymoe.bench.runs.lifecycle import Damaged
from steadymoe.bench.statistics import collapse
from steadymoe.bench.support import atomic_files, regular_files
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import all_visible, portable, visible
from steadymoe.bench.training import columns

# Columns of ``runs`` that are numbers of the config, each with its key; nan where a config lacks it.
NUMBERS = {
    "steps": "steps",
    "updates_per_rollout": "updates_per_rollout",
    "prompts": "rollout.prompts",
    "responses": "rollout.responses",
    "learning_rate": "optimizer.learning_rate",
    "strength": "engine.strength",
}
# The settings that a cold start follows from, besides the seed.
_OF_STARTS = ("model", "task", "cold_start", "device", "precision", "threads", "experts")
# The columns that tell one run from another, besides its seed.
ARM_KEYS = ["experiment", "algorithm", "model", "task", "axes"]
# The facts of a run that figures and tables read beside its numbers, and that an export has; ``start`` is read too.
FACTS = ["arm", *ARM_KEYS, "routing", "correction", "engine", "strength", "optimizer", "moe_layers", "experts", "seed"]
FACTS += ["updates_per_rollout", "prompts", "responses", "learning_rate"]
# How many runs are exported at a time.
_RUNS_OF_A_PIECE = 20

# The file of an archive that binds its tables together: file name → checksum. It is written last.
CHECKSUMS = "checksums.json"


def _fields(kind: pa.DataType, names: str, nullable: bool = False) -> list[pa.Field]:
    return [pa.field(name, kind, nullable) for name in names.split()]


_TEXT, _WHOLE, _REAL = pa.string(), pa.int64(), pa.float64()
# The tables of an archive.
_SCHEMAS = {
    "runs": [
        *_fields(_WHOLE, "run"),
        *_fields(_TEXT, "arm experiment algorithm model task axes"),
        *_fields(_WHOLE, "seed"),
        *_fields(_TEXT, "origin status"),
        *_fields(_TEXT, "diverged_reason", nullable=True),
        *_fields(_WHOLE, "diverged_step", nullable=True),
        *_fields(_TEXT, "routing correction engine optimizer"),
        *_fields(_WHOLE, "steps updates_per_rollout"),
        *_fields(_WHOLE, "prompts responses", nullable=True),
        *_fields(_REAL, "learning_rate strength wall_seconds", nullable=True),
        *_fields(_WHOLE, "tokens_sampled parameters active_parameters moe_layers experts top_k", nullable=True),
        *_fields(_TEXT, "config_hash config_without_seed settings algorithm_code versions revision machine command"),
        *_fields(_TEXT, "collapse_rule config start"),
    ],
    "steps": [*_fields(_WHOLE, "run step"), *_fields(_TEXT, "metric"), *_fields(_REAL, "value")],
    "histograms": [*_fields(_WHOLE, "run"), *_fields(_TEXT, "metric"), *_fields(_WHOLE, "bin count")],
    "evaluations": [*_fields(_WHOLE, "run"), *_fields(_TEXT, "prompt"), *_fields(_REAL, "score")],
}
# The bounds of counts; any other number may be as large as ``record.LARGEST``, or infinite.
_BOUNDS: dict[str, tuple[float, float]] = dict.fromkeys(("run", "step", "bin"), (0, record.MAX_COUNT))
_BOUNDS |= dict.fromkeys(("steps", "updates_per_rollout"), (1, record.MAX_COUNT)) | {"seed": (0, 2**63 - 1)}
# What no two rows of a table share.
_UNIQUE = {"runs": ["arm", "seed"], "steps": ["run", "step", "metric"], "histograms": ["run", "metric", "bin"]}
_LONGEST_ARM = 10_000


@dataclass(frozen=True, eq=False)
class Results:
    """What runs recorded. A run has a number: the index ``run`` of ``runs``, and a column of the other tables."""

    runs: pd.DataFrame
    """Facts, settings and status; loaded ones also have the verdict of the rule of collapse (``collapse.JUDGED``) and
    the last evaluation (``columns.OUTCOMES``), and, unless they are archived, ``folder``."""
    steps: pd.DataFrame
    """run, step, metric, value. A metric that a run does not have (routing of a dense model, clip fraction of a loss
    without a clip) has no rows. Step 0 has the outcomes of the cold start.

    A run ends at a number that is not finite. Up to its planned last step its reward is 0 after that step, and its
    accuracy from that step on, because a step is evaluated after its updates. (Averages over seeds would rise if such a
    run were left out.)"""
    histograms: pd.DataFrame
    """run, metric, bin (from 0), count: sums over steps."""
    evaluations: pd.DataFrame
    """run, prompt, score in [0, 1] of the last held-out evaluation; 0 after a number that is not finite."""

    @classmethod
    def load(cls, results: Path, experiment: str, foreign: bool = False) -> "Results":
        """Return what the ended runs of an experiment recorded; empty tables for an unknown one.

        They come from ``runs/`` if a run has ended there, else from the archive in ``data/``. Runs of other trainers,
        whose ``origin`` names the trainer, are left out unless ``foreign``: boards and scores must never hold one by
        accident. Raises Damaged if a table cannot be read.
        """
        is_known = experiment in experiments(results)
        ended, folder = ended_runs(results, experiment) if is_known else none(), results / "data" / experiment
        ended = ended if foreign else ended[ended["origin"] == ""]
        if not (ended.empty and is_known and folder.is_dir()):
            found = cls.of_folders(ended)
        else:
            found = cls(**_kept(folder))
            found = found if foreign else found.where(found.runs["origin"] == "")
        if found.runs.empty:
            return found
        outcomes = found.steps[found.steps["metric"].isin(columns.OUTCOMES)].sort_values("step", kind="stable")
        last = outcomes.groupby(["run", "metric"])["value"].last().unstack()
        return replace(found, runs=collapse.judged(found.runs, found.steps).join(last))

    @classmethod
    def of_folders(cls, runs: pd.DataFrame) -> "Results":
        """Return what ``runs`` (some rows of ``read_runs``) recorded, not judged."""
        steps, evaluations = (_read(runs, name) for name in ("steps", "evaluations"))
        long = _steps(runs, steps, evaluations)
        return cls(runs, long, _histograms(steps), _last_evaluation(runs, evaluations))

    def where(self, is_kept: pd.Series) -> "Results":
        """Return the runs for which ``is_kept``, indexed like ``runs``, is true, and their rows."""
        runs = self.runs[is_kept]
        long = {name: table[table["run"].isin(runs.index)] for name, table in self.long.items()}
        return Results(runs, **long)

    def of(self, arms: Sequence[str] | None) -> "Results":
        """Return the runs of some arms, by name or by algorithm; None means all. Raises UserError for an unknown arm."""
        if arms is None:
            return self
        names = self.runs[["arm", "algorithm"]].astype(str)
        names["shown"] = [paper.shown(*each) for each in names.to_numpy().tolist()]
        if unknown := [name for name in arms if not (names == name).any(axis=None)]:
            raise UserError(f"there is no arm {unknown[0]!r}; choose from {', '.join(sorted(set(names['arm'])))}")
        chosen = set(names.loc[names.isin(arms).any(axis=1), "arm"])
        return self.where(self.runs["arm"].isin(chosen))

    def one_trainer(self) -> "Results":
        """Return the arms that may be ranked together: the suite's own, or another trainer's where the suite has none.

        Runs of two trainers share neither a start nor a stream of random numbers.
        """
        trainers = self.runs["origin"].str.partition(" ")[0]  # without its version
        return self.where(trainers == trainers.min())  # the suite's own origin is empty, and comes first

    def wide(self, *metrics: str) -> pd.DataFrame:
        """Return a row for each run and step, a column for each of ``metrics`` (all without any), beside ``FACTS``."""
        chosen = self.steps[self.steps["metric"].isin(metrics)] if metrics else self.steps
        wide = chosen.pivot(index=["run", "step"], columns="metric", values="value").rename_axis(columns=None)
        return _with_facts(wide.reindex(columns=[*(metrics or wide)]).reset_index(), self.runs).set_index("run")

    @cached_property
    def joined(self) -> dict[str, pd.DataFrame]:
        """The long tables by name, each row with ``FACTS`` of its run and its cold start, ``start``."""
        return {name: _with_facts(table, self.runs) for name, table in self.long.items()}

    @property
    def long(self) -> dict[str, pd.DataFrame]:
        """The tables that have a column ``run``, by name."""
        return {"steps": self.steps, "histograms": self.histograms, "evaluations": self.evaluations}

    # The archive

    def keep(self, experiment: str, to: Path) -> list[Path]:
        """Write the tables to ``to/data/<experiment>/``, in place of older files; return the files.

        Of the steps only the metrics of ``columns.kept``, and the runs' own, are kept. ``refuse_to_lose`` asks first.
        """
        kept, folder = columns.kept(), regular_files.folder(to, "data", experiment)
        is_kept = self.steps["metric"].map(lambda name: name in kept or columns.is_own(name)).astype(bool)
        tables = {"runs": self.runs.reset_index(), **self.long, "steps": self.steps[is_kept]}
        for name in [*(f"{name}.parquet" for name in tables), CHECKSUMS]:
            atomic_files.replaceable(folder / name)
        for name, table in tables.items():
            arrow = pa.Table.from_pandas(table, pa.schema(_SCHEMAS[name]), preserve_index=False)
            atomic_files.write(folder / f"{name}.parquet", partial(_write, arrow))
        return [*(folder / f"{name}.parquet" for name in tables), bind(folder)]

    def refuse_to_lose(self, experiment: str, to: Path) -> None:
        """Raise UserError if the archive of an experiment in ``to`` holds a run whose like is not here.

        A run of equal arm and seed takes another's place, whatever its config.
        """
        path = regular_files.refuse_links(to / "data" / experiment / "runs.parquet", to)
        if not path.exists():
            return
        keys = [*ARM_KEYS, "seed"]
        old, new = (
            set(table[keys].astype(str).itertuples(index=False, name=None))
            for table in (_read_kept(path.parent, "runs"), self.runs)
        )
        if lost := sorted(old - new):
            algorithm, axes, seed = lost[0][1], lost[0][-2], lost[0][-1]
            raise UserError(
                f"archiving would delete the only copy of {len(lost)} of the {len(old)} runs in {path.parent} (the "
                f"first: {' '.join(filter(None, (algorithm, axes)))} seed={seed}); run them here first, or move that "
                "folder away"
            )


def experiments(results: Path) -> list[str]:
    """Return the names of the experiments below ``runs/`` and ``data/``, sorted."""
    places = [regular_files.refuse_links(results / name, results) for name in ("runs", "data")]
    return sorted({folder.name for place in places for folder in place.glob("*") if folder.is_dir()})


def _with_facts(long: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    return long.join(runs[[name for name in (*FACTS, "start") if name in runs]], on="run")


# From an archive


def bind(folder: Path) -> Path:
    """Write the checksums of an archive's tables, which belong together, and return the file."""
    checksums = {path.name: record.checksum(path) for path in sorted(folder.glob("*.parquet"))}
    atomic_files.write_json(folder / CHECKSUMS, checksums)
    return folder / CHECKSUMS


def _write(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd")


def _kept(folder: Path) -> dict[str, pd.DataFrame]:
    """Return the tables of an archive. Raises Damaged unless they are complete and match their checksums."""
    if (checksums := lifecycle.read(folder / CHECKSUMS, {})) is None:
        raise Damaged(f"{folder} lacks {CHECKSUMS}")
    for name in _SCHEMAS:
        path = folder / f"{name}.parquet"
        try:
            is_whole = record.checksum(path) == checksums.get(path.name)
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error}") from error
        if not is_whole:
            raise Damaged(
                f"{path} does not match {CHECKSUMS}: it is damaged, or from another archive than the files next to it; "
                "archive the experiment again"
            )
    tables = {name: _read_kept(folder, name) for name in _SCHEMAS}
    if why := _wrong(tables):
        raise Damaged(f"{folder}: {why}")
    return tables | {"runs": tables["runs"].set_index("run")}


def _read_kept(folder: Path, name: str) -> pd.DataFrame:
    """Return a table of an archive as its schema has it. Raises Damaged if it cannot be read, or has other types."""
    path = folder / f"{name}.parquet"
    try:
        table = all_visible(regular_files.read_parquet(path))
        return pa.Table.from_pandas(table, pa.schema(_SCHEMAS[name]), preserve_index=False).to_pandas()
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise Damaged(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _wrong(tables: Mapping[str, pd.DataFrame]) -> str | None:
    """Return what no archive holds besides its schema, or None."""
    for name, table in tables.items():
        for column in map(str, table.select_dtypes("number")):
            low, high = _BOUNDS.get(column, (-record.LARGEST, record.LARGEST))
            if not (table[column].dropna().between(low, high) | np.isinf(table[column].dropna())).all():
                return f"{name}: {column} must lie between {low:g} and {high:g}"
        if not set(table["run"]) <= set(tables["runs"]["run"]):
            return f"{name} has a run that is missing from runs"
        if name in _UNIQUE and table.duplicated(_UNIQUE[name]).any():
            return f"{name}: no two rows may have the same {', '.join(_UNIQUE[name])}"
    runs, steps = tables["runs"], tables["steps"]
    finite = steps["metric"].isin(["reward", *columns.OUTCOMES, *collapse.FINITE])
    rules = map(_object, runs["collapse_rule"].unique())
    wrong = {
        "runs: no two may have one number": runs["run"].duplicated().any(),
        "runs has an unfinished run": not set(runs["status"]) <= set(record.ENDED),
        "runs: an arm's name is too long": runs["arm"].str.len().max() > _LONGEST_ARM,
        "runs has a run without a reward": not set(runs["run"]) <= set(steps.loc[steps["metric"] == "reward", "run"]),
        "runs: collapse_rule must be a rule": not all(record.rule(numbers) for numbers in rules),
        "runs: config must be JSON": not all(map(_object, runs["config"].unique())),
        "rewards must be finite": not np.isfinite([*steps["value"][finite], *tables["evaluations"]["score"]]).all(),
    }
    return next((why for why, is_so in wrong.items() if is_so), None)


def _object(text: str) -> dict[str, Any]:
    """Return the object in a text of JSON; empty for anything else."""
    try:
        found = regular_files.parse_json(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# From run folders


def read_runs(results: Path, experiment: str) -> pd.DataFrame:
    """Return ``Results.runs`` of an experiment, those that have not ended too, from its undamaged run folders.

    All texts are made ``visible``, except the paths in ``folder``.
    """
    # Of damaged runs ``damaged`` and `steadymoe status` tell.
    sound = {folder: state for folder, state in _states(results, experiment).items() if state.status != "damaged"}
    if not sound:
        return none()
    facts = [state.facts for state in sound.values()]
    swept = {key for each in facts for key in each["axes"]}
    rows = [_facts(state.status, state.facts, swept) for state in sound.values()]
    shown = [{key: visible(value) if isinstance(value, str) else value for key, value in row.items()} for row in rows]
    runs = pd.DataFrame(shown).assign(folder=[*map(str, sound)]).rename_axis("run")
    runs["arm"] = name_arms(runs, [each["axes"] for each in facts], [flatten(each["config"]) for each in facts])
    return runs[list(none())]


def _facts(status: str, run: Mapping[str, Any], swept: set[str]) -> dict[str, Any]:
    """Return a run's row from the facts in its ``run.json``; ``swept`` are the axes of its experiment."""
    config, numbers = run["config"], flatten(run["config"])
    revision, diverged = run["revision"] or {"commit": "", "changed": False}, run["diverged"] or {}
    versions = " ".join(f"{name} {number}" for name, number in run["versions"].items())
    machine = f"{run['machine']['cpu']}, {run['machine'].get('gpu', config['device'])}"
    begun = json.dumps([{key: config.get(key) for key in _OF_STARTS}, versions, machine], sort_keys=True)
    same = ("experiment", "algorithm", "model", "task", "seed", "routing", "correction", "engine", "config_hash")
    return {
        **{key: run[key] for key in (*same, "algorithm_code")},
        **{key: run.get(key, np.nan) for key in ("parameters", "active_parameters", "moe_layers", "experts", "top_k")},
        **{key: numbers.get(field, np.nan) for key, field in NUMBERS.items()},
        "axes": run["axes_name"],
        "origin": run.get("origin", ""),
        "status": status,
        "diverged_reason": diverged.get("reason"),
        "diverged_step": diverged.get("step"),
        "collapse_rule": collapse.Rule(**config.get("collapse") or {}).text(),
        "wall_seconds": run.get("wall_seconds"),
        "tokens_sampled": run.get("tokens"),
        "optimizer": run.get("optimizer", OFF["optimizer"]),  # other trainers name none
        "config_without_seed": run["config_hash_without_seed"],
        "settings": settings_hash(config, swept),
        "config": json.dumps({key: value for key, value in config.items() if key not in NO_NUMBERS}, sort_keys=True),
        # Runs of one seed are paired if this is equal; without a cold start of their own, if they begin alike.
        "start": (run.get("cold_start") or {}).get("sha256") or begun,
        "versions": versions,
        "revision": revision["commit"] + ("+changes" if revision["changed"] else ""),
        "machine": machine,
        "command": portable(run["command"]),
    }


def name_arms(runs: pd.DataFrame, axes: Sequence[dict], numbers: Sequence[dict]) -> list[str]:
    """Return a short name of each run's arm: its algorithm, and every key and axis that varies within ``runs``.

    ``axes`` and ``numbers`` are the runs' axes and flat configs. A number at its usual value is no axis of its run. The
    name contains it nevertheless if other runs have another value. An axis is named by its last word, by its whole key
    where two axes share that word.
    """
    keys = sorted({key for own in axes for key in own})
    values = [{key: all_[key] for key in keys if key in all_} | own for own, all_ in zip(axes, numbers, strict=True)]
    differing = [key for key in keys if len({str(own.get(key)) for own in values}) > 1]
    last = Counter(key.rpartition(".")[2] for key in differing)
    words = {key: key if last[end := key.rpartition(".")[2]] > 1 else end for key in differing}
    labels = {key: shortener(own[key] for own in values if key in own) for key in differing}
    varying = [key for key in ARM_KEYS[:-1] if key == "algorithm" or runs[key].nunique() > 1]
    return [
        visible(" ".join([*row, *(f"{words[key]}={labels[key](own[key])}" for key in differing if key in own)]))
        for row, own in zip(runs[varying].to_numpy().tolist(), values, strict=True)
    ]


def ended_runs(results: Path, experiment: str) -> pd.DataFrame:
    """Return the rows of ``read_runs`` that have ended, those of other trainers too."""
    table = read_runs(results, experiment)
    return table[table["status"].isin(record.ENDED)]


def none() -> pd.DataFrame:
    """Return the empty table of ``read_runs``."""
    return pd.DataFrame(columns=[*(field.name for field in _SCHEMAS["runs"]), "folder"]).set_index("run")


def damaged(results: Path, experiment: str) -> dict[Path, str]:
    """Return damaged run folder of an experiment → reason. Tables and figures leave these runs out."""
    place = results / "runs" / experiment
    if place.is_symlink():
        return {place: "it is a link; links in a results folder are not followed"}
    return {folder: state.damage for folder, state in _states(results, experiment).items() if state.damage is not None}


def _states(results: Path, experiment: str) -> dict[Path, record.State]:
    """Return run folder → state; a run that has ended is damaged too if its tables do not hold what it says."""
    place = regular_files.refuse_links(results / "runs", results) / experiment
    folders = [] if place.is_symlink() else sorted(path.parent for path in place.glob("**/run.json"))
    return {folder: _read_through(folder, state) for folder, state in record.states(folders).items()}


def _read_through(folder: Path, state: record.State) -> record.State:
    try:
        why = _why_odd(folder, (folder / "run.json").stat().st_mtime_ns) if state.has_ended else None  # written last
    except OSError as error:
        why = str(error)
    return state if why is None else record.State("damaged", {}, why)


@lru_cache(maxsize=4096)
def _why_odd(folder: Path, changed: int) -> str | None:
    """Return why the tables of an ended run are not those of its facts; None if they are."""
    try:
        record.read_tables(folder, record.read_run(folder) or {})
    except Damaged as error:
        return str(error)
    return None


def tidy(runs: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield every number of the steps and updates of ``runs``, in pieces: ``FACTS``, step, update, metric, value.

    ``update`` is missing in a row of a step. The rows of steps come first, then the rows of updates, run by run. The
    first piece is empty; all have its types.
    """
    own = {name for folder in runs["folder"] for name in record.own_columns(Path(folder))}
    names = sorted({*columns.TABLES["steps"], *columns.TABLES["updates"], *own})
    texts = {key: sorted(runs[key].unique()) for key in ("arm", *ARM_KEYS)} | {"metric": names}
    types = {key: pd.CategoricalDtype(values) for key, values in texts.items()} | {"update": "Int64"}
    few = [runs[first : first + _RUNS_OF_A_PIECE] for first in range(0, len(runs), _RUNS_OF_A_PIECE)]
    ordered = [*FACTS, "step", "update", "metric", "value"]
    yield runs[FACTS].assign(step=0, update=None, metric=None, value=0.0).astype(types)[ordered][:0]
    for some in few:
        long = _steps(some, _read(some, "steps"), _read(some, "evaluations"))
        yield _with_facts(long, some).assign(update=None).astype(types)[ordered]
    for some in few:
        updates = _read(some, "updates").melt(id_vars=["run", "step", "update"], var_name="metric", value_name="value")
        long = updates.dropna(subset="value").sort_values("run", kind="stable", ignore_index=True)
        yield _with_facts(long, some).astype(types)[ordered]


def _read(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return one table of all ``runs``, concatenated, with the column ``run``."""
    places = zip(runs.index.tolist(), runs["folder"], strict=True)
    tables = [record.read_table(Path(folder), name).assign(run=run) for run, folder in places]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["run", *columns.TABLES[name]])


def _steps(runs: pd.DataFrame, table: pd.DataFrame, evaluated: pd.DataFrame) -> pd.DataFrame:
    """Return ``Results.steps`` from the tables ``steps`` and ``evaluations`` of ``runs``."""
    table = pd.concat([_cold_start(evaluated), table], ignore_index=True)
    table = table.drop(columns=_histograms_of(table))
    lost = runs[runs["diverged_reason"] == "not finite"]
    ends, planned = lost["diverged_step"].astype(int), lost["steps"].astype(int)
    missing = [
        pd.DataFrame({"run": run, "step": range(ends[run] + 1, planned[run] + 1), "reward": 0.0, "eval_accuracy": 0.0})
        for run in lost.index
    ]
    last = table["step"] == table["run"].map(ends)
    table.loc[last, "reward"] = table.loc[last, "reward"].fillna(0.0)  # the step could not be sampled
    table.loc[last, "eval_accuracy"] = 0.0
    table = pd.concat([table, *(each for each in missing if len(each))], ignore_index=True)
    at_end = table["step"] == table["run"].map(planned)
    table.loc[at_end, [name for name in columns.OUTCOMES if name in table]] = 0.0
    long = table.melt(id_vars=["run", "step"], var_name="metric", value_name="value").dropna(subset="value")
    return long.sort_values("run", kind="stable", ignore_index=True)


def _cold_start(table: pd.DataFrame) -> pd.DataFrame:
    """Return the outcomes of each run before its first step: run, step (0), those that it has."""
    scores = {score: name for name, score in columns.EVALUATED.items() if name in columns.OUTCOMES and score in table}
    first = table[table["step"] == 0].groupby(["run", "step"])[list(scores)].mean()
    return first.rename(columns=scores).reset_index()


def _histograms(table: pd.DataFrame) -> pd.DataFrame:
    """Return ``Results.histograms`` from the table ``steps`` of runs."""
    parts = []
    for metric in _histograms_of(table):
        for run, rows in table[["run", metric]].dropna().groupby("run")[metric]:
            counts = np.sum(rows.tolist(), axis=0)
            parts.append(pd.DataFrame({"run": run, "metric": metric, "bin": range(len(counts)), "count": counts}))
    long = pd.concat(parts) if parts else pd.DataFrame(columns=["run", "metric", "bin", "count"])
    return long.sort_values("run", kind="stable", ignore_index=True)


def _histograms_of(table: pd.DataFrame) -> list[str]:
    return [str(name) for name in table if columns.of_metric(str(name)).type == "list<int64>"]


def _last_evaluation(runs: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return ``Results.evaluations`` from the table ``evaluations`` of ``runs``."""
    table = table[table["step"] == table.groupby("run")["step"].transform("max")]
    lost = runs.index[runs["diverged_reason"] == "not finite"]
    return table.assign(score=table["score"].where(~table["run"].isin(lost), 0.0))[["run", "prompt", "score"]]
