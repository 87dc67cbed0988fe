"""The common style of all figures: width of a printed column, lines and marks of ``colours``, one notation of ticks.

A helper that draws numbers also notes them in ``DataFigure.numbers``, so that a figure's table is what it shows.
"""

import base64
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from PIL import Image

from steadymoe.bench.report import paper
from steadymoe.bench.report.figures.colours import Look
from steadymoe.bench.statistics import estimates
from steadymoe.bench.support.text import as_recorded

# Widths in inches: one column of a two-column page, and the whole page.
ONE_COLUMN, TWO_COLUMNS = 3.4, 6.8
# In inches: a character, a line of text, the handle of a legend's entry with its padding, a legend of one line.
_CHARACTER, _LINE, _HANDLE, _ONE_LINE = 0.05, 0.11, 0.45, 0.22
# Intervals that stand side by side cover a range of this factor on the x axis.
_SPREAD = 1.12
# The number of steps over which each seed's curve is averaged before seeds are averaged.
SMOOTHED_OVER = 5
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
        self.noted: list[tuple[tuple[str, str], pd.DataFrame]] = []
        self.blocks: list[list[Axes]] = []
        """The axes of each block (``blocks``); none for a figure that is not split."""
        self.rows_of_blocks = 1
        self.caption = ""
        """Statistic, n, intervals: what a reader must know. ``write`` draws it below the panels if the paper asks."""

    @property
    def numbers(self) -> pd.DataFrame:
        """Return every drawn number, in the order of drawing: panel, series, x, mean, and low, high, n if any."""
        if not self.noted:
            return pd.DataFrame()
        keys, parts = zip(*self.noted, strict=True)
        whole = pd.concat(parts, keys=keys, names=["panel", "series", None])
        return as_recorded(whole.reset_index(["panel", "series"]).reset_index(drop=True))

    def write(self, path: Path | BytesIO, suffix: str) -> None:
        """Write the figure as ``png`` (256 colours), ``svg`` or ``pdf``; the same data give the same bytes.

        Without its caption it has exactly its size.
        """
        with figure_style():
            metadata: Any = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
            drawn = _draw_caption(self)
            if not drawn:  # panels are laid out once, not for each format
                self.draw_without_rendering()
                self.set_layout_engine("none")
            self.savefig(path, format=suffix, dpi=300, bbox_inches="tight" if drawn else None, metadata=metadata)
            if drawn:
                drawn.remove()
        if suffix == "png":  # a palette takes a third of the bytes
            with Image.open(path) as image:
                few = image.convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
                few.save(path, "png", optimize=True, dpi=image.info["dpi"])


def svg(draw: Callable[[], DataFigure]) -> str:
    """Return what ``draw`` draws, as SVG in base64."""
    drawn = BytesIO()
    draw().write(drawn, "svg")
    return base64.b64encode(drawn.getvalue()).decode()


def narrow_svg(draw: Callable[[], DataFigure]) -> str:
    """Return the same for a narrow screen, its panels below each other."""
    with paper.used(replace(paper.current(), columns=1, stacked=True)):
        return svg(draw)


def _draw_caption(figure: DataFigure) -> Text | None:
    """Add the caption below the panels, if the paper asks for it and there is one."""
    if not (paper.current().caption and figure.caption):
        return None
    filled = textwrap.fill(figure.caption, 135 if figure.get_figwidth() > ONE_COLUMN else 70, break_on_hyphens=False)
    below = -0.05 / figure.get_figheight()
    return figure.text(0.5, below, filled, ha="center", va="top", fontsize=6.5, color="#444444")


def figure_style() -> Any:
    """Return a context in which figures are drawn and saved: matplotlib's defaults and ours; no user's matplotlibrc."""
    usual = {key: value for key, value in mpl.rcParamsDefault.items() if not key.startswith(("backend", "interactive"))}
    return mpl.rc_context(usual | FIGURE_STYLE)


def _width(own: float) -> float:
    """Return the width of a figure, in inches: of ``--columns``, else its ``own``."""
    return {None: own, 1: ONE_COLUMN, 2: TWO_COLUMNS}[paper.current().columns]


def panels(
    rows: int, columns: int, height: float, width: float = ONE_COLUMN, **settings: Any
) -> tuple[DataFigure, list]:
    """Return a figure and its axes, row by row."""
    figure = DataFigure(figsize=(_width(width), height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **settings).flat)


def blocks(count: int, columns: int, height: float, rows: int = 1, **settings: Any) -> tuple[DataFigure, list[list]]:
    """Return a figure over the whole page with the same panels ``count`` times, and the axes of each block.

    A block holds some of the lines and its own legend; ``finish`` gives the panels of all blocks the same limits.
    ``height`` is that of a row of panels. Blocks of one panel stand side by side.
    """
    if (width := _width(TWO_COLUMNS)) <= ONE_COLUMN and columns > (most := beside(2)):  # panels in further rows
        rows, columns, settings = rows * -(-columns // most), most, {}
    across = 2 if columns == 1 and width > ONE_COLUMN else 1
    down = -(-count // across)
    figure = DataFigure(figsize=(width, height * rows * down), layout="constrained")
    figure.rows_of_blocks, parts = down, figure.subfigures(down, across, squeeze=False).flat
    figure.blocks = [
        list(part.subplots(rows, columns, squeeze=False, **settings).flat)
        for part, _ in zip(parts, range(count), strict=False)
    ]
    return figure, figure.blocks


def beside(count: int) -> int:
    """Return how many panels stand side by side: ``count``, on a narrow screen 1."""
    return 1 if paper.current().stacked else count


def stacks(groups: int, count: int, height: float, **settings: Any) -> tuple[DataFigure, list[list]]:
    """Return a figure of ``count`` panels for each group of lines, and the axes of each group.

    The panels of one group stand below each other in a column, each of this ``height``, those of more side by side.
    """
    if groups > 1:
        return blocks(groups, count, height if count == 1 else 1.6, **settings)
    figure, axes = panels(count, 1, height * count, **settings)
    return figure, [axes]


def lowest(axes: Sequence[Axes]) -> list[Axes]:
    """Return the axes that have no panel below them."""
    return [axis for axis in axes if (place := axis.get_subplotspec()) and place.is_last_row()]


def note(axis: Axes, series: str, data: pd.DataFrame, panel: str = "") -> None:
    """Keep ``data`` (x, mean, …) among the numbers of the axis's figure."""
    figure = axis.get_figure(root=True)
    if isinstance(figure, DataFigure):
        figure.noted.append(((panel or axis.get_ylabel(), series), data))


def line(axis: Axes, name: str, data: pd.DataFrame, look: Look, panel: str = "") -> None:
    """Draw a curve, and its band if ``data`` has low and high; ``data``: x, mean, low, high, n."""
    drawn: Any = {"linestyle": look.dashes, "color": look.colour, "linewidth": 1.2}
    if look.marked:
        drawn |= look.mark | {"markersize": 3, "markevery": max(1, len(data) // 6)}
    axis.plot(data["x"], data["mean"], label=name, **drawn)
    if "low" in data:
        axis.fill_between(data["x"], data["low"], data["high"], color=look.colour, alpha=0.13, linewidth=0)
    note(axis, name, data, panel)


def thin(axis: Axes, name: str, data: pd.DataFrame, look: Look, panel: str = "") -> None:
    """Draw a thin line for each seed; ``data``: seed, x, mean (the seed's value)."""
    for seed, own in data.assign(n=1).groupby("seed")[["x", "mean", "n"]]:
        axis.plot(own["x"], own["mean"], linestyle=look.dashes, color=look.colour, linewidth=0.45, alpha=0.5)
        note(axis, f"{name}, seed {seed}", own, panel)


def dot(
    axis: Axes,
    name: str,
    row: float,
    estimate: estimates.Estimate,
    look: Look,
    panel: str = "",
    is_open: bool = False,
) -> None:
    """Draw an estimate at the height ``row``: a mark and its interval, a line that stops at the mark if endless.

    ``is_open`` leaves the mark white inside.
    """
    high = estimate.high if np.isfinite(estimate.high) else estimate.mean
    axis.plot([estimate.low, high], [row] * 2, color=look.colour, linewidth=1.1, zorder=1)
    mark: Any = replace(look, fill="none" if is_open else "full").mark  # here the fill is no part of an arm's look
    axis.plot(estimate.mean, row, linestyle="none", color=look.colour, markersize=4.5, **mark)
    note(axis, name, pd.DataFrame([vars(estimate)]), panel)


def aside(axis: Axes, name: str, data: pd.DataFrame, look: Look, shift: float = 0.0, panel: str = "") -> None:
    """Draw means with their intervals, joined; without data only the legend has a line.

    They are moved by ``shift``, −½ to ½, so that the intervals of several lines at one x stand side by side; ``data``:
    x, mean, low, high, n.
    """
    x = data["x"]
    places = x * _SPREAD**shift if x.empty or x.min() > 0 else x + 0.02 * shift * x.max()
    axis.vlines(places, data["low"], data["high"], color=look.colour, linewidth=0.8)
    marks: Any = {"linestyle": look.dashes, "linewidth": 1.2, "markersize": 4, "markeredgewidth": 0.7, **look.mark}
    axis.plot(places, data["mean"], label=name, color=look.colour, **marks)
    note(axis, name, data[["x", "mean", "low", "high", "n"]], panel)


def ticks_at(axis: Axes, values: Iterable[float], log: bool) -> None:
    """Label the x axis, logarithmic if ``log``, with these values alone."""
    if log:
        axis.set_xscale("log")
    occurring = sorted(set(values))
    axis.set_xticks(occurring, numbers(occurring))
    axis.set_xticks([], minor=True)


def wrapped(names: Iterable[str], width: float = 1.5) -> list[str]:
    """Return names in lines of at most ``width`` inches; the usual one leaves a row of marks half a column."""
    most = max(8, int(width / _CHARACTER))
    whole = (textwrap.wrap(name, most, break_long_words=False) for name in names)  # a word breaks if alone too long
    return ["\n".join(part for line in lines for part in textwrap.wrap(line, most)) for lines in whole]


def height_of(names: Sequence[str]) -> float:
    """Return the height of rows with these names, in inches."""
    return max(1.1, len(names) * max(0.1 + _LINE * (1 + name.count("\n")) for name in names))


def named_rows(axis: Axes, names: Sequence[str]) -> None:
    """Name the rows 0, 1, … of a plot of dots, from the top."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(visible=False, axis="y")


def zero(axis: Axes, base: Look) -> None:
    """Draw the line of no difference in the look of the arm that the others are compared with."""
    axis.axhline(0, color=base.colour, linestyle=base.dashes, linewidth=0.8)


# Captions


def smoothed_over(metric: str, steps: pd.DataFrame) -> int:
    """Return over how many steps the curve of a metric is smoothed: held-out accuracy is not, nor what is ``averaged``.

    At most a tenth of the steps of the arm that has the fewest: short curves stay as they are.
    """
    fewest = int(steps.groupby("arm", observed=True)["step"].nunique().min())
    return 1 if metric == "eval_accuracy" or "averaged" in steps else max(1, min(SMOOTHED_OVER, fewest // 10))


def few_seeds(steps: pd.DataFrame) -> bool:
    """Return whether an arm has fewer seeds than a band can be trusted with: then every seed is a line of its own."""
    return bool(steps.groupby("arm")["seed"].nunique().min() < estimates.MIN_FOR_BOOTSTRAP)


def seeds(steps: pd.DataFrame) -> str:
    """Return the number of seeds as text, for every arm if the arms differ."""
    counts = steps.groupby("arm")["seed"].nunique()
    if counts.nunique() == 1:
        return f"n\xa0=\xa0{counts.iloc[0]}"
    by_arm = ", ".join(f"{arm}: n = {count}" for arm, count in counts.items())
    return f"n = {span(counts.tolist())}" if len(counts) > 4 else by_arm


def span(counts: Sequence[int]) -> str:
    """Return the smallest and the largest count as text; one number if all counts are equal."""
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def numbers(values: Iterable[float]) -> list[str]:
    """Return numbers as text in one notation: 0.01, or 1e-2 if any is below 0.001 or at least 100,000."""
    listed = list(values)
    scientific = any(number and not 1e-3 <= abs(number) < 1e5 for number in listed)

    def text_of(number: float) -> str:
        size = abs(number)
        text = np.format_float_scientific(size, precision=3, trim="-", exp_digits=1).replace("e+", "e")
        return ("−" if number < 0 else "") + (text if scientific and size else f"{size:g}")

    return [text_of(number) for number in listed]


def describe(steps: pd.DataFrame, number: str | None = None, log: bool = False, against: str | None = None) -> str:
    """Return the caption of curves, or of one ``number`` per run: statistic, n, interval or thin lines, ``design``.

    ``against`` is the reference arm of the panels of differences, or None without such panels.
    """
    shown = "thin lines: seeds" if few_seeds(steps) else f"shaded: nominal 95 % {'BCa' if number else 't'} interval"
    if against is not None:
        shown += f"; Δ: arm − {against}, of the same seed and cold start"
    geometric = f" (on a logarithmic axis {'of values ' if number else ''}the geometric one)" if log else ""
    over = 1 if number else smoothed_over("reward", steps)
    of_curves = f", of curves smoothed over {over} steps" if over > 1 else ""
    of_runs = f" Of each run: {number}." if number else ""
    return f"Mean over seeds{geometric}, {seeds(steps)}{of_curves}; {shown}.{of_runs}{design(steps)}"


def design(steps: pd.DataFrame) -> str:
    """Return the sentence on what stays fixed while the updates per rollout vary; "" if they do not vary."""
    if "updates_per_rollout" not in steps or steps["updates_per_rollout"].nunique() < 2:
        return ""
    pairs = steps[["updates_per_rollout", "minibatch_prompts"]].drop_duplicates()
    minibatches, prompts = pairs["minibatch_prompts"], pairs.prod(axis=1)
    if minibatches.nunique() == 1:
        return f" Mini-batch fixed at {minibatches.iloc[0]:g} prompts: prompts per rollout grow with the updates."
    if prompts.nunique() == 1:
        return f" Rollout fixed at {prompts.iloc[0]:g} prompts: mini-batches shrink as updates grow."
    return " Neither the mini-batch nor the rollout is fixed while the updates per rollout vary."


def without_clip(steps: pd.DataFrame) -> str:
    """Return the sentence that names the arms without a clip, because they have no line; "" without such arms."""
    clipped = set(steps.loc[steps["metric"] == "clip_fraction", "arm"])
    lacking = sorted(set(steps["arm"]) - clipped)
    return f" No clip: {', '.join(lacking)}." if lacking and clipped else ""


def below(steps: pd.DataFrame, metric: str, least: float) -> str:
    """Return the sentence that names the arms whose metric stays below ``least``, where a panel does not show them."""
    highest = steps[steps["metric"] == metric].groupby("arm", observed=True)["value"].max()
    names = ", ".join(highest.index[highest < least])
    return f" Below the logarithmic panel: {names}." if names else ""


def covered(steps: pd.DataFrame, metrics: Iterable[str]) -> str:
    """Return the sentence that names arms whose numbers are equal to the bit, because a line hides the others."""
    wide = steps[steps["metric"].isin(list(metrics))].pivot(
        index="arm", columns=["metric", "seed", "step"], values="value"
    )
    alike: dict[bytes, list[str]] = {}
    for arm, row in zip(wide.index, wide.to_numpy(), strict=True):
        alike.setdefault(row.tobytes(), []).append(arm)
    hidden = [" and ".join(arms) for _, arms in sorted(alike.items()) if len(arms) > 1]
    return f" Equal to the bit, in one line: {'; '.join(hidden)}." if hidden else ""


def finish(figure: DataFigure, legend_from: Axes | None, text: str, title: str | None = None) -> DataFigure:
    """Add the legend above the panels, in a split figure above each block, and keep the caption.

    A legend of more than a line makes the figure higher, so that the panels keep their height.
    """
    for place in zip(*figure.blocks, strict=True):
        _same_limits(place)
        for axis in place:
            axis.set_ylabel(wrapped([axis.get_ylabel()], 0.8)[0])
    for axis in figure.axes:
        _ticks(axis)
        if cell := axis.get_subplotspec():  # labels break where a panel's width is not ours
            _, columns, *_ = cell.get_geometry()
            if paper.current().columns == 1:
                axis.set_xlabel(wrapped([axis.get_xlabel()], figure.get_figwidth() / columns - 0.4)[0])
    if legend_from is not None:
        named: set[str] = set()
        first = []
        for axis in [axes[0] for axes in figure.blocks] or [legend_from]:
            labels = set(axis.get_legend_handles_labels()[1])
            first += [axis] if labels - named else []  # lines look alike in all blocks
            named |= labels
        above = figure if len(first) == 1 else None
        leave_room(
            figure, [legend(axis, title, above) for axis in first], figure.rows_of_blocks if len(first) > 1 else 1
        )
    figure.caption = text
    return figure


def _same_limits(axes: Sequence[Axes]) -> None:
    """Give panels of one metric the widest limits of any with data."""
    drawn = [axis for axis in axes if axis.has_data()]
    for axis in axes if drawn and drawn[0].get_yscale() == "log" else ():
        axis.set_yscale("log")
    for get, set_ in (("get_xlim", "set_xlim"), ("get_ylim", "set_ylim")) if drawn else ():
        lows, highs = zip(*(getattr(axis, get)() for axis in drawn), strict=True)
        for axis in axes:
            getattr(axis, set_)(min(lows), max(highs))


def leave_room(figure: DataFigure, legends: Sequence[Legend], rows: int) -> None:
    """Make a figure higher by what the highest of its legends takes beyond one line, in each of ``rows``."""
    highest = max((legend.get_window_extent().height / figure.dpi for legend in legends), default=0.0)
    figure.set_figheight(figure.get_figheight() + max(0.0, highest - _ONE_LINE) * rows)


def legend(axis: Axes, title: str | None, above: DataFigure | None = None, width: float | None = None) -> Legend:
    """Add the legend of an axis above its block, or the figure ``above``; if given a ``width``, above its panel.

    A panel is that many inches wide. An ending common to all labels can be the ``title``.
    """
    parent: Any = axis if width is not None else above or axis.figure
    place: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "borderaxespad": 0.2}
    if width is None:
        width, place = parent.bbox.width / parent.dpi, {"loc": "outside upper center"}
    handles, labels = axis.get_legend_handles_labels()
    ending = f" {title}" if title else ""
    labels = wrapped([label.removesuffix(ending) for label in labels], width - _HANDLE)
    longest = max((len(line) for label in labels for line in label.split("\n")), default=1)
    columns = max(1, min(len(labels), int(width / (_CHARACTER * longest + _HANDLE))))
    size = mpl.rcParams["legend.fontsize"]
    return parent.legend(handles, labels, ncols=columns, title=title, title_fontsize=size, **place)


def is_long(name: str) -> bool:
    """Return whether a name needs more than a line in the legend of a figure of one column."""
    return "\n" in wrapped([name], ONE_COLUMN - _HANDLE)[0]


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
    if axis.get_xlabel().endswith("tokens"):
        axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))  # 50k
