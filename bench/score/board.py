"""The board: verified entries as a table and a page, ranked by their difference from GRPO."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from steadymoe.algorithms import names
from steadymoe.bench.report import write
from steadymoe.bench.score import comparison, rerun, standard
from steadymoe.bench.score.entry import BadEntry, Entry
from steadymoe.bench.score.standard import ANCHORS, PARTS, VERSION, Baselines, Part
from steadymoe.bench.statistics.comparisons import paired_difference
from steadymoe.bench.statistics.estimates import Estimate, over_seeds
from steadymoe.bench.support import regular_files
from steadymoe.bench.support.text import visible

_CHECKED = "checked.json"
CAPTION = (
    "Each part: the outcome, and the outcome less GRPO's on the same machine, paired by seed, with 95 % intervals; n "
    "counts seeds, of gradients checkpoints. Entries are ranked by the first difference. Tokens: sampled per run, mean "
    "over seeds. Anchors: whether the entry's runs of GRPO and GSPO agree with the recorded ones. Unchecked: nobody "
    "has repeated its runs. docs/your_algorithm.md says what may be tuned and what is verified."
)


def rerun_entries(entries: Sequence[Entry], verdicts: dict[str, str], folder: Path | None) -> bool:
    """Repeat two seeds of each entry and return whether all were repeated.

    ``verdicts`` gets hash of an entry → verdict, and is saved in the ``folder`` of the board, if there is one.
    """
    for number, entry in enumerate(entries, start=1):
        print(visible(f"[{number}/{len(entries)}] {entry.name}: check and two seeds"), file=sys.stderr, flush=True)
        verdicts[entry.digest] = rerun.verdict(entry)
        if folder is not None:
            write.files(folder, {_CHECKED: json.dumps(verdicts, indent=1) + "\n"})
    return all(verdicts[entry.digest].startswith(rerun.REPEATED) for entry in entries)


def verdicts(folder: Path | None) -> dict[str, str]:
    """Return hash of an entry → verdict of its rerun, as saved in the ``folder`` of a board; empty without one.

    Raises BadEntry for a file that holds something else.
    """
    if folder is None:
        return {}
    try:
        found = regular_files.read_json(folder / _CHECKED)
        return {str(digest): str(verdict) for digest, verdict in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise BadEntry(f"{folder / _CHECKED} does not hold verdicts of --run; remove it") from error


def less_grpo(entry: Entry, part: Part) -> Estimate:
    """Return the entry's outcome less GRPO's on the same machine; its n is 0 for a part that was not run."""
    return paired_difference(entry.by_seed(part), entry.by_seed(part, "grpo"), bounds=part.difference_bounds)


def table(entries: Sequence[Entry], verdicts: Mapping[str, str] = MappingProxyType({})) -> pd.DataFrame:
    """Return a row for each entry: untuned ones first, the highest difference from GRPO in the first part first.

    ``verdicts`` is hash of an entry → verdict of its rerun on this machine.
    """
    known = standard.baselines()
    ranked = sorted(entries, key=lambda entry: (bool(entry.about["tuning"]), -less_grpo(entry, PARTS[0]).mean))
    return pd.DataFrame([_row(entry, known, verdicts.get(entry.digest, "unchecked")) for entry in ranked])


def _row(entry: Entry, known: Baselines, verdict: str) -> dict[str, Any]:
    row: dict[str, Any] = {"entry": visible(entry.name), "tuned": "yes" if entry.about["tuning"] else "no"}
    for part in PARTS:
        difference = less_grpo(entry, part)
        outcome = over_seeds(entry.by_seed(part).dropna().tolist(), bounds=part.bounds)
        row[f"{part.name}: {part.outcome}"] = outcome if difference.n else "not run"
        row[f"{part.name}: less GRPO"] = difference if difference.n else "–"
        row[f"{part.name}: n"] = difference.n
    row["tokens"] = comparison.count(entry.by_seed(PARTS[0], column="tokens").mean())
    recorded = known.of(PARTS[0]).set_index(["arm", "seed"])["value"]
    here = {label: entry.by_seed(PARTS[0], name) for name, label in ANCHORS.items()}
    agree, _ = comparison.anchors_agree(here, {label: recorded[label] for label in here}, here)
    row["anchors"] = "agree" if agree else "differ from the recorded ones"
    row["repeated"] = visible(verdict)[:80]
    lengths = {"paper": 80, "machine": 80, "revision": 12}
    return row | {key: visible(entry.about[key])[:length] for key, length in lengths.items()}


def untrained() -> str:
    """Return a sentence on the recorded start and frozen policy of the first part: what no training gives."""
    rows = standard.baselines().of(PARTS[0])
    frozen = rows[rows["arm"] == "frozen"]
    start, end = (over_seeds(frozen[name].tolist(), bounds=PARTS[0].bounds) for name in ("start", "value"))
    return (
        f"Without training, as recorded: the reward begins at {start}, and the {PARTS[0].outcome} of the frozen policy "
        f"is {end}, n = {end.n}."
    )


def text(rows: pd.DataFrame) -> str:
    """Return the board as Markdown."""
    return f"{write.to_markdown(rows)}\n\n{untrained()}"


def html(entries: Sequence[Entry], rows: pd.DataFrame) -> str:
    """Return the page: entries with and without tuning; folded, their other columns and algorithms without an entry."""
    numbers = [f"{part.name}: {what}" for part in PARTS for what in (part.outcome, "less GRPO")]
    first = ["entry", *numbers, "paper"]
    groups = {"As published": rows[rows["tuned"] == "no"], "Tuned": rows[rows["tuned"] == "yes"]}
    entered = {entry.algorithm for entry in entries if not entry.own_files}
    return write.html(
        "score",
        "page.html",
        title=f"Board of {VERSION}",
        charts={f"{part.outcome.capitalize()}: {part.question}": part_chart(rows, part) for part in PARTS},
        legend="Points: mean and 95 % interval of an entry. Dashed: GRPO, GSPO and the frozen policy, as recorded.",
        tables={title: group[first] for title, group in groups.items() if len(group)},
        own="",
        notes=[untrained()],
        caption=CAPTION,
        command="",
        folded={
            "Repeated runs, tokens, anchors, machines and revisions": rows[
                ["entry", *(name for name in rows if name not in (*first, "tuned"))]
            ],
            "Not run": ", ".join(name for name in names() if name not in entered),
        },
    )


def part_chart(rows: pd.DataFrame, part: Part) -> dict[str, Any]:
    """Return the chart of a part: entries as points; GRPO, GSPO and the frozen policy, as recorded, as lines."""
    column = f"{part.name}: {part.outcome}"
    levels = {row["entry"]: row[column] for row in rows.to_dict("records") if isinstance(row[column], Estimate)}
    means = standard.baselines().of(part).groupby("arm")["value"].mean()
    return comparison.chart(levels, {arm: float(means[arm]) for arm in (*ANCHORS.values(), "frozen") if arm in means})


def write_board(entries: Sequence[Entry], rows: pd.DataFrame, folder: Path) -> list[Path]:
    """Write ``board.md`` and ``board.html`` to ``folder``; return both."""
    markdown = f"# Board of {VERSION}\n\n{text(rows)}\n\n{CAPTION}\n"
    return write.files(folder, {"board.md": markdown, "board.html": html(entries, rows)})
