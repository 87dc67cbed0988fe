"""``steadymoe seeds``: how many seeds a difference takes, from logs of the user's own."""

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from steadymoe.bench.report import write
from steadymoe.bench.statistics import comparisons
from steadymoe.bench.statistics.comparisons import ALPHA, MAX_SEEDS, POWER, Spread
from steadymoe.bench.statistics.estimates import MIN_FOR_INTERVAL
from steadymoe.bench.support import rows_of_files
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import shortened, visible

_DESCRIPTION = """\
Print how many seeds it takes to detect a difference between two arms, paired and unpaired, from logs (.csv or .jsonl).

  steadymoe seeds --arm grpo grpo-seed*.csv --arm gspo gspo-seed*.csv --metric reward   # a file for each run
  steadymoe seeds runs.csv --last 0.1       # one file with the columns arm, seed, step and value
  steadymoe seeds wandb.csv                 # an export of a Weights & Biases chart of runs named grpo-seed0, …

Seeds come from a column seed, else from seed0, seed=0 or seed_0 in the name of the run, the file or its folder. Runs
whose names have none are compared unpaired.
"""
DIFFERENCES = (0.02, 0.03, 0.05)
# The columns that count steps, in the order in which one is chosen.
_STEPS = ("step", "_step", "Step", "global_step", "trainer/global_step", "train/global_step")
# The seed in a name, and what joins it to the rest.
_SEED = re.compile(r"[-_. ]*\bseed[-_= ]?(\d{1,15})(?!\d)|[-_. ]+seed[-_= ]?(\d{1,15})(?!\d)", re.IGNORECASE)
# The most numbers of all logs, arms, and runs.
MAX_NUMBERS, MAX_ARMS, MAX_RUNS = 2 * 10**6, 20, 1000
# The largest number: the sum of its squares is still a float.
_LARGEST = 1e100
# Differences that vary by less, relative to the numbers, vary by rounding.
_ROUNDING = 1e-12
CAPTION = (
    f"Detectable: the smallest true difference that a two-sided t test at {ALPHA * 100:g} % finds with a probability "
    f"of {POWER * 100:g} % with the seeds at hand. Seeds for a difference: the seeds per arm that this test needs; in "
    "brackets, at the ends of the 95 % interval of the spread, which few seeds estimate poorly. Paired: both arms run "
    "the same seeds. r: correlation of the arms over shared seeds; pairing helps if it is positive."
)


class Run(NamedTuple):
    """Whose log it is."""

    arm: str
    seed: str


class Logs(NamedTuple):
    """The numbers of runs by step, and what the reader should know."""

    values: dict[Run, dict[float, float]]
    notes: list[str]


def main(words: list[str]) -> int:
    """Print the tables of arms and of pairs; return the exit code, 0. Raises UserError, or OSError, for bad logs."""
    parser = _parser()
    given = parser.parse_args(words)
    files: list[tuple[str | None, Path]] = [(None, path) for path in given.logs]
    for arm, *paths in given.arm:
        if not paths:
            parser.error(f"--arm takes a name and files; got {arm!r} alone")
        files += [(arm, Path(path)) for path in paths]
    if not files:
        parser.error("no logs given: name files, or --arm NAME FILES")
    logs = read(files, given.metric, given.step)
    at_end = ends(logs, given.last)
    numbers = [(arm, len(ours), float(ours.mean()), float(ours.std())) for arm, ours in at_end.items()]
    of_arms = pd.DataFrame(numbers, columns=["arm", "n", "mean", "sd"])
    of_pairs = pairs(at_end, given.difference or DIFFERENCES)
    notes = "\n".join(map(visible, shortened(logs.notes)))
    print("\n\n".join(filter(None, [write.to_markdown(of_arms), write.to_markdown(of_pairs), CAPTION, notes])))
    return 0


def ends(logs: Logs, last: float = 0.0) -> dict[str, pd.Series]:
    """Return arm → the number of each seed at its end: the last value, or the mean of the ``last`` share of its values.

    Raises UserError for an end that is not finite, for one arm, for too many, and for an arm of fewer than three seeds.
    """
    arms: dict[str, dict[str, float]] = defaultdict(dict)
    for run, by_step in logs.values.items():
        ordered = [by_step[step] for step in sorted(by_step)]
        end = float(np.mean(ordered[-max(1, math.ceil(last * len(ordered))) :]))
        if not abs(end) <= _LARGEST:
            raise UserError(
                f"{run.arm}, seed {run.seed}: the value to compare is {end}; fix the log or leave the arm out"
            )
        arms[run.arm][run.seed] = end
    if not 2 <= len(arms) <= MAX_ARMS or len(logs.values) > MAX_RUNS:
        some = ", ".join(list(arms)[:MAX_ARMS])
        runs = len(logs.values)
        raise UserError(
            f"expected 2 to {MAX_ARMS} arms and up to {MAX_RUNS} runs, got {runs} of {len(arms)} arms: {some}"
        )
    if few := [arm for arm, seeds in arms.items() if len(seeds) < MIN_FOR_INTERVAL]:
        count = len(arms[few[0]])
        need = f"at least {MIN_FOR_INTERVAL} are needed: add a column `seed`, or give one file per run"
        raise UserError(f"{few[0]} has {'one seed' if count == 1 else f'{count} seeds'}; {need}")
    return {arm: pd.Series(seeds) for arm, seeds in arms.items()}


def pairs(at_end: dict[str, pd.Series], differences: Sequence[float] = DIFFERENCES) -> pd.DataFrame:
    """Return a row for each pair of arms, paired where three seeds are shared, and unpaired.

    ``at_end`` is arm → number by seed, at least three each. A spread of 0 is not known, and has no seeds.
    """
    rows = []
    for (first, a), (second, b) in combinations(at_end.items(), 2):
        shared = sorted(set(a.index) & set(b.index))
        together, welch = pd.DataFrame({"a": a, "b": b}).loc[shared], comparisons.welch(b, a)
        designs = {"unpaired": (welch.estimate, comparisons.unpaired_spread(b, a), welch.error, welch.degrees)}
        if len(shared) >= MIN_FOR_INTERVAL:
            spread = comparisons.paired_spread(b, a)
            error = spread.deviation / math.sqrt(len(shared))
            designs = {"paired": (comparisons.paired_difference(b, a), spread, error, spread.degrees)} | designs
        for design, (difference, spread, error, degrees) in designs.items():
            varies = spread.deviation > _ROUNDING * max(a.abs().max(), b.abs().max())
            correlates = design == "paired" and bool((together.std() > 0).all())
            row = {"difference of": f"{second} − {first}", "design": design, "n": difference.n}
            row |= {"difference": difference, "r": together["a"].corr(together["b"]) if correlates else np.nan}
            row |= {"detectable": comparisons.detectable(error, degrees) if varies else np.nan}
            rows.append(row | {f"seeds for {each:g}": _seeds(spread, each) if varies else "–" for each in differences})
    return pd.DataFrame(rows)


def _seeds(spread: Spread, effect: float) -> str:
    counts = [each.seeds(effect) for each in (spread, *spread.ends())]
    few, low, high = ("≥ " * (count >= MAX_SEEDS) + str(count) for count in counts)
    return f"{few} ({low} to {high})"


# Logs


def read(files: Sequence[tuple[str | None, Path]], metric: str | None = None, step: str | None = None) -> Logs:
    """Return the numbers of the runs in files, each with the name of its arm, None where the file names its arms.

    ``metric`` and ``step`` are columns; without them ``value``, or the one common column, and a column of ``_STEPS``.
    Raises UserError, or OSError, in one line.
    """
    notes: list[str] = []
    columns: dict[Path, dict[str, None]] = {}
    for _, path in files:
        torn: list[str] = []
        columns[path] = {name: None for _, _, row in _rows(path, torn) for name in row}
        notes += [f"{path.name}: {note}" for note in torn]
    value = _metric(columns, metric, step)
    values: dict[Run, dict[float, float]] = defaultdict(dict)
    sources: dict[Run, tuple[Any, ...]] = {}
    count = 0
    for index, (arm, path) in enumerate(files):
        counter = step or next((name for name in _STEPS if name in columns[path]), None)
        if counter is None:
            notes.append(f"{path.name} has no step column, so rows are taken in order; name a column with --step")
        for place, name, row in _rows(path, []):
            number = rows_of_files.number(row.get(value), f"{place}: {value}")
            if number is None:
                continue
            run = _run(arm, path, name, row)
            at = rows_of_files.number(row.get(counter), f"{place}: {counter}") if counter else float(len(values[run]))
            if at is None or not math.isfinite(at):
                raise UserError(f"{place}: has no {counter}")
            if sources.setdefault(run, source := (index, name, row.get("arm"))) != source:
                raise UserError(f"{place}: {run.arm} has seed {run.seed} already, from another file or run")
            count += 1
            if count > MAX_NUMBERS:
                raise UserError(f"{place}: the logs have more than {MAX_NUMBERS} numbers; give fewer")
            values[run][at] = number
    if not values:
        raise UserError(f"the logs have no value in column {value}")
    if repeated := count - sum(map(len, values.values())):
        notes.append(f"{repeated} values repeat a step of their run; the later one counts")
    lasts = {run: max(by_step) for run, by_step in values.items()}
    if min(lasts.values()) < max(lasts.values()):
        run = min(lasts, key=lambda run: lasts[run])
        notes.append(f"runs end at steps {lasts[run]:g} ({run.arm}, seed {run.seed}) to {max(lasts.values()):g}")
    return Logs(values, notes)


def _run(arm: str | None, path: Path, name: str, row: dict[str, Any]) -> Run:
    """Return the run of a row, by its columns or the names of the run, the file and its folder."""
    named = next((found for each in (name, path.stem, path.parent.name) if (found := _SEED.search(each))), None)
    seed = _text(row.get("seed")) or (str(int(named[1] or named[2])) if named else name or str(path))
    run = Run(arm or _text(row.get("arm")) or _SEED.sub("", name), seed)
    if not run.arm:
        raise UserError(f"{path.name} has no column arm; name its arm: --arm NAME {path.name}")
    return run


def _rows(path: Path, torn: list[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the rows of the runs of a file: place, name of the run ("" outside charts, where a row has many), row."""
    for place, row in rows_of_files.read(path, torn):
        if row.keys() == {"step", "data"} and isinstance(row["data"], dict):  # verl's file logger
            row = row["data"] | {"step": row["step"]}
        elif {"metric", "value"} <= row.keys():  # a row per metric, as `steadymoe report --export` writes them
            metric, value = row.pop("metric"), row.pop("value")
            row[str(metric)] = value
        charted = [name for name in row if " - " in name]
        if not charted or set(row) - {*charted, *_STEPS}:
            yield place, "", row
            continue
        steps = {name: row[name] for name in row if name not in charted}
        for column in charted:
            name, _, charts = column.rpartition(" - ")
            if not charts.startswith("_") and not charts.endswith(("__MIN", "__MAX")):
                yield place, name, steps | {charts: row[column]}


def _metric(columns: dict[Path, dict[str, None]], metric: str | None, step: str | None) -> str:
    """Return the column to compare. Raises UserError if a file lacks it, or if it must be named."""
    keys = {"arm", "seed", step, *_STEPS}
    for path, names in columns.items():
        if not names:
            raise UserError(f"{path.name} has no rows")
        for wanted in (metric, step):
            if wanted is not None and wanted not in names:
                raise UserError(f"{path.name} has no column {wanted!r}; it has {_listed([*names])}")
    common = [name for name in next(iter(columns.values())) if all(name in names for names in columns.values())]
    common = [name for name in common if name not in keys]
    if metric is not None or "value" in common:
        return metric or "value"
    if not common:
        raise UserError(f"the logs have no column in common but steps, seeds and arms: {', '.join(map(str, columns))}")
    if len(common) > 1:
        raise UserError(f"name the column to compare with --metric; the logs share {_listed(common)}")
    return common[0]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _text(cell: Any) -> str:
    """Return the name in a cell, "" if there is none; 3 and 3.0 are one seed."""
    text = "" if cell is None else str(cell).strip()
    return text.removesuffix(".0") if re.fullmatch(r"-?\d+\.0", text) else text


def _parser() -> Parser:
    parser = Parser(prog="steadymoe seeds", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("logs", nargs="*", type=Path, metavar="FILE", help="logs that name their arms")
    arm = "an arm's logs: one file per run, or one file with a column seed; repeatable"
    parser.add_argument("--arm", action="append", nargs="+", default=[], metavar=("NAME", "FILE"), help=arm)
    parser.add_argument("--metric", metavar="COLUMN", help="the column to compare (default: value, or the only one)")
    parser.add_argument("--step", metavar="COLUMN", help="the column of steps (default: step, _step, global_step, …)")
    last = "use the mean of this last share of a run's values instead of the last one"
    parser.add_argument("--last", type=_up_to(1), default=0.0, metavar="SHARE", help=last)
    effect = "a difference to detect; repeatable (default: 0.02, 0.03, 0.05)"
    parser.add_argument("--difference", type=_up_to(_LARGEST), action="append", metavar="X", help=effect)
    return parser


def _up_to(most: float) -> Callable[[str], float]:
    """Return a converter of argparse for a number above 0."""

    def number(text: str) -> float:
        if not 0 < (value := float(text)) <= most:
            raise argparse.ArgumentTypeError(f"must be above 0 and at most {most:g}, got {text}")
        return value

    return number
