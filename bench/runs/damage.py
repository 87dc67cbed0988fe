"""Damage: whether a run's folder holds a whole run, with a proper ``run.json`` and the tables that the run wrote."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
    "training_version": int,
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
    """Why the tables of an ended run are not whole, by the checksums in its ``run.json``; None if they are."""
    recorded = facts.get("tables")
    if not isinstance(recorded, dict):
        return "it has no checksums of its tables"
    for table in columns.TABLES:
        path = folder / f"{table}.parquet"
        try:
            is_whole = checksum(path) == recorded.get(table)
        except FileNotFoundError:
            return f"there is no {path.name}"
        except OSError as error:
            return f"{path.name} cannot be read: {error.strerror or error}"
        if not is_whole:
            return f"{path.name} is not as the run has written it"
    return None


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
