"""Figures of stability: survival curves, the frontier, and the gain around it."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from steadymoe.bench.report import tables
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.statistics import estimates

# The final reward of ``gain_map`` is the mean over the rollouts of this many updates.
_LAST_UPDATES = 48


def survival(curves: pd.DataFrame, steps: pd.DataFrame) -> DataFigure:
    """Share of runs that have not collapsed, over steps, and how many have (R3, 2510.11370, main table).

    ``curves``: ``collapses.survival_curves``. ``steps`` names the algorithm of each arm.
    """
    few_seeds = curves["n"].max() < estimates.MIN_FOR_BOOTSTRAP
    judged = set(curves["arm"])  # the others are too short
    groups = looks.groups({arm: look for arm, look in looks.of_lines(steps).items() if arm in judged})
    with style.figure_style():
        figure, stacks = style.stacks(len(groups), 1, 2.3)
        for (axis,), group in zip(stacks, groups, strict=True):
            axis.set_ylabel("runs not collapsed (share)")
            for arm, look in group.items():
                curve = curves[curves["arm"] == arm].sort_values("step")
                drawn: Any = {"color": look.colour, "linestyle": look.dashes, "linewidth": 1.2}
                drawn |= look.mark | {"markersize": 3} if look.marked else {}
                name = f"{arm}: {curve['collapsed'].iloc[0]} of {curve['n'].iloc[0]} collapsed"
                axis.step(curve["step"], curve["survival"], where="post", label=name, **drawn)
                shown = curve.rename(columns={"step": "x", "survival": "mean"})[["x", "mean", "low", "high", "n"]]
                if few_seeds:
                    shown = shown.drop(columns=["low", "high"])
                else:
                    band = curve[["step", "low", "high"]].to_numpy().T
                    axis.fill_between(*band, step="post", color=look.colour, alpha=0.08, linewidth=0)
                style.note(axis, str(arm), shown)
            axis.set_ylim(0, 1.04)
            axis.set_xlabel("step (rollout)")
        n = style.span(curves.groupby("arm")["n"].max().tolist())
        shaded = "every step down is a seed" if few_seeds else "shaded: its nominal 95 % interval"
        text = f"Kaplan–Meier estimate over seeds, n = {n}; {shaded}; runs that ended stable are censored."
        return style.finish(figure, axis, text)


def frontier(grid: pd.DataFrame, line: pd.DataFrame, steps: pd.DataFrame) -> DataFigure:
    """Where training is stable: the share of stable runs over two axes, and the frontier.

    ``grid`` has arm, x, y, stable (share of seeds), n. ``line`` has arm, x, y: the lowest y at which the share falls
    below one half, between two cells or at an edge of the grid. The caption takes from ``steps`` which quantity stays
    fixed while staleness varies.
    """
    xs, ys = sorted(grid["x"].unique()), sorted(grid["y"].unique())
    with style.figure_style():
        label = "stable runs (share)"
        figure, panels = _grids(1.7, grid.rename(columns={"arm": "panel"}), "stable", label, ".2g", (0.55, np.inf))
        for arm, axis in panels.items():
            own = line[line["arm"] == arm].dropna().sort_values("x")
            # The line is interpolated over log y, like the statistic. At the lowest or the highest y of the grid it is
            # drawn at the edge of the panel.
            tops = dict(zip(own["x"], np.interp(np.log(own["y"]), np.log(ys), range(len(ys))), strict=True))
            tops = {x: -0.5 if top == 0 else top + 0.5 if top == len(ys) - 1 else top for x, top in tops.items()}
            edges = [place - 0.5 for place in range(len(xs) + 1)]
            heights = [tops.get(x, -0.5) for x in xs]
            axis.stairs(heights, edges, baseline=None, color=looks.COLOURS[1], linewidth=2, clip_on=False)
            ours = grid.loc[grid["arm"] == arm, ["x", "y", "stable", "n"]]
            style.note(axis, arm, ours.rename(columns={"stable": "mean"}), "stable")
            style.note(axis, arm, own[["x", "y"]], "frontier")
        text = (
            f"Share of seeds that did not collapse, n = {style.span(grid['n'].tolist())} a cell; no smoothing, no "
            "interval; line: where, going up, it falls below one half."
        )
        return style.finish(figure, None, text + style.design(steps))


def gain_map(steps: pd.DataFrame) -> DataFigure:
    """Where training learns: the gain in reward over learning rate and updates per rollout, a panel for each method.

    The gain is the mean reward of the last ``_LAST_UPDATES`` updates' rollouts less the held-out accuracy of the cold
    start. A frame marks the experiment's own setting.
    """
    keys = ["panel", "x", "y", "seed"]
    steps = steps.assign(panel=tables.line_names(steps, ["model"]), x=steps["learning_rate"])
    steps = steps.assign(y=steps["updates_per_rollout"], update=steps["step"] * steps["updates_per_rollout"])
    rewards = steps[steps["metric"] == "reward"]
    ends = rewards.groupby(keys)["update"].transform("max")
    last = rewards[rewards["update"] > ends - _LAST_UPDATES].groupby(keys)["value"].mean()
    start = steps[(steps["metric"] == "eval_accuracy") & (steps["step"] == 0)].set_index(keys)["value"]
    gains = (last - start).rename("gain").reset_index()
    cells = gains.groupby(["panel", "x", "y"])["gain"].agg(mean="mean", min="min", max="max", n="size").reset_index()
    xs, ys = sorted(cells["x"].unique()), sorted(cells["y"].unique())
    most = cells["mean"].abs().max()
    own = steps[~steps["axes"].str.contains("learning_rate|updates_per_rollout")]
    marked = {(xs.index(x), ys.index(y)) for x, y in own[["x", "y"]].drop_duplicates().itertuples(index=False)}
    with style.figure_style():
        height, label, light = 0.7 + 0.22 * len(ys), "gain in reward", (-0.6 * most, 0.6 * most)
        figure, panels = _grids(height, cells, "mean", label, "+z.2f", light, "PuOr", (-most, most))
        for method, axis in panels.items():
            for x, y in marked:
                frame = Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="black", linewidth=1.4, zorder=3)
                axis.add_patch(frame)
            style.note(axis, method, cells[cells["panel"] == method].drop(columns="panel"), label)
        text = (
            f"Mean over seeds, n = {style.span(cells['n'].tolist())} a cell, of the mean reward over the last "
            f"{_LAST_UPDATES} updates less the held-out accuracy of the cold start; no interval; the data beside the "
            "figure have each cell's lowest and highest seed. Frame: the experiment's own setting."
        )
        return style.finish(figure, None, text + style.design(steps))


def _grids(
    height: float,
    cells: pd.DataFrame,
    value: str,
    label: str,
    text: str,
    light: tuple[float, float],
    colours: str = "cividis",
    ends: tuple[float, float] = (0.0, 1.0),
) -> tuple[DataFigure, dict[str, Axes]]:
    """Draw a heat map over learning rate (x) and staleness (y) for each panel of ``cells``; return figure and panels.

    ``value`` is the column that is drawn; ``height`` is that of a row of panels.
    """
    names = sorted(cells["panel"].unique())
    across, _ = style.across(len(names))
    rows, width = -(-len(names) // across), style.ONE_COLUMN if across == 1 else style.TWO_COLUMNS
    figure, axes = style.panels(rows, across, 0.6 + height * rows, width, sharex=True, sharey=True)
    for place, (axis, name) in enumerate(zip(axes, names, strict=False)):
        wide = cells[cells["panel"] == name].pivot(index="y", columns="x", values=value)
        wide = wide.reindex(index=sorted(cells["y"].unique()), columns=sorted(cells["x"].unique()))
        style.title(axis, name)
        axis.set_ylabel("updates per rollout")
        image = style.heatmap(axis, wide, text, light, cmap=colours, vmin=ends[0], vmax=ends[1])
        if place + across >= len(names):  # no panel stands below it
            axis.tick_params(labelbottom=True)
            axis.set_xlabel("learning rate")
    for axis in axes[len(names) :]:
        axis.remove()
    shrink = min(0.9, 3 / figure.get_figheight())
    figure.colorbar(image, ax=axes[: len(names)], label=label, shrink=shrink)
    return figure, dict(zip(names, axes, strict=False))
