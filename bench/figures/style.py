"""The house style of every figure: one column of print, Okabe and Ito's colours, a line style and marker for each.

A helper that draws numbers also notes them in ``Sheet.numbers``, so that a figure's table is what it shows.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from steadymoe.bench import stats
from steadymoe.bench.text import as_recorded

# Inches: a column of a two-column page, and the whole page.
ONE_COLUMN, TWO_COLUMNS = 3.4, 6.8
# Each seed's curve is averaged over this many steps before seeds are averaged.
SMOOTHED_OVER = 5
# Okabe and Ito's palette, distinguishable without colour vision, without its yellow; and line styles for print.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F"]
STYLES = ["-", "--", "-.", ":"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
FORMATS = ("png", "svg", "pdf")
HOUSE: Any = {
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "svg.hashsalt": "steadymoe",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # text stays text, as journals ask
}


class Sheet(Figure):
    """A figure that knows the numbers it shows: panel, series, x, mean and, where there are any, low, high, n."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.noted: list[pd.DataFrame] = []

    @property
    def numbers(self) -> pd.DataFrame:
        """Every number that is drawn, in the order of drawing."""
        return as_recorded(pd.concat(self.noted, ignore_index=True)) if self.noted else pd.DataFrame()


def house() -> Any:
    """A context in which figures are made and saved."""
    return mpl.rc_context(HOUSE)


def panels(rows: int, columns: int, height: float, width: float = ONE_COLUMN, **settings: Any) -> tuple[Sheet, list]:
    """A sheet and its axes, row by row."""
    figure = Sheet(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **settings).flat)


def note(axis: Axes, series: str, data: pd.DataFrame, panel: str = "") -> None:
    """Keep ``data`` (x, mean, …) as numbers of the figure."""
    sheet = axis.get_figure(root=True)
    if isinstance(sheet, Sheet):
        named = {"panel": panel or axis.get_ylabel(), "series": series}
        columns = [*named, *(str(name) for name in data)]
        sheet.noted.append(data.assign(**named)[columns])


def line(axis: Axes, name: str, data: pd.DataFrame, colour: str, style: str, panel: str = "") -> None:
    """A curve with its band: x, mean, low, high, n."""
    axis.plot(data["x"], data["mean"], style, color=colour, linewidth=1.2, label=name)
    axis.fill_between(data["x"], data["low"], data["high"], color=colour, alpha=0.13, linewidth=0)
    note(axis, name, data, panel)


def points(axis: Axes, name: str, data: pd.DataFrame, index: int, shift: float = 0.0, factor: float = 1.0) -> None:
    """Marks with their bars, joined: x, mean, low, high, n; ``shift`` and ``factor`` keep bars from hiding bars."""
    below, above = (data["mean"] - data["low"]).fillna(0.0), (data["high"] - data["mean"]).fillna(0.0)
    axis.errorbar(
        data["x"] * factor + shift,
        data["mean"],
        yerr=[below, above],
        fmt=MARKERS[index % len(MARKERS)] + STYLES[index % len(STYLES)],
        color=COLOURS[index % len(COLOURS)],
        linewidth=1.1,
        markersize=3.2,
        elinewidth=0.7,
        label=name,
    )
    note(axis, name, data)


def look(index: int) -> tuple[str, str]:
    """Colour and line style of the ``index``-th of things that have no order."""
    return COLOURS[index % len(COLOURS)], STYLES[(index + index // len(COLOURS)) % len(STYLES)]


def ramp(index: int, of: int) -> tuple[str, str]:
    """The same for things that have an order: dark to light of cividis, which reads the same without colour vision."""
    shade = mpl.colormaps["cividis"](0.85 * index / max(1, of - 1))
    return mpl.colors.to_hex(shade), STYLES[index % len(STYLES)]


def seeds(steps: pd.DataFrame) -> str:
    """n, of every arm where they differ."""
    counts = steps.groupby("arm")["seed"].nunique()
    if counts.nunique() == 1:
        return f"n\xa0=\xa0{counts.iloc[0]}"
    return f"n = {span(counts.tolist())}" if len(counts) > 4 else _each(counts)


def span(counts: Sequence[int]) -> str:
    """One number where all are equal, otherwise the first and the last."""
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def short(number: float) -> str:
    """The shorter of 0.0004 and 4e-4."""
    return min(f"{number:g}", np.format_float_scientific(number, trim="-", exp_digits=1), key=len)


def _each(counts: pd.Series) -> str:
    return ", ".join(f"{arm}: n = {count}" for arm, count in counts.items())


def curves_caption(steps: pd.DataFrame, log: bool = False) -> str:
    """Statistic, smoothing, interval, number of seeds and, where staleness varies, the design."""
    least = steps.groupby("arm")["seed"].nunique().min()
    interval = "; shaded: 95 % t interval" if least >= stats.LEAST_FOR_INTERVAL else ""
    geometric = " (on a logarithmic axis the geometric one)" if log else ""
    smoothed = f"of curves smoothed over {SMOOTHED_OVER} steps"
    return f"Mean over seeds{geometric}, {seeds(steps)}, {smoothed}{interval}.{design(steps)}"


def points_caption(steps: pd.DataFrame, of_each: str) -> str:
    """The same for one number of each run, which ``of_each`` says."""
    least = steps.groupby("arm")["seed"].nunique().min()
    most = steps.groupby("arm")["seed"].nunique().max()
    kinds = [
        kind
        for kind, is_there in (("t", least < stats.LEAST_FOR_BOOTSTRAP), ("BCa", most >= stats.LEAST_FOR_BOOTSTRAP))
        if is_there
    ]
    bars = f"; bars: 95 % {' or '.join(kinds)} interval" if least >= stats.LEAST_FOR_INTERVAL else ""
    mean = "Mean over seeds (on a logarithmic axis of values the geometric one)"
    return f"{mean}, {seeds(steps)}{bars}. Of each run: {of_each}.{design(steps)}"


def design(steps: pd.DataFrame) -> str:
    """What stays as it is while the updates per rollout vary; nothing where they do not."""
    if "updates_per_rollout" not in steps or steps["updates_per_rollout"].nunique() < 2:
        return ""
    pairs = steps[["updates_per_rollout", "prompts"]].drop_duplicates()
    minibatches = pairs["prompts"] / pairs["updates_per_rollout"]
    if minibatches.nunique() == 1:
        return f" Mini-batch fixed at {minibatches.iloc[0]:g} prompts: prompts per rollout grow with the updates."
    if pairs["prompts"].nunique() == 1:
        return f" Rollout fixed at {pairs['prompts'].iloc[0]:g} prompts: mini-batches shrink as updates grow."
    return " Neither the mini-batch nor the rollout is fixed while the updates per rollout vary."


def without_clip(steps: pd.DataFrame) -> str:
    """Names the arms that have no clip, where a reader may miss their line."""
    clipped = set(steps.loc[steps["metric"] == "clip_fraction", "arm"])
    lacking = sorted(set(steps["arm"]) - clipped)
    return f" No clip: {', '.join(lacking)}." if lacking and clipped else ""


def below(steps: pd.DataFrame, metric: str, least: float) -> str:
    """Names the arms of which a metric is never as high as ``least``, and which a logarithmic panel leaves out."""
    highest = steps[steps["metric"] == metric].groupby("arm", observed=True)["value"].max()
    return (
        f" Below the logarithmic panel: {', '.join(highest.index[highest < least])}." if (highest < least).any() else ""
    )


def finish(figure: Sheet, legend_from: Axes | None, text: str, title: str | None = None) -> Sheet:
    """Add the legend above the panels and the caption below them."""
    for axis in figure.axes:
        _label_short_span(axis)
    wide = figure.get_figwidth() > ONE_COLUMN
    if legend_from is not None:
        handles, labels = legend_from.get_legend_handles_labels()
        longest = max(map(len, labels), default=1)
        # A character is about 0.05 inches, a handle and its padding 0.45.
        columns = max(1, min(len(labels), int(figure.get_figwidth() / (0.05 * longest + 0.45))))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, title=title)
    wrapped = textwrap.fill(text, 135 if wide else 70)
    figure.text(0.5, -0.02, wrapped, ha="center", va="top", fontsize=6.5, color="#444444")
    return figure


def _label_short_span(axis: Axes) -> None:
    """On a logarithmic y axis with fewer than two powers of ten to label, labels between them."""
    low, high = axis.get_ylim()
    if axis.get_yscale() == "linear" or low <= 0 or np.floor(np.log10(high)) - np.ceil(np.log10(low)) >= 1:
        return
    fewest = ticker.MaxNLocator(4, steps=[1, 2, 5, 10])
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)) if high > 10 * low else fewest)
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda number, _: f"{number:g}"))
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def legend(axis: Axes, **settings: Any) -> Legend:
    """A legend inside the panel, on a white ground."""
    return axis.legend(frameon=True, framealpha=0.85, edgecolor="none", **settings)


def save(figure: Figure, path: Path, suffix: str) -> None:
    """Write a figure as ``png``, ``svg`` or ``pdf``; the same data give the same bytes."""
    with house():
        metadata: Any = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
        figure.savefig(path, format=suffix, dpi=300, bbox_inches="tight", metadata=metadata)
