"""The records of an experiment as tidy tables: from its run folders, or from an archive of them.

Training writes ``results/runs/<experiment>/``. ``keep`` archives it as ``results/data/<experiment>/``: small enough to
be committed, and enough for ``steadymoe report``.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from steadymoe.bench.runs import record, run_folder
from steadymoe.bench.runs.identity import NO_NUMBERS, flatten, settings_hash, shortener
from steadymoe.bench.runs.run_folder import Damaged
from steadymoe.bench.statistics import collapse
from steadymoe.bench.support import atomic_files, regular_files
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import all_visible, portable, visible
from steadymoe.bench.training import columns

# The columns that tell one run from another, besides its seed.
ARM_KEYS = ["experiment", "algorithm", "model", "task", "axes"]
# The sizes of a model, from ``models.build.size``.
SIZES = ["parameters", "active_parameters", "moe_layers", "experts", "top_k"]
# The columns of a run in the long tables; ``arm`` is its name by ``name_arms``, ``strength`` the engine's strength.
KEYS = ["arm", *ARM_KEYS, "routing", "correction", "engine", "strength", "optimizer", "moe_layers", "experts", "seed"]
# Further columns: numbers of the run's config; nan where a config does not have the number.
NUMBERS = {
    "updates_per_rollout": "updates_per_rollout",
    "prompts": "rollout.prompts",
    "responses": "rollout.responses",
    "learning_rate": "optimizer.learning_rate",
}
KEYS += NUMBERS
# The optimizer of runs that name none: those of other trainers, and those of some archives.
USUAL_OPTIMIZER = "adamw"
# The most characters of an arm's name.
_LONGEST_ARM = 10_000
# How many runs are exported at a time.
_RUNS_OF_A_PIECE = 20
_TABLES = ("runs", "steps", "histograms", "evaluations")
# The file of an archive that binds its tables together: file name → checksum. It is written last.
CHECKSUMS = "checksums.json"
# What an archive holds: the columns of each table, those that are numbers, and those that no two rows share.
_FACTS = ("config_hash", "config_without_seed", "algorithm_code", "versions", "revision", "machine", "command")
_ENDS = ("status", "origin", "collapse_rule", "config", "settings", "diverged_reason", "diverged_step")
_COLUMNS = {
    "runs": [*KEYS, *SIZES, *_FACTS, *_ENDS, "steps", "wall_seconds", "tokens_sampled"],
    "steps": [*KEYS, "step", "metric", "value"],
    "histograms": [*KEYS, "metric", "bin", "count"],
    "evaluations": ["arm", "seed", "prompt", "score"],
}
_NUMBERS = {"seed", "strength", *SIZES, *NUMBERS, "steps", "wall_seconds", "tokens_sampled", "diverged_step"}
_NUMBERS |= {"step", "value", "bin", "count", "score"}
# The settings that a cold start follows from, besides the seed.
_OF_STARTS = ("model", "task", "cold_start", "device", "precision", "threads", "experts")
# What pandas calls columns of numbers.
_KINDS = ("integer", "floating", "mixed-integer-float", "empty")
_UNIQUE = {
    "runs": ["arm", "seed"],
    "steps": ["arm", "seed", "step", "metric"],
    "histograms": ["arm", "seed", "metric", "bin"],
}
# Counts, which are neither missing nor beyond these bounds.
_COUNTS = {"seed": 2**63 - 1, **dict.fromkeys(("steps", "updates_per_rollout", "step", "bin"), run_folder.MAX_COUNT)}


def load(results: Path, experiment: str, foreign: bool = False) -> dict[str, pd.DataFrame]:
    """Return the tables of the runs that have ended: ``runs``, ``steps``, ``histograms``, ``evaluations``.

    They come from ``runs/`` if a run has ended there, else from the archive in ``data/``. ``runs`` has the recorded
    status and the verdict of the rule of collapse (``collapse.judged``). Runs of other trainers, whose column
    ``origin`` names the trainer, are left out unless ``foreign``: boards and scores must never hold one by
    accident. The tables are empty for an unknown experiment. Raises Damaged if one cannot be read.
    """
    is_known = experiment in experiments(results)
    ended = ended_runs(results, experiment) if is_known else none()
    ended = ended if foreign else ended[_origins(ended) == ""]
    folder = results / "data" / experiment
    if ended.empty and is_known and folder.is_dir():
        tables = _kept(folder)
        tables = tables if foreign else _from_trainer(tables, "")
    else:
        read = {name: _read(ended, name) for name in ("steps", "evaluations")}
        tables = {"runs": ended, "steps": _long(ended, read["steps"], read["evaluations"])}
        tables |= {"histograms": _histograms(ended, read["steps"])}
        tables |= {"evaluations": _evaluations(ended, read["evaluations"])}
    if tables["runs"].empty:
        return tables
    runs = tables["runs"].assign(start=_starts(tables["runs"]))
    starts = runs.set_index(["arm", "seed"])["start"]
    steps = tables["steps"].join(starts, on=["arm", "seed"])
    return tables | {"runs": collapse.judged(runs, steps), "steps": steps}


def _checksum(made: Any) -> str:
    return str(made.get("sha256", "")) if isinstance(made, dict) else ""


def _starts(runs: pd.DataFrame) -> pd.Series:
    """Return the checksum of each run's cold start; where none was recorded, what such a start followed from.

    Runs of one seed are paired if this is equal. Without a checksum that takes the same config of model, task and cold
    start, the same libraries and the same processor.
    """
    found = runs["start"].fillna("") if "start" in runs else pd.Series("", runs.index)
    made = []
    for run in runs.to_dict("records"):
        config = _object(run["config"])
        parts = {key: config.get(key) for key in _OF_STARTS} if config else [run["model"], run["task"]]
        made.append(json.dumps([parts, run["versions"], run["machine"]], sort_keys=True))
    return found.where(found != "", pd.Series(made, runs.index))


def experiments(results: Path) -> list[str]:
    """Return the names of the experiments below ``runs/`` and ``data/``, sorted."""
    places = [regular_files.refuse_links(results / name, results) for name in ("runs", "data")]
    return sorted({folder.name for place in places for folder in place.glob("*") if folder.is_dir()})


def one_trainer(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return the arms that may be ranked together: the suite's own, or another trainer's where the suite has none.

    Runs of two trainers share neither a start nor a stream of random numbers.
    """
    return _from_trainer(tables, _origins(tables["runs"]).min())  # the suite's own origin is empty, and comes first


def _from_trainer(tables: Mapping[str, pd.DataFrame], origin: str) -> dict[str, pd.DataFrame]:
    arms = set(tables["runs"].loc[_origins(tables["runs"]) == origin, "arm"])  # an arm has one trainer
    return {name: table[table["arm"].isin(arms)] for name, table in tables.items()}


def _origins(runs: pd.DataFrame) -> pd.Series:
    """Return the trainer of each run, empty for the suite's own. An origin names its version, too."""
    return runs["origin"].fillna("").map(lambda origin: origin.partition(" ")[0])


def read_kept(path: Path) -> pd.DataFrame:
    """Return a table of an archive. Raises Damaged if it cannot be read."""
    try:
        return regular_files.read_parquet(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def keep(tables: dict[str, pd.DataFrame], experiment: str, to: Path) -> list[Path]:
    """Write the tables of ``load`` to ``to/data/<experiment>/``, in place of older files; return the files.

    Only the metrics of ``columns.kept``, and the runs' own, are kept of the steps. ``refuse_to_lose`` asks first.
    """
    tables, kept = dict(tables), columns.kept()
    tables["runs"] = tables["runs"].drop(columns=["folder", "axes_values", "numbers"], errors="ignore")
    tables["steps"] = tables["steps"].drop(columns="start", errors="ignore")  # it is in runs
    is_kept = tables["steps"]["metric"].map(lambda name: name in kept or columns.is_own(name)).astype(bool)
    tables["steps"] = tables["steps"][is_kept]
    folder = regular_files.folder(to, "data", experiment)
    paths = [folder / f"{name}.parquet" for name in _TABLES]
    for path in [*paths, folder / CHECKSUMS]:
        atomic_files.replaceable(path)
    for path in paths:
        write = partial(tables[path.stem].reset_index(drop=True).to_parquet, index=False, compression="zstd")
        atomic_files.write(path, write)
    return [*paths, bind(folder)]


def bind(folder: Path) -> Path:
    """Write the checksums of an archive's tables, which belong together, and return the file."""
    checksums = {path.name: run_folder.checksum(path) for path in sorted(folder.glob("*.parquet"))}
    atomic_files.write_json(folder / CHECKSUMS, checksums)
    return folder / CHECKSUMS


def _refuse_mixed(folder: Path, checksums: Mapping[str, Any]) -> None:
    """Raise Damaged if a table of an archive is not the one of its checksums."""
    for name, checksum in checksums.items():
        try:
            is_whole = Path(name).name == name and run_folder.checksum(folder / name) == checksum
        except OSError as error:
            raise Damaged(f"{folder / name} cannot be read: {error}") from error
        if not is_whole:
            raise Damaged(
                f"{folder / name} does not match {CHECKSUMS}: it is damaged, or from another archive than the files "
                "next to it; archive the experiment again"
            )


def _kept(folder: Path) -> dict[str, pd.DataFrame]:
    """Return the tables of an archive. Raises Damaged unless they are complete and match their checksums."""
    if (checksums := run_folder.read(folder / CHECKSUMS)) is None:
        raise Damaged(f"{folder} lacks {CHECKSUMS}")
    paths = {name: folder / f"{name}.parquet" for name in _TABLES if f"{name}.parquet" in checksums}
    _refuse_mixed(folder, checksums)
    if lacking := [name for name in _TABLES if name not in paths]:
        raise Damaged(f"{folder / CHECKSUMS} lacks {lacking[0]}.parquet")
    tables = {name: all_visible(read_kept(path)) for name, path in paths.items()}
    for name in {"runs", "steps", "histograms"} & {name for name in tables if "optimizer" not in tables[name]}:
        tables[name] = tables[name].assign(optimizer=USUAL_OPTIMIZER)
    if why := next(_wrong(tables), None):
        raise Damaged(f"{folder}: {why}")
    return tables


def _wrong(tables: Mapping[str, pd.DataFrame]) -> Iterator[str]:
    """Yield what no archive holds; the first of these may hide others."""
    for name, table in tables.items():
        for column in _COLUMNS[name]:
            if column not in table:
                yield f"{name} lacks {column}"
            values = table[column].dropna()
            kind = pd.api.types.infer_dtype(values) if len(values) else "empty"
            if column not in _NUMBERS:
                if kind not in ("string", "empty") or (name != "runs" and len(values) < len(table)):
                    yield f"{name}: {column} must hold text"
            elif kind not in _KINDS or values.astype(float).abs().between(record.LARGEST, np.inf, "neither").any():
                yield f"{name}: {column} must hold numbers"
            elif column in _COUNTS and not (len(values) == len(table) and values.between(0, _COUNTS[column]).all()):
                yield f"{name}: {column} must be a count in every row"
        if not _pairs(table) <= _pairs(tables["runs"]):
            yield f"{name} has a run that is missing from runs"
        if name in _UNIQUE and table.duplicated(_UNIQUE[name]).any():
            yield f"{name}: no two rows may have the same {', '.join(_UNIQUE[name])}"
    runs, steps = tables["runs"], tables["steps"]
    if not set(runs["status"]) <= set(run_folder.ENDED):
        yield "runs has an unfinished run"
    is_nameless = runs[[*ARM_KEYS, "arm", "origin", "collapse_rule"]].isna().any(axis=None)
    if is_nameless or runs["arm"].str.len().max() > _LONGEST_ARM:
        yield "runs: its arms must be named"
    finite = steps[steps["metric"].isin(["reward", "eval_accuracy", *collapse.FINITE])]
    if not np.isfinite(np.asarray([*finite["value"], *tables["evaluations"]["score"]], float)).all():
        yield "rewards must be finite"
    if not _pairs(runs) <= _pairs(steps[steps["metric"] == "reward"]):
        yield "runs has a run without a reward"
    for text in runs["collapse_rule"].unique():
        if run_folder.rule(_object(text)) is None:
            yield f"runs: {text[:80]!r} is not a collapse rule"
    if not all(_object(text) for text in runs["config"].dropna().unique()):
        yield "runs: config must be JSON"


def _pairs(table: pd.DataFrame) -> set[tuple[Any, ...]]:
    return set(table[["arm", "seed"]].drop_duplicates().itertuples(index=False, name=None))


def _object(text: Any) -> dict[str, Any]:
    """Return the object in a text of JSON; empty for anything else."""
    try:
        found = regular_files.parse_json(text)
    except (ValueError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def refuse_to_lose(runs: pd.DataFrame, experiment: str, to: Path) -> None:
    """Raise UserError if the archive of an experiment in ``to`` holds a run whose like is not in ``runs``.

    A run of equal arm and seed takes another's place, whatever its config.
    """
    path = regular_files.refuse_links(to / "data" / experiment / "runs.parquet", to)
    if not path.exists():
        return
    keys = [*ARM_KEYS, "seed"]
    old, new = (set(each[keys].astype(str).itertuples(index=False, name=None)) for each in (read_kept(path), runs))
    if lost := sorted(old - new):
        algorithm, axes, seed = lost[0][1], lost[0][-2], lost[0][-1]
        raise UserError(
            f"archiving would delete the only copy of {len(lost)} of the {len(old)} runs in {path.parent} (the first: "
            f"{' '.join(filter(None, (algorithm, axes)))} seed={seed}); run them here first, or move that folder away"
        )


# From run folders


def runs(results: Path, experiment: str) -> pd.DataFrame:
    """Return one row per undamaged run folder of an experiment: keys, seed, status, and facts of its ``run.json``.

    All texts are made ``visible``, except the paths in ``folder``.
    """
    rows, folders = [], []
    for folder, state in _states(results, experiment).items():
        status, facts = state.status, state.facts
        if status == "damaged":
            continue  # ``damaged`` and `steadymoe status` report it
        numbers = flatten(facts["config"])
        revision, diverged = facts["revision"] or {"commit": "", "changed": False}, facts["diverged"] or {}
        rows.append(
            {key: facts[key] for key in ("experiment", "algorithm", "model", "task", "seed")}
            | {
                "axes": facts["axes_name"],
                "origin": facts.get("origin", ""),
                "status": status,
                "diverged_reason": diverged.get("reason"),
                "diverged_step": diverged.get("step"),
                "collapse_rule": collapse.Rule(**facts["config"].get("collapse") or {}).text(),
                "steps": facts["config"]["steps"],
                "wall_seconds": facts.get("wall_seconds"),
                "tokens_sampled": facts.get("tokens"),
                **{key: facts[key] for key in ("routing", "correction", "engine")},
                "strength": facts["config"]["engine"].get("strength"),
                "optimizer": facts.get("optimizer", USUAL_OPTIMIZER),
                **{key: facts.get(key, np.nan) for key in SIZES},
                **{key: numbers.get(field, np.nan) for key, field in NUMBERS.items()},
                "config_hash": facts["config_hash"],
                "config_without_seed": facts["config_hash_without_seed"],
                "config": facts["config"],
                "algorithm_code": facts["algorithm_code"],
                "start": _checksum(facts.get("cold_start")),
                "axes_values": facts["axes"],
                "numbers": numbers,
                "versions": " ".join(f"{name} {number}" for name, number in facts["versions"].items()),
                "revision": revision["commit"] + ("+changes" if revision["changed"] else ""),
                "machine": f"{facts['machine']['cpu']}, {facts['machine'].get('gpu', facts['config']['device'])}",
                "command": portable(facts["command"]),
            }
        )
        folders.append(str(folder))
    if not rows:
        return none()
    shown = [{key: visible(value) if isinstance(value, str) else value for key, value in row.items()} for row in rows]
    frame = pd.DataFrame(shown).assign(folder=folders)
    swept = {key for axes in frame["axes_values"] for key in axes}
    frame["settings"] = [settings_hash(config, swept) for config in frame["config"]]
    kept = [{key: value for key, value in config.items() if key not in NO_NUMBERS} for config in frame["config"]]
    frame["config"] = [json.dumps(config, sort_keys=True) for config in kept]
    return frame.assign(arm=name_arms(frame))


def ended_runs(results: Path, experiment: str) -> pd.DataFrame:
    """Return the rows of ``runs`` that have ended, those of other trainers too."""
    table = runs(results, experiment)
    return table[table["status"].isin(run_folder.ENDED)]


def none() -> pd.DataFrame:
    """Return the empty table of ``runs``."""
    return pd.DataFrame(columns=[*KEYS, "status", "origin", "folder", "diverged_reason"])


def damaged(results: Path, experiment: str) -> dict[Path, str]:
    """Return damaged run folder of an experiment → reason. Tables and figures leave these runs out."""
    place = results / "runs" / experiment
    if place.is_symlink():
        return {place: "it is a link; links in a results folder are not followed"}
    return {folder: state.damage for folder, state in _states(results, experiment).items() if state.damage is not None}


def _states(results: Path, experiment: str) -> dict[Path, run_folder.State]:
    """Return run folder → state; a run that has ended is damaged too if its tables do not hold what it says."""
    place = regular_files.refuse_links(results / "runs", results) / experiment
    folders = [] if place.is_symlink() else sorted(path.parent for path in place.glob("**/run.json"))
    return {folder: _read_through(folder, state) for folder, state in run_folder.read_states(folders).items()}


def _read_through(folder: Path, state: run_folder.State) -> run_folder.State:
    try:
        why = _why_odd(folder, (folder / "run.json").stat().st_mtime_ns) if state.has_ended else None  # written last
    except OSError as error:
        why = str(error)
    return state if why is None else run_folder.State("damaged", {}, why)


@lru_cache(maxsize=4096)
def _why_odd(folder: Path, changed: int) -> str | None:
    """Return why the tables of an ended run are not those of its facts; None if they are."""
    try:
        record.read_tables(folder, run_folder.read_run(folder) or {})
    except Damaged as error:
        return str(error)
    return None


def tidy(runs: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield every number of the steps and updates of ``runs``, in pieces: ``KEYS``, step, update, metric, value.

    ``update`` is missing in a row of a step. The rows of steps come first, then the rows of updates, run by run. The
    first piece is empty; all have its types.
    """
    own = {name for folder in runs["folder"] for name in record.own_columns(Path(folder))}
    names = sorted({*columns.TABLES["steps"], *columns.TABLES["updates"], *own})
    texts = {key: sorted(runs[key].unique()) for key in ("arm", *ARM_KEYS)} | {"metric": names}
    types = {key: pd.CategoricalDtype(values) for key, values in texts.items()} | {"update": "Int64"}
    few = [runs[first : first + _RUNS_OF_A_PIECE] for first in range(0, len(runs), _RUNS_OF_A_PIECE)]
    ordered = [*KEYS, "step", "update", "metric", "value"]
    yield runs[KEYS].assign(step=0, update=None, metric=None, value=0.0).astype(types)[ordered][:0]
    for some in few:
        yield steps(some).assign(update=None).astype(types)[ordered]
    for some in few:
        updates = _read(some, "updates").melt(id_vars=["run", "step", "update"], var_name="metric", value_name="value")
        yield _with_keys(some, updates.dropna(subset="value")).astype(types)[ordered]


def steps(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the ``steps`` tables of ``runs`` in long form: the columns ``KEYS``, step, metric, value.

    A metric that a run does not have (routing of a dense model, clip fraction of a loss without a clip) has no rows.
    A run ends at a number that is not finite. Up to its planned last step its reward is 0 after that step, and its
    accuracy from that step on, because a step is evaluated after its updates. (Averages over seeds would rise if such a
    run were left out.) Step 0 has the outcomes of the cold start.
    """
    return _long(runs, _read(runs, "steps"), _read(runs, "evaluations"))


def _long(runs: pd.DataFrame, table: pd.DataFrame, evaluated: pd.DataFrame) -> pd.DataFrame:
    """Return ``steps`` from the tables of ``runs``."""
    table = pd.concat([_cold_start(evaluated), table], ignore_index=True)
    table = table.drop(columns=_histograms_of(table))
    lost, ends, planned = [], {}, {}
    for place, run in enumerate(runs.to_dict("records")):
        if run["diverged_reason"] == "not finite":
            ends[place], planned[place] = int(run["diverged_step"]), int(run["steps"])
            missing = range(ends[place] + 1, planned[place] + 1)
            lost.append(pd.DataFrame({"run": place, "step": missing, "reward": 0.0, "eval_accuracy": 0.0}))
    last = table["step"] == table["run"].map(ends)
    table.loc[last, "reward"] = table.loc[last, "reward"].fillna(0.0)  # the step could not be sampled
    table.loc[last, "eval_accuracy"] = 0.0
    table = pd.concat([table, *(each for each in lost if len(each))], ignore_index=True)
    at_end = table["step"] == table["run"].map(planned)
    table.loc[at_end, [name for name in columns.OUTCOMES if name in table]] = 0.0
    long = table.melt(id_vars=["run", "step"], var_name="metric", value_name="value").dropna(subset="value")
    return _with_keys(runs, long)[[*KEYS, "step", "metric", "value"]]


def _cold_start(table: pd.DataFrame) -> pd.DataFrame:
    """Return the outcomes of each run before its first step: run (its place), step (0), those that it has."""
    scores = {score: name for name, score in columns.EVALUATED.items() if name in columns.OUTCOMES and score in table}
    first = table[table["step"] == 0].groupby(["run", "step"])[list(scores)].mean()
    return first.rename(columns=scores).reset_index()


def _histograms(runs: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return the histogram columns in long form, summed over steps: ``KEYS``, metric, bin (from 0), count."""
    parts = []
    for metric in _histograms_of(table):
        for place, rows in table[["run", metric]].dropna().groupby("run")[metric]:
            counts = np.sum(rows.tolist(), axis=0)
            parts.append(pd.DataFrame({"run": place, "metric": metric, "bin": range(len(counts)), "count": counts}))
    long = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["run", "metric", "bin", "count"])
    return _with_keys(runs, long)[[*KEYS, "metric", "bin", "count"]]


def _histograms_of(table: pd.DataFrame) -> list[str]:
    return [str(name) for name in table if columns.of_metric(str(name)).type == "list<int64>"]


def _read(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return one table of all ``runs``, concatenated; the column ``run`` is the place of the run in ``runs``."""
    tables = [record.read_table(Path(folder), name) for folder in runs["folder"]]
    if not tables:
        return pd.DataFrame(columns=["run", *columns.TABLES[name]])
    return pd.concat([table.assign(run=place) for place, table in enumerate(tables)], ignore_index=True)


def _with_keys(runs: pd.DataFrame, long: pd.DataFrame) -> pd.DataFrame:
    """Return ``long`` sorted by run, with the columns ``KEYS`` of the run in place of the column ``run``."""
    long = long.sort_values("run", kind="stable", ignore_index=True)
    keys = runs[KEYS].iloc[long.pop("run").to_numpy(int)].reset_index(drop=True)
    return pd.concat([keys, long], axis=1)


def _evaluations(runs: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return the last held-out evaluation of each of ``runs``, one row per prompt: arm, seed, prompt, score in [0, 1].

    As in ``steps``, the scores of a run that met a number that is not finite are 0.
    """
    table = table[table["step"] == table.groupby("run")["step"].transform("max")]
    lost = (runs["diverged_reason"] == "not finite").to_numpy()
    table = table.assign(score=table["score"].where(~lost[table["run"].to_numpy(int)], 0.0))
    return _with_keys(runs, table)[["arm", "seed", "prompt", "score"]]


def name_arms(frame: pd.DataFrame) -> pd.Series:
    """Return a short name of each row's arm: its algorithm, and every key and axis that varies within ``frame``.

    A number at its usual value is no axis of its run. The name contains it nevertheless if other runs have another
    value. An axis is named by its last word, by its whole key where two axes share that word.
    """
    varying = [key for key in ARM_KEYS if key == "algorithm" or (key != "axes" and frame[key].nunique() > 1)]
    axes = frame["axes_values"].tolist()
    keys = sorted({key for each in axes for key in each})
    usual = [{key: numbers[key] for key in keys if key in numbers} for numbers in frame["numbers"]]
    axes = [given | own for given, own in zip(usual, axes, strict=True)]
    differing = [key for key in keys if len({str(each.get(key)) for each in axes}) > 1]
    last = Counter(key.rpartition(".")[2] for key in differing)
    names_of = {key: key if last[end := key.rpartition(".")[2]] > 1 else end for key in differing}
    label_of = {key: shortener(each[key] for each in axes if key in each) for key in differing}
    names = [
        visible(" ".join(row + [f"{names_of[key]}={label_of[key](each[key])}" for key in differing if key in each]))
        for row, each in zip(frame[varying].to_numpy().tolist(), axes, strict=True)
    ]
    return pd.Series(names, index=frame.index)
