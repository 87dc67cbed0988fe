"""The records of an experiment as tidy tables: from its run folders, or from an archive of them.

Training writes ``results/runs/<experiment>/``. ``keep`` archives it as ``results/data/<experiment>/``: small enough to
be committed, and enough for ``steadymoe report``.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from steadymoe.bench.config.identity import NO_NUMBERS, flatten, settings_hash, shortener
from steadymoe.bench.measurement import columns
from steadymoe.bench.runs import record
from steadymoe.bench.runs.lifecycle import Damaged
from steadymoe.bench.statistics import collapse
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import all_visible, visible

# The columns that tell one run from another, besides its seed.
ARM_KEYS = ["experiment", "algorithm", "model", "task", "axes"]
# The sizes of a model, from ``models.build.size``.
SIZES = ["parameters", "active_parameters", "moe_layers", "experts", "top_k"]
# The columns of a run in the long tables; ``arm`` is its name by ``name_arms``, ``strength`` the engine's strength.
KEYS = ["arm", *ARM_KEYS, "routing", "correction", "engine", "strength", "moe_layers", "experts", "seed"]
# Further columns: numbers of the run's config; nan where a config does not have the number.
NUMBERS = {
    "updates_per_rollout": "updates_per_rollout",
    "prompts": "rollout.prompts",
    "responses": "rollout.responses",
    "learning_rate": "optimizer.learning_rate",
}
KEYS += NUMBERS
# How many runs are exported at a time.
_RUNS_OF_A_PIECE = 20
_TABLES = ("runs", "steps", "histograms", "evaluations", "tails")


def load(results: Path, experiment: str, foreign: bool = False) -> dict[str, pd.DataFrame]:
    """Return the tables of the runs that have ended: ``runs``, ``steps``, ``histograms``, ``evaluations``, ``tails``.

    They come from ``runs/`` if a run has ended there, else from the archive in ``data/``. ``runs`` has the recorded
    status and the verdict of today's rule of collapse (``collapse.judged``). Runs of other trainers, whose column
    ``origin`` names the trainer, are left out unless ``foreign``: claims, boards and scores must never hold one by
    accident. The tables are empty for an unknown experiment. Raises Damaged if one cannot be read.
    """
    is_known = experiment in experiments(results)
    ended = ended_runs(results, experiment) if is_known else none()
    ended = ended if foreign else ended[_origins(ended) == ""]
    folder = results / "data" / experiment
    if ended.empty and is_known and folder.is_dir():
        paths = {name: folder / f"{name}.parquet" for name in _TABLES}
        kept = [name for name, path in paths.items() if name not in columns.ADDED or path.exists()]
        tables = {"tails": tails(none())} | {name: all_visible(read_kept(paths[name])) for name in kept}
        if lacking := sorted({"origin", "collapse_rule"} - set(tables["runs"])):
            raise Damaged(f"{folder / 'runs.parquet'} lacks {lacking[0]}: it is of an earlier version of steadymoe")
        tables = tables if foreign else _from_trainer(tables, "")
    else:
        tables = {"runs": ended, "steps": steps(ended)}
        tables |= {"histograms": histograms(ended), "evaluations": evaluations(ended), "tails": tails(ended)}
    return tables | {"runs": collapse.judged(tables["runs"], tables["steps"])} if len(tables["runs"]) else tables


def experiments(results: Path) -> list[str]:
    """Return the names of the experiments below ``runs/`` and ``data/``, sorted."""
    folders = [*(results / "runs").glob("*"), *(results / "data").glob("*")]
    return sorted({folder.name for folder in folders if folder.is_dir()})


def one_trainer(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return the arms that may be ranked together: the suite's own, or another trainer's where the suite has none.

    Runs of two trainers share neither a start nor a stream of random numbers.
    """
    return _from_trainer(tables, _origins(tables["runs"]).min())  # the suite's own origin is empty, and comes first


def _from_trainer(tables: Mapping[str, pd.DataFrame], origin: str) -> dict[str, pd.DataFrame]:
    arms = set(tables["runs"].loc[_origins(tables["runs"]) == origin, "arm"])  # an arm has one trainer
    return {name: table[table["arm"].isin(arms)] for name, table in tables.items()}


def _origins(runs: pd.DataFrame) -> pd.Series:
    """Return the trainer of each run, empty for the suite's own. An origin names its version or its log, too."""
    return runs["origin"].fillna("").map(lambda origin: origin.partition(" ")[0])


def read_kept(path: Path) -> pd.DataFrame:
    """Return a table of an archive. Raises Damaged if it cannot be read."""
    try:
        return pd.read_parquet(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def keep(tables: dict[str, pd.DataFrame], experiment: str, to: Path) -> list[Path]:
    """Write the tables of ``load`` to ``to/data/<experiment>/``, in place of older files; return the files.

    Only the metrics that ``columns.kept`` names are kept of the steps. ``refuse_to_lose`` asks first.
    """
    tables = dict(tables)
    tables["runs"] = tables["runs"].drop(columns=["folder", "axes_values", "numbers"], errors="ignore")
    tables["steps"] = tables["steps"][tables["steps"]["metric"].isin(columns.kept())]
    folder = to / "data" / experiment
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TABLES:
        write = partial(tables[name].reset_index(drop=True).to_parquet, index=False, compression="zstd")
        atomic_files.write(folder / f"{name}.parquet", write)
    return [folder / f"{name}.parquet" for name in _TABLES]


def refuse_to_lose(runs: pd.DataFrame, experiment: str, to: Path) -> None:
    """Raise UserError if the archive of an experiment in ``to`` holds a run whose like is not in ``runs``.

    A run of equal arm and seed takes another's place, whatever its config.
    """
    path = to / "data" / experiment / "runs.parquet"
    if not path.exists():
        return
    old, new = (
        set(each[[*ARM_KEYS, "seed"]].astype(str).itertuples(index=False, name=None))
        for each in (read_kept(path), runs)
    )
    if lost := sorted(old - new):
        algorithm, axes, seed = lost[0][1], lost[0][-2], lost[0][-1]
        raise UserError(
            f"{path.parent} holds {len(lost)} of its {len(old)} runs alone (the first: "
            f"{' '.join(filter(None, (algorithm, axes)))} seed={seed}); run them here, or move that folder away"
        )


# From run folders


def runs(results: Path, experiment: str) -> pd.DataFrame:
    """Return one row per undamaged run folder of an experiment: keys, seed, status, and facts of its ``run.json``.

    All texts are made ``visible``, except the paths in ``folder``.
    """
    rows, folders = [], []
    for folder in _folders(results, experiment):
        status = record.status(folder)
        if status == "damaged":
            continue  # ``damaged`` and `steadymoe status` report it
        facts = record.read_run(folder) or {}
        numbers = flatten(facts["config"])
        revision = facts["revision"] or {"commit": "", "changed": False}
        rows.append(
            {key: facts[key] for key in ("experiment", "algorithm", "model", "task", "seed")}
            | {
                "axes": facts["axes_name"],
                "origin": facts.get("origin", ""),
                "status": status,
                "diverged_reason": (facts["diverged"] or {}).get("reason"),
                "diverged_step": (facts["diverged"] or {}).get("step"),
                "collapse_rule": collapse.Rule(**facts["config"].get("collapse", {})).text(),
                "steps": facts["config"]["steps"],
                "wall_seconds": facts.get("wall_seconds"),
                "tokens_sampled": facts.get("tokens"),
                **{key: facts[key] for key in ("routing", "correction", "engine")},
                "strength": facts["config"]["engine"].get("strength"),
                **{key: facts.get(key, np.nan) for key in SIZES},
                **{key: numbers.get(field, np.nan) for key, field in NUMBERS.items()},
                "config_hash": facts["config_hash"],
                "config_without_seed": facts["config_hash_without_seed"],
                "config": facts["config"],
                "algorithm_code": facts["algorithm_code"],
                "axes_values": facts["axes"],
                "numbers": numbers,
                "versions": " ".join(f"{name} {number}" for name, number in facts["versions"].items()),
                "revision": revision["commit"] + ("+changes" if revision["changed"] else ""),
                "machine": f"{facts['machine']['cpu']}, {facts['machine'].get('gpu', facts['config']['device'])}",
                "command": facts["command"],
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
    return table[table["status"].isin(record.ENDED)]


def none() -> pd.DataFrame:
    """Return the empty table of ``runs``."""
    return pd.DataFrame(columns=[*KEYS, "status", "origin", "folder", "diverged_reason"])


def damaged(results: Path, experiment: str) -> dict[Path, str]:
    """Return damaged run folder of an experiment → reason. Tables and figures leave these runs out."""
    reasons = {folder: record.damage(folder) for folder in _folders(results, experiment)}
    return {folder: reason for folder, reason in reasons.items() if reason is not None}


def _folders(results: Path, experiment: str) -> list[Path]:
    return sorted(path.parent for path in (results / "runs" / experiment).glob("**/run.json"))


def tidy(runs: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield every number of the steps and updates of ``runs``, in pieces: ``KEYS``, step, update, metric, value.

    ``update`` is missing in a row of a step. The rows of steps come first, then the rows of updates, run by run. The
    first piece is empty; all have its types.
    """
    names = sorted({*columns.TABLES["steps"], *columns.TABLES["updates"]})
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
    run were left out.) Step 0 has the held-out accuracy of the cold start.
    """
    table = pd.concat([_cold_start(runs), _read(runs, "steps")], ignore_index=True)
    table = table.drop(columns=[name for name in table if str(name).endswith("_histogram")])
    lost, ends = [], {}
    for place, run in enumerate(runs.to_dict("records")):
        if run["diverged_reason"] == "not finite":
            ends[place] = int(run["diverged_step"])
            missing = range(ends[place] + 1, int(run["steps"]) + 1)
            lost.append(pd.DataFrame({"run": place, "step": missing, "reward": 0.0, "eval_accuracy": 0.0}))
    last = table["step"] == table["run"].map(ends)
    table.loc[last, "reward"] = table.loc[last, "reward"].fillna(0.0)  # the step could not be sampled
    table.loc[last, "eval_accuracy"] = 0.0
    table = pd.concat([table, *(each for each in lost if len(each))], ignore_index=True)
    long = table.melt(id_vars=["run", "step"], var_name="metric", value_name="value").dropna(subset="value")
    return _with_keys(runs, long)[[*KEYS, "step", "metric", "value"]]


def _cold_start(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the held-out accuracy of each run before its first step: run (its place), step (0), eval_accuracy."""
    table = _read(runs, "evaluations")
    first = table[table["step"] == 0].groupby(["run", "step"])["score"].mean()
    return first.rename("eval_accuracy").reset_index()


def histograms(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the histogram columns in long form, summed over steps: ``KEYS``, metric, bin (from 0), count."""
    table, parts = _read(runs, "steps"), []
    for metric in [str(name) for name in table if str(name).endswith("_histogram")]:
        for place, rows in table[["run", metric]].dropna().groupby("run")[metric]:
            counts = np.sum(rows.tolist(), axis=0)
            parts.append(pd.DataFrame({"run": place, "metric": metric, "bin": range(len(counts)), "count": counts}))
    long = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["run", "metric", "bin", "count"])
    return _with_keys(runs, long)[[*KEYS, "metric", "bin", "count"]]


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


def evaluations(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the last held-out evaluation of each of ``runs``, one row per prompt: arm, seed, prompt, score in [0, 1].

    As in ``steps``, the scores of a run that met a number that is not finite are 0.
    """
    table = _read(runs, "evaluations")
    table = table[table["step"] == table.groupby("run")["step"].transform("max")]
    lost = (runs["diverged_reason"] == "not finite").to_numpy()
    table = table.assign(score=table["score"].where(~lost[table["run"].to_numpy(int)], 0.0))
    return _with_keys(runs, table)[["arm", "seed", "prompt", "score"]]


def tails(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the tokens whose ratio moved most in probed steps: arm, seed and the columns of the table ``tails``."""
    table = all_visible(_read(runs, "tails"))
    numbers = dict.fromkeys(table.select_dtypes("float").columns, "float32")  # as measured: half an archive's bytes
    return _with_keys(runs, table.astype(numbers))[["arm", "seed", *columns.TABLES["tails"]]]


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
        visible(
            " ".join(row + [f"{names_of[key]}={label_of[key](each[key])}" for key in differing if key in each])
        )
        for row, each in zip(frame[varying].to_numpy().tolist(), axes, strict=True)
    ]
    return pd.Series(names, index=frame.index)
