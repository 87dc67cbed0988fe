"""Figures of one number a run: bars, dumbbells, and lines over an axis of the experiment."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench import columns, stats, tables
from steadymoe.bench.figures import style
from steadymoe.bench.figures.curves import LEAST_CLIPPED, line_names
from steadymoe.bench.figures.style import Sheet

# Below this a divergence between sampler and trainer is rounding.
_LEAST_KL = 1e-6


def clip_fraction(steps: pd.DataFrame) -> Sheet:
    """Share of clipped tokens, one bar an algorithm (GSPO, 2507.18071, figure 2), logarithmic, a dot for each seed."""
    chosen = steps[steps["metric"] == "clip_fraction"]
    with style.house():
        figure, (axis,) = style.panels(1, 1, 2.2)
        axis.set_ylabel("clipped tokens (share)")
        for index, arm in enumerate(sorted(steps["arm"].unique())):
            seeds = chosen[chosen["arm"] == arm].groupby("seed")["value"].mean()
            if seeds.empty:
                continue  # a loss without a clip has no bar
            estimate = stats.over_seeds(seeds.tolist(), bounds=columns.bounds("clip_fraction"))
            axis.bar(arm, estimate.mean, color=style.look(index)[0], alpha=0.6, width=0.6)
            axis.plot([arm] * len(seeds), seeds, ".", color="black", markersize=3.5)
            axis.annotate(f"{estimate.mean:.2g}", (arm, seeds.max()), (0, 5), textcoords="offset points", ha="center")
            style.note(axis, arm, pd.DataFrame([vars(estimate)]))
        axis.set_yscale("symlog", linthresh=LEAST_CLIPPED)
        axis.set_ylim(0, 2.5)
        axis.tick_params(axis="x", labelrotation=30 if chosen["arm"].nunique() > 4 else 0)
        axis.grid(visible=False, axis="x")
        text = f"Bar: mean over steps and seeds ({style.seeds(steps)}); dots: seeds.{style.without_clip(steps)}"
        return style.finish(figure, None, text)


def best_last(steps: pd.DataFrame) -> Sheet:
    """Best against last reward of each method, the widest fall on top (GEPO's columns Best and Last)."""
    chosen = steps[steps["metric"] == "reward"].sort_values("step")
    of_seeds = chosen.groupby(["arm", "seed"])["value"]
    last = of_seeds.agg(lambda curve: tables.one_number(curve, "last"))
    best = last + of_seeds.agg(lambda curve: tables.one_number(curve, "fall"))
    arms = (best - last).groupby(level="arm").mean().sort_values().index
    with style.house():
        figure, (axis,) = style.panels(1, 1, 0.8 + 0.2 * len(arms))
        for row, arm in enumerate(arms):
            bounds = columns.bounds("reward")
            ends = [stats.over_seeds(series[arm].tolist(), bounds=bounds) for series in (best, last)]
            axis.plot([each.mean for each in ends], [row, row], color="#999999", linewidth=1.5, zorder=1)
            for each, name, up in zip(ends, ("best", "last"), (0.16, -0.16), strict=True):
                colour = style.COLOURS[0] if name == "best" else style.COLOURS[1]
                if each.low == each.low:
                    limits = np.clip([each.low, each.high], 0, 1)
                    axis.plot(limits, [row + up] * 2, color=colour, linewidth=0.7)
                face, mark = ("white", "o") if name == "best" else (colour, "s")
                label = name if row == 0 else None
                axis.plot(each.mean, row, mark, color=colour, markerfacecolor=face, markersize=4.5, label=label)
                style.note(axis, str(arm), pd.DataFrame([vars(each)]), name)
        axis.set_yticks(range(len(arms)), arms)
        axis.set_ylim(-0.6, len(arms) - 0.4)
        axis.set_xlabel("training reward")
        axis.grid(visible=False, axis="y")
        of_each = f"best and last mean over {tables.LAST_STEPS} steps"
        return style.finish(figure, axis, style.points_caption(steps, of_each).replace("bars", "thin lines"))


# By verdict: colour, and the mark that tells it without colour.
_VERDICTS = {
    "supported": (2, "o"),
    "contradicted": (1, "X"),
    "not decided": (7, "s"),
    "not testable on this testbed": (7, "d"),
}


def outcomes(table: pd.DataFrame) -> Sheet:
    """What papers claim of final rewards, and what was seen: effect, 95 % interval, threshold and verdict.

    ``table``: claim, outcome, effect, claimed side, threshold, verdict, a row each.
    """
    with style.house():
        figure, (axis,) = style.panels(1, 1, 0.9 + 0.19 * len(table), style.TWO_COLUMNS)
        rows: list[Any] = list(table.itertuples())
        named = [f"{row.claim}  {row.outcome}" for row in rows]
        for row, found in enumerate(rows):
            index, mark = _VERDICTS[found.verdict]
            colour, effect = style.COLOURS[index], found.effect
            axis.plot([effect.low, effect.high], [row, row], color=colour, linewidth=1.1)
            axis.plot(effect.mean, row, mark, color=colour, markersize=4.5)
            axis.plot(found.threshold, row, "|", color="black", markersize=9)
            pointing = {"above": ">", "below": "<"}[found.side]
            axis.plot(found.threshold, row, pointing, color="black", markersize=2.6)
            numbers = vars(effect) | {"threshold": found.threshold, "verdict": found.verdict}
            style.note(axis, named[row], pd.DataFrame([numbers]), "difference in final reward")
        for verdict in [verdict for verdict in _VERDICTS if (table["verdict"] == verdict).any()]:
            index, mark = _VERDICTS[verdict]
            axis.plot([], [], mark, color=style.COLOURS[index], markersize=4.5, label=verdict)
        axis.axvline(0, color="#999999", linewidth=0.6, zorder=0)
        axis.set_yticks(range(len(table)), named)
        axis.set_ylim(len(table) - 0.4, -0.6)
        axis.set_xlabel("difference in final reward")
        axis.grid(visible=False, axis="y")
        of = style.span([effect.n for effect in table["effect"]])
        text = (
            f"Means over seeds, n = {of}, of differences seed by seed; bars: 95 % interval. Black: the threshold, "
            "and on which side of it the effect was claimed to be. The number in front is the claim's."
        )
        return style.finish(figure, axis, text)


def dose_response(steps: pd.DataFrame) -> Sheet:
    """Final reward, sampler–trainer divergence and token-ratio variance against the strength of the rollout engine."""
    steps = steps.assign(line=line_names(steps, ["algorithm", "routing", "correction", "model"]))
    (dial,) = set(steps["engine"]) - {"exact"}
    with style.house():
        figure, axes = style.panels(3, 1, 4.9, sharex=True)
        against(axes[0], steps, "strength", "reward", "last", "final reward")
        against(axes[1], steps, "strength", "rollout_kl_k3", "median", "KL sampler–trainer (k3)", log=True)
        against(axes[2], steps, "strength", "token_ratio_variance", "median", "var. of the token ratio", log=True)
        axes[1].set_ylim(bottom=_LEAST_KL)
        axes[-1].set_xlabel(f"strength of {dial}")
        of_each = (
            f"its last {tables.LAST_STEPS} steps for the final reward, else the median over steps; a KL below "
            f"{_LEAST_KL:g}, that of an exact engine's rounding, is below the panel"
        )
        return style.finish(figure, axes[0], style.points_caption(steps, of_each))


def against(
    axis: Axes,
    steps: pd.DataFrame,
    x: str,
    metric: str,
    how: str,
    label: str,
    log: bool = False,
    logx: bool = False,
    every: Sequence[str] | None = None,
) -> None:
    """One line per ``line`` over the values of ``x``: the mean over seeds with its interval, of one number a run.

    Of a reward no interval is drawn where it cannot be.
    """
    axis.set_ylabel(label)
    chosen = steps[steps["metric"] == metric].sort_values("step")
    lines = sorted(steps["line"].unique()) if every is None else every
    numbers = chosen.groupby(["line", x, "seed"])["value"].agg(lambda curve: tables.one_number(curve, how))
    span = steps[x].max() - steps[x].min()
    for index, line in enumerate(lines):
        if line not in numbers.index.get_level_values("line"):
            continue
        groups = numbers.xs(line, level="line").groupby(level=x)
        bounds = columns.bounds(metric)
        estimates = {at: stats.over_seeds(values.tolist(), log=log, bounds=bounds) for at, values in groups}
        data = pd.DataFrame([{"x": at} | vars(estimate) for at, estimate in estimates.items()])
        if metric == "reward":
            data[["low", "high"]] = data[["low", "high"]].clip(0, 1)
        apart = index - (len(lines) - 1) / 2
        shift, factor = (0.0, 1.02**apart) if logx else (0.008 * span * apart, 1.0)
        style.points(axis, line, data, index, shift, factor)
    if log:
        axis.set_yscale("log")
