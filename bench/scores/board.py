"""``steadymoe board``: entries verified, and a table and a page of where they stand."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd

from steadymoe.algorithms import names
from steadymoe.bench.report import tables
from steadymoe.bench.scores import entry, repeat
from steadymoe.bench.scores.entry import BadEntry, Entry
from steadymoe.bench.scores.standard import PARTS, VERSION, Part
from steadymoe.bench.statistics.estimates import Estimate, over_seeds
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.text import visible

CAPTION = (
    "Each part: the outcome, and beside it the outcome less GRPO's on the same machine, seed by seed, with its 95 % "
    "interval. An entry is ranked by this difference. Unchecked: nobody has repeated its runs. docs/board.md "
    "says what may be tuned and what is verified."
)
_UNCHECKED = "unchecked"


def answer(arguments: argparse.Namespace) -> int:
    """Verify the entries below the folders, repeat some of their runs if asked, and write table and page.

    0: done; 1: an entry could not be repeated. Raises BadEntry.
    """
    entries = load(arguments.folders)
    checked = _repeat(entries) if arguments.run else {}
    table = standings(entries, checked)
    print(tables.to_markdown(table))
    if arguments.page is not None:
        arguments.page.parent.mkdir(parents=True, exist_ok=True)
        page = html(entries, checked)
        atomic_files.write(arguments.page, partial(Path.write_text, data=page))
        print(visible(f"wrote {arguments.page}"))
    return 0 if all(said.startswith(repeat.REPEATED) for said in checked.values()) else 1


def _repeat(entries: Sequence[Entry]) -> dict[str, str]:
    """What came of repeating each entry, by name."""
    found = {}
    for number, each in enumerate(entries, start=1):
        print(visible(f"[{number}/{len(entries)}] {each.name}: check and two runs"), file=sys.stderr, flush=True)
        found[each.name] = repeat.verdict(each)
    return found


def load(folders: Sequence[Path]) -> list[Entry]:
    """The entries in the folders, or below them. Raises BadEntry for a bad one and for two of one name."""
    found: dict[str, Entry] = {}
    for folder in folders:
        if not folder.is_dir():
            raise BadEntry(f"there is no folder {folder}")
        below = sorted(path for path in folder.iterdir() if path.is_dir())
        places = [folder] if (folder / "entry.yaml").exists() or not below else below
        for place in places:
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
    return over_seeds((ours - each.by_seed(part, "grpo")).dropna().tolist())


def standings(entries: Sequence[Entry], checked: Mapping[str, str]) -> pd.DataFrame:
    """A row for each entry, by the mean of its differences in the first part, untuned entries first."""
    rows = []
    for each in sorted(entries, key=lambda one: (bool(one.about["tuned"]), -_order(less_grpo(one, PARTS[0])))):
        row: dict[str, Any] = {"entry": visible(each.name), "tuned": "yes" if each.about["tuned"] else "no"}
        for part in PARTS:
            ours, apart = each.by_seed(part), less_grpo(each, part)
            row[_of(part)] = "not run" if apart is None else str(over_seeds(ours.tolist()))
            row[_beside(part)] = "–" if apart is None else f"{apart}, n {apart.n}"
        rows.append(row | {"repeated": checked.get(each.name, _UNCHECKED)} | _provenance(each))
    return pd.DataFrame(rows)


def _of(part: Part) -> str:
    return f"{part.name}: {part.outcome}"


def _beside(part: Part) -> str:
    return f"{part.name}: less GRPO"


def _order(apart: Estimate | None) -> float:
    return -np.inf if apart is None else apart.mean


def _sorted_by(value: float | str) -> float | str:
    """What a cell is sorted by; "" comes last."""
    return value if isinstance(value, str) or np.isfinite(value) else ""


def _provenance(each: Entry) -> dict[str, str]:
    told = {
        "paper": each.about["paper"],
        "machine": each.made.get("machine", ""),
        "revision": each.made.get("revision", ""),
    }
    return {key: visible(str(value))[:80] for key, value in told.items()}


def html(entries: Sequence[Entry], checked: Mapping[str, str]) -> str:
    """The page: entries with and without tuning apart, sortable; algorithms of the suite without an entry are named."""
    environment = jinja2.Environment(autoescape=True, loader=jinja2.PackageLoader("steadymoe.bench.scores", "."))
    table = standings(entries, checked)
    orders = {
        visible(each.name): {_beside(part): _order(less_grpo(each, part)) for part in PARTS}
        | {_of(part): each.by_seed(part).mean() for part in PARTS}
        for each in entries
    }
    columns = [name for name in table.columns if name != "tuned"]
    groups: dict[str, list[list[dict[str, Any]]]] = {}
    for title, tuned in (("As published", "no"), ("Tuned", "yes")):
        rows = table[table["tuned"] == tuned] if len(table) else table
        groups[title] = [
            [{"text": row[name], "order": _sorted_by(orders[row["entry"]].get(name, row[name]))} for name in columns]
            for _, row in rows.iterrows()
        ]
    of_suite = [each for each in entries if not each.own_files]
    there = {word.partition("=")[2] for each in of_suite for word in each.words if word.startswith("algorithm=")}
    lacking = ", ".join(name for name in names() if name not in there)
    return environment.get_template("board.html").render(
        version=VERSION, caption=CAPTION, columns=columns, tables=groups, lacking=lacking
    )
