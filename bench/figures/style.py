"""Figures: pure functions of the long table of ``collect.steps`` (with a column ``arm``). None reads the disk."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from steadymoe.bench import stats, tables

# Each seed's curve is averaged over this many steps before seeds are averaged.
SMOOTHED_OVER = 5
# Shares and rewards: an interval is not drawn where the quantity cannot be.
_SHARES = {"reward", "eval_accuracy", "expert_change_rate", "clip_fraction"}
# Shares of clipped tokens are drawn on a logarithmic scale that turns linear below this, so that 0 is shown.
_LEAST_CLIPPED = 1e-3
# Okabe and Ito's palette, distinguishable without colour vision; and line styles for print.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000"]
_STYLES = ["-", "--", "-.", ":"]
_MARKERS = ["o", "s", "^", "D", "v", "P"]
_STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "steadymoe",
    "svg.fonttype": "none",
}


def reward(steps: pd.DataFrame) -> Figure:
    """Training reward over steps (GSPO, 2507.18071, figure 1, at our scale)."""
    return _single(steps, "reward", "training reward")


def expert_change(steps: pd.DataFrame) -> Figure:
    """Expert-change rate against the rollout's routes over steps (2507.18071, section 5.3)."""
    return _single(steps, "expert_change_rate", "expert-change rate")


def ratio_variance(steps: pd.DataFrame) -> Figure:
    """Variance of the token ratio and of the sequence ratio over steps, logarithmic."""
    with mpl.rc_context(_STYLE):
        figure, axes = _panels(1, 2, 2.6)
        _curves(axes[0], steps, "token_ratio_variance", "variance of the token ratio", log=True)
        _curves(axes[1], steps, "sequence_ratio_variance", "variance of the sequence ratio", log=True)
        return _finish(figure, axes[0], caption(steps, log=True))


def clip_fraction(steps: pd.DataFrame) -> Figure:
    """Share of clipped tokens, one bar an algorithm (2507.18071, figure 2), logarithmic, with a dot for each seed."""
    chosen = steps[steps["metric"] == "clip_fraction"]
    with mpl.rc_context(_STYLE):
        figure, (axis,) = _panels(1, 1, 2.6)
        for index, arm in enumerate(sorted(steps["arm"].unique())):
            seeds = chosen[chosen["arm"] == arm].groupby("seed")["value"].mean()
            if seeds.empty:
                continue  # a loss without a clip has no bar
            estimate = stats.mean_over_seeds(seeds.tolist())
            axis.bar(arm, estimate.mean, color=_COLOURS[index % len(_COLOURS)], alpha=0.6, width=0.6)
            axis.plot([arm] * len(seeds), seeds, ".", color="black", markersize=4)
            axis.annotate(f"{estimate.mean:.2g}", (arm, seeds.max()), (0, 6), textcoords="offset points", ha="center")
        axis.set_yscale("symlog", linthresh=_LEAST_CLIPPED)
        axis.set_ylim(0, 1.5)
        axis.tick_params(axis="x", labelrotation=30 if steps["arm"].nunique() > 4 else 0)
        axis.set_ylabel("clipped tokens (share)")
        axis.grid(visible=False, axis="x")
        return _finish(figure, None, f"Bar: mean over steps and seeds ({_seeds(steps)}); dots: seeds.")


def overview(steps: pd.DataFrame) -> Figure:
    """Reward, expert change, token-ratio variance and clip fraction side by side."""
    with mpl.rc_context(_STYLE):
        figure, axes = _panels(2, 2, 4.6)
        _curves(axes[0], steps, "reward", "training reward")
        _curves(axes[1], steps, "expert_change_rate", "expert-change rate")
        _curves(axes[2], steps, "token_ratio_variance", "variance of the token ratio", log=True)
        _curves(axes[3], steps, "clip_fraction", "clipped tokens (share)")
        axes[3].set_yscale("symlog", linthresh=_LEAST_CLIPPED)
        return _finish(figure, axes[0], caption(steps, log=True))


def dose_response(steps: pd.DataFrame) -> Figure | None:
    """Final reward, sampler–trainer divergence and token-ratio variance against the strength of the rollout engine.

    None where all runs have one strength.
    """
    if steps["strength"].nunique() < 2:
        return None
    steps = steps.assign(line=_line_names(steps, ["algorithm", "routing", "correction"]))
    (dial, *others) = sorted(set(steps["engine"]) - {"exact"})
    label = f"strength of {dial}" if not others else "engine strength"
    with mpl.rc_context(_STYLE):
        figure, axes = _panels(1, 3, 2.7)
        _against(axes[0], steps, "strength", "reward", "last", "final reward")
        _against(axes[1], steps, "strength", "rollout_kl_k3", "median", "KL of sampler from trainer (k3)", log=True)
        _against(axes[2], steps, "strength", "token_ratio_variance", "median", "variance of the token ratio", log=True)
        for axis in axes:
            axis.set_xlabel(label)
        return _finish(figure, axes[0], _points_caption(steps))


def attribution(steps: pd.DataFrame) -> Figure | None:
    """How much of the log-ratio routing causes, against depth and number of experts.

    Left: 1 − E[(log r pinned)²] / E[(log r free)²]. Right: E[(log r)²] of tokens whose route changed in any layer,
    over that of the others. None where all runs have one depth.
    """
    steps = steps[steps["experts"] > 0]
    if steps["moe_layers"].nunique() < 2:
        return None
    named = steps["experts"].astype(int).astype(str) + " experts"
    varied = _line_names(steps, ["algorithm", "routing", "engine"])
    steps = steps.assign(line=named if varied.nunique() == 1 else varied + " " + named)
    with mpl.rc_context(_STYLE):
        figure, axes = _panels(1, 2, 2.7)
        _against(axes[0], steps, "moe_layers", "routing_share", "median", "share of routing in E[(log r)²]")
        changed = _ratio(steps, "log_ratio_moment_changed", "log_ratio_moment_unchanged")
        _against(axes[1], changed, "moe_layers", "ratio", "median", "E[(log r)²], changed / unchanged", log=True)
        for axis in axes:
            axis.set_xlabel("MoE layers")
            axis.set_xticks(sorted(steps["moe_layers"].unique()))
        return _finish(figure, axes[0], _points_caption(steps))


FIGURES: dict[str, Callable[[pd.DataFrame], Figure | None]] = {
    "overview": overview,
    "reward": reward,
    "expert_change": expert_change,
    "ratio_variance": ratio_variance,
    "clip_fraction": clip_fraction,
    "dose_response": dose_response,
    "attribution": attribution,
}


def save(figure: Figure, path: Path, suffix: str) -> None:
    """Write a figure as ``png`` or ``svg``; the same data give the same bytes."""
    with mpl.rc_context(_STYLE):
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(path, format=suffix, dpi=200, bbox_inches="tight", metadata=metadata)


def caption(steps: pd.DataFrame, log: bool = False) -> str:
    """Statistic, smoothing, interval and number of seeds, as the caption of a figure of curves says them."""
    least = steps.groupby("arm")["seed"].nunique().min()
    interval = "; shaded: 95 % t interval" if least >= stats.LEAST_FOR_INTERVAL else ""
    geometric = " (of variances the geometric one)" if log else ""
    smoothed = f"of curves smoothed over {SMOOTHED_OVER} steps"
    return f"Mean over seeds{geometric}, {_seeds(steps)}, {smoothed}{interval}.{_without(steps)}"


def _without(steps: pd.DataFrame) -> str:
    """Names the arms that have no clip, where a reader may miss their line."""
    clipped = set(steps.loc[steps["metric"] == "clip_fraction", "arm"])
    lacking = sorted(set(steps["arm"]) - clipped)
    return f" No clip: {', '.join(lacking)}." if lacking and clipped else ""


def _seeds(steps: pd.DataFrame) -> str:
    counts = steps.groupby("arm")["seed"].nunique()
    return (
        f"n = {counts.iloc[0]}" if counts.nunique() == 1 else ", ".join(f"{arm}: n = {k}" for arm, k in counts.items())
    )


def _single(steps: pd.DataFrame, metric: str, label: str) -> Figure:
    with mpl.rc_context(_STYLE):
        figure, (axis,) = _panels(1, 1, 2.6)
        _curves(axis, steps, metric, label)
        return _finish(figure, axis, caption(steps))


def _panels(rows: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(3.4 if columns == 1 else 6.8, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _curves(axis: Axes, steps: pd.DataFrame, metric: str, label: str, log: bool = False) -> None:
    """One line per arm with its interval; an arm without the metric keeps its colour and has no line."""
    curves = stats.curves(steps, metric, SMOOTHED_OVER, log)
    if metric in _SHARES:
        curves[["low", "high"]] = curves[["low", "high"]].clip(0, 1)
    for index, arm in enumerate(sorted(steps["arm"].unique())):
        curve = curves[curves["arm"] == arm]
        if curve.empty:
            continue
        colour, style = _COLOURS[index % len(_COLOURS)], _STYLES[(index + index // len(_COLOURS)) % len(_STYLES)]
        axis.plot(curve["step"], curve["mean"], style, color=colour, linewidth=1.3, label=arm)
        axis.fill_between(curve["step"], curve["low"], curve["high"], color=colour, alpha=0.13, linewidth=0)
    if log:
        axis.set_yscale("log")
    axis.set_xlabel("step (rollout)")
    axis.set_ylabel(label)


def _line_names(steps: pd.DataFrame, keys: list[str]) -> pd.Series:
    """What the lines of a figure compare: the algorithm, and those of ``keys`` that differ."""
    varying = [key for key in keys if key == "algorithm" or steps[key].nunique() > 1]
    return steps[varying].agg(" ".join, axis=1)


def _ratio(steps: pd.DataFrame, above: str, below: str) -> pd.DataFrame:
    """One metric over another at every step that has both, as a metric ``ratio``."""
    keys = ["line", "moe_layers", "seed", "step"]
    wide = steps[steps["metric"].isin([above, below])].pivot_table(index=keys, columns="metric", values="value")
    both = wide.reindex(columns=[above, below]).dropna()
    both = both[(both > 0).all(axis=1)]
    return (both[above] / both[below]).rename("value").reset_index().assign(metric="ratio")


def _against(axis: Axes, steps: pd.DataFrame, x: str, metric: str, how: str, label: str, log: bool = False) -> None:
    """One line per ``line`` over the values of ``x``: the mean over seeds with its interval, of one number a run."""
    chosen = steps[steps["metric"] == metric].sort_values("step")
    lines = sorted(steps["line"].unique())
    numbers = chosen.groupby(["line", x, "seed"])["value"].agg(lambda curve: tables.one_number(curve, how))
    for index, line in enumerate(lines):
        if line not in numbers.index.get_level_values("line"):
            continue
        points = numbers[line].groupby(level=0)
        estimates = {at: stats.mean_over_seeds(values.tolist(), log) for at, values in points}
        means = [each.mean for each in estimates.values()]
        lows = [each.mean - each.low if each.low == each.low else 0.0 for each in estimates.values()]
        highs = [each.high - each.mean if each.high == each.high else 0.0 for each in estimates.values()]
        # Set a little apart, or intervals at one place would cover each other.
        spread = (max(estimates) - min(estimates)) * 0.006 * (index - (len(lines) - 1) / 2)
        axis.errorbar(
            [at + spread for at in estimates],
            means,
            yerr=[lows, highs],
            fmt=_MARKERS[index % len(_MARKERS)] + _STYLES[index % len(_STYLES)],
            color=_COLOURS[index % len(_COLOURS)],
            linewidth=1.2,
            markersize=3.5,
            elinewidth=0.7,
            label=line,
        )
    if log:
        axis.set_yscale("log")
    axis.set_ylabel(label)


def _points_caption(steps: pd.DataFrame) -> str:
    least = steps.groupby(["line", "arm"])["seed"].nunique().min()
    bars = "; bars: 95 % t interval" if least >= stats.LEAST_FOR_INTERVAL else ""
    return (
        f"Mean over seeds (on a logarithmic axis the geometric one), {_seeds(steps)}{bars}. Of each run: its last "
        f"{tables.LAST_STEPS} steps for the final reward, else the median over steps."
    )


def _finish(figure: Figure, legend_from: Axes | None, text: str) -> Figure:
    """Add the legend above the panels and the caption below them."""
    if legend_from is not None:
        handles, labels = legend_from.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(4, max(1, len(labels))))
    wide = figure.get_figwidth() > 4
    figure.text(
        0.5,
        -0.02,
        textwrap.fill(text, 125 if wide else 62),
        ha="center",
        va="top",
        fontsize=7,
        color="#444444",
    )
    return figure
