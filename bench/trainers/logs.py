"""The log of another trainer: numbers of each step, from verl's file logger, a CSV file, or a plain JSONL file.

Nothing is guessed: a column is taken where its name is known or mapped, and a value that is no number is named with its
row. A value that is not there stays absent.
"""

import csv
import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.measurement import columns
from steadymoe.plugins import verl

# The most bytes of a file.
MOST_BYTES = 2**28
# The largest step or count: tables have whole numbers of 64 bits, also for the product of two.
MOST = 10**9
# The largest number of any other column: the sum of its squares is still a float.
_LARGEST = 1e100
# The columns of a step that a log can have, the step itself included; a histogram is no number.
TARGETS = tuple(name for name, column in columns.TABLES["steps"].items() if not pa.types.is_list(column.type))
# What verl 0.9 logs, by the column that it is. ``plugins.verl.columns`` makes further columns from our own sums.
VERL = {
    "reward": "critic/score/mean",
    "shaped_reward": "critic/rewards/mean",
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "entropy": "actor/entropy",
    "clip_fraction": "actor/pg_clipfrac",
    "response_length": "response_length/mean",
    "rollout_kl_k1": "rollout_corr/kl",
    "rollout_kl_k3": "rollout_corr/k3_kl",
    "rollout_chi2_token": "rollout_corr/chi2_token",
    "rollout_chi2_sequence": "rollout_corr/chi2_seq",
    "rollout_probability_correlation": "training/rollout_actor_probs_pearson_corr",
    "rollout_seconds": "timing_s/gen",
    "old_policy_seconds": "timing_s/old_log_prob",
    "update_seconds": "timing_s/update_actor",
    "evaluation_seconds": "timing_s/testing",
}

Numbers = dict[str, float]


@dataclass(frozen=True)
class Log:
    """What a log holds, by our columns."""

    rows: list[Numbers]
    """One for each step, steps rising from 1 or later; an absent column is no key, and a number may be nan."""
    names: dict[str, str]
    """Our column → theirs."""
    is_verl: bool
    notes: list[str]
    """What a reader should know: rows that were left out or renumbered."""


def read(path: Path, mapped: Mapping[str, str]) -> Log:
    """The log in a file; ``mapped`` is our column → theirs. Raises ConfigError, in one line, for what is no log."""
    raw = list(_rows(path))
    is_verl = bool(raw) and all(set(row) == {"step", "data"} and isinstance(row["data"], dict) for _, row in raw)
    if is_verl:
        # orjson writes nan and infinities as null.
        raw = [(place, _with_nan(row["data"]) | {"step": row["step"]}) for place, row in raw]
    there = list(dict.fromkeys(name for _, row in raw for name in row))
    if not raw:
        raise ConfigError(f"{path.name} has no rows, so no steps")
    names = _names(there, mapped, is_verl, path.name)
    rows = [(place, _numbers(row, names, place) | _of_sums(row, place, mapped)) for place, row in raw]
    whole, notes = _steps(rows, path.name)
    return Log(whole, names, is_verl, notes)


def _names(there: Sequence[str], mapped: Mapping[str, str], is_verl: bool, file: str) -> dict[str, str]:
    """Our column → theirs, for the columns that the log has."""
    for ours, theirs in mapped.items():
        if ours not in TARGETS:
            near = difflib.get_close_matches(ours, TARGETS)
            raise ConfigError(
                f"--map: a step has no column {ours!r}; "
                + (f"did you mean {', '.join(near)}?" if near else "docs/metrics.md lists them")
            )
        if theirs not in there:
            raise ConfigError(f"--map: {file} has no column {theirs!r}; it has {_listed(there)}")
    known = {name: name for name in TARGETS} | (VERL if is_verl else {})
    names = {ours: theirs for ours, theirs in known.items() if theirs in there} | dict(mapped)
    for needed in ("step", "reward"):
        if needed not in names:
            raise ConfigError(f"{file} has no column {needed}; name it by --map {needed}=…: it has {_listed(there)}")
    return names


def _listed(there: Sequence[str], most: int = 12) -> str:
    return ", ".join(there[:most]) + (f" and {len(there) - most} more" if len(there) > most else "")


def _numbers(row: Mapping[str, Any], names: Mapping[str, str], place: str) -> Numbers:
    """The numbers of a row by our columns. Raises ConfigError for a value that is none."""
    found = {}
    for ours, theirs in names.items():
        value = _number(row.get(theirs), f"{place}: {theirs}")
        if value is None:
            continue
        is_whole = pa.types.is_integer(columns.TABLES["steps"][ours].type)
        if is_whole and not (value.is_integer() and 0 <= value <= MOST):
            raise ConfigError(f"{place}: {theirs} must be a whole number between 0 and {MOST}, got {row[theirs]!r}")
        if math.isfinite(value) and abs(value) > _LARGEST:
            raise ConfigError(f"{place}: {theirs} must be between ±{_LARGEST:g}, nan or inf, got {row[theirs]!r}")
        found[ours] = int(value) if is_whole else value
    return found


def _number(value: Any, what: str) -> float | None:
    """A number, nan and infinities included; None for nothing."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise ConfigError(f"{what} must be a number; got {str(value)[:40]!r}")


def _of_sums(row: Mapping[str, Any], place: str, mapped: Mapping[str, str]) -> Numbers:
    """The columns that our losses leave in verl's log as sums; a column that is mapped is not replaced."""
    sums = {name: _number(value, f"{place}: {name}") for name, value in row.items() if verl.PREFIX in name}
    if not sums or not all(value is not None and math.isfinite(value) for value in sums.values()):
        return {}
    try:
        found = verl.columns({name: value for name, value in sums.items() if value is not None})
    except KeyError as error:
        raise ConfigError(f"{place}: the sums of a loss of steadymoe lack {error.args[0]}") from error
    return {name: value for name, value in found.items() if name not in mapped}


def _steps(rows: Sequence[tuple[str, Numbers]], file: str) -> tuple[list[Numbers], list[str]]:
    """One row for each step. Rows of one step are joined; the row of a step 0 is no step, or all are counted from 1."""
    found: list[Numbers] = []
    for place, row in rows:
        if "step" not in row:
            raise ConfigError(f"{place}: has no step")
        before = found[-1] if found else {}
        if row["step"] != before.get("step"):
            if before and row["step"] < before["step"]:
                raise ConfigError(f"{place}: step {row['step']} comes after step {before['step']}; steps must rise")
            found.append(dict(row))
            continue
        twice = [name for name in row if name != "step" and name in before]
        if twice:
            raise ConfigError(f"{place}: a second {twice[0]} of step {row['step']}")
        before |= row
    notes = []
    if found[0]["step"] == 0 and _has_reward(found[0]):
        found = [row | {"step": row["step"] + 1} for row in found]
        notes.append("the log counts its steps from 0, the run from 1")
    elif found[0]["step"] == 0:
        found = found[1:]
        notes.append("left out: step 0, before training, which has no reward")
    found = [row for row in found if len(row) > 1]
    if not any(map(_has_reward, found)):
        raise ConfigError(f"{file} has no step with a reward")
    return found, notes


def _has_reward(row: Numbers) -> bool:
    return math.isfinite(row.get("reward", math.nan))


def _with_nan(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in data.items()}


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file, each with its place in words."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{path.name} has {path.stat().st_size} bytes; at most {MOST_BYTES} are read")
    readers = {".jsonl": _of_jsonl, ".csv": _of_csv}
    if path.suffix not in readers:
        raise ConfigError(f"{path.name} must be a file .jsonl or .csv")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is no text in UTF-8") from error
    yield from readers[path.suffix](text, path.name)


def _of_jsonl(text: str, file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: no JSON ({error})") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: must be an object with named columns")
        yield place, row


def _of_csv(text: str, file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        header = next(reader, [])
        twice = [name for name in header if header.count(name) > 1]
        if twice:
            raise ConfigError(f"{file}: two columns have the name {twice[0]!r}")
        for row in reader:
            place = f"{file}, line {reader.line_num}"
            if row and len(row) != len(header):
                raise ConfigError(f"{place}: has {len(row)} values for {len(header)} columns")
            if row:
                yield place, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{file}, line {reader.line_num}: no CSV ({error})") from error
