"""Figures of one number per run: bars, dumbbells, and lines over an axis of the experiment."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.measurement import columns
from steadymoe.bench.report import tables
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.curves import LEAST_CLIPPED, line_names
from steadymoe.bench.report.figures.looks import Look
from steadymoe.bench.report.figures.seeds import compared
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.statistics import estimates

# A divergence between sampler and trainer below this is rounding.
_LEAST_KL = 1e-6


def clip_fraction(steps: pd.DataFrame) -> DataFigure:
    """Share of clipped tokens, one bar an algorithm (GSPO, 2507.18071, figure 2), logarithmic, a dot for each seed."""
    chosen = steps[steps["metric"] == "clip_fraction"]
    with style.figure_style():
        figure, (axis,) = style.panels(1, 1, 2.2)
        axis.set_ylabel(columns.label("clip_fraction"))
        for arm, look in looks.of_lines(steps).items():
            seeds = chosen[chosen["arm"] == arm].groupby("seed")["value"].mean()
            if seeds.empty:
                continue  # a loss without a clip has no bar
            estimate = estimates.over_seeds(seeds.tolist(), bounds=columns.bounds("clip_fraction"))
            axis.bar(arm, estimate.mean, color=look.colour, alpha=0.6, width=0.6)
            axis.plot([arm] * len(seeds), seeds, ".", color="black", markersize=3.5)
            axis.annotate(f"{estimate.mean:.2g}", (arm, seeds.max()), (0, 5), textcoords="offset points", ha="center")
            style.note(axis, arm, pd.DataFrame([vars(estimate)]))
        axis.set_yscale("symlog", linthresh=LEAST_CLIPPED)
        axis.set_ylim(0, 2.5)
        axis.tick_params(axis="x", labelrotation=30 if chosen["arm"].nunique() > 4 else 0)
        axis.grid(visible=False, axis="x")
        text = f"Bar: mean over steps and seeds ({style.seeds(steps)}); dots: seeds.{style.without_clip(steps)}"
        return style.finish(figure, None, text)


def best_last(steps: pd.DataFrame) -> DataFigure:
    """Best against last reward of each method, the widest fall on top (GEPO's columns Best and Last)."""
    chosen = steps[steps["metric"] == "reward"].sort_values("step")
    of_seeds = chosen.groupby(["arm", "seed"])["value"]
    last = of_seeds.agg(lambda curve: tables.one_number(curve, "last"))
    best = last + of_seeds.agg(lambda curve: tables.one_number(curve, "fall"))
    arms = (best - last).groupby(level="arm").mean().sort_values().index
    lines = looks.of_lines(steps)
    against = compared(steps, lines)
    size = 0.8 + 0.2 * len(arms)
    with style.figure_style():
        width = style.ONE_COLUMN if against is None else style.TWO_COLUMNS
        figure, axes = style.panels(1, 1 if against is None else 2, size, width, sharey=True)
        for row, arm in enumerate(arms):
            _dumbbell(
                axes[0], row, str(arm), {"best": best[arm], "last": last[arm]}, lines[arm], style.few_seeds(steps)
            )
            if against is not None:
                _paired(axes[1], row, f"{arm} − {against}", (last[arm] - last[against]).dropna(), lines[arm])
        for face, mark, name in (("white", "o", "best"), ("black", "s", "last")):
            axes[0].plot([], [], mark, color="black", markerfacecolor=face, markersize=4.5, label=name)
        axes[0].set_yticks(range(len(arms)), arms)
        axes[0].set_ylim(-0.6, len(arms) - 0.4)
        axes[0].set_xlabel(columns.label("reward"))
        for axis in axes:
            axis.grid(visible=False, axis="y")
        if against is not None:
            axes[1].axvline(0, color="#999999", linewidth=0.6, zorder=0)
            axes[1].set_xlabel("Δ last reward")
        of_each = f"best and last mean over {tables.LAST_STEPS} steps"
        text = style.points_caption(steps, of_each, against=against).replace("bars", "thin lines")
        return style.finish(figure, axes[0], text)


def _dumbbell(axis: Axes, row: int, arm: str, ends: dict[str, pd.Series], look: Look, few_seeds: bool) -> None:
    """Best and last reward of one arm, joined, with intervals, or with a thin line for each seed if seeds are few."""
    means = {
        name: estimates.over_seeds(values.tolist(), bounds=columns.bounds("reward")) for name, values in ends.items()
    }
    axis.plot([each.mean for each in means.values()], [row, row], color=look.colour, linewidth=1.5, zorder=1)
    if few_seeds:
        for place, seed in enumerate(ends["best"].index):
            height = row + 0.6 * ((place + 1) / (len(ends["best"]) + 1) - 0.5)
            own = [float(values[seed]) for values in ends.values()]
            axis.plot(own, [height] * 2, ".-", color=look.colour, linewidth=0.5, markersize=1.5, alpha=0.7)
    for (name, each), up in zip(means.items(), (0.16, -0.16), strict=True):
        if not few_seeds:
            axis.plot([each.low, each.high], [row + up] * 2, color=look.colour, linewidth=0.7)
        face, mark = ("white", "o") if name == "best" else (look.colour, "s")
        axis.plot(each.mean, row, mark, color=look.colour, markerfacecolor=face, markersize=4.5)
        shown = vars(each) if not few_seeds else {"mean": each.mean, "n": each.n}
        style.note(axis, arm, pd.DataFrame([shown]), name)


def _paired(axis: Axes, row: int, name: str, apart: pd.Series, look: Look) -> None:
    """The differences of one arm, one dot per seed, and their mean."""
    axis.plot(apart, [row] * len(apart), "|", color=look.colour, markersize=5, alpha=0.8)
    axis.plot(apart.mean(), row, "s", color=look.colour, markersize=4.5)
    style.note(axis, name, pd.DataFrame([{"mean": apart.mean(), "n": len(apart)}]), "Δ last")


def dose_response(steps: pd.DataFrame) -> DataFigure:
    """Final reward, sampler–trainer divergence and token-ratio variance against the strength of the rollout engine."""
    steps = steps.assign(line=line_names(steps, ["algorithm", "routing", "correction", "model"]))
    lines = looks.of_lines(steps, "line")
    base = compared(steps.assign(arm=steps["line"]), lines)
    (dial,) = set(steps["engine"]) - {"exact"}
    with style.figure_style():
        figure, axes = style.panels(3 + (base is not None), 1, 4.9 + 1.5 * (base is not None), sharex=True)
        against(axes[0], steps, "strength", RunNumber("reward", "last", "final reward"), lines)
        for axis, metric in zip(axes[1:], ("rollout_kl_k3", "token_ratio_variance"), strict=False):
            against(axis, steps, "strength", RunNumber(metric, "median", columns.short(metric), log=True), lines)
        axes[1].set_ylim(bottom=_LEAST_KL)
        if base is not None:
            against(axes[3], steps, "strength", RunNumber("reward", "last", "Δ final reward"), lines, base)
        axes[-1].set_xlabel(f"strength of {dial}")
        of_each = (
            f"its last {tables.LAST_STEPS} steps for the final reward, else the median over steps; a KL below "
            f"{_LEAST_KL:g} is rounding, as with an exact engine, and lies below the panel"
        )
        return style.finish(figure, axes[0], style.points_caption(steps, of_each, True, base))


@dataclass(frozen=True)
class RunNumber:
    """One number of each run: a statistic of the curve of one metric."""

    metric: str
    how: str
    """The statistic of ``tables.one_number``."""
    label: str
    """Of its axis."""
    log: bool = False
    """Whether its axis is logarithmic and the mean over seeds geometric."""


def against(
    axis: Axes,
    steps: pd.DataFrame,
    x: str,
    number: RunNumber,
    lines: dict[str, Look],
    base: str | None = None,
    logx: bool = False,
) -> None:
    """One line per name in ``lines`` (column ``line``) over the values of ``x``: the mean over seeds of ``number``.

    A line has intervals from ten seeds on (cut to [0, 1] for
    reward); below ten seeds every seed has a thin line. With ``base`` a line shows the difference from the line
    ``base``, seed by seed.
    """
    axis.set_ylabel(number.label)
    chosen = steps[steps["metric"] == number.metric].sort_values("step")
    numbers = chosen.groupby(["line", x, "seed"])["value"].agg(lambda curve: tables.one_number(curve, number.how))
    span = steps[x].max() - steps[x].min()
    few_seeds = numbers.groupby(level=["line", x]).size().min() < estimates.LEAST_FOR_BOOTSTRAP
    for index, (line, look) in enumerate(lines.items()):
        if line == base or line not in numbers.index.get_level_values("line"):
            continue
        ours = numbers.xs(line, level="line")
        if base is not None:
            ours = (ours - numbers.xs(base, level="line")).dropna()
        bounds = columns.bounds(number.metric) if base is None else None
        name = line if base is None else f"{line} − {base}"
        apart = index - (len(lines) - 1) / 2
        shift, factor = (0.0, 1.02**apart) if logx else (0.008 * span * apart, 1.0)
        if few_seeds:
            shift, factor = 0.0, 1.0
            for seed, values in ours.groupby(level="seed"):
                own = pd.DataFrame({"x": values.index.get_level_values(x), "mean": values.to_numpy()})
                style.thin(axis, name, seed, own, look)
        rows = [
            {"x": at} | vars(estimates.over_seeds(own.tolist(), log=number.log, bounds=bounds))
            for at, own in ours.groupby(level=x)
        ]
        data = pd.DataFrame(rows, columns=["x", "mean", "low", "high", "n"])
        style.points(axis, name, data.drop(columns=["low", "high"]) if few_seeds else data, look, shift, factor)
    if base is not None:
        axis.axhline(0, color=lines[base].colour, linestyle=lines[base].dashes, linewidth=0.8)
    if number.log:
        axis.set_yscale("log")
