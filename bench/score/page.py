"""What a score shows: a table for each part, a figure with the scored algorithm in front, and one HTML page."""

import base64
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.report import tables, web
from steadymoe.bench.report.figures import style
from steadymoe.bench.report.figures.curves import curves
from steadymoe.bench.report.figures.looks import Look
from steadymoe.bench.score.comparison import Comparison
from steadymoe.bench.score.standard import VERSION
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.text import visible, without_mathematics

CAPTION = (
    "Filled: mean over seeds (checkpoints for gradients) with its 95 % interval; open: reward at the start. Circles "
    "ran here; differences from them are paired by seed. Squares were recorded on the standard's machine; differences "
    "from them are differences of means. Tokens: sampled per run, mean over seeds. p: sign flips for paired "
    "differences, else Welch's; Holm over the rows of a part; below 0.05 a difference is decided. No number sums up "
    "the parts."
)
_OWN, _OTHERS = "#D55E00", "#9A9A9A"


def table(compared: Comparison) -> pd.DataFrame:
    """Return the rows of a part, best first."""
    rows = compared.rows
    columns: dict[str, Sequence[Any]] = {
        "algorithm": [visible(row.algorithm) for row in rows],
        "run": [row.source for row in rows],
        compared.part.outcome: [row.outcome for row in rows],
        "n": [row.outcome.n for row in rows],
        "tokens": [_tokens(compared.tokens[row.algorithm]) for row in rows] if compared.tokens else [],
        "yours less it": [row.difference for row in rows],
        "n of both": [row.difference.n or "–" for row in rows],
        "p (Holm)": [f"{row.corrected:.2g}" if row.difference.n else "–" for row in rows],
        "verdict": [row.verdict for row in rows],
    }
    return pd.DataFrame({name: values for name, values in columns.items() if values})


def _tokens(count: float) -> str:
    return "not recorded" if math.isnan(count) else f"{count:,.0f}"


def text(parts: Sequence[Comparison]) -> str:
    """Return the tables for a terminal."""
    return "\n".join(f"{each.part.name}: {each.part.question}\n\n{tables.to_markdown(table(each))}\n" for each in parts)


def figure(parts: Sequence[Comparison]) -> style.DataFigure:
    """Draw a row for each part: curves of reward where there are runs, and outcomes; the scored algorithm in colour."""
    with style.figure_style():
        heights = [max(2.0, 0.6 + 0.17 * len(each.rows)) for each in parts]
        drawn = style.DataFigure(figsize=(style.TWO_COLUMNS, sum(heights) + 0.4), layout="constrained")
        names = [(each.part.name, f"{each.part.name} {'outcome' if each.starts else ''}".strip()) for each in parts]
        axes: Any = drawn.subplot_mosaic([list(pair) for pair in names], height_ratios=heights)
        for (left, right), each in zip(names, parts, strict=True):
            if each.starts:
                looks = {arm: Look(_OTHERS, "-", "o") for arm in each.curves["arm"].unique() if arm != each.own}
                looks[each.own] = Look(_OWN, "-", "o")
                curves(axes[left], without_mathematics(each.curves), "reward", looks)
                axes[left].set_xlabel("gradient updates")
            _outcomes(axes[right], each)
        return drawn


def _outcomes(axis: Any, compared: Comparison) -> None:
    for place, row in enumerate(compared.rows):
        colour = _OWN if row.algorithm == compared.own else _OTHERS
        axis.plot([row.outcome.low, row.outcome.high], [place, place], color=colour, linewidth=1.1)
        axis.plot(row.outcome.mean, place, "o" if row.source == "here" else "s", color=colour, markersize=4)
        if row.algorithm in compared.starts:
            axis.plot(compared.starts[row.algorithm], place, "o", color=colour, markersize=4, markerfacecolor="white")
        style.note(axis, row.algorithm, pd.DataFrame([vars(row.outcome)]), compared.part.name)
    names = without_mathematics(pd.DataFrame({"name": [visible(row.algorithm) for row in compared.rows]}))["name"]
    axis.set_yticks(range(len(compared.rows)), names)
    axis.set_ylim(len(compared.rows) - 0.4, -0.6)
    axis.set_xlabel(compared.part.outcome)
    axis.grid(visible=False, axis="y")


def write(parts: Sequence[Comparison], notes: Sequence[str], command: str, folder: Path) -> list[Path]:
    """Write ``score.html``, ``score.csv`` and the figure to ``folder``; return the files, the page first."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figure(parts)
    page, numbers, *pictures = (folder / f"score.{suffix}" for suffix in ("html", "csv", "png", "svg"))
    for path in pictures:
        atomic_files.write(path, partial(style.save, drawn, suffix=path.suffix[1:]))
    rows = pd.concat([_numbers(each) for each in parts], ignore_index=True)
    atomic_files.write(numbers, partial(Path.write_text, data=rows.to_csv(index=False)))
    atomic_files.write(page, partial(Path.write_text, data=html(parts, notes, command, pictures[0])))
    return [page, numbers, *pictures]


def _numbers(compared: Comparison) -> pd.DataFrame:
    """Return the rows of a part as numbers."""
    names = {"part": compared.part.name, "measure": compared.part.outcome, "standard": VERSION}
    rows = pd.DataFrame([vars(row) | {"verdict": row.verdict} for row in compared.rows])
    return tables.to_numbers(rows.assign(**names, tokens=rows["algorithm"].map(compared.tokens)))


def html(parts: Sequence[Comparison], notes: Sequence[str], command: str, drawn: Path) -> str:
    """Return one self-contained page; names and the command are escaped. ``drawn`` is the figure as PNG."""
    shown = []
    for each in parts:
        rows = [
            {"mine": row.algorithm == each.own, "cells": [tables.to_text(cell) for cell in cells]}
            for row, cells in zip(each.rows, table(each).to_numpy().tolist(), strict=True)
        ]
        shown.append({"part": each.part, "columns": list(table(each)), "rows": rows})
    return web.render(
        "score",
        "page.html",
        name=visible(parts[0].own),
        version=VERSION,
        command=visible(command),
        notes=[visible(note) for note in notes],
        parts=shown,
        image=base64.b64encode(drawn.read_bytes()).decode(),
        caption=CAPTION,
    )
