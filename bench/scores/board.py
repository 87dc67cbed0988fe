"""``steadymoe board``: entries verified, and a table and a page of where they stand."""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from steadymoe.algorithms import names
from steadymoe.bench.report import tables, web
from steadymoe.bench.scores import entry, kept, repeat, standing
from steadymoe.bench.scores.asked import SHOWN
from steadymoe.bench.scores.entry import BadEntry, Entry
from steadymoe.bench.scores.standard import ANCHORS, PARTS, VERSION, Part
from steadymoe.bench.statistics.comparisons import paired_difference
from steadymoe.bench.statistics.estimates import Estimate, over_seeds
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.text import visible

CAPTION = (
    "Each part: the outcome, and the outcome less GRPO's on the same machine, seed by seed, with 95 % intervals; n "
    "counts seeds, of gradients checkpoints. An entry is ranked by the first of these differences. Anchors: whether "
    "the entry's runs of GRPO and GSPO agree with the recorded ones. Unchecked: nobody has repeated its runs. "
    "docs/board.md says what may be tuned and what is verified."
)
_UNCHECKED = "unchecked"
# Verdicts of --run, beside the folders of the entries.
_CHECKED = "checked.json"


def answer(arguments: argparse.Namespace) -> int:
    """Verify the entries below the folders, repeat some of their runs if asked, and write table and page.

    0: done; 1: an entry could not be repeated; 130: interrupted. Raises BadEntry, Damaged.
    """
    entries = load(arguments.folders)
    said: dict[str, str] = {}
    if arguments.run:
        try:
            said = _repeat(entries)
        except KeyboardInterrupt:
            print("steadymoe: interrupted", file=sys.stderr)
            return 130
    rows = standings(entries)
    print(tables.to_markdown(rows), reference(), sep="\n\n")
    if arguments.page is not None:
        arguments.page.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(arguments.page, partial(Path.write_text, data=html(entries, rows)))
        print(visible(f"wrote {arguments.page}"))
    return 0 if all(each.startswith(repeat.REPEATED) for each in said.values()) else 1


def _repeat(entries: Sequence[Entry]) -> dict[str, str]:
    """What came of repeating each entry, by name; kept beside the entry's folder."""
    found = {}
    for number, each in enumerate(entries, start=1):
        print(visible(f"[{number}/{len(entries)}] {each.name}: check and two seeds"), file=sys.stderr, flush=True)
        found[each.name] = repeat.verdict(each)
        place = each.folder.parent / _CHECKED
        atomic_files.write_json(place, _verdicts(place) | {each.digest: found[each.name]})
    return found


def _verdicts(place: Path) -> dict[str, str]:
    """Hash of an entry → what came of repeating it. Raises BadEntry for a file that is no such list."""
    try:
        known = json.loads(place.read_text())
        return {str(digest): str(said) for digest, said in known.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise BadEntry(f"{place} does not hold verdicts of --run; remove it") from error


def load(folders: Sequence[Path]) -> list[Entry]:
    """The entries in the folders, or below them. Raises BadEntry for a bad one and for two of one name."""
    found: dict[str, Entry] = {}
    for folder in folders:
        if not folder.is_dir():
            raise BadEntry(f"there is no folder {folder}")
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        for place in [folder] if (folder / "entry.json").exists() or not below else below:
            each = entry.read(place)
            if each.name in found:
                raise BadEntry(f"{place} and {found[each.name].folder} are both entries of {each.name}")
            found[each.name] = each
    return list(found.values())


def less_grpo(each: Entry, part: Part) -> Estimate | None:
    """The entry's outcome less the outcome of GRPO on the same machine; None for a part that was not run."""
    ours = each.by_seed(part)
    if ours.empty:
        return None
    return paired_difference(ours, each.by_seed(part, "grpo"), bounds=part.difference_bounds)


def standings(entries: Sequence[Entry]) -> pd.DataFrame:
    """A row for each entry, by the mean of its differences in the first part, untuned entries first."""
    recorded = kept.load()
    ordered = sorted(entries, key=lambda one: (bool(one.about["tuned"]), -_first(one)))
    return pd.DataFrame([_row(each, recorded) for each in ordered])


def reference() -> str:
    """The recorded start and frozen policy of the first part in a sentence: what no training gives."""
    rows = kept.load().of(PARTS[0])
    frozen = rows[rows["arm"] == "frozen"]
    start, end = (over_seeds(frozen[name].tolist(), bounds=PARTS[0].bounds) for name in ("start", "value"))
    return (
        f"Without training, as recorded: the reward begins at {start}, and the {PARTS[0].outcome} of the frozen policy "
        f"is {end}, n = {end.n}."
    )


def _first(each: Entry) -> float:
    apart = less_grpo(each, PARTS[0])
    return float("-inf") if apart is None else apart.mean


def _row(each: Entry, recorded: kept.Kept) -> dict[str, Any]:
    row: dict[str, Any] = {"entry": visible(each.name), "tuned": "yes" if each.about["tuned"] else "no"}
    for part in PARTS:
        ours, apart = each.by_seed(part), less_grpo(each, part)
        row[f"{part.name}: {part.outcome}"] = (
            "not run" if apart is None else over_seeds(ours.dropna().tolist(), bounds=part.bounds)
        )
        row[f"{part.name}: less GRPO"] = "–" if apart is None else apart
        row[f"{part.name}: n"] = 0 if apart is None else apart.n
    row["anchors"] = _anchors(each, recorded)
    row["repeated"] = visible(_verdicts(each.folder.parent / _CHECKED).get(each.digest, _UNCHECKED))[:80]
    shown = {"paper": 80, "machine": 80, "revision": 12}  # letters
    return row | {key: visible(each.about[key])[:letters] for key, letters in shown.items()}


def _anchors(each: Entry, recorded: kept.Kept) -> str:
    """Whether the entry's runs of the anchors agree with the recorded ones in the first part."""
    rows = recorded.of(PARTS[0])
    theirs = {SHOWN[name]: rows[rows["arm"] == SHOWN[name]].set_index("seed")["value"] for name in ANCHORS}
    here = {SHOWN[name]: each.by_seed(PARTS[0], name) for name in ANCHORS}
    agree, _ = standing.agreement(here, theirs, list(here))
    return "agree" if agree else "differ from the recorded ones"


def html(entries: Sequence[Entry], rows: pd.DataFrame) -> str:
    """The page of ``standings``: a chart of each part, entries with and without tuning, algorithms without an entry."""
    numbers = [f"{part.name}: {what}" for part in PARTS for what in (part.outcome, "less GRPO")]
    first = ["entry", *numbers, "repeated", "paper"]
    groups = {}
    for title, tuned in (("As published", "no"), ("Tuned", "yes")):
        if len(chosen := rows[rows["tuned"] == tuned] if len(rows) else rows):
            groups[title] = chosen[first]
    made = rows[["entry", *(name for name in rows if name not in (*first, "tuned"))]] if len(rows) else rows
    there = {each.algorithm for each in entries if not each.own_files}
    lacking = ", ".join(name for name in names() if name not in there)
    shown: dict[str, Any] = {"version": VERSION, "reference": reference(), "caption": CAPTION, "tables": groups}
    charts = [chart(rows, part) for part in PARTS]
    return web.render("scores", "board.html", lacking=lacking, made=made, charts=charts, **shown)


def chart(rows: pd.DataFrame, part: Part) -> dict[str, Any]:
    """Return what the page draws of a part, with places in percent of its axis.

    Entries are points with intervals; GRPO, GSPO and the frozen policy, as recorded, are lines.
    """
    column = f"{part.name}: {part.outcome}"
    levels = {row["entry"]: row[column] for row in rows.to_dict("records") if isinstance(row[column], Estimate)}
    recorded = kept.load().of(part).groupby("arm")["value"].mean()
    lines = recorded.reindex([*SHOWN.values(), "frozen"]).dropna().to_dict()
    ends = [end for each in levels.values() for end in (each.low, each.high, each.mean) if not np.isnan(end)]
    ticks = list(MaxNLocator(6).tick_values(min(0.0, *ends, *lines.values()), max(*ends, *lines.values())))

    def place(value: float) -> float:
        return round(float(100 * (value - ticks[0]) / (ticks[-1] - ticks[0])), 2)

    points = [
        {"name": name, "text": str(each), "at": place(each.mean)}
        | ({} if np.isnan(each.low) else {"low": place(each.low), "width": place(each.high) - place(each.low)})
        for name, each in levels.items()
    ]
    return {
        "part": part,
        "points": points,
        "lines": {name: place(value) for name, value in lines.items()},
        "ticks": {f"{tick:.3g}": place(tick) for tick in ticks},
    }
