"""The folder of a run: ``run.json`` and its tables, written during the run and never overwritten silently.

A running run appends its rows to ``<table>.jsonl``; at its end they become ``<table>.parquet``. However a run is
killed, the rows of its finished steps are on disk.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadymoe.bench.runs import lifecycle
from steadymoe.bench.runs.lifecycle import Damaged, at
from steadymoe.bench.statistics.collapse import FINITE, Rule
from steadymoe.bench.support import atomic_files, regular_files
from steadymoe.bench.training import columns

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from steadymoe.bench.runs.compose import Run

# A run with one of these statuses is complete and never changes.
ENDED = ("finished", "collapsed", "diverged")
STATUSES = ("running", "interrupted", "failed", *ENDED)
# The config groups whose choices a run names.
GROUPS = ("algorithm", "correction", "routing", "engine", "model", "task", "optimizer")

_FIELDS: lifecycle.Fields = {
    **dict.fromkeys(("status", "experiment", *GROUPS[:-1]), str),  # other trainers name no optimizer
    **dict.fromkeys(("axes_name", "config_hash", "config_hash_without_seed", "algorithm_code", "command"), str),
    **dict.fromkeys(("axes", "versions", "machine", "config", "config.engine"), dict),
    **dict.fromkeys(("seed", "training_version", "config.steps", "config.updates_per_rollout"), int),
    **dict.fromkeys(("machine.cpu", "config.device"), str),
    **dict.fromkeys(("config.rollout.prompts", "config.rollout.responses"), int),
    **dict.fromkeys(("config.optimizer.learning_rate", "wall_seconds"), (int, float)),
}
# Fields of facts that may be null.
_OR_NULL = {"revision.commit": str, "revision.changed": bool, "diverged.reason": str, "diverged.step": int}

# The largest count, and the most steps that a run may lack at its end: tables add rows for them.
MAX_COUNT, _MAX_STEPS = 10**9, 10**6
# Numbers that a run's facts may have, each with its bounds; those of ``_FIELDS`` must be there.
_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("seed", "training_version", "tokens", "parameters", "active_parameters"), (0, 2**63 - 1)),
    **dict.fromkeys(("moe_layers", "experts", "top_k"), (0, MAX_COUNT)),
    **dict.fromkeys(("config.steps", "config.updates_per_rollout", "diverged.step"), (1, MAX_COUNT)),
    **dict.fromkeys(("config.rollout.prompts", "config.rollout.responses"), (1, MAX_COUNT)),
    **dict.fromkeys(("progress.step", "progress.steps"), (0, MAX_COUNT)),
    **dict.fromkeys(("wall_seconds", "progress.seconds_per_step"), (0, 1e12)),
    "config.optimizer.learning_rate": (0, 1e12),
    "config.engine.strength": (-1e12, 1e12),
}
# Facts that need not be there, each with its type.
_MAY_HAVE: lifecycle.Fields = {
    **dict.fromkeys(("config.collapse", "progress", "tables"), dict),
    **dict.fromkeys(("origin", "error", "optimizer", "config.experts"), str),
}
# The longest name, and text of any other fact.
_LONGEST_NAME, _LONGEST = 1000, 10**5
_NAMES = ("experiment", *GROUPS, "axes_name", "origin")
# The columns of each table that tell its rows apart.
_KEYS = {"steps": ["step"], "updates": ["step", "update"], "layers": ["step", "update", "layer"]}
# The longest histogram, and the largest number: the sum of squares is still a float.
_MAX_BINS, LARGEST = 10_000, 1e100

# A look at the status of a run holds its lock for a moment, so a process that wants to run it waits this long.
_PROBE_SECONDS = 3

Row = dict[str, Any]


def read_run(folder: Path) -> dict[str, Any] | None:
    """Return the ``run.json`` of a run folder, or None without one. Raises Damaged (a ValueError) if it is no run's."""
    facts = lifecycle.read(folder / "run.json", _FIELDS)
    if facts is not None and (why := _wrong(facts)) is not None:
        raise Damaged(f"{folder / 'run.json'} has no valid {why}")
    return facts


def _wrong(facts: dict[str, Any]) -> str | None:
    """Return the first fact beyond ``_FIELDS`` that is not as a run writes it."""
    for place, kind in _MAY_HAVE.items():
        if (value := at(facts, place)) is not None and not lifecycle.is_a(value, kind):
            return place
    for place, kind in _OR_NULL.items():
        name = place.partition(".")[0]
        if name not in facts or not (facts[name] is None or lifecycle.is_a(at(facts, place), kind)):
            return name
    for place, (low, high) in _BOUNDS.items():
        value = at(facts, place)
        if value is not None and not (lifecycle.is_a(value, (int, float)) and low <= value <= high):
            return f"{place}: it must be a number from {low:g} to {high:g}"
    if rule(at(facts, "config.collapse") or {}) is None:
        return "config.collapse"
    lost = facts["diverged"] is not None and facts["config"]["steps"] - facts["diverged"]["step"]
    if not 0 <= lost <= _MAX_STEPS:
        return "diverged: it lies outside the run"
    for name, value in facts.items():
        if not _is_plain(value, _LONGEST_NAME if name in _NAMES else _LONGEST):
            return f"{name[:_LONGEST_NAME]}: a text is too long, or a number too large"
    return None if facts["status"] in STATUSES else f"status: {facts['status']!r}"


def rule(numbers: Mapping[str, Any]) -> Rule | None:
    """Return the rule of collapse with these numbers; None if it has none of them, or if they are odd."""
    is_rule = numbers.keys() <= {field.name for field in fields(Rule)} and all(
        lifecycle.is_a(value, (int, float)) and 0 <= value <= MAX_COUNT for value in numbers.values()
    )
    return Rule(**numbers) if is_rule else None


def _is_plain(value: Any, longest: int) -> bool:
    """Return whether a value of JSON holds bounded texts and whole numbers alone."""
    if isinstance(value, dict):
        return _is_plain(list(value), _LONGEST_NAME) and _is_plain(list(value.values()), longest)
    if isinstance(value, list):
        return all(_is_plain(each, longest) for each in value)
    if isinstance(value, str):
        return len(value) <= longest
    return not isinstance(value, int) or abs(value) < 2**63


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


States = Mapping[Path, State]
"""Run folder → state."""


def read_state(folder: Path) -> State:
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
    state = read_state(run.folder)
    if state.facts:
        lifecycle.refuse(run, state.facts, may_redo or not state.has_ended)
    return state


def weights_path(folder: Path, step: int) -> Path:
    """Return the path of the weights that ``checkpoint_keep`` keeps in a run's folder."""
    return folder / f"weights-{step}.safetensors"


def current_status(folder: Path, facts: dict[str, Any]) -> str:
    """Return the status of a run by its ``run.json`` and its lock, without a look at its tables."""
    if facts["status"] == "running" and not lifecycle.is_held(folder):
        return "interrupted"  # it was killed before it could write its status
    return facts["status"]


def ended(how: dict[str, Any] | None) -> str:
    """Return the status of a run that has ended from the field ``diverged`` of its ``run.json``.

    ``diverged``: a number was not finite. ``collapsed``: by the rule.
    """
    if how is None:
        return "finished"
    return "diverged" if how["reason"] == "not finite" else "collapsed"


def states(folders: Iterable[Path]) -> dict[Path, State]:
    """Return run folder → state. Of a run and its copies, one folder has it, and the others are damaged.

    A run belongs where its facts say: a copy would count as a further seed.
    """
    found = {folder: read_state(folder) for folder in folders}
    first: dict[tuple[str, ...], Path] = {}
    for folder in sorted(found, key=lambda folder: (not _is_at_its_place(folder, found[folder].facts), folder)):
        state = found[folder]
        if state.facts and (original := first.setdefault(_place(state.facts), folder)) != folder:
            found[folder] = State("damaged", {}, f"it is a copy of the run in {original}")
    return found


def _place(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the folders in which a run is recorded."""
    names = (facts[key] for key in ("experiment", "algorithm", "model", "task", "axes_name"))
    return (*filter(None, names), f"seed={facts['seed']}")


def _is_at_its_place(folder: Path, facts: Mapping[str, Any]) -> bool:
    return bool(facts) and folder.parts[-len(_place(facts)) :] == _place(facts)


def checksum(path: Path) -> str:
    """Return the first 16 hex digits of the SHA-256 of a file's bytes. Raises OSError if it cannot be read."""
    with regular_files.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _damaged_table(folder: Path, facts: dict[str, Any]) -> str | None:
    """Return why the tables of an ended run are not whole, by the checksums in ``run.json``; None if they are."""
    recorded = facts.get("tables")
    if not isinstance(recorded, dict):
        return "it has no checksums of its tables"
    for table in columns.TABLES:
        path = folder / f"{table}.parquet"
        try:
            if checksum(path) != recorded.get(table):
                return f"{path.name} has changed since the run wrote it"
        except FileNotFoundError:
            return f"there is no {path.name}"
        except OSError as error:
            return f"{path.name} cannot be read: {error.strerror or error}"
    return None


def read_table(folder: Path, table: str) -> "pd.DataFrame":
    """Return one table of a run, ended or not, with the columns of ``columns.TABLES`` and its own; whole steps only.

    Raises Damaged if the table of an ended run cannot be read.
    """
    import pyarrow as pa  # here and below: a look at a run's status needs no tables
    import pyarrow.parquet as pq

    path = folder / f"{table}.parquet"
    if os.path.lexists(path):
        try:
            with regular_files.opened(path) as file:
                regular_files.refuse_large(path, file)
                schema = _schema(table, pq.ParquetFile(file).schema_arrow.names)
                file.seek(0)
                return pq.read_table(file, schema=schema).to_pandas()
        except (pa.ArrowException, OSError, ValueError) as error:
            why = " ".join(str(error).split())
            raise Damaged(f"{path} cannot be read ({why}); remove {folder} to rerun it") from error
    rows = _read_rows(folder, table)
    if table != "steps":
        # "steps" is written last: rows of a step that it lacks belong to an unfinished step.
        steps = [row["step"] for row in _read_rows(folder, "steps")]
        rows = [row for row in rows if row["step"] <= max(steps, default=0)]
    return _to_arrow(rows, table).to_pandas()


def read_tables(folder: Path, facts: Mapping[str, Any]) -> "dict[str, pd.DataFrame]":
    """Return the tables of an ended run, without its layers. Raises Damaged if one does not hold what the run says."""
    tables = {name: read_table(folder, name) for name in columns.TABLES if name != "layers"}
    for name, table in tables.items():
        if why := next(_wrong_in(name, table, facts), None):
            raise Damaged(f"{folder / name}.parquet: {why}")
    return tables


def _wrong_in(name: str, table: "pd.DataFrame", facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what no run writes in a table; the first of these may hide others."""
    import numpy as np

    last = facts["config"]["steps"]
    for column in columns.TABLES[name].values():
        values = table[column.name]
        if column.type == "list<int64>":
            lengths = {len(each) for each in values.dropna()}
            if len(lengths) > 1 or not all(np.all(np.asarray(each, float) >= 0) for each in values.dropna()):
                yield f"{column.name} must be counts of the same bins in every row"
            if max(lengths, default=0) > _MAX_BINS:
                yield f"{column.name} has more than {_MAX_BINS} bins"
        elif column.type == "string" and (values.isna().any() or values.str.len().max() > _LONGEST):
            yield f"{column.name} must be a string of at most {_LONGEST} characters in every row"
    numbers = [column.name for column in columns.TABLES[name].values() if column.type == "float64"]
    numbers += filter(columns.is_own, table.columns)
    # All at once: a call for each column takes most of the time in which a report reads.
    sizes = np.abs(table[numbers].to_numpy(float))
    for place in np.flatnonzero(((sizes > LARGEST) & np.isfinite(sizes)).any(axis=0)):
        yield f"{numbers[place]} has a number beyond ±{LARGEST:g}"
    low = 0 if name == "evaluations" else 1
    if not table["step"].between(low, last).all():
        yield f"step must be a whole number from {low} to {last} in every row"
    if name in _KEYS and (table[_KEYS[name]].isna().any(axis=None) or table.duplicated(_KEYS[name]).any()):
        yield f"every row needs its own {', '.join(_KEYS[name])}"
    end = facts["diverged"]["step"] if facts["diverged"] and facts["diverged"]["reason"] == "not finite" else math.inf
    if name == "steps":
        before = table[table["step"] < end]
        if np.isinf(before[list(FINITE)].to_numpy(float)).any():
            yield f"{', '.join(FINITE)} must be finite in a run that has not diverged"
        if before["reward"].isna().all() and end > 1:
            yield "it has no reward"
    if name == "evaluations" and not np.isfinite(table["score"]).all():
        yield "score must be finite in every row"


class Record:
    """Writes the folder of one run. Use as a context: it holds the folder's lock while it is open."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        """``facts`` are known before the run: config, hash, command, versions, machine, …"""
        self.folder = folder
        self.run: dict[str, Any] = facts
        self._begun = datetime.now(UTC)
        self._seconds_before = 0.0
        self._own: set[str] = set()

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

    def begin(self, resume_from: int | None) -> None:
        """Mark the run as running and drop the rows after step ``resume_from`` (all rows for None)."""
        before = read_run(self.folder)
        if resume_from is None:
            self.checkpoint.unlink(missing_ok=True)  # or a later resume would take it for this run's
            for weights in self.folder.glob("weights-*.safetensors"):
                weights.unlink()
        if before is not None and resume_from is not None:
            self._seconds_before = before["wall_seconds"]
            self.run["started"] = before["started"]
        for table in columns.TABLES:
            (self.folder / f"{table}.parquet").unlink(missing_ok=True)  # of an end that was not reached
            rows = [] if resume_from is None else _read_rows(self.folder, table)
            kept = [row for row in rows if row["step"] <= (resume_from or 0)]
            self._own |= {name for row in kept for name in row if columns.is_own(name)}
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

    def quarantine(self, why: str) -> Path:
        """Move a damaged run out of the folder and return its new place; ``run.json`` will name place and reason."""
        place = lifecycle.archive_old_run(self.folder, Path(self.run["config"]["results_dir"]), "damaged")
        self.run["restarted"] = f"the run that was here was damaged ({why}) and is now in {place}"
        return place

    def append(self, rows: dict[str, list[Row]]) -> None:
        """Append the rows of a finished step; ``steps`` is written last and marks the step as whole.

        Raises KeyError for a column that a table does not have, and ValueError for too many of the run's own.
        """
        for table in sorted(rows, key="steps".__eq__):
            unknown = {name for row in rows[table] for name in row} - columns.TABLES[table].keys()
            if table in columns.OWN_TABLES:
                self._own |= set(filter(columns.is_own, unknown))
                unknown -= self._own
            if len(self._own) > columns.MAX_OWN:
                raise ValueError(f"a run may have at most {columns.MAX_OWN} columns from its loss")
            if unknown:
                raise KeyError(f"columns that {table} does not have: {sorted(unknown)}")
            with atomic_files.replaceable(self.folder / f"{table}.jsonl").open("a") as file:
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
            path, arrow = self.folder / f"{table}.parquet", _to_arrow(_read_rows(self.folder, table), table)
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
    try:
        lines = regular_files.read_bytes(folder / f"{table}.jsonl").decode().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # torn by a kill
    return [regular_files.parse_json(line) for line in lines]


def own_columns(folder: Path) -> list[str]:
    """Return the columns of a run that has ended, by its table of steps, that ``columns.TABLES`` does not declare."""
    import pyarrow.parquet as pq

    with regular_files.opened(folder / "steps.parquet") as file:
        return list(filter(columns.is_own, pq.read_schema(file).names))


def _schema(table: str, names: Iterable[str] = ()) -> "pa.Schema":
    """Return the types of a table's columns and of the run's own among ``names``. Raises ValueError for too many."""
    import pyarrow as pa

    own = sorted({name for name in names if columns.is_own(name)}) if table in columns.OWN_TABLES else []
    if len(own) > columns.MAX_OWN:
        raise ValueError(f"it has more than {columns.MAX_OWN} columns of its own")
    types = {"list<int64>": pa.list_(pa.int64())}
    columns_of = columns.TABLES[table].items()
    fields = [(name, types.get(column.type) or pa.type_for_alias(column.type)) for name, column in columns_of]
    return pa.schema([*fields, *((name, pa.float64()) for name in own)])


def _to_arrow(rows: list[Row], table: str) -> "pa.Table":
    import pyarrow as pa

    return pa.Table.from_pylist(rows, schema=_schema(table, {name for row in rows for name in row}))
