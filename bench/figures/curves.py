"""Figures of numbers that run over a training: one line for each thing compared. They take ``collect.steps``."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench import stats
from steadymoe.bench.figures import style
from steadymoe.bench.figures.style import Sheet

# Shares and rewards: an interval is not drawn where the quantity cannot be.
_SHARES = {"reward", "eval_accuracy", "expert_change_rate", "clip_fraction", "token_any_layer_change_rate"}
# Shares of clipped tokens are drawn on a logarithmic scale that turns linear below this, so that 0 is shown.
LEAST_CLIPPED = 1e-3
_COMPUTE = {
    "tokens": "sampled tokens",
    "updates": "gradient updates",
    "samples": "sampled responses",
    "seconds": "seconds (sampling and training)",
}
# A variance below this is one of rounding.
_NOTHING = 10 * stats.LEAST_LOG
_SECONDS = ["rollout_seconds", "old_policy_seconds", "update_seconds"]


def overview(steps: pd.DataFrame) -> Sheet:
    """Reward, expert change, token-ratio variance and clip fraction side by side."""
    with style.house():
        figure, axes = style.panels(2, 2, 4.2, style.TWO_COLUMNS)
        curves(axes[0], steps, "reward", "training reward")
        curves(axes[1], steps, "expert_change_rate", "expert-change rate")
        curves(axes[2], steps, "token_ratio_variance", "variance of the token ratio", log=True)
        curves(axes[3], steps, "clip_fraction", "clipped tokens (share)")
        axes[3].set_yscale("symlog", linthresh=LEAST_CLIPPED)
        notes = " Clipped shares: the plain mean." + style.without_clip(steps)
        notes += style.below(steps, "token_ratio_variance", _NOTHING)
        return style.finish(figure, axes[0], style.curves_caption(steps, log=True) + notes)


def reward_compute(steps: pd.DataFrame, unit: str = "tokens") -> Sheet:
    """Training reward and held-out accuracy against compute, algorithms compared (GSPO, 2507.18071, figure 1)."""
    spent = compute(steps, unit)
    with style.house():
        figure, axes = style.panels(2, 1, 3.6, sharex=True)
        curves(axes[0], steps, "reward", "training reward", x=spent)
        curves(axes[1], steps, "eval_accuracy", "held-out accuracy", x=spent, window=1)
        axes[0].set_xlabel("")
        axes[1].set_xlabel(_COMPUTE[unit])
        return style.finish(figure, axes[0], style.curves_caption(steps) + " Held-out accuracy is not smoothed.")


def replay(steps: pd.DataFrame) -> Sheet:
    """Reward and token-ratio variance with and without routing replay (GSPO, 2507.18071, figure 3)."""
    steps = steps.assign(arm=line_names(steps, ["algorithm", "routing"]))
    with style.house():
        figure, axes = style.panels(2, 1, 3.6, sharex=True)
        curves(axes[0], steps, "reward", "training reward")
        curves(axes[1], steps, "token_ratio_variance", "variance of the token ratio", log=True)
        axes[0].set_xlabel("")
        return style.finish(figure, axes[0], style.curves_caption(steps, log=True))


def staleness_panels(steps: pd.DataFrame) -> Sheet:
    """Held-out score, sampler–trainer KL, reward and entropy, a block for each staleness (MiniRL, figures 2 to 4)."""
    lines = line_names(steps, ["algorithm", "routing", "correction"])
    shown = (
        ("eval_accuracy", "held-out score", False),
        ("rollout_kl_k3", "KL(μ‖π_old)", True),
        ("reward", "training reward", False),
        ("entropy", "entropy (nats)", False),
    )
    staleness = sorted(steps["updates_per_rollout"].unique())
    with style.house():
        figure, axes = style.panels(2 * len(staleness), 2, 2.35 * len(staleness) + 0.3)
        for block, updates in enumerate(staleness):
            of_block = steps["updates_per_rollout"] == updates
            ours = steps[of_block].assign(arm=lines[of_block])
            four = axes[4 * block : 4 * block + 4]
            for axis, (metric, label, log) in zip(four, shown, strict=True):
                panel = f"N = {updates:g}, {label}"
                every = sorted(set(lines))
                window = 1 if metric == "eval_accuracy" else style.SMOOTHED_OVER
                curves(axis, ours, metric, label, log=log, every=every, panel=panel, window=window)
            four[0].set_title(f"N = {updates:g} updates per rollout", loc="left", fontweight="bold")
            for axis in four[:2]:
                axis.set_xlabel("")
        text = style.curves_caption(steps, log=True) + " The held-out score is not smoothed."
        return style.finish(figure, axes[0], text)


def staleness_grid(steps: pd.DataFrame) -> Sheet:
    """Reward over gradient updates, a panel for each method and a line for each staleness (VESPO, figure 3)."""
    staleness = sorted(steps["updates_per_rollout"].unique())
    names = line_names(steps, ["algorithm", "routing", "correction"])
    methods = sorted(set(names))
    rows = (len(methods) + 1) // 2
    with style.house():
        figure, axes = style.panels(rows, 2, 1.55 * rows + 0.5, sharex=True, sharey=True)
        for axis, method in zip(axes, methods, strict=False):
            ours = steps[names == method]
            ours = ours.assign(arm="N = " + ours["updates_per_rollout"].map("{:g}".format))
            labels = [f"N = {updates:g}" for updates in staleness]
            spent = compute(ours, "updates")
            curves(axis, ours, "reward", "training reward", x=spent, every=labels, ordered=True, panel=method)
            axis.set_title(method)
            axis.set_xlabel("gradient updates")
            axis.label_outer()
        for axis in axes[len(methods) :]:  # the place of a panel that is not there; the one above it needs its axis
            axis.remove()
            axes[-3].tick_params(labelbottom=True)
            axes[-3].set_xlabel("gradient updates")
        text = style.curves_caption(steps.assign(arm=names + " N = " + steps["updates_per_rollout"].astype(str)))
        return style.finish(figure, axes[0], text, "updates per rollout")


def mismatch(steps: pd.DataFrame) -> Sheet:
    """Reward above the mismatch of sampler and trainer, whose growth goes before collapse (DPPO, sanity figure)."""
    with style.house():
        figure, axes = style.panels(2, 1, 3.6, sharex=True)
        curves(axes[0], steps, "reward", "training reward")
        curves(axes[1], steps, "rollout_kl_k3", "KL of sampler from trainer (k3)", log=True)
        axes[0].set_xlabel("")
        return style.finish(figure, axes[0], style.curves_caption(steps, log=True))


def curves(
    axis: Axes,
    steps: pd.DataFrame,
    metric: str,
    label: str,
    log: bool = False,
    *,
    x: pd.Series | None = None,
    window: int = style.SMOOTHED_OVER,
    every: Sequence[str] | None = None,
    ordered: bool = False,
    panel: str = "",
) -> None:
    """One line per arm with its interval, over steps or over ``x`` by arm and step.

    An arm of ``every`` without the metric keeps its colour and has no line. ``ordered`` arms go from dark to light.
    """
    made = stats.curves(steps, metric, window, log)
    if metric in _SHARES:
        made[["low", "high"]] = made[["low", "high"]].clip(0, 1)
    every = sorted(steps["arm"].unique()) if every is None else every
    for index, arm in enumerate(every):
        curve = made[made["arm"] == arm].drop(columns="arm")
        if curve.empty:
            continue
        curve = curve.assign(x=curve["step"] if x is None else x[arm].reindex(curve["step"]).to_numpy())
        colour, dashes = style.ramp(index, len(every)) if ordered else style.look(index)
        style.line(axis, arm, curve[["x", "mean", "low", "high", "n"]], colour, dashes, panel)
    if log:
        axis.set_yscale("log")
        some = made[made["mean"] > _NOTHING]
        if len(some) < len(made) and len(some):  # what does not vary at all would leave no room for the rest
            axis.set_ylim(bottom=0.5 * some["mean"].min())
    axis.set_xlabel("step (rollout)")
    axis.set_ylabel(label)


def compute(steps: pd.DataFrame, unit: str) -> pd.Series:
    """What an arm has spent after each step, the mean over its seeds, by arm and step.

    A seed that ended early counts with what it had spent.
    """
    if unit == "updates":
        last = steps.groupby(["arm", "step"])["updates_per_rollout"].first()
        return last * last.index.get_level_values("step")
    metrics = {"tokens": ["tokens_sampled"], "samples": ["prompts_sampled"], "seconds": _SECONDS}[unit]
    chosen = steps[steps["metric"].isin(metrics)]
    if unit == "samples":
        chosen = chosen.assign(value=chosen["value"] * chosen["responses"])
    of_seed = chosen.groupby(["arm", "seed", "step"])["value"].sum()
    every = steps[["arm", "seed", "step"]].drop_duplicates().sort_values(["arm", "seed", "step"])
    of_seed = of_seed.reindex(pd.MultiIndex.from_frame(every), fill_value=0.0)
    return of_seed.groupby(level=["arm", "seed"]).cumsum().groupby(level=["arm", "step"]).mean()


def line_names(steps: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """What the lines of a figure compare: the algorithm, and those of ``keys`` that differ."""
    varying = [key for key in keys if key == "algorithm" or steps[key].nunique() > 1]
    names = {point: " ".join(point) for point in steps[varying].drop_duplicates().itertuples(index=False, name=None)}
    return pd.Series([names[point] for point in steps[varying].itertuples(index=False, name=None)], index=steps.index)
