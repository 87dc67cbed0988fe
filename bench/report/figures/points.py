"""Figures of one number per run: bars, and lines over an axis of the experiment."""

from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.report import tables
from steadymoe.bench.report.figures import colours, style
from steadymoe.bench.report.figures.colours import Look
from steadymoe.bench.report.figures.curves import CLIPPED, KL, LEAD, MIN_CLIPPED, REWARD, VARIANCE, compared, effect
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.statistics import estimates
from steadymoe.bench.statistics.estimates import Bounds
from steadymoe.bench.training import columns

# A divergence between sampler and trainer below this is rounding.
_MIN_KL = 1e-6


def clip_fraction(steps: pd.DataFrame) -> DataFigure:
    """Share of clipped tokens, one bar per algorithm (GSPO, 2507.18071, figure 2), logarithmic, a dot for each seed."""
    chosen = steps[steps["metric"] == CLIPPED]
    with style.figure_style():
        arms = sorted(set(chosen["arm"]))  # a loss without a clip has no bar
        names, lines = style.wrapped(arms), colours.of_lines(steps)
        figure, (axis,) = style.panels(1, 1, 0.7 + style.height_of(names))
        axis.set_xlabel(columns.label(CLIPPED))
        for row, arm in enumerate(arms):
            seeds = chosen[chosen["arm"] == arm].groupby("seed")["value"].mean()
            estimate = estimates.over_seeds(seeds.tolist(), bounds=columns.bounds(CLIPPED))
            axis.barh(row, estimate.mean, color=lines[arm].colour, alpha=0.6, height=0.6)
            axis.plot(seeds, [row] * len(seeds), ".", color="black", markersize=3.5)
            end, side = (seeds.min(), "right") if seeds.max() > 0.1 else (seeds.max(), "left")
            place: Any = {"xytext": (5 if side == "left" else -5, 0), "textcoords": "offset points", "va": "center"}
            axis.annotate(f"{estimate.mean:.2g}", (end, row), ha=side, **place)
            style.note(axis, arm, pd.DataFrame([vars(estimate)]), columns.label(CLIPPED))
        axis.set_xscale("symlog", linthresh=MIN_CLIPPED)
        axis.set_xlim(0, 1)
        axis.set_xticks([0, 1e-3, 1e-2, 1e-1, 1])
        style.named_rows(axis, names)
        text = f"Bar: mean over steps and seeds ({style.seeds(steps)}); dots: seeds.{style.without_clip(steps)}"
        text += effect(steps, CLIPPED, "mean", LEAD, "above 0")
        return style.finish(figure, None, text)


def dose_response(steps: pd.DataFrame) -> DataFigure:
    """Final reward, sampler–trainer divergence and token-ratio variance against the strength of the rollout engine."""
    named = steps.assign(arm=tables.arm_names(steps, ["routing", "correction", "model"]))
    lines = colours.of_lines(named)
    groups, base = colours.groups(lines), compared(named, lines)
    (engine,) = set(steps["engine"]) - {"exact"}
    keys = ["arm", "strength", "seed"]
    with style.figure_style():
        figure, stacks = style.stacks(len(groups), 3 + (base is not None), 1.6, sharex=True)
        rewards = tables.run_numbers(named, REWARD, "last", keys)
        for axes, group in zip(stacks, groups, strict=True):
            against(axes[0], rewards, "final reward", group, bounds=columns.bounds(REWARD))
            for axis, metric in zip(axes[1:], (KL, VARIANCE), strict=False):
                numbers = tables.run_numbers(named, metric, "median", keys)
                against(axis, numbers, columns.short(metric), group, log=True, bounds=columns.bounds(metric))
            axes[1].set_ylim(bottom=_MIN_KL)
            if base is not None:
                against(axes[3], rewards, "Δ final reward", group, base=base)
            for axis in style.lowest(axes):
                axis.set_xlabel(f"strength of {engine}")
        number = (
            f"its last {tables.LAST_STEPS} steps for the final reward, else the median over steps; a KL below "
            f"{_MIN_KL:g} is rounding, as with an exact engine, and lies below the panel"
        )
        return style.finish(figure, axes[0], style.describe(steps, number, True, base))


def against(
    axis: Axes,
    numbers: pd.Series,
    label: str,
    lines: dict[str, Look],
    *,
    log: bool = False,
    bounds: Bounds | None = None,
    base: str | None = None,
) -> None:
    """Draw one line per name in ``lines`` over an axis of the experiment: means over seeds of one number of each run.

    ``numbers`` is indexed by arm, the axis, and seed; ``bounds``: see ``over_seeds``. With ``log`` the y axis is
    logarithmic and the means are geometric. A line has a band from ten seeds on; below ten seeds every seed has a thin
    line. With ``base`` a line shows the difference from the line ``base``, seed by seed.
    """
    axis.set_ylabel(label)
    x = str(numbers.index.names[1])
    few_seeds = numbers.groupby(level=["arm", x]).size().min() < estimates.MIN_FOR_BOOTSTRAP
    for line, look in lines.items():
        if line == base or line not in numbers.index.get_level_values("arm"):
            continue
        ours, name = numbers.xs(line, level="arm"), line
        if base is not None:
            ours, name = (ours - numbers.xs(base, level="arm")).dropna(), f"{line} − {base}"
        if few_seeds:
            style.thin(axis, name, ours.rename("mean").rename_axis(index={x: "x"}).reset_index(), look)
        rows = [
            {"x": at} | vars(estimates.over_seeds(own.tolist(), log=log, bounds=bounds))
            for at, own in ours.groupby(level=x)
        ]
        data = pd.DataFrame(rows, columns=["x", "mean", "n"] if few_seeds else ["x", "mean", "low", "high", "n"])
        style.line(axis, name, data, replace(look, marked=True))
    if base is not None:
        style.zero(axis, lines[base])
    if log:
        axis.set_yscale("log")
