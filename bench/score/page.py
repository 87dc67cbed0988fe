"""What a score shows: a table for each part, a figure with the scored algorithm in front, and one HTML page."""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.report import tables, web
from steadymoe.bench.report.figures import style
from steadymoe.bench.report.figures.curves import curves
from steadymoe.bench.report.figures.looks import Look
from steadymoe.bench.score.standard import VERSION, Part
from steadymoe.bench.score.standing import Row
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.text import visible, without_mathematics

CAPTION = (
    "Filled: the mean over seeds (checkpoints for gradients) with its 95 % interval; open: the reward at the start. "
    "Here (circles): run on this machine, so differences are taken seed by seed. Recorded (squares): from the machine "
    "of the standard; differences are of means. Tokens: sampled by a run, mean over seeds. p: sign flips for paired "
    "differences, Welch's for others, Holm for the rows of a part; below 0.05 a difference is decided. A part says one "
    "thing, and no number sums them up."
)
_MINE, _OTHERS = "#D55E00", "#9A9A9A"


@dataclass(frozen=True)
class Shown:
    """One part of a score."""

    part: Part
    rows: Sequence[Row]
    mine: str
    curves: pd.DataFrame
    """arm, seed, step (gradient updates), metric, value; empty for a part without runs."""
    starts: Mapping[str, float]
    """Arm → the mean reward at the start; empty for a part without runs."""
    tokens: Mapping[str, float]
    """Arm → response tokens that a run sampled, the mean over seeds; nan where they are not recorded."""


def table(shown: Shown) -> pd.DataFrame:
    """The rows of a part as texts."""
    return pd.DataFrame(
        [
            {
                "": number,
                "algorithm": visible(row.arm),
                "run": row.where,
                shown.part.outcome: str(row.numbers),
                "n": row.numbers.n,
                **({"tokens": _tokens(shown.tokens.get(row.arm, math.nan))} if shown.part.kind == "runs" else {}),
                "yours less it": "–" if row.apart is None else str(row.apart),
                "n of both": "–" if row.apart is None else row.apart.n,
                "p (Holm)": "–" if row.corrected != row.corrected else f"{row.corrected:.2g}",
                "so": row.says,
            }
            for number, row in enumerate(shown.rows, start=1)
        ]
    )


def _tokens(count: float) -> str:
    return "not recorded" if math.isnan(count) else f"{count:,.0f}"


def text(parts: Sequence[Shown]) -> str:
    """The tables for a terminal."""
    return "\n".join(f"{each.part.name}: {each.part.asks}\n\n{tables.to_markdown(table(each))}\n" for each in parts)


def figure(parts: Sequence[Shown]) -> style.DataFigure:
    """A row for each part: curves of reward where there are runs, and outcomes; the scored algorithm in colour."""
    with style.figure_style():
        heights = [max(2.0, 0.6 + 0.17 * len(each.rows)) for each in parts]
        drawn = style.DataFigure(figsize=(style.TWO_COLUMNS, sum(heights) + 0.4), layout="constrained")
        names = [(each.part.name, f"{each.part.name} {'outcome' if each.starts else ''}".strip()) for each in parts]
        axes: Any = drawn.subplot_mosaic([[left, right] for left, right in names], height_ratios=heights)
        for (left, right), each in zip(names, parts, strict=True):
            if each.starts:
                lines = {arm: Look(_OTHERS, "-", "o") for arm in each.curves["arm"].unique() if arm != each.mine}
                curves(
                    axes[left], without_mathematics(each.curves), "reward", {**lines, each.mine: Look(_MINE, "-", "o")}
                )
                axes[left].set_xlabel("gradient updates")
            _outcomes(axes[right], each)
        return drawn


def _outcomes(axis: Any, shown: Shown) -> None:
    for place, row in enumerate(shown.rows):
        colour = _MINE if row.arm == shown.mine else _OTHERS
        axis.plot([row.numbers.low, row.numbers.high], [place, place], color=colour, linewidth=1.1)
        axis.plot(row.numbers.mean, place, "o" if row.where == "here" else "s", color=colour, markersize=4)
        if row.arm in shown.starts:
            axis.plot(shown.starts[row.arm], place, "o", color=colour, markersize=4, markerfacecolor="white")
        style.note(axis, row.arm, pd.DataFrame([vars(row.numbers)]), shown.part.name)
    names = without_mathematics(pd.DataFrame({"name": [visible(row.arm) for row in shown.rows]}))["name"]
    axis.set_yticks(range(len(shown.rows)), names)
    axis.set_ylim(len(shown.rows) - 0.4, -0.6)
    axis.set_xlabel(shown.part.outcome)
    axis.grid(visible=False, axis="y")


def write(parts: Sequence[Shown], notes: Sequence[str], command: str, folder: Path) -> list[Path]:
    """Write ``score.html``, ``score.csv`` and the figure to ``folder``; return the files, the page first."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figure(parts)
    files = [folder / "score.html", folder / "score.csv", folder / "score.png", folder / "score.svg"]
    for path in files[2:]:
        atomic_files.write(path, partial(style.save, drawn, suffix=path.suffix[1:]))
    numbers = pd.concat([_numbers(each) for each in parts], ignore_index=True)
    atomic_files.write(files[1], partial(Path.write_text, data=numbers.to_csv(index=False)))
    page = html(parts, notes, command, files[2])
    atomic_files.write(files[0], partial(Path.write_text, data=page))
    return files


def _numbers(shown: Shown) -> pd.DataFrame:
    """The rows of a part as numbers."""
    return pd.DataFrame(
        [
            {"part": shown.part.name, "algorithm": row.arm, "run": row.where, "outcome": shown.part.outcome}
            | vars(row.numbers)
            | {"tokens": shown.tokens.get(row.arm, math.nan)}
            | ({} if row.apart is None else {f"apart_{key}": value for key, value in vars(row.apart).items()})
            | {"paired": row.paired, "p": row.p, "p_corrected": row.corrected, "standard": VERSION}
            for row in shown.rows
        ]
    )


def html(parts: Sequence[Shown], notes: Sequence[str], command: str, drawn: Path) -> str:
    """One self-contained page; names and the command are escaped. ``drawn`` is the figure as PNG."""
    told = []
    for each in parts:
        cells = table(each)
        rows = [
            {"mine": row.arm == each.mine, "cells": list(values)}
            for row, values in zip(each.rows, cells.itertuples(index=False, name=None), strict=True)
        ]
        told.append({"name": each.part.name, "asks": each.part.asks, "columns": list(cells.columns), "rows": rows})
    return web.render(
        "score",
        "page.html",
        name=visible(parts[0].mine),
        version=VERSION,
        command=visible(command),
        notes=[visible(note) for note in notes],
        parts=told,
        image=base64.b64encode(drawn.read_bytes()).decode(),
        caption=CAPTION,
    )
