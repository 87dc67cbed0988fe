"""The log of another trainer becomes a run folder, for ``status``, ``report`` and exports.

A log says little of a run. What it does not say is absent: columns, the machine, the number of prompts. Such a run has
an ``origin``, so it never enters claims, scores or boards.
"""

import argparse
import hashlib
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.config import identity
from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.runs.record import Record
from steadymoe.bench.statistics.collapse import FINITE, Rule, detect
from steadymoe.bench.trainers import logs
from steadymoe.bench.trainers.logs import Numbers
from steadymoe.bench.trainers.run_folder import ForeignRun

# Of a run folder's axes: these are named by options of their own.
_RESERVED = ("trainer", "seed", "correction", "routing", "engine")


def write(arguments: argparse.Namespace) -> list[str]:
    """Write the run folder; return what it holds, line by line.

    Raises ConfigError, in one line, for bad input, before anything is written.
    """
    _check_numbers(arguments)
    mapped, axes = _pairs("--map", arguments.map), _pairs("--axis", arguments.axis)
    for name in axes:
        if name in _RESERVED or not identity.is_name(name):
            raise ConfigError(f"--axis: a name is letters and digits, and none of {', '.join(_RESERVED)}; got {name!r}")
    log = logs.read(arguments.file, mapped)
    rows, diverged, dropped = judged(log.rows, arguments.updates)
    run = _run(arguments, axes, "verl" if log.is_verl else "log", int(log.rows[-1]["step"]))
    facts = _facts(run, arguments.file, log.names)
    run.refuse_taken()
    with Record(run.folder, facts) as record:
        record.begin(None)
        record.append({"steps": rows})
        record.end("finished" if diverged is None else "diverged", diverged=diverged)
    found = ", ".join(f"{ours} ({theirs})" if ours != theirs else ours for ours, theirs in log.names.items())
    read = f"read {len(rows)} steps of {arguments.file.name}: {found}"
    return [read, *log.notes, *dropped, f"wrote {run.folder}"]


def judged(rows: Sequence[Numbers], updates: int) -> tuple[list[Numbers], dict[str, Any] | None, list[str]]:
    """The rows up to the end of the run, how it diverged (None if it did not), and what is said of dropped numbers.

    A run whose last rows all hold a number that is not finite, in a column of ``FINITE``, ended at the first of these
    rows. Where such numbers come and go, as where a trainer skips an update, they count as absent. The rule of collapse
    is asked of the columns that are there.
    """

    def broken(row: Numbers) -> list[str]:
        return [name for name in FINITE if not math.isfinite(row.get(name, 0.0))]

    sound = max((place for place, row in enumerate(rows) if not broken(row)), default=-1) + 1
    dropped = [(name, row["step"]) for row in rows[:sound] for name in broken(row)]
    kept = [{name: value for name, value in row.items() if name not in broken(row)} for row in rows[:sound]]
    said = [f"{name} of step {step:g} is not finite, and absent" for name, step in dropped[:5]]
    said += [f"{len(dropped) - 5} more numbers are not finite, and absent"] if len(dropped) > 5 else []
    if sound < len(rows):
        end = rows[sound]
        return [*kept, end], {"reason": "not finite", "step": int(end["step"]), "update": None}, said
    # An absent column cannot break the rule, as in collapse.judged.
    table = pd.DataFrame(kept).reindex(columns=["step", *FINITE]).ffill().fillna(1.0)
    collapse = detect(table, Rule(), updates)
    if collapse is None:
        return kept, None, said
    return kept, {"reason": collapse.reason, "step": collapse.step, "update": None}, said


def _run(arguments: argparse.Namespace, axes: dict[str, str], trainer: str, steps: int) -> ForeignRun:
    """The run folder's names and config. Raises ConfigError for a name that can be no folder."""
    trainer = arguments.trainer or trainer
    groups = {name: getattr(arguments, name) for name in ("correction", "routing", "engine")}
    for option, name in {"trainer": trainer, **groups}.items():
        if not identity.is_name(name):
            raise ConfigError(f"--{option} must be letters, digits, '.', '_', '-' or '@'; got {name!r}")
    rollout = {name: getattr(arguments, name) for name in ("prompts", "responses")}
    optimizer = {"learning_rate": arguments.learning_rate}
    return ForeignRun(
        origin=f"{trainer} {arguments.file.name}",
        axes=axes,
        config={
            "experiment_name": arguments.experiment,
            "seed": arguments.seed,
            "device": "unknown",
            "engine": {},
            "steps": steps,
            "updates_per_rollout": arguments.updates,
            "rollout": {name: value for name, value in rollout.items() if value is not None},
            "optimizer": {name: value for name, value in optimizer.items() if value is not None},
        },
        command=shlex.join(["steadymoe", *sys.argv[1:]]),
        **{name: getattr(arguments, name) for name in ("results", "experiment", "algorithm", "model", "task", "seed")},
        **groups,
    )


def _facts(run: ForeignRun, file: Path, names: dict[str, str]) -> dict[str, Any]:
    """``run.json`` before the rows: of code, libraries and machine a log says nothing."""
    unknown = {"versions": {}, "machine": {"cpu": "unknown"}, "revision": None, "algorithm_code": ""}
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return run.facts() | unknown | {"imported": {"file": file.name, "sha256": digest, "columns": names}}


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("updates", "prompts", "responses"):
        if (value := getattr(arguments, name)) is not None and not 1 <= value <= logs.MOST:
            raise ConfigError(f"--{name} must be between 1 and {logs.MOST}, got {value}")
    if not 0 <= arguments.seed < 2**32:
        raise ConfigError(f"--seed must be at least 0 and below 2**32; got {arguments.seed}")
    if arguments.learning_rate is not None and not 0 <= arguments.learning_rate < math.inf:
        raise ConfigError(f"--learning-rate must be at least 0 and finite; got {arguments.learning_rate}")


def _pairs(option: str, words: Sequence[str]) -> dict[str, str]:
    """``name=value`` words. Raises ConfigError for another form, and for a name that is given twice."""
    found: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not (name and sign and value) or name in found:
            raise ConfigError(f"{option} takes name=value, each name once; got {word!r}")
        found[name] = value
    return found
