"""Figures below ten seeds show no band: they show every seed's own curve, and its difference from another arm."""

import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.measurement import columns
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.looks import Look
from steadymoe.bench.statistics import estimates


def smoothed(steps: pd.DataFrame, metric: str, log: bool = False, over: int | None = None) -> pd.DataFrame:
    """One metric of every seed by itself, smoothed as ``estimates.curves`` does: arm, seed, step, mean.

    ``over`` that many steps; None: as the metric asks.
    """
    chosen, window = steps[steps["metric"] == metric], over or style.smoothed_over(metric)
    parts = [estimates.curves(ours, metric, window, log).assign(seed=seed) for seed, ours in chosen.groupby("seed")]
    names = ["arm", "seed", "step", "mean"]
    return pd.concat(parts, ignore_index=True)[names] if parts else pd.DataFrame(columns=names)


def differences(
    axis: Axes,
    steps: pd.DataFrame,
    metric: str,
    lines: dict[str, Look],
    panel: str = "",
) -> None:
    """Each arm minus the reference arm at the same seed and step: one thin line per seed, and their mean."""
    base = looks.reference(lines)
    label = f"Δ {columns.label(metric)}"
    wide = smoothed(steps, metric).pivot(index=["seed", "step"], columns="arm", values="mean")
    axis.axhline(0, color=lines[base].colour, linestyle=lines[base].dashes, linewidth=0.8)
    for arm, look in lines.items():
        if arm == base or not {arm, base} <= set(wide):
            continue
        name = f"{arm} − {base}"
        apart = (wide[arm] - wide[base]).dropna().rename("mean").reset_index().rename(columns={"step": "x"})
        for seed, ours in apart.groupby("seed"):
            style.thin(axis, name, seed, ours[["x", "mean"]], look, panel or label)
        mean = apart.groupby("x")["mean"].agg(["mean", "count"]).reset_index().rename(columns={"count": "n"})
        style.line(axis, name, mean, look, panel or label)
    axis.set_xlabel("step (rollout)")
    axis.set_ylabel(label)


def compared(steps: pd.DataFrame, lines: dict[str, Look]) -> str | None:
    """The reference arm for differences seed by seed; None from ten seeds on, or if no arm shares a seed with it."""
    if len(lines) < 2 or not style.few_seeds(steps):
        return None
    base = looks.reference(lines)
    seeds = steps.groupby("arm")["seed"].agg(set)
    return base if base in seeds and any(arm != base and seeds[arm] & seeds[base] for arm in seeds.index) else None
