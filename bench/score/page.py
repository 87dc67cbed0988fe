"""What a score shows: a chart and a table for each part, in the terminal, as CSV and as one HTML page."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.report import tables, web
from steadymoe.bench.score.chart import chart
from steadymoe.bench.score.comparison import Comparison
from steadymoe.bench.score.standard import VERSION
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.text import visible

CAPTION = (
    "Mean over seeds (checkpoints for gradients) with its 95 % interval; dashed: reward at the start. Differences from "
    "algorithms that ran here are paired by seed; those from recorded ones, which ran on the standard's machine, are "
    "differences of means. Tokens: sampled per run, mean over seeds. p: sign flips for paired differences, else "
    "Welch's; Holm over the rows of a part; below 0.05 a difference is decided. No number sums up the parts."
)


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


def write(parts: Sequence[Comparison], notes: Sequence[str], command: str, folder: Path) -> list[Path]:
    """Write ``score.html`` and ``score.csv`` to ``folder``; return both."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = pd.concat([_numbers(each) for each in parts], ignore_index=True).to_csv(index=False)
    files = {folder / "score.html": html(parts, notes, command), folder / "score.csv": numbers}
    for path, content in files.items():
        atomic_files.write(path, partial(Path.write_text, data=content))
    return list(files)


def _numbers(compared: Comparison) -> pd.DataFrame:
    """Return the rows of a part as numbers."""
    names = {"part": compared.part.name, "measure": compared.part.outcome, "standard": VERSION}
    rows = pd.DataFrame([vars(row) | {"verdict": row.verdict} for row in compared.rows])
    return tables.to_numbers(rows.assign(**names, tokens=rows["algorithm"].map(compared.tokens)))


def html(parts: Sequence[Comparison], notes: Sequence[str], command: str) -> str:
    """Return one self-contained page; names and the command are escaped."""
    shown = []
    for each in parts:
        rows = [
            {"mine": row.algorithm == each.own, "cells": [tables.to_text(cell) for cell in cells]}
            for row, cells in zip(each.rows, table(each).to_numpy().tolist(), strict=True)
        ]
        levels = {visible(row.algorithm): row.outcome for row in each.rows}
        drawn = chart(levels, {} if each.start is None else {"start": each.start}, visible(each.own))
        shown.append({"part": each.part, "chart": drawn, "columns": list(table(each)), "rows": rows})
    return web.render(
        "score",
        "page.html",
        name=visible(parts[0].own),
        version=VERSION,
        command=visible(command),
        notes=[visible(note) for note in notes],
        parts=shown,
        caption=CAPTION,
    )
