"""What a calibration shows: tables for a terminal, a figure, and one self-contained HTML page."""

import base64
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from matplotlib import ticker

from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.support.text import visible, without_mathematics

CAPTION = (
    "Here: the mean with its 95 % interval where there is one, over n prompts (each with its responses) or mini-batches "
    "of one seed; other seeds are other models. Factor: the number as a multiple of the nearer end of the published "
    "range, or within. R1 to R8 are the realism gates that the ranges belong to."
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
    gate = f" ({row['gate']})" if row["gate"] else ""
    return {
        "measure": visible(row["label"]),
        "here": here,
        "n": f"{row['n']} {row['unit']}" if row["n"] else "–",
        "published": published + gate,
        "factor": "" if math.isnan(factor) else "within" if factor == 1 else f"{factor:.2g} ×",
        "source": visible(row["source"]),
    }


def _number(value: float) -> str:
    return "–" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}"


def figure(table: pd.DataFrame, name: str) -> style.DataFigure:
    """The readings with a published range: a dot of ours with its interval beside a bar of the range, log axes."""
    known = without_mathematics(table[table["published_low"].notna() & table["mean"].notna()])
    of_tokens = known["key"] == _TOKENS
    groups = [known[~of_tokens], known[of_tokens]]
    with style.figure_style():
        drawn = style.DataFigure(figsize=(style.TWO_COLUMNS, 0.19 * len(known) + 1.0), layout="constrained")
        axes = drawn.subplots(2, 1, height_ratios=[max(1, len(each)) + 0.6 for each in groups])
        for axis, rows, label in zip(axes, groups, ("share, quotient or nats", "tokens"), strict=True):
            _draw(axis, rows.reset_index(drop=True), label)
        axes[0].set_xlim(_LEAST, _MOST)
        title = without_mathematics(pd.DataFrame({"name": [visible(name)]}))["name"].iloc[0]
        axes[0].set_title(title, loc="left")
        edge = " At the left edge, open: 0 or less than the axis shows." if (groups[0]["mean"] <= _LEAST).any() else ""
        caption = (
            f"Dots: this model, with 95 % intervals over prompts or mini-batches of one seed. Bars: published of real "
            f"models; a line is a single number.{edge}"
        )
        return style.finish(drawn, None, caption)


def _draw(axis: Any, rows: pd.DataFrame, label: str) -> None:
    axis.set_xscale("log")
    axis.set_xlabel(label)
    axis.set_yticks(range(len(rows)), rows["label"])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.yaxis.set_major_formatter(ticker.FixedFormatter(rows["label"].tolist()))
    for place, row in rows.iterrows():
        low, high = row["published_low"], row["published_high"]
        if low < high:
            axis.barh(place, high - low, left=low, height=0.62, color="#7F7F7F", alpha=0.35, linewidth=0)
        else:
            axis.plot([low, low], [place - 0.31, place + 0.31], color="#7F7F7F", linewidth=1.6)
        is_seen = row["mean"] > _LEAST
        if is_seen and not math.isnan(row["low"]):
            axis.plot([max(row["low"], _LEAST), row["high"]], [place, place], color=looks.COLOURS[0], linewidth=0.9)
        axis.plot(
            [max(row["mean"], _LEAST)],
            [place],
            "o",
            color=looks.COLOURS[0],
            markersize=3.4,
            markerfacecolor=looks.COLOURS[0] if is_seen else "white",
            clip_on=False,
        )
    for series, columns in (("here", ["mean", "low", "high", "n"]), ("published", ["published_low", "published_high"])):
        named = {"published_low": "low", "published_high": "high"}
        style.note(axis, series, rows[["label", *columns]].rename(columns={"label": "x"} | named), label)


def html(table: pd.DataFrame, facts: Mapping[str, Any], drawn: Path) -> str:
    """One self-contained page; what comes from the config or the machine is escaped. ``drawn`` is the figure as PNG."""
    environment = jinja2.Environment(autoescape=True, loader=jinja2.PackageLoader("steadymoe.bench.calibration", "."))
    image = base64.b64encode(drawn.read_bytes()).decode()
    sections = {
        name: {"header": list(rows.columns), "rows": rows.to_numpy().tolist()} for name, rows in shown(table).items()
    }
    told = {key: value for key, value in facts.items() if key not in ("readings", "config")}
    return environment.get_template("page.html").render(
        name=facts["name"], sections=sections, image=image, facts=told, caption=CAPTION
    )
