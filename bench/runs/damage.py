"""Damage: whether a run's folder holds a whole run, with a proper ``run.json`` and the tables that the run wrote."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from steadymoe.bench.measurement import columns
from steadymoe.bench.support.errors import UserError

STATUSES = ("running", "interrupted", "failed", "finished", "collapsed", "diverged")
# Dotted place in run.json → type; every run.json has these facts.
_FACTS: dict[str, type | tuple[type, ...]] = {
    "status": str,
    **dict.fromkeys(("experiment", "algorithm", "correction", "routing", "engine", "model", "task"), str),
    "axes": dict,
    "axes_name": str,
    "seed": int,
    "config_hash": str,
    "config_hash_without_seed": str,
    "algorithm_code": str,
    "command": str,
    "wall_seconds": (int, float),
    "versions": dict,
    "machine": dict,
    "machine.cpu": str,
    "config": dict,
    "config.device": str,
    "config.engine": dict,
    "config.steps": int,
    "config.updates_per_rollout": int,
    "config.rollout.prompts": int,
    "config.rollout.responses": int,
    "config.optimizer.learning_rate": (int, float),
}
# Facts of a run's config that a log of another trainer may lack.
_MAY_LACK = ("config.rollout.prompts", "config.rollout.responses", "config.optimizer.learning_rate")
# Facts that are null or have the inner fields.
_OR_NULL: dict[str, dict[str, type]] = {
    "revision": {"commit": str, "changed": bool},
    "diverged": {"reason": str, "step": int},
}
# The first and the last four bytes of every parquet file.
_MAGIC = b"PAR1"


class Damaged(UserError, ValueError):
    """A file on disk is damaged; the message is one line and names the file."""


def in_facts(facts: Any) -> str | None:
    """Why ``facts`` cannot be the content of a run's ``run.json``; None if they can."""
    if not isinstance(facts, dict):
        return f"it holds {type(facts).__name__} in place of a run's facts"
    for place, kind in _FACTS.items():
        may_lack = place in _MAY_LACK and bool(facts.get("origin")) and _at(facts, place) is None
        if not may_lack and not isinstance(_at(facts, place), kind):
            return f"it has no proper {place}"
    for name, inner in _OR_NULL.items():
        value = facts.get(name)
        if value is not None and not all(isinstance(_at(facts, f"{name}.{key}"), inner[key]) for key in inner):
            return f"it has no proper {name}"
    return None if facts["status"] in STATUSES else f"it has no proper status: {facts['status']!r}"


def in_tables(folder: Path, facts: Mapping[str, Any]) -> str | None:
    """Why the tables of an ended run are not whole; None if they are.

    ``run.json`` holds the checksums of the tables. An older run has no checksums, and its check is weaker: each table
    must begin and end like a parquet file, and ``steps`` must have one row for each step of the run.
    """
    recorded = facts.get("tables")
    for table in columns.TABLES:
        path = folder / f"{table}.parquet"
        try:
            is_whole = checksum(path) == recorded.get(table) if isinstance(recorded, dict) else _is_closed(path)
        except FileNotFoundError:
            return f"there is no {path.name}"
        except OSError as error:
            return f"{path.name} cannot be read: {error.strerror or error}"
        if not is_whole:
            return f"{path.name} is not as the run has written it"
    return None if isinstance(recorded, dict) else _lacks_steps(folder / "steps.parquet", facts)


def checksum(path: Path) -> str:
    """The first 16 hex digits of the SHA-256 of a file's bytes. Raises OSError if the file cannot be read."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def put_aside(folder: Path, results: Path) -> Path:
    """Move the content of a run's folder, except its lock, to a new folder below ``results/damaged``; return it."""
    place = results.absolute() / "damaged" / folder.relative_to(results.absolute() / "runs")
    to = next(each for each in _numbered(place) if not each.exists())
    to.mkdir(parents=True)
    for path in sorted(folder.iterdir(), key=lambda path: path.name != "run.json"):  # the rest is no run without it
        if path.name != ".lock":
            os.replace(path, to / path.name)
    return to


def _numbered(place: Path) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        yield place / str(number)


def _at(facts: Any, place: str) -> Any:
    """The value at a dotted place; None without such a place."""
    for part in place.split("."):
        facts = facts.get(part) if isinstance(facts, dict) else None
    return facts


def _is_closed(path: Path) -> bool:
    with path.open("rb") as file:
        begins = file.read(4)
        size = file.seek(0, os.SEEK_END)
        if size < 12:
            return False
        file.seek(-8, os.SEEK_END)
        length, ends = int.from_bytes(file.read(4), "little"), file.read(4)
    return begins == ends == _MAGIC and length <= size - 12


def _lacks_steps(path: Path, facts: Mapping[str, Any]) -> str | None:
    lost = facts["diverged"] is not None and facts["diverged"]["reason"] == "not finite"
    expected = facts["diverged"]["step"] if lost else facts["config"]["steps"]
    try:
        rows = pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        return f"{path.name} cannot be read: {' '.join(str(error).split())}"
    return f"{path.name} has {rows} of {expected} steps" if rows < expected else None
