"""Tolerances of a sweep over a dial: the outcomes over the dial, the threshold, and where each loss crosses it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.report import paper, tolerances
from steadymoe.bench.report.figures import colours, style
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.statistics.estimates import Estimate, over_seeds
from steadymoe.bench.statistics.tolerance import REFERENCE, SHARE, Tolerance, heights, of_arm
from steadymoe.bench.training import columns


def over_dial(steps: pd.DataFrame) -> DataFigure:
    """Tolerance: held-out accuracy over a dial, and where each loss falls below a share of GRPO's best gain.

    A row for each setting besides the dial; sampled accuracy decides, greedy accuracy stands beside it.
    """
    runs, (dial, *_) = tolerances.levels(steps), tolerances.varying(steps)
    outcomes = [name for name in tolerances.OUTCOMES if runs[name].notna().any()]
    settings = runs.groupby("panel", sort=False)
    panels = [(str(title), ours, outcome) for title, ours in settings for outcome in outcomes]
    names, alone = sorted(set(runs["arm"])), runs["algorithm"].nunique() == 1  # its colour would tell nothing apart
    arms = {name: colours.look(place) for place, name in enumerate(names)} if alone else colours.of_lines(runs)
    groups, across = colours.groups(arms), style.beside(len(outcomes))
    rows = len(panels) // across
    with style.figure_style():
        if len(groups) > 1:
            figure, blocks = style.blocks(len(groups), across, 2.0, rows, sharey=True)
        else:
            width = style.ONE_COLUMN if across == 1 else style.TWO_COLUMNS
            figure, axes = style.panels(rows, across, 2.0 * rows + 0.3, width, sharey=True)
            blocks = [axes]
        for axes, group in zip(blocks, groups, strict=True):
            for axis, panel in zip(axes, panels, strict=True):
                _draw(axis, *panel, group)
            for axis in axes[-across:]:
                axis.set_xlabel(tolerances.LABELS[dial])
            nothing = pd.DataFrame(columns=["x", "mean", "low", "high", "n"], dtype=float)
            for name in [name for name in group if name not in set(panels[0][1]["arm"])]:  # the legend is its
                style.aside(axes[0], name, nothing, group[name])
        counts = runs.groupby(["panel", "arm", "value"])["seed"].nunique()
        text = (
            f"Mean over seeds, n = {style.span(counts.tolist())}, with a nominal 95 % interval; dotted: the start; "
            f"dashed: the threshold, the start plus {SHARE:.0%} of the gain of {paper.shown(REFERENCE, REFERENCE)} at "
            "its best; ticks below: where each loss first falls below it."
        )
        return style.finish(figure, axes[0], text)


def _draw(axis: Axes, title: str, levels: pd.DataFrame, outcome: str, arms: Mapping[str, colours.Look]) -> None:
    """Draw the curves ``arms`` of an outcome in one setting; of sampled accuracy the threshold and its crossings, too.

    The panel's name in the figure's numbers has its ``title`` before its label.
    """
    label = columns.label(tolerances.OUTCOMES[outcome])
    called = f"{title}, {label}" if title else ""
    axis.set_title(title)
    axis.set_ylabel(label)
    names = [name for name in dict.fromkeys(levels["arm"]) if name in arms]
    for place, name in enumerate(names):
        groups = levels[levels["arm"] == name].groupby("value")[outcome]
        points = [{"x": x} | vars(over_seeds(each.dropna().tolist(), bounds=(0, 1))) for x, each in groups]
        style.aside(axis, name, pd.DataFrame(points), arms[name], (place + 0.5) / len(names) - 0.5, called)
    style.ticks_at(axis, levels["value"], log=levels["value"].min() > 0)
    if outcome != "sampled" or (both := heights(levels)) is None:
        return
    for height, dashes in zip(both, (":", "--"), strict=True):
        axis.axhline(height, color="#777777", linestyle=dashes, linewidth=0.8, zorder=0)
    for name in names:
        tolerance, _ = of_arm(levels, name)
        if tolerance is not None and np.isfinite(x := tolerance.crossing):
            axis.plot([x, x], [0, 0.05], color=arms[name].colour, transform=axis.get_xaxis_transform())
            crossing = pd.DataFrame([{"x": x, "mean": both[1]}])
            style.note(axis, name, crossing, panel=f"{called} crossing".strip())


def routing_costs(numbers: Mapping[str, Mapping[str, Tolerance | None]], closed: Mapping[str, Estimate]) -> DataFigure:
    """What each loss tolerates, × GRPO's: on the MoE with free and with pinned routes, on its dense twin; gap closed.

    ``numbers`` has those of ``free``, ``pinned`` and ``dense`` by loss, None without a threshold; ``free`` gives the
    rows, from the top. A triangle is a bound: the loss never falls below the threshold on its grid.
    """
    reference, names = paper.shown(REFERENCE, REFERENCE), list(numbers["free"])
    looks = {what: replace(colours.look(place), marker="o") for place, what in enumerate((*numbers, "gap"))}
    labels = {"moe": f"MoE: rate × {reference}'s", "dense": f"dense twin: rate × {reference}'s", "gap": "gap closed"}
    places = [place for place, its in (("moe", names), ("dense", numbers["dense"]), ("gap", closed)) if its]
    across = style.beside(len(places))
    down = len(places) // across
    with style.figure_style():
        width = style.TWO_COLUMNS if across > 1 else style.ONE_COLUMN
        figure, axes = style.panels(down, across, style.height_of(names) * down, width)
        axis_of = dict(zip(places, axes, strict=True))
        for place, axis in axis_of.items():
            style.named_rows(axis, names if axis is axes[0] or across == 1 else [""] * len(names))
            axis.set_xlabel(labels[place])
            axis.set_xscale("linear" if place == "gap" else "log")  # before the marks, whose margins depend on it
            axis.axvline(0 if place == "gap" else 1, color="#777777", linewidth=0.8, zorder=0)
        for what, its in numbers.items():
            axis = axis_of.get("dense" if what == "dense" else "moe", axes[0])
            for name, number in its.items():
                if number is not None and np.isfinite(number.ratio):
                    row = names.index(name) + {"free": -0.15, "pinned": 0.15}.get(what, 0.0)
                    _mark(axis, name, row, number, looks[what], what)
        for name, share in closed.items():
            style.dot(axis_of["gap"], name, names.index(name), share, looks["gap"], "gap")
        for place, axis in axis_of.items():
            if place != "gap":
                low, high = axis.get_xlim()
                style.ticks_at(axis, [ratio for ratio in 2.0 ** np.arange(-4, 7) if low <= ratio <= high], log=True)
        for what in ("free", "pinned"):
            mark: Any = replace(looks[what], fill="none" if what == "pinned" else "full").mark
            axes[0].plot([], [], linestyle="none", color=looks[what].colour, label=f"{what} routes", **mark)
        seeds = style.span([number.n for number in numbers["free"].values() if number is not None] or [0])
        text = (
            f"Learning rates that a loss tolerates, in multiples of {reference}'s with free routes, or on the dense "
            f"twin, with a nominal 95 % interval over paired seeds, n = {seeds}. Between the two marks lies what "
            "moving routes cost. A triangle: at least that. A line that stops at its mark has no upper end; a "
            "mark without one has no interval. Gap "
            f"closed: the share of {reference}'s routing cost that a loss does not pay; nothing where it gains as much "
            "with pinned routes."
        )
        return style.finish(figure, axes[0], text)


def _mark(axis: Axes, name: str, row: float, number: Tolerance, look: colours.Look, what: str) -> None:
    """Draw one ratio: a triangle without an interval where it is a bound."""
    is_bound = np.isinf(number.crossing)
    ends = (np.nan, np.nan) if is_bound else (number.low, number.high)
    estimate = Estimate(number.ratio, *ends, number.n)
    style.dot(axis, name, row, estimate, replace(look, marker=">") if is_bound else look, what, what == "pinned")
