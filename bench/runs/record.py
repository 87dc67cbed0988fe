"""The tables of a run: written during the run, never overwritten silently, and checked when they are read.

A running run appends its rows to ``<table>.jsonl``; at its end they become ``<table>.parquet``. However a run is
killed, the rows of its finished steps are on disk.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadymoe.bench.runs import run_folder
from steadymoe.bench.runs.run_folder import Damaged
from steadymoe.bench.statistics.collapse import FINITE
from steadymoe.bench.support import files
from steadymoe.bench.training import columns

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# The columns of each table that tell its rows apart.
_KEYS = {"steps": ["step"], "updates": ["step", "update"], "layers": ["step", "update", "layer"]}
# The longest histogram, and the largest number: the sum of squares is still a float.
_MAX_BINS, LARGEST = 10_000, 1e100
# A look at the status of a run holds its lock for a moment, so a process that wants to run it waits this long.
_PROBE_SECONDS = 3

Row = dict[str, Any]


def read_table(folder: Path, table: str) -> "pd.DataFrame":
    """Return one table of a run, ended or not, with the columns of ``columns.TABLES`` and its own; whole steps only.

    Raises Damaged if the table of an ended run cannot be read.
    """
    import pyarrow as pa  # here and below: a look at a run's status needs no tables
    import pyarrow.parquet as pq

    path = folder / f"{table}.parquet"
    if os.path.lexists(path):
        try:
            with files.opened(path) as file:
                files.refuse_large(path, file)
                parquet = pq.ParquetFile(file)
                wanted = schema(table, parquet.schema_arrow.names)
                if parquet.schema_arrow.equals(wanted):  # nearly always, and twice as fast
                    return parquet.read().to_pandas()
                file.seek(0)
                return pq.read_table(file, schema=wanted).to_pandas()
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
        if fault := next(_faults(name, table, facts), None):
            raise Damaged(f"{folder / name}.parquet: {fault}")
    return tables


def _faults(name: str, table: "pd.DataFrame", facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what no run writes in a table; the first of these may hide others."""
    import numpy as np

    for column in columns.TABLES[name].values():
        if column.type == "list<int64>":
            rows = [np.asarray(counts, float) for counts in table[column.name].dropna()]
            if len({len(counts) for counts in rows}) > 1 or not all((counts >= 0).all() for counts in rows):
                yield f"{column.name} must be counts of the same bins in every row"
            if rows and len(rows[0]) > _MAX_BINS:
                yield f"{column.name} has more than {_MAX_BINS} bins"
        elif column.type == "string" and not table[column.name].str.len().between(0, run_folder.MAX_TEXT).all():
            yield f"{column.name} must be a string of at most {run_folder.MAX_TEXT} characters in every row"
    numbers = [column.name for column in columns.TABLES[name].values() if column.type == "float64"]
    numbers += filter(columns.is_own, table.columns)
    # All at once: a call for each column takes most of the time in which a report reads.
    sizes = np.abs(table[numbers].to_numpy(float))
    for place in np.flatnonzero(((sizes > LARGEST) & np.isfinite(sizes)).any(axis=0)):
        yield f"{numbers[place]} has a number beyond ±{LARGEST:g}"
    first, last = int(name != "evaluations"), run_folder.rollouts(facts)
    if not table["step"].between(first, last).all():
        yield f"step must be a whole number from {first} to {last} in every row"
    if name in _KEYS and (table[_KEYS[name]].isna().any(axis=None) or table.duplicated(_KEYS[name]).any()):
        yield f"every row needs its own {', '.join(_KEYS[name])}"
    if name == "steps":
        is_cut = run_folder.final_status(facts["diverged"]) == "diverged"
        end = facts["diverged"]["step"] if is_cut else math.inf
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
        self._lock = run_folder.hold(self.folder, _PROBE_SECONDS)
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
        before = run_folder.read_run(self.folder)
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
            files.write(self.folder / f"{table}.jsonl", partial(Path.write_text, data=text))
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
            with files.replaceable(self.folder / f"{table}.jsonl").open("a") as file:
                file.write("".join(_line(row) for row in rows[table]))

    def update(self, **facts: Any) -> None:
        """Add ``facts`` to ``run.json`` and write it."""
        seconds = (datetime.now(UTC) - self._begun).total_seconds()
        self.run |= facts | {"wall_seconds": round(self._seconds_before + seconds, 3)}
        files.write_json(self.folder / "run.json", self.run)

    def end(self, diverged: dict[str, Any] | None, **facts: Any) -> None:
        """Turn the rows into parquet, write the status, and delete the files that only a resume needs.

        ``diverged``: reason, step and update of a collapse or of a number that is not finite; None for neither.
        """
        import pyarrow.parquet as pq

        checksums = {}
        for table in columns.TABLES:
            path, arrow = self.folder / f"{table}.parquet", _to_arrow(_read_rows(self.folder, table), table)
            files.write(path, partial(pq.write_table, arrow))
            checksums[table] = run_folder.checksum(path)
        self.run["tables"] = checksums
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.update(status=run_folder.final_status(diverged), ended=now, diverged=diverged, **facts)
        self.checkpoint.unlink(missing_ok=True)
        for table in columns.TABLES:
            (self.folder / f"{table}.jsonl").unlink(missing_ok=True)


def _line(row: Row) -> str:
    # json keeps every bit of a float, and writes nan and inf by Python's names.
    return json.dumps(row) + "\n"


def _read_rows(folder: Path, table: str) -> list[Row]:
    try:
        lines = files.read_bytes(folder / f"{table}.jsonl").decode().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # torn by a kill
    return [files.parse_json(line) for line in lines]


def schema(table: str, names: Iterable[str] = ()) -> "pa.Schema":
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

    return pa.Table.from_pylist(rows, schema=schema(table, {name for row in rows for name in row}))
