"""The board: verified entries as a table and a page, ranked by their difference from GRPO."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.algorithms import names
from steadymoe.bench.report import tables, web
from steadymoe.bench.score import baselines, comparison, rerun
from steadymoe.bench.score.baselines import Baselines
from steadymoe.bench.score.chart import chart
from steadymoe.bench.score.entry import BadEntry, Entry
from steadymoe.bench.score.standard import ANCHORS, PARTS, VERSION, Part
from steadymoe.bench.statistics.comparisons import paired_difference
from steadymoe.bench.statistics.estimates import Estimate, over_seeds
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.text import visible

CAPTION = (
    "Each part: the outcome, and the outcome less GRPO's on the same machine, paired by seed, with 95 % intervals; n "
    "counts seeds, of gradients checkpoints. Entries are ranked by the first difference. Anchors: whether the entry's "
    "runs of GRPO and GSPO agree with the recorded ones. Unchecked: nobody has repeated its runs. "
    "docs/your_algorithm.md says what may be tuned and what is verified."
)
_UNCHECKED = "unchecked"
# Verdicts of --run, next to the folders of the entries.
_CHECKED = "checked.json"


def rerun_entries(entries: Sequence[Entry]) -> bool:
    """Repeat two seeds of each entry and keep the verdicts next to its folder; return whether all were repeated."""
    verdicts = []
    for number, entry in enumerate(entries, start=1):
        print(visible(f"[{number}/{len(entries)}] {entry.name}: check and two seeds"), file=sys.stderr, flush=True)
        verdicts.append(rerun.verdict(entry))
        place = entry.folder.parent / _CHECKED
        atomic_files.write_json(place, _verdicts(place) | {entry.digest: verdicts[-1]})
    return all(verdict.startswith(rerun.REPEATED) for verdict in verdicts)


def _verdicts(place: Path) -> dict[str, str]:
    """Hash of an entry → verdict of its rerun. Raises BadEntry for a file that holds something else."""
    try:
        return {str(digest): str(verdict) for digest, verdict in json.loads(place.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise BadEntry(f"{place} does not hold verdicts of --run; remove it") from error


def less_grpo(entry: Entry, part: Part) -> Estimate | None:
    """Return the entry's outcome less GRPO's on the same machine; None for a part that was not run."""
    ours = entry.by_seed(part)
    if ours.empty:
        return None
    return paired_difference(ours, entry.by_seed(part, "grpo"), bounds=part.difference_bounds)


def table(entries: Sequence[Entry]) -> pd.DataFrame:
    """Return a row for each entry, by the mean of its differences in the first part, untuned entries first."""
    known = baselines.load()

    def rank(entry: Entry) -> tuple[bool, float]:
        difference = less_grpo(entry, PARTS[0])
        return bool(entry.about["tuned"]), np.inf if difference is None else -difference.mean

    return pd.DataFrame([_row(entry, known) for entry in sorted(entries, key=rank)])


def _row(entry: Entry, known: Baselines) -> dict[str, Any]:
    row: dict[str, Any] = {"entry": visible(entry.name), "tuned": "yes" if entry.about["tuned"] else "no"}
    for part in PARTS:
        difference = less_grpo(entry, part)
        outcome = over_seeds(entry.by_seed(part).dropna().tolist(), bounds=part.bounds)
        row[f"{part.name}: {part.outcome}"] = "not run" if difference is None else outcome
        row[f"{part.name}: less GRPO"] = "–" if difference is None else difference
        row[f"{part.name}: n"] = 0 if difference is None else difference.n
    row["anchors"] = _anchors(entry, known)
    row["repeated"] = visible(_verdicts(entry.folder.parent / _CHECKED).get(entry.digest, _UNCHECKED))[:80]
    lengths = {"paper": 80, "machine": 80, "revision": 12}
    return row | {key: visible(entry.about[key])[:length] for key, length in lengths.items()}


def _anchors(entry: Entry, known: Baselines) -> str:
    """Whether the entry's runs of the anchors agree with the recorded ones in the first part."""
    recorded = known.of(PARTS[0]).set_index(["arm", "seed"])["value"]
    theirs = {label: recorded[label] for label in ANCHORS.values()}
    here = {label: entry.by_seed(PARTS[0], name) for name, label in ANCHORS.items()}
    agree, _ = comparison.anchors_agree(here, theirs, here)
    return "agree" if agree else "differ from the recorded ones"


def untrained() -> str:
    """Return a sentence on the recorded start and frozen policy of the first part: what no training gives."""
    rows = baselines.load().of(PARTS[0])
    frozen = rows[rows["arm"] == "frozen"]
    start, end = (over_seeds(frozen[name].tolist(), bounds=PARTS[0].bounds) for name in ("start", "value"))
    return (
        f"Without training, as recorded: the reward begins at {start}, and the {PARTS[0].outcome} of the frozen policy "
        f"is {end}, n = {end.n}."
    )


def text(rows: pd.DataFrame) -> str:
    """Return the board as Markdown."""
    return f"{tables.to_markdown(rows)}\n\n{untrained()}"


def write(entries: Sequence[Entry], rows: pd.DataFrame, folder: Path) -> list[Path]:
    """Write ``board.md`` and ``board.html`` to ``folder``; return both."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        folder / "board.md": f"# Board of {VERSION}\n\n{text(rows)}\n\n{CAPTION}\n",
        folder / "board.html": html(entries, rows),
    }
    for path, content in pages.items():
        atomic_files.write(path, partial(Path.write_text, data=content))
    return list(pages)


def html(entries: Sequence[Entry], rows: pd.DataFrame) -> str:
    """Return the page: a chart of each part, entries with and without tuning, algorithms without an entry."""
    numbers = [f"{part.name}: {what}" for part in PARTS for what in (part.outcome, "less GRPO")]
    first = ["entry", *numbers, "repeated", "paper"]
    groups = {}
    for title, tuned in (("As published", "no"), ("Tuned", "yes")):
        if len(chosen := rows[rows["tuned"] == tuned] if len(rows) else rows):
            groups[title] = chosen[first]
    made = rows[["entry", *(name for name in rows if name not in (*first, "tuned"))]] if len(rows) else rows
    there = {entry.algorithm for entry in entries if not entry.own_files}
    lacking = ", ".join(name for name in names() if name not in there)
    shown: dict[str, Any] = {"version": VERSION, "untrained": untrained(), "caption": CAPTION, "tables": groups}
    charts = [(part, part_chart(rows, part)) for part in PARTS]
    return web.render("score", "board.html", lacking=lacking, made=made, charts=charts, **shown)


def part_chart(rows: pd.DataFrame, part: Part) -> dict[str, Any]:
    """Return the chart of a part: entries as points; GRPO, GSPO and the frozen policy, as recorded, as lines."""
    column = f"{part.name}: {part.outcome}"
    levels = {row["entry"]: row[column] for row in rows.to_dict("records") if isinstance(row[column], Estimate)}
    means = baselines.load().of(part).groupby("arm")["value"].mean()
    return chart(levels, {arm: float(means[arm]) for arm in (*ANCHORS.values(), "frozen") if arm in means})
