"""``steadymoe-integrations import``: turn the log of another trainer into a run folder."""

import argparse
import hashlib
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from steadymoe.bench.runs import identity
from steadymoe.bench.runs.record import Record, ended
from steadymoe.bench.statistics.collapse import FINITE
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import visible
from steadymoe.integrations import run_folder
from steadymoe.integrations.logs import read as logs

_DESCRIPTION = """\
Turn the log of another trainer into a run folder that status, report and exports include.

FILE is a log of verl's file logger (.jsonl), or a .csv or .jsonl file with one row per step. Columns with the suite's
names (docs/metrics.md) are read; name others with --map. Step and reward are required. Missing numbers stay missing.

  steadymoe-integrations import verl.jsonl --algorithm gspo --model Qwen3-30B-A3B --task dapo_math --updates 4 --seed 0
  steadymoe-integrations import train.csv --algorithm grpo --model OLMoE --task math --updates 1 --map step=iteration
  steadymoe report --experiment imported
"""
# Axes of a run folder that have options of their own.
_RESERVED = ("trainer", "seed", "correction", "routing", "engine")
_GROUPS = ("correction", "routing", "engine")


def main(words: list[str]) -> int:
    """Import a log and print what was read; return the exit code. Raises UserError before anything is written."""
    arguments = _parser().parse_args(words)
    axes, mapped = _mapping("--axis", arguments.axis), _mapping("--map", arguments.map)
    for name in axes:
        if name in _RESERVED or not identity.is_name(name):
            raise UserError(f"--axis: names are letters and digits, and none of {', '.join(_RESERVED)}; got {name!r}")
    log = logs.read(arguments.file, mapped)
    steps, diverged, notes = outcome(log.steps, arguments.updates)
    facts = _facts(arguments, axes, log)
    folder = run_folder.free_folder(arguments.results, facts)
    with Record(folder, facts) as record:
        record.begin(None)
        record.end(diverged, {"steps": steps})
    names = ", ".join(ours if ours == theirs else f"{ours} ({theirs})" for ours, theirs in log.names.items())
    if diverged is not None:
        notes.append(f"the run {ended(diverged)} at step {diverged['step']}: {diverged['reason']}")
    for line in (f"read {len(steps)} steps of {arguments.file.name}: {names}", *log.notes, *notes, f"wrote {folder}"):
        print(visible(line))
    return 0


def outcome(steps: pa.Table, updates: int) -> tuple[pa.Table, dict[str, Any] | None, list[str]]:
    """Return the steps up to the end of the run, how it diverged (None if it did not), and notes on dropped numbers.

    If every step from some step on has a number of ``FINITE`` that is nan or infinite, the run diverged at that step.
    Earlier ones, as where a trainer skips an update, count as missing. The rule of collapse reads the columns that are
    there; ``updates`` is the number of updates per step.
    """
    recorded = [name for name in FINITE if name in steps.column_names]
    broken = {name: pc.invert(pc.fill_null(pc.is_finite(steps[name]), True)).to_numpy() for name in recorded}
    is_broken = np.logical_or.reduce(list(broken.values()))
    end = int(np.flatnonzero(~is_broken)[-1]) + 1 if not is_broken.all() else 0
    whole, places = steps[:end], np.flatnonzero(is_broken[:end])
    numbers = whole["step"]
    notes = [
        f"{name} of step {numbers[int(place)].as_py():g} is not finite, so it counts as missing"
        for place in places[:6]
        for name in recorded
        if broken[name][place]
    ]
    count = sum(int(each[:end].sum()) for each in broken.values())
    notes = [*notes[:5], f"{count - 5} more numbers are not finite"] if count > 5 else notes
    for name in recorded:
        left = pc.if_else(pa.array(broken[name][:end]), None, whole[name])
        whole = whole.set_column(whole.column_names.index(name), name, left)
    if end < len(steps):
        last = int(steps["step"][end].as_py())
        return (
            pa.concat_tables([whole, steps[end : end + 1]]),
            {"reason": "not finite", "step": last, "update": None},
            notes,
        )
    # A missing column cannot break the rule, as in collapse.judged.
    table = whole.select(["step", *recorded]).to_pandas().reindex(columns=["step", *FINITE]).ffill().fillna(1.0)
    return whole, run_folder.collapse(table, updates), notes


def _facts(arguments: argparse.Namespace, axes: dict[str, str], log: logs.Log) -> dict[str, Any]:
    """Return ``run.json``; a log says nothing about code, libraries and machine."""
    file = arguments.file
    rollout = {"prompts": arguments.prompts, "responses": arguments.responses}
    optimizer = {"learning_rate": arguments.learning_rate}
    config = {
        "experiment_name": arguments.experiment,
        "seed": arguments.seed,
        "device": run_folder.UNKNOWN,
        "engine": {},
        "steps": int(log.steps["step"][-1].as_py()),
        "updates_per_rollout": arguments.updates,
        "rollout": {name: value for name, value in rollout.items() if value is not None},
        "optimizer": {name: value for name, value in optimizer.items() if value is not None},
    }
    names = {name: getattr(arguments, name) for name in ("experiment", "algorithm", "model", "task", *_GROUPS)}
    names["trainer"] = arguments.trainer or ("verl" if log.is_verl else "log")
    command = shlex.join(["steadymoe-integrations", *sys.argv[1:]])
    imported = {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "columns": log.names}
    return run_folder.facts(names, file.name, axes, config, command) | {
        "versions": {},
        "machine": {"cpu": run_folder.UNKNOWN},
        "revision": None,
        "algorithm_code": "",
        "imported": imported,
    }


def _mapping(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """Return repeated ``name=value`` options as a mapping. Raises UserError for another form and for repeated names."""
    mapping: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not (name and value) or name in mapping:
            raise UserError(f"{option} takes name=value, each name once; got {pair!r}")
        mapping[name] = value
    return mapping


def _between(kind: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    """Return a converter of argparse for a number from ``low`` to ``high``."""

    def number(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be between {low} and {high}, got {text}")
        return value

    return number


def _parser() -> Parser:
    verb = Parser(prog="steadymoe-integrations import", description=_DESCRIPTION, allow_abbrev=False)
    count = _between(int, 1, logs.MAX_COUNT)
    verb.add_argument("file", type=Path, metavar="FILE", help="the log")
    for name in ("algorithm", "model", "task"):
        verb.add_argument(f"--{name}", required=True, metavar="NAME", help=f"the name of the {name}")
    verb.add_argument("--updates", type=count, required=True, metavar="N", help="gradient updates per step")
    verb.add_argument("--map", action="append", default=[], metavar="OURS=THEIRS", help="rename a column; repeatable")
    verb.add_argument("--experiment", default="imported", metavar="NAME", help="default: imported")
    verb.add_argument("--seed", type=_between(int, 0, 2**32 - 1), default=0, metavar="N", help="default: 0")
    axis = "an axis that tells runs of the experiment apart; repeatable"
    verb.add_argument("--axis", action="append", default=[], metavar="NAME=VALUE", help=axis)
    verb.add_argument("--trainer", metavar="NAME", help="default: verl for its log, else log")
    for name in _GROUPS:
        verb.add_argument(f"--{name}", default=run_folder.UNKNOWN, metavar="NAME", help="default: unknown")
    verb.add_argument("--prompts", type=count, metavar="N", help="prompts per step (default: unknown)")
    verb.add_argument("--responses", type=count, metavar="N", help="responses per prompt (default: unknown)")
    rate = _between(float, 0, sys.float_info.max)
    verb.add_argument("--learning-rate", type=rate, metavar="X", help="default: unknown")
    verb.add_argument("--results", type=Path, default=Path("results"), metavar="FOLDER", help="default: results")
    return verb
