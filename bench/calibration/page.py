"""What a calibration shows: tables for a terminal, a figure, and one self-contained HTML page."""

import base64
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.calibration.readings import ENGINES, LABELS
from steadymoe.bench.report import web
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.support.text import visible, without_mathematics

CAPTION = (
    "Here: the mean with its 95 % interval where there is one, over n prompts (each with its responses) or over n "
    "mini-batches, of one seed; other seeds are other models. Factor: the number as a multiple of the nearer end of "
    "the published range, or within. A gate is the realism gate that a range belongs to."
)
# Length has a scale of its own.
_TOKENS = "response_length"
# What the axis of shares shows at least, and the end at which smaller numbers stand.
_LEAST, _MOST = 1e-5, 2.0


def shown(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Heading → the readings under it, as texts: measure, here, n, published, factor, source."""
    found: dict[str, pd.DataFrame] = {}
    for section, rows in table.groupby("section", sort=False):
        cells = [_cells(row) for row in rows.to_dict("records")]
        found[str(section)] = pd.DataFrame(cells)
    return found


def text(table: pd.DataFrame) -> str:
    """The readings as tables for a terminal."""
    parts = [f"{section}\n\n{rows.to_markdown(index=False)}\n" for section, rows in shown(table).items()]
    return "\n".join(parts)


def _cells(row: Mapping[Any, Any]) -> dict[str, str]:
    here = _number(row["mean"])
    if not math.isnan(row["low"]):
        here += f" [{_number(row['low'])}, {_number(row['high'])}]"
    low, high, factor = row["published_low"], row["published_high"], row["factor"]
    published = "" if math.isnan(low) else _number(low) if low == high else f"{_number(low)} to {_number(high)}"
    gate = f" (gate {row['gate']})" if row["gate"] else ""
    return {
        "measure": visible(row["label"]),
        "here": here,
        "n": f"{row['n']} {row['unit']}" if row["n"] else "–",
        "published": published + gate,
        "factor": "" if math.isnan(factor) else "within" if factor == 1 else f"{factor:.3g} ×",
        "source": visible(row["source"]),
    }


def _number(value: float) -> str:
    return "–" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}"


def figure(table: pd.DataFrame, name: str) -> style.DataFigure:
    """The readings with a published range: dots of ours with intervals beside a bar of the range, log axes."""
    known = without_mathematics(table[table["published_low"].notna() & table["mean"].notna()])
    is_length = known["key"] == _TOKENS
    with style.figure_style():
        rows = [_rows(known[~is_length]), _rows(known[is_length])]
        drawn = style.DataFigure(figsize=(style.TWO_COLUMNS, 0.28 * sum(map(len, rows)) + 1.1), layout="constrained")
        axes = drawn.subplots(2, 1, height_ratios=[max(1, len(each)) for each in rows])
        engines = known.loc[known["section"] == ENGINES, "of"].unique().tolist()
        for axis, each, label in zip(axes, rows, ("share, quotient or nats", "tokens"), strict=True):
            _draw(axis, each, engines, label)
        axes[0].set_xlim(_LEAST, _MOST)
        axes[0].plot([], [], "o", color=looks.COLOURS[0], markersize=3.4, label="this model")
        for place, engine in enumerate(engines):
            axes[0].plot([], [], color="none", label=f"engine {engine}", markersize=3.4, **_mark(place))
        title = without_mathematics(pd.DataFrame({"name": [visible(name)]}))["name"].iloc[0]
        shown = known.loc[~is_length, "mean"]
        edge = " Open, at the left edge: 0 or less than the axis shows." if (shown <= _LEAST).any() else ""
        caption = (
            f"{title}. Marks: this model, with 95 % intervals over prompts or mini-batches of one seed. Bars: what is "
            f"published of real models; a line is a single number.{edge}"
        )
        return style.finish(drawn, axes[0], caption)


def _rows(known: pd.DataFrame) -> list[pd.DataFrame]:
    """The readings that share a quantity and a published range stand in one row of the figure."""
    keys = ["key", "published_low", "published_high"]
    return [row for _, row in known.groupby(keys, sort=False)]


def _mark(place: int) -> dict[str, Any]:
    """The mark and colour of the ``place``-th engine."""
    its = looks.look(place + 1)
    return {"marker": its.marker, "markeredgecolor": its.colour, "markerfacecolor": its.colour}


def _draw(axis: Any, rows: list[pd.DataFrame], engines: list[str], label: str) -> None:
    axis.set_xscale("log")
    axis.set_xlabel(label)
    names = [LABELS[row["key"].iloc[0]] if len(row) > 1 else row["label"].iloc[0] for row in rows]
    axis.set_yticks(range(len(rows)), names[::-1])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.grid(axis="y", visible=False)
    for place, row in enumerate(reversed(rows)):
        low, high = row["published_low"].iloc[0], row["published_high"].iloc[0]
        if low < high:
            axis.barh(place, high - low, left=low, height=0.76, color="#7F7F7F", alpha=0.3, linewidth=0)
        else:
            axis.plot([low, low], [place - 0.38, place + 0.38], color="#7F7F7F", linewidth=1.6)
        for index, (_, ours) in enumerate(row.iterrows()):
            level = place + (0.64 * (0.5 - (index + 0.5) / len(row)))
            is_engine = ours["section"] == ENGINES
            mark = _mark(engines.index(ours["of"])) if is_engine else _mark(-1)
            _dot(axis, ours, level, mark)
        series = {"published_low": "low", "published_high": "high"}
        style.note(axis, "here", row[["label", "mean", "low", "high", "n"]].rename(columns={"label": "x"}), label)
        published = row[["label", *series]].rename(columns={"label": "x"} | series)
        style.note(axis, "published", published, label)


def _dot(axis: Any, ours: pd.Series, level: float, mark: dict[str, Any]) -> None:
    """One number with its interval; open at the left edge where the axis does not reach down to it."""
    is_seen = ours["mean"] > _LEAST
    if is_seen and not math.isnan(ours["low"]):
        interval = [max(ours["low"], _LEAST), ours["high"]]
        axis.plot(interval, [level, level], color=mark["markeredgecolor"], linewidth=0.9)
    if not is_seen:
        mark = mark | {"markerfacecolor": "white"}
    axis.plot([max(ours["mean"], _LEAST)], [level], linestyle="none", markersize=3.2, clip_on=False, **mark)


def html(table: pd.DataFrame, facts: Mapping[str, Any], drawn: Path) -> str:
    """One self-contained page; what comes from the config or the machine is escaped. ``drawn`` is the figure as PNG."""
    image = base64.b64encode(drawn.read_bytes()).decode()
    sections = {
        name: {
            "columns": list(rows.columns),
            "rows": [{"mine": False, "cells": cells} for cells in rows.to_numpy().tolist()],
        }
        for name, rows in shown(table).items()
    }
    told = {key: value for key, value in facts.items() if key not in ("readings", "config")}
    values = {"name": facts["name"], "sections": sections, "image": image, "facts": told, "caption": CAPTION}
    return web.render("calibration", "page.html", **values)
