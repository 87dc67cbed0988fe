"""Figures of metrics over the steps of training, one line for each arm. They take the table ``collect.steps``."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.measurement import columns
from steadymoe.bench.report.figures import looks, seeds, style
from steadymoe.bench.report.figures.looks import Look
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.statistics import estimates

# Shares of clipped tokens are drawn on a logarithmic scale that turns linear below this, so that 0 is shown.
LEAST_CLIPPED = 1e-3
_OVERVIEW = ("reward", "expert_change_rate", "token_ratio_variance", "clip_fraction")
# A variance below this is one of rounding.
_NOTHING = 10 * estimates.LEAST_LOG


def overview(steps: pd.DataFrame) -> DataFigure:
    """Reward, expert change, token-ratio variance and clip fraction side by side.

    A metric that no run recorded (``measure=little``, a dense model) has no panel.
    """
    lines = looks.of_lines(steps)
    against = seeds.compared(steps, lines)
    recorded = set(steps["metric"])
    shown = [metric for metric in _OVERVIEW if metric in recorded]
    rows = -(-len(shown) // 2)
    with style.figure_style():
        more = 0 if against is None else 1
        figure, axes = style.panels(rows + more, 2, 2.1 * rows + 2.0 * more, style.TWO_COLUMNS)
        for axis, metric in zip(axes, shown, strict=False):
            curves(axis, steps, metric, lines, log=metric == "token_ratio_variance")
            if metric == "clip_fraction":
                axis.set_yscale("symlog", linthresh=LEAST_CLIPPED)
        if len(shown) % 2:  # an empty place in the grid of panels
            axes[len(shown)].remove()
        if against is not None:
            seeds.differences(axes[2 * rows], steps, "reward", lines)
            seeds.differences(axes[2 * rows + 1], steps, "eval_accuracy", lines)
        notes = " Clipped shares: the plain mean." + style.without_clip(steps) if "clip_fraction" in shown else ""
        notes += style.below(steps, "token_ratio_variance", _NOTHING)
        return style.finish(figure, axes[0], style.curves_caption(steps, True, against) + notes)


def reward_compute(steps: pd.DataFrame) -> DataFigure:
    """Training reward and held-out accuracy against compute, algorithms compared (GSPO, 2507.18071, figure 1)."""
    spent, lines = sampled_tokens(steps), looks.of_lines(steps)
    against = seeds.compared(steps, lines)
    with style.figure_style():
        figure, axes = _above(2, against)
        curves(axes[0], steps, "reward", lines, x=spent)
        curves(axes[1], steps, "eval_accuracy", lines, x=spent)
        axes[1].set_xlabel("sampled tokens")
        _differences(axes, steps, against, lines)
        text = style.curves_caption(steps, against=against)
        return style.finish(figure, axes[0], text + " Held-out accuracy is not smoothed.")


def replay(steps: pd.DataFrame) -> DataFigure:
    """Reward and token-ratio variance with and without routing replay (GSPO, 2507.18071, figure 3)."""
    steps = steps.assign(arm=line_names(steps, ["algorithm", "routing"]))
    return _reward_above(steps, "token_ratio_variance")


def mismatch(steps: pd.DataFrame) -> DataFigure:
    """Reward above the mismatch of sampler and trainer; the mismatch grows before a collapse (DPPO, sanity figure)."""
    return _reward_above(steps, "rollout_kl_k3")


def _reward_above(steps: pd.DataFrame, metric: str) -> DataFigure:
    """Reward, and below it an explaining metric on a logarithmic axis."""
    lines = looks.of_lines(steps)
    against = seeds.compared(steps, lines)
    with style.figure_style():
        figure, axes = _above(2, against)
        curves(axes[0], steps, "reward", lines)
        curves(axes[1], steps, metric, lines, log=True)
        _differences(axes, steps, against, lines)
        return style.finish(figure, axes[0], style.curves_caption(steps, True, against))


def _above(rows: int, against: str | None) -> tuple[DataFigure, list[Axes]]:
    """``rows`` panels on one x axis, and one more panel for differences if ``against`` names an arm."""
    figure, axes = style.panels(rows + (against is not None), 1, 1.8 * (rows + (against is not None)))
    for axis in axes[: rows - 1]:
        axis.sharex(axes[rows - 1])
        axis.tick_params(labelbottom=False)
    return figure, axes


def _differences(axes: list[Axes], steps: pd.DataFrame, against: str | None, lines: dict[str, Look]) -> None:
    """Finish the panels of ``_above``: no label on a shared x axis, differences in reward in the last panel."""
    for axis in axes[: -1 if against is None else -2]:
        axis.set_xlabel("")
    if against is not None:
        seeds.differences(axes[-1], steps, "reward", lines)


def staleness_panels(steps: pd.DataFrame) -> DataFigure:
    """Held-out score, sampler–trainer KL, reward and entropy, a block for each staleness (MiniRL, figures 2 to 4)."""
    steps = steps.assign(arm=line_names(steps, ["algorithm", "routing", "correction"]))
    lines = looks.of_lines(steps)
    shown = (
        ("eval_accuracy", "held-out score", False),
        ("rollout_kl_k3", columns.short("rollout_kl_k3"), True),
        ("reward", columns.label("reward"), False),
        ("entropy", columns.label("entropy"), False),
    )
    staleness, against = sorted(steps["updates_per_rollout"].unique()), seeds.compared(steps, lines)
    rows = 2 if against is None else 3
    with style.figure_style():
        figure, axes = style.panels(rows * len(staleness), 2, (1.17 * rows * len(staleness)) + 0.3)
        for block, updates in enumerate(staleness):
            ours = steps[steps["updates_per_rollout"] == updates]
            of_block = axes[2 * rows * block : 2 * rows * (block + 1)]
            for axis, (metric, label, log) in zip(of_block, shown, strict=False):
                curves(axis, ours, metric, lines, log, panel=f"N = {updates:g}, {label}")
                axis.set_ylabel(label)
            for axis, (metric, label, _) in zip(of_block[4:], shown[::2], strict=False):
                seeds.differences(axis, ours, metric, lines, panel=f"N = {updates:g}, {label}")
                axis.set_ylabel(f"Δ {label}")
            of_block[0].set_title(f"N = {updates:g} updates per rollout", loc="left", fontweight="bold")
            for axis in of_block[:-2]:
                axis.set_xlabel("")
        text = style.curves_caption(steps, True, against) + " The held-out score is not smoothed."
        return style.finish(figure, axes[0], text)


def staleness_grid(steps: pd.DataFrame) -> DataFigure:
    """Reward over gradient updates, a panel for each method and a line for each staleness (VESPO, figure 3).

    With few seeds, panels below show each seed's difference from the least staleness at equal numbers of updates.
    """
    names = line_names(steps, ["algorithm", "routing", "correction"])
    methods, staleness = sorted(set(names)), sorted(steps["updates_per_rollout"].unique())
    lines = {f"N = {updates:g}": looks.ramp(place, len(staleness)) for place, updates in enumerate(staleness)}
    # Steps are counted in gradient updates, so that lines are compared after equal training.
    steps = steps.assign(method=names, arm="N = " + steps["updates_per_rollout"].map("{:g}".format))
    steps = steps.assign(step=steps["step"] * steps["updates_per_rollout"])
    against = seeds.compared(steps, lines)
    rows, kinds = -(-len(methods) // 2), 1 if against is None else 2
    with style.figure_style():
        figure, axes = style.panels(rows * kinds, 2, 1.55 * rows * kinds + 0.5, sharex=True)
        for kind in range(kinds):
            for place in range(2 * rows):
                axis = axes[2 * (kinds * (place // 2) + kind) + place % 2]
                axis.sharey(axes[2 * kind]) if axis is not axes[2 * kind] else None
                if place >= len(methods):  # an empty place in the grid of panels
                    axis.remove()
                    continue
                ours = steps[steps["method"] == methods[place]]
                if kind == 0:
                    curves(axis, ours, "reward", lines, panel=methods[place])
                    axis.set_title(methods[place])
                else:
                    seeds.differences(axis, ours, "reward", lines, panel=methods[place])
                axis.set_xlabel("gradient updates")
                axis.tick_params(labelbottom=True)
                axis.set_ylabel("" if place % 2 else axis.get_ylabel())
        text = style.curves_caption(steps.assign(arm=names + " " + steps["arm"]), against=against)
        return style.finish(figure, axes[0], text, "updates per rollout")


def curves(
    axis: Axes,
    steps: pd.DataFrame,
    metric: str,
    lines: dict[str, Look],
    log: bool = False,
    x: pd.Series | None = None,
    panel: str = "",
    smoothed_over: int | None = None,
) -> None:
    """One line per arm of ``lines`` over steps, or over ``x`` (indexed by arm and step); no line without the metric.

    A line has its interval from ten seeds on; below ten seeds every seed has a thin line. ``panel`` names the panel
    among the figure's numbers, in place of the label of its y axis. ``smoothed_over`` steps; None: as the metric asks.
    """
    axis.set_xlabel("step (rollout)")
    axis.set_ylabel(columns.label(metric))
    over = smoothed_over or style.smoothed_over(metric)
    means = estimates.curves(steps, metric, over, log, columns.bounds(metric))
    few_seeds = style.few_seeds(steps)
    of_seeds = seeds.smoothed(steps, metric, log, over) if few_seeds else means.iloc[:0].assign(seed=0)
    for arm, look in lines.items():
        curve = means[means["arm"] == arm]
        if curve.empty:
            continue

        def placed(rows: pd.DataFrame, arm: str = arm) -> pd.DataFrame:
            return rows.assign(x=rows["step"] if x is None else x[arm].reindex(rows["step"]).to_numpy())

        for seed, rows in of_seeds[of_seeds["arm"] == arm].groupby("seed"):
            style.thin(axis, arm, seed, placed(rows)[["x", "mean"]], look, panel)
        shown = ["x", "mean", "n"] if few_seeds else ["x", "mean", "low", "high", "n"]
        style.line(axis, arm, placed(curve)[shown], look, panel)
    if log:
        axis.set_yscale("log")
        some = means[means["mean"] > _NOTHING]
        if len(some) < len(means) and len(some):  # what does not vary at all would leave no room for the rest
            axis.set_ylim(bottom=0.5 * some["mean"].min())


def sampled_tokens(steps: pd.DataFrame) -> pd.Series:
    """The tokens that an arm has sampled until each step, the mean over its seeds, by arm and step.

    A seed that ended early counts with the tokens that it had sampled.
    """
    chosen = steps[steps["metric"] == "tokens_sampled"]
    of_seed = chosen.groupby(["arm", "seed", "step"])["value"].sum()
    every = steps[["arm", "seed", "step"]].drop_duplicates().sort_values(["arm", "seed", "step"])
    of_seed = of_seed.reindex(pd.MultiIndex.from_frame(every), fill_value=0.0)
    return of_seed.groupby(level=["arm", "seed"]).cumsum().groupby(level=["arm", "step"]).mean()


def line_names(steps: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """The name of each row's line: the algorithm, and the ``keys`` that vary."""
    varying = [key for key in keys if key == "algorithm" or steps[key].nunique() > 1]
    names = {point: " ".join(point) for point in steps[varying].drop_duplicates().itertuples(index=False, name=None)}
    return pd.Series([names[point] for point in steps[varying].itertuples(index=False, name=None)], index=steps.index)
