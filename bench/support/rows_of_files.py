"""Rows of a table that another program wrote: a CSV file with a header, or a JSONL file of objects."""

import csv
import io
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steadymoe.bench.support import regular_files
from steadymoe.bench.support.errors import UserError

# The most bytes of a file.
MAX_BYTES = 2**28


def number(value: Any, what: str) -> float | None:
    """Return the number of a cell, which may be nan or infinite; None if the cell is empty.

    Raises UserError that begins with ``what``.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        return float("no number" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{what} must be a number; got {reprlib.repr(value)}") from error


def read(path: Path, torn: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a file, each with its place for messages; a note on a torn last line goes to ``torn``.

    No link is followed. Raises UserError, or OSError, in one line, for a file that holds no such table.
    """
    if path.suffix not in (".jsonl", ".csv"):
        raise UserError(f"{path.name or path} must be a .jsonl or .csv file")
    try:
        file = regular_files.opened(path, MAX_BYTES)
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    with io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        lines = _lines(text, path.suffix == ".csv", torn)
        try:
            yield from (_rows_of_jsonl if path.suffix == ".jsonl" else _rows_of_csv)(lines, path.name)
        except UnicodeDecodeError as error:
            raise UserError(f"{path.name} is not UTF-8 text") from error


def _lines(file: io.TextIOWrapper, is_csv: bool, torn: list[str]) -> Iterator[str]:
    for line in file:
        if not line.endswith("\n") and line.strip() and (is_csv or not _is_json(line)):
            torn.append(f"left out: the last line, which has no line break and so may be torn: {line[:40]!r}")
        else:
            yield line


def _is_json(text: str) -> bool:
    try:
        regular_files.parse_json(text)
    except ValueError:
        return False
    return True


def _rows_of_jsonl(lines: Iterator[str], file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = regular_files.parse_json(line)
        except ValueError as error:
            raise UserError(f"{file}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{file}, line {number}: must be an object with named columns")
        yield f"{file}, line {number}", row


def _rows_of_csv(lines: Iterator[str], file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(lines, strict=True)
    try:
        header = reader.fieldnames or []
        if repeated := [name for name in header if header.count(name) > 1]:
            raise UserError(f"{file}: two columns have the name {repeated[0]!r}")
        for row in reader:
            if None in row or None in row.values():
                raise UserError(f"{file}, line {reader.line_num}: must have {len(header)} values, like the header")
            yield f"{file}, line {reader.line_num}", row
    except csv.Error as error:
        raise UserError(f"{file}, line {reader.line_num}: not CSV ({error})") from error
