"""The common style of all figures: width of a printed column, lines and marks of ``looks``, one notation of ticks.

A helper that draws numbers also notes them in ``DataFigure.numbers``, so that a figure's table is what it shows.
"""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from PIL import Image

from steadymoe.bench.report.figures.looks import Look
from steadymoe.bench.statistics import estimates
from steadymoe.bench.support.text import as_recorded

# Widths in inches: one column of a two-column page, and the whole page.
ONE_COLUMN, TWO_COLUMNS = 3.4, 6.8
# The number of steps over which each seed's curve is averaged before seeds are averaged.
SMOOTHED_OVER = 5
FORMATS = ("png", "svg", "pdf")
FIGURE_STYLE: Any = {
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
    "pdf.fonttype": 42,  # text stays text, as journals demand
}


class DataFigure(Figure):
    """A figure that knows the numbers it shows: panel, series, x, mean and, where there are any, low, high, n."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.noted: list[pd.DataFrame] = []

    @property
    def numbers(self) -> pd.DataFrame:
        """Every drawn number, in the order of drawing: panel, series, x, mean, and low, high, n if there are any."""
        return as_recorded(pd.concat(self.noted, ignore_index=True)) if self.noted else pd.DataFrame()


def figure_style() -> Any:
    """A context in which figures are made and saved."""
    return mpl.rc_context(FIGURE_STYLE)


def panels(
    rows: int, columns: int, height: float, width: float = ONE_COLUMN, **settings: Any
) -> tuple[DataFigure, list]:
    """A figure and its axes, row by row."""
    figure = DataFigure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **settings).flat)


def note(axis: Axes, series: str, data: pd.DataFrame, panel: str = "") -> None:
    """Keep ``data`` (x, mean, …) among the numbers of the axis's figure."""
    figure = axis.get_figure(root=True)
    if isinstance(figure, DataFigure):
        named = {"panel": panel or axis.get_ylabel(), "series": series}
        columns = [*named, *(str(name) for name in data)]
        figure.noted.append(data.assign(**named)[columns])


def line(axis: Axes, name: str, data: pd.DataFrame, look: Look, panel: str = "") -> None:
    """Draw a curve, and its band if ``data`` has low and high; ``data``: x, mean, low, high, n."""
    marks: Any = {"marker": look.marker, "markersize": 2.6, "markevery": max(1, len(data) // 6)} if look.marked else {}
    axis.plot(data["x"], data["mean"], look.dashes, color=look.colour, linewidth=1.2, label=name, **marks)
    if "low" in data:
        axis.fill_between(data["x"], data["low"], data["high"], color=look.colour, alpha=0.13, linewidth=0)
    note(axis, name, data, panel)


def thin(axis: Axes, name: str, seed: Any, data: pd.DataFrame, look: Look, panel: str = "") -> None:
    """Draw the thin line of one seed; ``data``: x, mean (the seed's value)."""
    axis.plot(data["x"], data["mean"], look.dashes, color=look.colour, linewidth=0.45, alpha=0.5)
    note(axis, f"{name}, seed {seed}", data.assign(n=1), panel)


def dot(
    axis: Axes,
    name: str,
    row: float,
    estimate: estimates.Estimate,
    look: Look,
    panel: str = "",
    is_open: bool = False,
    **more: Any,
) -> None:
    """Draw an estimate at the height ``row``: a mark, and its interval as a horizontal line.

    ``is_open`` leaves the mark white inside. ``more`` are further numbers that belong to the row of the figure's table.
    """
    axis.plot([estimate.low, estimate.high], [row, row], color=look.colour, linewidth=1.1, zorder=1)
    face = "white" if is_open else look.colour
    axis.plot(estimate.mean, row, look.marker, color=look.colour, markerfacecolor=face, markersize=4.5)
    note(axis, name, pd.DataFrame([vars(estimate) | more]), panel)


def named_rows(axis: Axes, names: Sequence[str], top_down: bool = False) -> None:
    """Name the rows 0, 1, … of a plot of dots, from below or from the top."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(*((len(names) - 0.4, -0.6) if top_down else (-0.6, len(names) - 0.4)))
    axis.grid(visible=False, axis="y")


def stacked(axis: Axes, heights: pd.DataFrame, colours: Sequence[str]) -> None:
    """Draw a bar for each row of ``heights``, stacked from its columns: positive parts upwards, negative ones down."""
    for name, colour in zip(heights, colours, strict=True):
        part, before = heights[name].fillna(0.0), heights.loc[:, :name].iloc[:, :-1].fillna(0.0)
        bottoms = before.where(before.ge(0).eq(part.ge(0), axis=0), 0.0).sum(axis=1)
        axis.bar(range(len(part)), part, bottom=bottoms, color=colour, width=0.7, label=str(name))
    axis.set_xticks(range(len(heights)), [str(name) for name in heights.index])
    axis.axhline(0, color="#999999", linewidth=0.6, zorder=0)
    axis.grid(visible=False, axis="x")


def points(axis: Axes, name: str, data: pd.DataFrame, look: Look, shift: float = 0.0, factor: float = 1.0) -> None:
    """Draw joined marks, with bars if ``data`` has low and high; ``shift`` and ``factor`` move x to set lines apart."""
    bars = None
    if "low" in data:
        bars = [(data["mean"] - data["low"]).fillna(0.0), (data["high"] - data["mean"]).fillna(0.0)]
    axis.errorbar(
        data["x"] * factor + shift,
        data["mean"],
        yerr=bars,
        fmt=look.marker + look.dashes,
        color=look.colour,
        linewidth=1.1,
        markersize=3.2,
        elinewidth=0.7,
        label=name,
    )
    note(axis, name, data)


def smoothed_over(metric: str) -> int:
    """Over how many steps the curve of a metric is smoothed: held-out accuracy is not."""
    return 1 if metric == "eval_accuracy" else SMOOTHED_OVER


def few_seeds(steps: pd.DataFrame) -> bool:
    """Whether an arm has fewer seeds than a band can be trusted with: then every seed is a line of its own."""
    return bool(steps.groupby("arm")["seed"].nunique().min() < estimates.LEAST_FOR_BOOTSTRAP)


def seeds(steps: pd.DataFrame) -> str:
    """The number of seeds as text, for every arm if the arms differ."""
    counts = steps.groupby("arm")["seed"].nunique()
    if counts.nunique() == 1:
        return f"n\xa0=\xa0{counts.iloc[0]}"
    return f"n = {span(counts.tolist())}" if len(counts) > 4 else _each(counts)


def span(counts: Sequence[int]) -> str:
    """The smallest and the largest count as text; one number if all counts are equal."""
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def numbers(values: Iterable[float]) -> list[str]:
    """Numbers as text in one notation: 0.01, or 1e-2 if any number is below 0.001 or at least 100,000."""
    kept = list(values)
    scientific = any(number and not 1e-3 <= abs(number) < 1e5 for number in kept)

    def text_of(number: float) -> str:
        size = abs(number)
        text = np.format_float_scientific(size, precision=3, trim="-", exp_digits=1).replace("e+", "e")
        return ("−" if number < 0 else "") + (text if scientific and size else f"{size:g}")

    return [text_of(number) for number in kept]


def _each(counts: pd.Series) -> str:
    return ", ".join(f"{arm}: n = {count}" for arm, count in counts.items())


def curves_caption(steps: pd.DataFrame, log: bool = False, against: str | None = None) -> str:
    """The caption of curves: statistic, n, smoothing, interval or thin lines, and ``design``.

    ``against`` is the reference arm of the panels of differences, or None without such panels.
    """
    shown = _seeds_shown(against) if few_seeds(steps) else "; shaded: 95 % t interval"
    geometric = " (on a logarithmic axis the geometric one)" if log else ""
    smoothed = f"of curves smoothed over {SMOOTHED_OVER} steps"
    return f"Mean over seeds{geometric}, {seeds(steps)}, {smoothed}{shown}.{design(steps)}"


def points_caption(steps: pd.DataFrame, of_each: str, log: bool = False, against: str | None = None) -> str:
    """The caption of a figure with one number per run; ``of_each`` describes this number."""
    shown = _seeds_shown(against) if few_seeds(steps) else "; bars: 95 % BCa interval"
    mean = "Mean over seeds" + (" (on a logarithmic axis of values the geometric one)" if log else "")
    return f"{mean}, {seeds(steps)}{shown}. Of each run: {of_each}.{design(steps)}"


def _seeds_shown(against: str | None) -> str:
    """The words of a caption below ten seeds, in place of an interval."""
    differences = "" if against is None else f"; Δ: arm − {against}, of the same seed"
    return f"; thin lines: seeds{differences}"


def design(steps: pd.DataFrame) -> str:
    """The words for the quantity that stays fixed while the updates per rollout vary; "" if they do not vary."""
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
    """The words that name the arms without a clip, because they have no line; "" without such arms."""
    clipped = set(steps.loc[steps["metric"] == "clip_fraction", "arm"])
    lacking = sorted(set(steps["arm"]) - clipped)
    return f" No clip: {', '.join(lacking)}." if lacking and clipped else ""


def below(steps: pd.DataFrame, metric: str, least: float) -> str:
    """The words that name the arms whose metric stays below ``least``: a logarithmic panel does not show them."""
    highest = steps[steps["metric"] == metric].groupby("arm", observed=True)["value"].max()
    return (
        f" Below the logarithmic panel: {', '.join(highest.index[highest < least])}." if (highest < least).any() else ""
    )


def finish(figure: DataFigure, legend_from: Axes | None, text: str, title: str | None = None) -> DataFigure:
    """Add the legend above the panels and the caption below them."""
    for axis in figure.axes:
        _ticks(axis)
    text += _cut(figure)
    wide = figure.get_figwidth() > ONE_COLUMN
    if legend_from is not None:
        handles, labels = legend_from.get_legend_handles_labels()
        longest = max(map(len, labels), default=1)
        # A character is about 0.05 inches, a handle and its padding 0.45.
        columns = max(1, min(len(labels), int(figure.get_figwidth() / (0.05 * longest + 0.45))))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, title=title)
    wrapped = textwrap.fill(text, 135 if wide else 70, break_on_hyphens=False)
    figure.text(0.5, -0.02, wrapped, ha="center", va="top", fontsize=6.5, color="#444444")
    return figure


class _OneNotation(ticker.Formatter):
    """Tick labels in the notation of ``numbers``."""

    def __call__(self, value: float, pos: int | None = None) -> str:
        return numbers([value])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        low, high = sorted(self.axis.get_view_interval())  # type: ignore[union-attr]
        seen = dict(zip(shown := [value for value in values if low <= value <= high], numbers(shown), strict=True))
        return [seen.get(value, "") for value in values]


def _ticks(axis: Axes) -> None:
    """One notation on all axes, whole steps, and labels between powers of ten if fewer than two powers are visible."""
    if axis.get_xlabel().startswith("step"):
        axis.xaxis.set_major_locator(ticker.MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    for each in (axis.xaxis, axis.yaxis):
        low, high = sorted(each.get_view_interval())
        if isinstance(each.get_major_formatter(), ticker.ScalarFormatter) and max(abs(low), abs(high)) >= 1e5:
            each.set_major_formatter(_OneNotation())
        if each.get_scale() == "linear" or isinstance(each.get_major_locator(), ticker.FixedLocator):
            continue
        if low > 0 and np.floor(np.log10(high)) - np.ceil(np.log10(low)) < 1:
            fewest = ticker.MaxNLocator(4, steps=[1, 2, 5, 10])
            each.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)) if high > 10 * low else fewest)
        each.set_major_formatter(_OneNotation())
        each.set_minor_formatter(ticker.NullFormatter())


def _cut(figure: DataFigure) -> str:
    """The words that name each panel whose limits cut off drawn numbers, with side and limit."""
    cut: dict[str, None] = {}
    for axis in figure.axes:
        (low, high), height = sorted(axis.get_ylim()), 0.0
        for values in _heights(axis):
            height = 1e-9 * max(abs(low), abs(high))
            for side, limit, beyond in (("below", low, values < low - height), ("above", high, values > high + height)):
                if beyond.any():
                    panel = axis.get_ylabel() or axis.get_title() or "the panel"
                    cut[f"{panel} {side} {numbers([float(f'{limit:.2g}')])[0]}"] = None
    return f" Cut off: {', '.join(cut)}." if cut else ""


def _heights(axis: Axes) -> list[np.ndarray]:
    """The y values of the lines, bands and bars that an axis shows in its own coordinates."""
    heights = [np.asarray(each.get_ydata(), float) for each in axis.lines if each.get_transform() == axis.transData]
    for each in axis.collections:
        if isinstance(each, PolyCollection | LineCollection):
            heights += [np.asarray(path.vertices, dtype=float)[:, 1] for path in each.get_paths()]
    return [values[np.isfinite(values)] for values in heights]


def legend(axis: Axes, title: str | None = None) -> Legend:
    """A legend above its panel, so that it covers no data; an ending common to all labels can be the ``title``."""
    handles, labels = axis.get_legend_handles_labels()
    if title is not None:
        labels = [label.removesuffix(f" {title}") for label in labels]
    columns = len(labels) if max(map(len, labels)) < 12 else 1
    place: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "borderaxespad": 0.2}
    return axis.legend(handles, labels, ncols=columns, title=title, title_fontsize=6.5, **place)


def save(figure: Figure, path: Path, suffix: str) -> None:
    """Write a figure as ``png`` (a palette of 256 colours), ``svg`` or ``pdf``; the same data give the same bytes."""
    with figure_style():
        metadata: Any = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
        figure.savefig(path, format=suffix, dpi=300, bbox_inches="tight", metadata=metadata)
    if suffix == "png":  # a palette takes a third of the bytes
        with Image.open(path) as drawn:
            few = drawn.convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
            few.save(path, "png", optimize=True, dpi=drawn.info["dpi"])
