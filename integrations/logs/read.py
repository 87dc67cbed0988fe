"""Read the log of another trainer: numbers of each step, from verl's file logger, a CSV file, or a JSONL file.

Nothing is guessed: a column is read if its name is known or mapped, and a value that is not a number is reported with
its line. Missing values stay missing.
"""

import difflib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from steadymoe.bench.support import rows_of_files
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.training import columns
from steadymoe.integrations.verl import losses as verl

# The largest step or count: tables have 64-bit integers, also for the product of two.
MAX_COUNT = 10**9
# A table of more rows decodes to more than is read of one file.
MAX_STEPS = 10**6
# How many rows are held as rows; the others are columns.
_ROWS_OF_A_PIECE = 10_000
# The largest number of any other column: the sum of its squares is still a float.
_LARGEST = 1e100
# The columns of a step that a log can have, without histograms.
_COLUMNS = {name: column.type for name, column in columns.TABLES["steps"].items() if column.type != "list<int64>"}
# Our column → its name in verl 0.9's log. ``verl.losses.columns`` computes more columns from the sums of our losses.
_VERL = {
    "step": "step",
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


@dataclass(frozen=True)
class Log:
    """The numbers of a log under the suite's column names."""

    steps: pa.Table
    """One row per step; steps rise from 1 or later. A missing number is null; a number may be nan or infinite."""
    names: dict[str, str]
    """Our column → the log's."""
    is_verl: bool
    notes: list[str]
    """Rows that were left out, replaced or renumbered."""


def read(path: Path, mapped: Mapping[str, str]) -> Log:
    """Read the log in a file; ``mapped`` is our column → the log's. Raises UserError, in one line, for a bad log."""
    present: dict[str, None] = {}
    inner: dict[str, None] = {}
    torn: list[str] = []
    is_empty, is_verl = True, True
    for _, row in rows_of_files.read(path, torn):
        is_empty = False
        is_verl = is_verl and row.keys() == {"step", "data"} and isinstance(row["data"], dict)
        present |= dict.fromkeys(row)
        inner |= dict.fromkeys(row["data"]) if is_verl else {}
    if is_empty:
        raise UserError(f"{path.name} has no rows, so no steps")
    names = _names([*inner, "step"] if is_verl else list(present), mapped, is_verl, path.name)

    def known(row: dict[str, Any], place: str) -> dict[str, float]:
        if is_verl:  # orjson writes nan and infinities as null
            data = {name: math.nan if value is None else value for name, value in row["data"].items()}
            row = data | {"step": row["step"]}
        numbers = {ours: _number(row.get(theirs), ours, f"{place}: {theirs}") for ours, theirs in names.items()}
        from_sums = {name: value for name, value in _from_sums(row, place).items() if name not in mapped}
        return {name: value for name, value in numbers.items() if value is not None} | from_sums

    steps, notes = _by_step((place, known(row, place)) for place, row in rows_of_files.read(path, []))
    if "reward" not in steps.column_names or not pc.any(pc.is_finite(steps["reward"])).as_py():
        raise UserError(f"{path.name} has no step with a reward")
    if len(steps) > MAX_STEPS:
        raise UserError(f"{path.name} has {len(steps)} steps; the limit is {MAX_STEPS}")
    return Log(steps, names, is_verl, torn + notes)


def _names(present: Sequence[str], mapped: Mapping[str, str], is_verl: bool, file: str) -> dict[str, str]:
    """Match our columns to the log's."""
    listed = ", ".join(present[:12]) + (f" and {len(present) - 12} more" if len(present) > 12 else "")
    for ours, theirs in mapped.items():
        if ours not in _COLUMNS:
            near = difflib.get_close_matches(ours, _COLUMNS)
            hint = (
                f"did you mean {', '.join(near)}?"
                if near
                else "docs/metrics.md and bench/training/columns.py list them"
            )
            raise UserError(f"--map: a step has no column {ours!r}; {hint}")
        if theirs not in present:
            raise UserError(f"--map: {file} has no column {theirs!r}; it has {listed}")
    known = _VERL if is_verl else {name: name for name in _COLUMNS}
    names = {ours: theirs for ours, theirs in known.items() if theirs in present} | dict(mapped)
    for name in ("step", "reward"):
        if name not in names:
            raise UserError(f"{file} has no column {name}; name it with --map {name}=…; it has {listed}")
    return names


def _number(value: Any, column: str | None, what: str) -> float | None:
    """Return the number of a cell, which may be nan or infinite; None if the cell is empty.

    ``column`` is ours, whose type and bounds the number must fit, if any. Raises UserError that begins with ``what``.
    """
    number = rows_of_files.number(value, what)
    if number is None or column is None:
        return number
    if _COLUMNS[column] == "int64":
        if not (number.is_integer() and 0 <= number <= MAX_COUNT):
            raise UserError(f"{what} must be a whole number between 0 and {MAX_COUNT}, got {value!r}")
        return int(number)
    if math.isfinite(number) and abs(number) > _LARGEST:
        raise UserError(f"{what} must be between ±{_LARGEST:g}, nan or inf, got {value!r}")
    return number


def _from_sums(row: Mapping[str, Any], place: str) -> dict[str, float]:
    """Return the columns that follow from the sums that our losses leave in verl's log."""
    sums = {name: _number(value, None, f"{place}: {name}") for name, value in row.items() if verl.PREFIX in name}
    finite = {name: value for name, value in sums.items() if value is not None and math.isfinite(value)}
    try:
        return verl.columns(finite) if len(finite) == len(sums) else {}
    except KeyError as error:
        raise UserError(f"{place}: the sums of a loss of steadymoe lack {error.args[0]}") from error


def _by_step(rows: Iterable[tuple[str, dict[str, float]]]) -> tuple[pa.Table, list[str]]:
    """Merge rows of the same step; where a log goes back, the run was resumed, and later rows replace earlier ones.

    Steps that start at 0 are renumbered, or step 0 is left out if it has no reward. Raises UserError for a log that
    goes back as often as it has steps: another column must be the step.
    """
    before: list[pa.Table] = []  # steps but for the last ones, in columns: rows take ten times the memory
    steps: list[dict[str, float]] = []
    replaced, resumed, where = 0, 0, ""
    for place, row in rows:
        if "step" not in row:
            raise UserError(f"{place}: has no step")
        last = steps[-1] if steps else {"step": -1}
        if row["step"] == last["step"] and (row.keys() & last.keys()) == {"step"}:
            last |= row
            continue
        if row["step"] <= last["step"]:
            resumed += 1
            where = where or f"{place}: step {row['step']} comes after step {last['step']}"
            while steps and steps[-1]["step"] >= row["step"]:
                steps.pop()
                replaced += 1
            while not steps and before:
                table = before.pop()
                left = pc.sum(pc.less(table["step"], row["step"])).as_py()
                replaced += len(table) - left
                before += [table[:left]] if left else []
                if left:
                    break
        if len(steps) >= _ROWS_OF_A_PIECE:
            before.append(_in_columns(steps))
            steps = []
        steps.append(dict(row))
    table = pa.concat_tables([*before, _in_columns(steps)], promote_options="default")
    if resumed >= max(1, len(table)):
        raise UserError(f"{where}, and so on; steps must rise, except where a run was resumed")
    notes = [f"the run was resumed {resumed} times; later rows replace {replaced} steps"] if resumed else []
    first = table[:1].to_pylist()[0]
    if first["step"] == 0 and math.isfinite(math.nan if first.get("reward") is None else first["reward"]):
        table = table.set_column(table.column_names.index("step"), "step", pc.add(table["step"], 1))
        notes.append("the log counts steps from 0, the run from 1")
    elif first["step"] == 0:
        table = table[1:]
        notes.append("left out: step 0, before training, which has no reward")
    others = [table[name].is_valid() for name in table.column_names if name != "step"]
    return table.filter(functools.reduce(pc.or_, others)) if others else table[:0], notes


def _in_columns(rows: Sequence[dict[str, float]]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: pa.array([row.get(name) for row in rows], _COLUMNS[name]) for name in names})
