"""What the run folders of an experiment hold, as tables: a row a run, and long tables that name a run by its number."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.bench.runs import record, run_folder
from steadymoe.bench.runs.identity import NO_NUMBERS, OFF, flatten, settings_hash, shortener
from steadymoe.bench.runs.run_folder import Damaged
from steadymoe.bench.statistics import collapse
from steadymoe.bench.support import files
from steadymoe.bench.support.text import portable, visible
from steadymoe.bench.training import columns

# Columns of ``runs`` that are numbers of the config, each with its key.
NUMBERS = {
    "updates_per_rollout": "updates_per_rollout",
    "minibatch_prompts": "minibatch_prompts",
    "responses": "rollout.responses",
    "learning_rate": "optimizer.learning_rate",
    "strength": "engine.strength",
}
# The settings that a cold start follows from, besides the seed.
_START_KEYS = ("model", "task", "cold_start", "device", "precision", "threads", "experts")
# The columns that tell one run from another, besides its seed.
ARM_KEYS = ["experiment", "algorithm", "model", "task", "axes"]
_SIZES = ("parameters", "active_parameters", "moe_layers", "experts", "top_k")
# Columns of ``runs`` → their types.
_TEXTS = (*ARM_KEYS, "origin", "status", "routing", "correction", "engine", "optimizer", "config_hash")
_TEXTS += ("config_without_seed", "settings", "algorithm_code", "versions", "revision", "machine", "command")
RUNS: dict[str, type] = {"arm": str, "seed": int} | dict.fromkeys(
    (*_TEXTS, "collapse_rule", "config", "start", "diverged_reason"), str
)
RUNS |= dict.fromkeys((*NUMBERS, *_SIZES, "steps", "tokens_sampled", "diverged_step"), int)
RUNS |= dict.fromkeys(("learning_rate", "strength", "wall_seconds"), float)
# Those that a run may lack.
MAY_LACK = {"minibatch_prompts", "responses", "learning_rate", "strength", *_SIZES, "tokens_sampled", "wall_seconds"}
MAY_LACK |= {"diverged_reason", "diverged_step"}
# The facts of a run that figures and tables read beside its numbers, and that an export has.
FACTS = ["arm", *ARM_KEYS, "routing", "correction", "engine", "strength", "optimizer", "moe_layers", "experts", "seed"]
FACTS += ["updates_per_rollout", "minibatch_prompts", "responses", "learning_rate"]
# How many runs are exported at a time.
_RUNS_AT_ONCE = 20


def experiments(results: Path) -> list[str]:
    """Return the names of the experiments below ``runs/`` and ``data/``, sorted."""
    places = [files.refuse_links(results / name, results) for name in ("runs", "data")]
    return sorted({folder.name for place in places for folder in place.glob("*") if folder.is_dir()})


def read_runs(results: Path, experiment: str) -> pd.DataFrame:
    """Return a row for each undamaged run of an experiment, those that have not ended too: ``RUNS`` and ``folder``.

    The index, ``run``, numbers them. All texts are made ``visible``, except the paths in ``folder``.
    """
    # Of damaged runs ``damaged`` and `steadymoe status` tell.
    sound = {folder: state for folder, state in _states(results, experiment).items() if state.status != "damaged"}
    facts = [state.facts for state in sound.values()]
    swept = {key for run in facts for key in run["axes"]}
    rows = [_facts(state.status, state.facts, swept) for state in sound.values()]
    shown = [{key: visible(value) if isinstance(value, str) else value for key, value in row.items()} for row in rows]
    table = pd.DataFrame(shown, columns=[*RUNS, "folder"]).rename_axis("run")
    arms = name_arms(table, [run["axes"] for run in facts], [flatten(run["config"]) for run in facts])
    return table.assign(arm=arms, folder=[*map(str, sound)])


def ended_runs(results: Path, experiment: str) -> pd.DataFrame:
    """Return the rows of ``read_runs`` that have ended, those of other trainers too."""
    table = read_runs(results, experiment)
    return table[table["status"].isin(run_folder.ENDED)]


def _facts(status: str, run: Mapping[str, Any], swept: set[str]) -> dict[str, Any]:
    """Return a run's row from the facts in its ``run.json``; ``swept`` are the axes of its experiment."""
    config, numbers = run["config"], flatten(run["config"])
    revision, diverged = run["revision"] or {"commit": "", "changed": False}, run["diverged"] or {}
    versions = " ".join(f"{name} {number}" for name, number in run["versions"].items())
    machine = f"{run['machine']['cpu']}, {run['machine'].get('gpu', config['device'])}"
    begun = json.dumps([{key: config.get(key) for key in _START_KEYS}, versions, machine], sort_keys=True)
    return {
        **{key: run[key] for key in RUNS if key in run},
        **{key: numbers.get(field, np.nan) for key, field in NUMBERS.items()},
        "steps": run_folder.rollouts(run),
        "axes": run["axes_name"],
        "origin": run.get("origin", ""),
        "status": status,
        "diverged_reason": diverged.get("reason"),
        "diverged_step": diverged.get("step"),
        "optimizer": run.get("optimizer", OFF["optimizer"]),  # other trainers name none
        "tokens_sampled": run.get("tokens"),
        "collapse_rule": collapse.Rule(**config.get("collapse") or {}).text(),
        "config_without_seed": run["config_hash_without_seed"],
        "settings": settings_hash(config, swept),
        "config": json.dumps({key: value for key, value in config.items() if key not in NO_NUMBERS}, sort_keys=True),
        # Runs of one seed are paired if this is equal: of a start that was not recorded, what it follows from.
        "start": str(flatten({"start": run.get("cold_start")}).get("start.sha256") or begun),
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


def renamed(runs: pd.DataFrame) -> list[str]:
    """Return the names of arms (``name_arms``) of runs that come from several places.

    The names stay where a run's axes were too long for its folder's name, which has only their hash.
    """
    if runs["axes"].str.contains("~").any():
        return runs["arm"].tolist()
    axes = [dict(pair.split("=", 1) for pair in text.split(",") if "=" in pair) for text in runs["axes"]]
    return name_arms(runs, axes, [flatten(json.loads(text)) for text in runs["config"]])


# Damage


def damaged(results: Path, experiment: str) -> dict[Path, str]:
    """Return damaged run folder of an experiment → reason. Tables and figures leave these runs out."""
    place = results / "runs" / experiment
    if place.is_symlink():
        return {place: "it is a link; links in a results folder are not followed"}
    return {folder: state.damage for folder, state in _states(results, experiment).items() if state.damage is not None}


def _states(results: Path, experiment: str) -> dict[Path, run_folder.State]:
    """Return run folder → state; a run that has ended is damaged too if its tables do not hold what it says."""
    place = files.refuse_links(results / "runs", results) / experiment
    is_known = experiment in experiments(results) and not place.is_symlink()
    folders = sorted(path.parent for path in place.glob("**/run.json")) if is_known else []
    states = run_folder.read_states(folders)
    for folder in [folder for folder, state in states.items() if state.has_ended]:
        if (why := _why_odd(folder, (folder / "run.json").stat().st_mtime_ns)) is not None:  # it is written last
            states[folder] = run_folder.State("damaged", {}, why)
    return states


@lru_cache(maxsize=4096)
def _why_odd(folder: Path, changed: int) -> str | None:
    """Return why the tables of an ended run are not those of its facts; None if they are."""
    try:
        record.read_tables(folder, run_folder.read_run(folder) or {})
    except Damaged as error:
        return str(error)
    return None


# Long tables


def tidy(runs: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield every number of the steps and updates of ``runs``, in pieces: ``FACTS``, step, update, metric, value.

    ``update`` is missing in a row of a step. The rows of steps come first, then the rows of updates, run by run.
    """
    few = [runs[first : first + _RUNS_AT_ONCE] for first in range(0, len(runs), _RUNS_AT_ONCE)]
    ordered = [*FACTS, "step", "update", "metric", "value"]
    for some in few:
        long = steps(some, read(some, "steps"), read(some, "evaluations")).assign(update=None)
        yield long.join(some[FACTS], on="run")[ordered].astype({"update": "Int64"})
    for some in few:
        updates = read(some, "updates").melt(id_vars=["run", "step", "update"], var_name="metric", value_name="value")
        long = updates.dropna(subset="value").sort_values("run", kind="stable", ignore_index=True)
        yield long.join(some[FACTS], on="run")[ordered].astype({"update": "Int64"})


def read(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return one table of all ``runs``, concatenated, with the column ``run``."""
    places = zip(runs.index.tolist(), runs["folder"], strict=True)
    tables = [record.read_table(Path(folder), name).assign(run=run) for run, folder in places]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["run", *columns.TABLES[name]])


def steps(runs: pd.DataFrame, table: pd.DataFrame, evaluated: pd.DataFrame) -> pd.DataFrame:
    """Return the tables ``steps`` and ``evaluations`` of ``runs`` in long form: run, step, metric, value.

    A metric that a run does not have (routing of a dense model, clip fraction of a loss without a clip) has no rows.
    A run ends at a number that is not finite. Up to its planned last step its reward is 0 after that step, and its
    accuracy from that step on, because a step is evaluated after its updates. (Averages over seeds would rise if such a
    run were left out.) Step 0 has the outcomes of the cold start.
    """
    scores = {score: name for name, score in columns.EVALUATED.items() if name in columns.OUTCOMES}
    first = evaluated[evaluated["step"] == 0].groupby(["run", "step"])[[name for name in scores if name in evaluated]]
    lost = runs[runs["diverged_reason"] == "not finite"]
    ends, planned = lost["diverged_step"].astype(int), lost["steps"].astype(int)
    missing = [
        pd.DataFrame({"run": run, "step": range(ends[run] + 1, planned[run] + 1), "reward": 0.0, "eval_accuracy": 0.0})
        for run in lost.index[ends < planned]
    ]
    table = table.drop(columns=_histograms_of(table))
    table = pd.concat([first.mean().rename(columns=scores).reset_index(), table, *missing], ignore_index=True)
    at_end, at_last = (table["step"] == table["run"].map(each) for each in (ends, planned))
    table.loc[at_end, "reward"] = table.loc[at_end, "reward"].fillna(0.0)  # the step could not be sampled
    table.loc[at_end, "eval_accuracy"] = 0.0
    table.loc[at_last, [name for name in columns.OUTCOMES if name in table]] = 0.0
    long = table.melt(id_vars=["run", "step"], var_name="metric", value_name="value").dropna(subset="value")
    return long.sort_values("run", kind="stable", ignore_index=True)


def histograms(table: pd.DataFrame) -> pd.DataFrame:
    """Return the histograms of the tables ``steps`` of runs, summed over steps: run, metric, bin (from 0), count."""
    parts = []
    for metric in _histograms_of(table):
        for run, rows in table[["run", metric]].dropna().groupby("run")[metric]:
            counts = np.sum(rows.tolist(), axis=0)
            parts.append(pd.DataFrame({"run": run, "metric": metric, "bin": range(len(counts)), "count": counts}))
    long = pd.concat(parts) if parts else pd.DataFrame(columns=["run", "metric", "bin", "count"])
    return long.sort_values("run", kind="stable", ignore_index=True)


def _histograms_of(table: pd.DataFrame) -> list[str]:
    return [str(name) for name in table if columns.of_metric(str(name)).type == "list<int64>"]


def last_evaluation(runs: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return the last held-out evaluation in the tables ``evaluations`` of ``runs``: run, prompt, score in [0, 1].

    As in ``steps``, the scores of a run that met a number that is not finite are 0.
    """
    table = table[table["step"] == table.groupby("run")["step"].transform("max")]
    lost = runs.index[runs["diverged_reason"] == "not finite"]
    return table.assign(score=table["score"].where(~table["run"].isin(lost), 0.0))[["run", "prompt", "score"]]
