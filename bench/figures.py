"""Figures: pure functions of the long table of ``collect.steps`` (with a column ``arm``). None reads the disk."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from steadymoe.bench import stats

# Each seed's curve is averaged over this many steps before seeds are averaged.
SMOOTHED_OVER = 5
# Shares and rewards: an interval is not drawn where the quantity cannot be.
_SHARES = {"reward", "eval_accuracy", "expert_change_rate", "clip_fraction"}
# Shares of clipped tokens are drawn on a logarithmic scale that turns linear below this, so that 0 is shown.
_LEAST_CLIPPED = 1e-3
# Okabe and Ito's palette, distinguishable without colour vision; and line styles for print.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000"]
_STYLES = ["-", "--", "-.", ":"]
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


FIGURES: dict[str, Callable[[pd.DataFrame], Figure]] = {
    "overview": overview,
    "reward": reward,
    "expert_change": expert_change,
    "ratio_variance": ratio_variance,
    "clip_fraction": clip_fraction,
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
