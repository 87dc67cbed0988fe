"""The folder of a run: ``run.json`` and its tables, written during the run and never overwritten silently.

A running run appends its rows to ``<table>.jsonl``; at its end they become ``<table>.parquet``. However a run is
killed, the rows of its finished steps are on disk.
"""

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadymoe.bench.config import branch
from steadymoe.bench.measurement import columns
from steadymoe.bench.runs import lifecycle
from steadymoe.bench.runs.lifecycle import Damaged, at
from steadymoe.bench.support import atomic_files

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from steadymoe.bench.config.compose import Run

# A run with one of these statuses is complete and never changes.
ENDED = ("finished", "collapsed", "diverged")
STATUSES = ("running", "interrupted", "failed", *ENDED)

_FIELDS: lifecycle.Fields = {
    **dict.fromkeys(("status", "experiment", "algorithm", "correction", "routing", "engine", "model", "task"), str),
    **dict.fromkeys(("axes_name", "config_hash", "config_hash_without_seed", "algorithm_code", "command"), str),
    **dict.fromkeys(("axes", "versions", "machine", "config", "config.engine"), dict),
    **dict.fromkeys(("seed", "training_version", "config.steps", "config.updates_per_rollout"), int),
    **dict.fromkeys(("machine.cpu", "config.device"), str),
    "wall_seconds": (int, float),
}
# The suite's own runs have these too; a log of another trainer may lack them, not give them another type.
_FIELDS_OF_OURS: lifecycle.Fields = {
    "config.rollout.prompts": int,
    "config.rollout.responses": int,
    "config.optimizer.learning_rate": (int, float),
}
# Facts that are null or have these fields.
_OR_NULL: dict[str, dict[str, type]] = {
    "revision": {"commit": str, "changed": bool},
    "diverged": {"reason": str, "step": int},
}

# A look at the status of a run holds its lock for a moment, so a process that wants to run it waits this long.
_PROBE_SECONDS = 3

Row = dict[str, Any]


def read_run(folder: Path) -> dict[str, Any] | None:
    """Return the ``run.json`` of a run folder, or None without one. Raises Damaged (a ValueError) if it is no run's."""
    facts = lifecycle.read(folder / "run.json", _FIELDS)
    if facts is not None and (why := _wrong(facts)) is not None:
        raise Damaged(f"{folder / 'run.json'} has no proper {why}")
    return facts


def _wrong(facts: dict[str, Any]) -> str | None:
    """Return the first fact beyond ``_FIELDS`` that is not as a run writes it."""
    for place, kind in _FIELDS_OF_OURS.items():
        value = at(facts, place)
        if not isinstance(value, kind) and not (value is None and facts.get("origin")):
            return place
    for name, inner in _OR_NULL.items():
        if facts.get(name) is not None and not all(isinstance(at(facts[name], key), inner[key]) for key in inner):
            return name
    return None if facts["status"] in STATUSES else f"status: {facts['status']!r}"


def known(folder: Path) -> dict[str, Any]:
    """Return the ``run.json`` of a run folder; empty if there is none or if it is damaged."""
    try:
        return read_run(folder) or {}
    except Damaged:
        return {}


@dataclass(frozen=True)
class State:
    """A run's folder as it stands."""

    status: str
    """One of ``ENDED``, or ``failed``, ``running``, ``interrupted``, ``missing``, ``damaged``."""
    facts: dict[str, Any]
    """The run's ``run.json``; empty if there is none or if it is damaged."""
    damage: str | None
    """Why the run is damaged: its ``run.json`` is no run's, or it has ended and its tables are not whole."""

    @property
    def has_ended(self) -> bool:
        """Whether the run is complete: such a run never changes."""
        return self.status in ENDED


def look(folder: Path) -> State:
    """Read the state of a run from its folder: ``run.json``, lock, and the checksums of its tables."""
    try:
        facts = read_run(folder)
    except Damaged as error:
        return State("damaged", {}, str(error))
    if facts is None:
        return State("missing", {}, None)
    why = _damaged_table(folder, facts) if facts["status"] in ENDED else None
    return State(current_status(folder, facts) if why is None else "damaged", facts, why)


def state_of(run: "Run", may_redo: bool = True) -> State:
    """Return the state of the run's folder.

    Raises ConfigError if it holds a run of another config or, without ``may_redo``, a run that other code has ended.
    """
    state = look(run.folder)
    now = {"config_hash": run.config_hash, "config": run.plain}
    lifecycle.refuse(run.folder, state.facts or None, now, may_redo or not state.has_ended)
    return state


def damage(folder: Path) -> str | None:
    """Return why the run in the folder is not whole, in one line; None if it is whole or if there is no run."""
    return look(folder).damage


def status(folder: Path) -> str:
    """Return the status of a run, as ``State`` lists them."""
    return look(folder).status


def current_status(folder: Path, facts: dict[str, Any]) -> str:
    """Return the status of a run by its ``run.json`` and its lock, without a look at its tables."""
    if facts["status"] == "running" and not lifecycle.is_held(folder):
        return "interrupted"  # it was killed before it could write its status
    return ended(facts["diverged"]) if facts["status"] in ENDED else facts["status"]


def ended(how: dict[str, Any] | None) -> str:
    """Return the status of a run that has ended from the field ``diverged`` of its ``run.json``.

    ``diverged``: a number was not finite. ``collapsed``: by the rule. (Older runs call both ``diverged``.)
    """
    if how is None:
        return "finished"
    return "diverged" if how["reason"] == "not finite" else "collapsed"


def checksum(path: Path) -> str:
    """Return the first 16 hex digits of the SHA-256 of a file's bytes. Raises OSError if it cannot be read."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _damaged_table(folder: Path, facts: dict[str, Any]) -> str | None:
    """Return why the tables of an ended run are not whole, by the checksums in ``run.json``; None if they are."""
    recorded = facts.get("tables")
    if not isinstance(recorded, dict):
        return "it has no checksums of its tables"
    for table in columns.TABLES:
        path = folder / f"{table}.parquet"
        if table in columns.ADDED and table not in recorded and not path.exists():
            continue  # recorded before the suite had this table
        try:
            if checksum(path) != recorded.get(table):
                return f"{path.name} is not as the run wrote it"
        except FileNotFoundError:
            return f"there is no {path.name}"
        except OSError as error:
            return f"{path.name} cannot be read: {error.strerror or error}"
    return None


def read_table(folder: Path, table: str) -> "pd.DataFrame":
    """Return one table of a run, ended or not, with the columns of ``columns.TABLES``; whole steps only.

    Raises Damaged if the table of an ended run cannot be read.
    """
    import pyarrow as pa  # here and below: a look at a run's status needs no tables
    import pyarrow.parquet as pq

    path = folder / f"{table}.parquet"
    if path.exists():
        try:
            return pq.read_table(path, schema=_schema(table)).to_pandas()
        except (pa.ArrowException, OSError, ValueError) as error:
            why = " ".join(str(error).split())
            raise Damaged(f"{path} cannot be read ({why}); remove {folder} to rerun it") from error
    rows = _read_rows(folder, table)
    if table != "steps":
        # "steps" is written last: rows of a step that it lacks belong to an unfinished step.
        steps = [row["step"] for row in _read_rows(folder, "steps")]
        rows = [row for row in rows if row["step"] <= max(steps, default=0)]
    return _to_arrow(rows, table).to_pandas()


class Record:
    """Writes the folder of one run. Use as a context: it holds the folder's lock while it is open."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        """``facts`` are known before the run: config, hash, command, versions, machine, …"""
        self.folder = folder
        self.run: dict[str, Any] = facts
        self._begun = datetime.now(UTC)
        self._seconds_before = 0.0

    def __enter__(self) -> "Record":
        """Take the folder; raises filelock.Timeout if another process has it."""
        self._lock = lifecycle.hold(self.folder, _PROBE_SECONDS)
        self._lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @property
    def checkpoint(self) -> Path:
        """The path of the run's checkpoint, whether it exists or not."""
        return self.folder / "checkpoint.safetensors"

    def kept(self, step: int) -> Path:
        """Return the path of the checkpoint that ``checkpoint_keep`` keeps, whether it exists or not."""
        return branch.kept(self.folder, step)

    def begin(self, resume_from: int | None) -> None:
        """Mark the run as running and drop the rows after step ``resume_from`` (all rows for None)."""
        before = read_run(self.folder)
        if resume_from is None:
            self.checkpoint.unlink(missing_ok=True)  # or a later resume would take it for this run's
            for of_branches in self.folder.glob("checkpoint-*.safetensors"):
                of_branches.unlink()
        for table in columns.TABLES:
            (self.folder / f"{table}.parquet").unlink(missing_ok=True)  # of an end that was not reached
        if before is not None and resume_from is not None:
            self._seconds_before = before["wall_seconds"]
            self.run["started"] = before["started"]
        for table in columns.TABLES:
            rows = [] if resume_from is None else _read_rows(self.folder, table)
            kept = [row for row in rows if row["step"] <= (resume_from or 0)]
            text = "".join(_line(row) for row in kept)
            atomic_files.write(self.folder / f"{table}.jsonl", partial(Path.write_text, data=text))
        self.run.setdefault("started", self._begun.isoformat(timespec="seconds"))
        self.update(status="running")

    def holds(self, step: int) -> bool:
        """Return whether the rows of all steps up to ``step`` can be read; the run can then go on after that step."""
        import pyarrow as pa

        wanted = set(range(1, step + 1))
        try:
            steps, updates = ({row["step"] for row in _read_rows(self.folder, name)} for name in ("steps", "updates"))
            for table in columns.TABLES:
                _to_arrow(_read_rows(self.folder, table), table)
        except (OSError, ValueError, TypeError, KeyError, pa.ArrowException):
            return False
        return wanted <= steps and wanted <= updates

    def put_aside(self, why: str) -> Path:
        """Move a damaged run out of the folder and return its new place; ``run.json`` will name place and reason."""
        place = lifecycle.put_away(self.folder, Path(self.run["config"]["results_dir"]), "damaged")
        self.run["restarted"] = f"what was here was damaged ({why}) and is kept in {place}"
        return place

    def append(self, rows: dict[str, list[Row]]) -> None:
        """Append the rows of a finished step; ``steps`` is written last and marks the step as whole.

        Raises KeyError for a column that a table does not have.
        """
        for table in sorted(rows, key="steps".__eq__):
            unknown = {name for row in rows[table] for name in row} - columns.TABLES[table].keys()
            if unknown:
                raise KeyError(f"columns that {table} does not have: {sorted(unknown)}")
            with (self.folder / f"{table}.jsonl").open("a") as file:
                file.write("".join(_line(row) for row in rows[table]))

    def update(self, **facts: Any) -> None:
        """Add ``facts`` to ``run.json`` and write it."""
        seconds = (datetime.now(UTC) - self._begun).total_seconds()
        self.run |= facts | {"wall_seconds": round(self._seconds_before + seconds, 3)}
        atomic_files.write_json(self.folder / "run.json", self.run)

    def end(self, diverged: dict[str, Any] | None, **facts: Any) -> None:
        """Turn the rows into parquet, write the status, and delete the files that only a resume needs.

        ``diverged``: reason, step and update of a collapse or of a number that is not finite; None for neither.
        """
        import pyarrow.parquet as pq

        checksums = {}
        for table in columns.TABLES:
            arrow, path = _to_arrow(_read_rows(self.folder, table), table), self.folder / f"{table}.parquet"
            atomic_files.write(path, partial(pq.write_table, arrow))
            checksums[table] = checksum(path)
        self.run["tables"] = checksums
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.update(status=ended(diverged), ended=now, diverged=diverged, **facts)
        self.checkpoint.unlink(missing_ok=True)
        for table in columns.TABLES:
            (self.folder / f"{table}.jsonl").unlink(missing_ok=True)


def _line(row: Row) -> str:
    # json keeps every bit of a float, and writes nan and inf by Python's names.
    return json.dumps(row) + "\n"


def _read_rows(folder: Path, table: str) -> list[Row]:
    path = folder / f"{table}.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # torn by a kill
    return [json.loads(line) for line in lines]


def _schema(table: str) -> "pa.Schema":
    import pyarrow as pa

    types = {"list<int64>": pa.list_(pa.int64())}
    columns_of = columns.TABLES[table].items()
    return pa.schema([(name, types.get(column.type) or pa.type_for_alias(column.type)) for name, column in columns_of])


def _to_arrow(rows: list[Row], table: str) -> "pa.Table":
    import pyarrow as pa

    return pa.Table.from_pylist(rows, schema=_schema(table))
