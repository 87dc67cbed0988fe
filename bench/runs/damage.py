"""Whether what lies in a run's folder is a whole run: a ``run.json`` that says what runs say, and tables as written."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from steadymoe.bench.measurement import columns

STATUSES = ("running", "interrupted", "failed", "finished", "diverged")
# What every run.json holds, by its place, and as what.
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
# What may be null; otherwise as the inner table says.
_OR_NULL: dict[str, dict[str, type]] = {
    "revision": {"commit": str, "changed": bool},
    "diverged": {"reason": str, "step": int},
}
# The first and the last four bytes of every parquet file.
_MAGIC = b"PAR1"


class Damaged(ValueError):
    """Something on disk that is not whole; the message is one line that names the file."""


def in_facts(facts: Any) -> str | None:
    """Why the content of a ``run.json`` is not that of a run; None if it is."""
    if not isinstance(facts, dict):
        return f"it holds {type(facts).__name__} in place of a run's facts"
    for place, kind in _FACTS.items():
        if not isinstance(_at(facts, place), kind):
            return f"it has no proper {place}"
    for name, inner in _OR_NULL.items():
        value = facts.get(name)
        if value is not None and not all(isinstance(_at(facts, f"{name}.{key}"), inner[key]) for key in inner):
            return f"it has no proper {name}"
    return None if facts["status"] in STATUSES else f"it has no proper status: {facts['status']!r}"


def in_tables(folder: Path, facts: Mapping[str, Any]) -> str | None:
    """Why the tables of a run that has ended are not whole; None if they are.

    A run says in ``run.json`` what its tables' checksums are. One from before they were recorded is looked at less
    closely: each table begins and ends as such a file does, and ``steps`` has as many rows as the run had steps.
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
    """16 hex digits over the bytes of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def put_aside(folder: Path, results: Path) -> Path:
    """Move what is in a run's folder, but for its lock, to a new folder below ``results/damaged``; returns that one."""
    place = results.absolute() / "damaged" / folder.relative_to(results.absolute() / "runs")
    to = next(each for each in _numbered(place) if not each.exists())
    to.mkdir(parents=True)
    for path in sorted(folder.iterdir(), key=lambda path: path.name != "run.json"):  # nobody takes the rest for a run
        if path.name != ".lock":
            os.replace(path, to / path.name)
    return to


def _numbered(place: Path) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        yield place / str(number)


def _at(facts: Any, place: str) -> Any:
    """The value at a dotted place; None where there is none."""
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
