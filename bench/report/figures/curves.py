"""Figures of metrics over the steps of training, one line per arm, from ``Results.joined["steps"]``.

Below ten seeds a figure has no bands: it shows each seed as a thin line, and its difference from another arm.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.report import paper, tables
from steadymoe.bench.report.figures import colours, style
from steadymoe.bench.report.figures.colours import Look
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.statistics import estimates
from steadymoe.bench.training import columns

# Shares of clipped tokens are drawn on a logarithmic scale that turns linear below this, so that 0 is shown.
MIN_CLIPPED = 1e-3
_OVERVIEW = REWARD, _, VARIANCE, CLIPPED = columns.names(
    "reward", "expert_change_rate", "token_ratio_variance", "clip_fraction"
)
ACCURACY, TOKENS, KL = columns.names("eval_accuracy", "tokens_sampled", "rollout_kl_k3")
_LOGARITHMIC = {VARIANCE, KL}
_MAX_OWN = 8
_STEP = "step (rollout)"
# The difference that GSPO's paper is about.
LEAD = {"algorithm": ("gspo", "grpo")}
# A variance below this is one of rounding.
_NOTHING = 10 * estimates.MIN_LOG


def overview(steps: pd.DataFrame) -> DataFigure:
    """Reward, expert change, token-ratio variance and clip fraction side by side.

    A metric that no run recorded (``measure=little``, a dense model) has no panel.
    """
    shown = [metric for metric in _OVERVIEW if metric in set(steps["metric"])]
    notes = " Clipped shares: the plain mean." + style.without_clip(steps) if CLIPPED in shown else ""
    return _beside(steps, shown, 2, notes + style.below(steps, VARIANCE, _NOTHING))


def reward_compute(steps: pd.DataFrame) -> DataFigure:
    """Training reward and held-out accuracy against compute, algorithms compared (GSPO, 2507.18071, figure 1)."""
    note = " Held-out accuracy is not smoothed." + effect(steps, ACCURACY, "end", LEAD, "above 0")
    return _beside(steps, (REWARD, ACCURACY), 3, note, differs=True, over_tokens=True)


def replay(steps: pd.DataFrame) -> DataFigure:
    """Reward and token-ratio variance with and without routing replay (GSPO, 2507.18071, figure 3)."""
    replayed, claims = {"routing": ("r2", "off")}, {"grpo": "above 0", "gspo": "0"}
    notes = [effect(steps, ACCURACY, "end", replayed, claimed, algorithm=name) for name, claimed in claims.items()]
    return _beside(steps, (REWARD, VARIANCE), 3, "".join(notes), differs=True)


def own_numbers(steps: pd.DataFrame) -> DataFigure:
    """The numbers that losses report, a panel for each of the first eight by name."""
    return _beside(steps, own_metrics(steps)[:_MAX_OWN], 2)


def own_metrics(steps: pd.DataFrame) -> list[str]:
    """Return the names of the losses' own numbers in ``steps``, sorted."""
    return sorted(filter(columns.is_own, steps["metric"].unique()))


def _beside(
    steps: pd.DataFrame,
    metrics: Sequence[str],
    across: int,
    notes: str = "",
    differs: bool = False,
    over_tokens: bool = False,
) -> DataFigure:
    """Draw a panel for each metric, ``across`` of them side by side, over steps or sampled tokens.

    Each model has a block of its own, and so has each group of more lines than a panel holds. With few seeds the last
    panel of a block has differences in reward, if it ``differs``.
    """
    experts = steps.groupby("model", observed=True)["experts"].max()
    models = sorted(map(str, experts.index), key=lambda model: (experts[model] == 0, model))  # dense twins last
    named = {model: _without_word(steps[steps["model"] == model], model) for model in models}
    named = named if len(models) > 1 else {models[0]: steps}
    looks = colours.of_lines(pd.concat(named.values()))  # a line looks the same in every block
    lines = {model: {arm: looks[arm] for arm in looks if (ours["arm"] == arm).any()} for model, ours in named.items()}
    rows = [(model, group) for model in models for group in colours.groups(lines[model])]
    bases = {model: compared(named[model], lines[model]) if differs else None for model in models}
    count, side = len(metrics) + any(bases.values()), 1 if paper.current().columns == 1 else style.beside(across)
    with style.figure_style():
        if len(rows) > 1:
            figure, blocks = style.blocks(len(rows), count, 1.8)
        else:
            down = -(-count // side)
            figure, axes = style.panels(down, min(count, side), 2.1 * down, style.TWO_COLUMNS)
            blocks = [axes]
        for axes, (model, group) in zip(blocks, rows, strict=True):
            ours, base = named[model], bases[model]
            kind = f"MoE, {experts[model]:.0f} experts" if experts[model] > 0 else "dense"
            x, title = sampled_tokens(ours) if over_tokens else None, f"{kind} ({model})" if len(models) > 1 else ""
            for axis, metric in zip(axes, metrics, strict=False):
                curves(axis, ours, metric, group, x, f"{title}, {columns.label(metric)}" if title else "")
                if metric == CLIPPED:
                    axis.set_yscale("symlog", linthresh=MIN_CLIPPED)
            if base is not None:
                differences(axes[count - 1], ours, REWARD, {base: lines[model][base]} | group, title, x)
            for axis in axes[len(metrics) + (base is not None) :]:
                axis.remove()
            for axis in axes[:count]:
                axis.set_xlabel(_STEP if x is None else "sampled tokens")
                if not axis.has_data():  # such as experts of a dense model
                    axis.text(0.5, 0.5, "none", ha="center", transform=axis.transAxes)
            axes[0].set_title(title, loc="left")
        base = next(filter(None, bases.values()), None)
        text = style.describe(steps, log=not _LOGARITHMIC.isdisjoint(metrics), against=base)
        text += " Δ at equal sampled tokens." if over_tokens and base is not None else ""
        return style.finish(figure, blocks[0][0], text + notes + style.covered(steps, metrics))


def effect(
    steps: pd.DataFrame, metric: str, how: str, between: Mapping[str, tuple[str, str]], claimed: str, **where: str
) -> str:
    """Return the sentence that sets a difference beside what a paper says of it; "" if nothing was run that shows it.

    The difference: of one of ``tables.NUMBERS`` between the first and the second value of the column in ``between``, of
    runs whose other columns are as ``where`` says, else off; paired by seed and start. ``claimed`` is the paper's.
    """
    ((column, (above, below)),) = between.items()
    plain = {"routing": "off", "correction": "off"} | where
    found = []
    for model, ours in tables.by_start(steps).groupby("model", observed=True):
        sides = []
        for value in (above, below):
            asked = plain | {column: value}
            its = ours[np.logical_and.reduce([ours[key] == wanted for key, wanted in asked.items()])]
            sides.append(tables.run_numbers(its, metric, how, ["seed"]) if its["arm"].nunique() == 1 else pd.Series())
        apart = (sides[0] - sides[1]).dropna()
        if len(apart):
            estimate = estimates.over_seeds(apart.tolist(), bounds=estimates.DIFFERENCE)
            verdict = "above 0" if estimate.low > 0 else "below 0" if estimate.high < 0 else "not told from 0"
            found.append(f"{model} {estimate}, n = {estimate.n}, {verdict}")
    label, names = columns.label(metric), [paper.shown(name, name) for name in (*where.values(), above, "−", below)]
    said = f" {label[0].upper()}{label[1:]}, {' '.join(names)} (the paper: {claimed}): {'; '.join(found)}."
    return said if found else ""


def _without_word(steps: pd.DataFrame, model: str) -> pd.DataFrame:
    """Return ``steps`` of one model with arms that do not name it."""
    names = {arm: " ".join(w for w in arm.split(" ") if w != model) for arm in steps["arm"].unique()}
    return steps.assign(arm=steps["arm"].map(names))


def staleness_grid(steps: pd.DataFrame) -> DataFigure:
    """Reward over the gradient updates before each rollout, a line for each staleness (VESPO, figure 3).

    A panel for each method. With few seeds, panels below show each seed's difference from the least staleness at equal
    updates.
    """
    stale = (steps := steps[steps["metric"] == REWARD])["updates_per_rollout"]
    dials = ("updates_per_rollout", "minibatch_prompts")
    methods_of = tables.arm_names(steps, ["model", "routing", "correction"], dials)
    steps = steps.assign(method=methods_of, begun=(steps["step"] - 1) * stale)
    # Small rollouts are noisy: a point is a mean over about a sixteenth of the training.
    around = (steps["begun"] + stale).max() / 32
    runs = [run.sort_values("step") for _, run in steps.groupby(["arm", "seed"], observed=True)]
    smooth = [_centred(run, int(around // run["updates_per_rollout"].iloc[0])) for run in runs]
    steps = pd.concat(smooth, ignore_index=True)
    steps["arm"] = "N = " + steps["updates_per_rollout"].map("{:g}".format)
    x = steps.drop_duplicates(["arm", "step"]).set_index(["arm", "step"])["begun"]
    methods = sorted(set(steps["method"]))
    lines = colours.ordered(f"N = {updates:g}" for updates in sorted(stale.unique()))
    is_wide = len(methods) > colours.TOGETHER and paper.current().columns != 1
    across, width = (4, style.TWO_COLUMNS) if is_wide else (min(2, len(methods)), style.ONE_COLUMN)
    base = None if is_wide else compared(steps, lines)
    rows, kinds = -(-len(methods) // across), 1 if base is None else 2
    with style.figure_style():
        figure, axes = style.panels(rows * kinds, across, 1.55 * rows * kinds + 0.5, width, sharex=True)
        grid: Any = np.array(axes).reshape(rows, kinds, across)
        for kind, row, right in np.ndindex(kinds, rows, across):  # rewards, then differences
            axis, place = grid[row, kind, right], across * row + right
            if axis is not grid[0, kind, 0]:
                axis.sharey(grid[0, kind, 0])
            if place >= len(methods):  # an empty place in the grid of panels
                axis.remove()
                continue
            ours = steps[steps["method"] == methods[place]]
            (differences if kind else curves)(axis, ours, REWARD, lines, x=x, panel=methods[place])
            if kind == 0:
                axis.set_title(*style.wrapped([methods[place]], figure.get_figwidth() / across - 0.4))
            is_lowest = kind == kinds - 1 and place + across >= len(methods)
            axis.set_xlabel("gradient updates so far" if is_lowest else "")
            axis.set_ylabel("" if right else axis.get_ylabel())
            axis.tick_params(labelbottom=is_lowest, labelleft=not right)
        text = style.describe(steps.assign(arm=steps["method"] + " " + steps["arm"]), against=base)
        if around >= stale.min():
            text += (
                f" Points average rollouts within {around:g} updates on either side; the first and last stand alone."
            )
        return style.finish(figure, axes[0], text, "updates per rollout")


def _centred(run: pd.DataFrame, most: int) -> pd.DataFrame:
    """Return the steps of a run with means over ``most`` values on either side; near an end fewer, on both alike."""
    sums, place = np.concatenate([[0.0], run["value"].cumsum()]), np.arange(len(run))
    reach = np.minimum(most, np.minimum(place, place[::-1]))
    return run.assign(value=(sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1), averaged=True)


def curves(
    axis: Axes,
    steps: pd.DataFrame,
    metric: str,
    lines: dict[str, Look],
    x: pd.Series | None = None,
    panel: str = "",
) -> None:
    """Draw one line per arm of ``lines`` over steps, or over ``x`` (indexed by arm and step).

    A line has its interval from ten seeds on; below ten seeds every seed has a thin line. ``panel`` names the panel
    among the figure's numbers, in place of the label of its y axis. Variances and divergences have a logarithmic
    axis and geometric means.
    """
    log = metric in _LOGARITHMIC
    axis.set_xlabel(_STEP)
    axis.set_ylabel(columns.label(metric))
    over = style.smoothed_over(metric, steps)
    few_seeds, steps = style.few_seeds(steps), steps[steps["arm"].isin(lines)]
    means = estimates.curves(steps, metric, over, log, columns.bounds(metric))
    single = _seeds(steps, metric, log, over) if few_seeds else means.iloc[:0].assign(seed=0)
    for rows in (means, single):
        rows["x"] = rows["step"] if x is None else x.reindex(pd.MultiIndex.from_frame(rows[["arm", "step"]])).to_numpy()
    shown = ["x", "mean", "n"] if few_seeds else ["x", "mean", "low", "high", "n"]
    for arm, look in lines.items():
        curve = means.loc[means["arm"] == arm, shown]
        if curve.empty:  # an arm without the metric
            continue
        style.thin(axis, arm, single[single["arm"] == arm], look, panel)
        style.line(axis, arm, curve, look, panel)
    if log and (means["mean"] > 0).any():
        axis.set_yscale("log")
        some = means[means["mean"] > _NOTHING]
        if len(some) < len(means) and len(some):  # what does not vary at all would leave no room for the rest
            axis.set_ylim(bottom=0.5 * some["mean"].min())


def differences(
    axis: Axes, steps: pd.DataFrame, metric: str, lines: dict[str, Look], panel: str = "", x: pd.Series | None = None
) -> None:
    """Draw each arm minus the reference arm at the same seed and step: one thin line per seed, and their mean.

    With ``x`` (indexed by arm and step) the arms are compared at equal x: the reference's curve is interpolated to the
    places of the arm, as far as the reference has come.
    """
    base, label = colours.reference(lines), f"Δ {columns.label(metric)}"
    single = _seeds(steps, metric, False, style.smoothed_over(metric, steps))
    wide = single.pivot(index=["seed", "step"], columns="arm", values="mean")
    style.zero(axis, lines[base])
    paired = _paired_seeds(steps, base)
    for arm, look in lines.items():
        if arm == base or not {arm, base} <= set(wide) or not paired.get(arm):
            continue
        name = f"{arm} − {base}"
        at_one_start = wide[arm].where(wide.index.get_level_values("seed").isin(paired[arm]))
        its = wide[base] if x is None else _moved(wide[base], x[base], x[arm])
        apart = (at_one_start - its).dropna().rename("mean").reset_index().rename(columns={"step": "x"})
        apart = apart if x is None else apart.assign(x=x[arm].reindex(apart["x"]).to_numpy())
        style.thin(axis, name, apart, look, panel or label)
        mean = apart.groupby("x")["mean"].agg(["mean", "count"]).reset_index().rename(columns={"count": "n"})
        style.line(axis, name, mean, look, panel or label)
    axis.set_xlabel(_STEP)
    axis.set_ylabel(label)


def _moved(curves: pd.Series, x: pd.Series, to: pd.Series) -> pd.Series:
    """Return curves over seed and step at the x of another arm (``to``, by step): flat before theirs, nan beyond."""
    parts = {}
    for seed, own in curves.dropna().groupby(level="seed"):
        at = x.reindex(own.index.get_level_values("step")).to_numpy()
        parts[seed] = pd.Series(np.interp(to, at, own, right=np.nan), to.index)
    return pd.concat(parts, names=["seed", "step"])


def compared(steps: pd.DataFrame, lines: dict[str, Look]) -> str | None:
    """Return the reference arm for differences seed by seed.

    None from ten seeds on, if no arm shares a seed with the reference, and for more lines than a panel holds.
    """
    if not 2 <= len(lines) <= colours.TOGETHER or not style.few_seeds(steps):
        return None
    base = colours.reference(lines)
    return base if any(seeds for arm, seeds in _paired_seeds(steps, base).items() if arm != base) else None


def _paired_seeds(steps: pd.DataFrame, base: str) -> dict[str, set[int]]:
    """Return the seeds at which each arm begins at the cold start of the arm ``base``."""
    found = steps.filter(["arm", "seed", "start"]).drop_duplicates()
    found["pair"] = tables.by_start(found)["seed"]
    shared = set(found.loc[found["arm"] == base, "pair"])
    return {
        str(arm): set(own.loc[own["pair"].isin(shared), "seed"]) for arm, own in found.groupby("arm", observed=True)
    }


def _seeds(steps: pd.DataFrame, metric: str, log: bool, over: int) -> pd.DataFrame:
    """Return one metric of every seed by itself, smoothed like the mean: arm, seed, step, mean."""
    chosen = steps[steps["metric"] == metric]
    parts = [estimates.curves(ours, metric, over, log).assign(seed=seed) for seed, ours in chosen.groupby("seed")]
    names = ["arm", "seed", "step", "mean"]
    return pd.concat(parts, ignore_index=True)[names] if parts else pd.DataFrame(columns=names)


def sampled_tokens(steps: pd.DataFrame) -> pd.Series:
    """Return the tokens that an arm has sampled until each step, the mean over its seeds, by arm and step.

    A seed that ended early counts with the tokens that it had sampled.
    """
    chosen = steps[steps["metric"] == TOKENS]
    spent = chosen.groupby(["arm", "seed", "step"])["value"].sum()
    every = steps[["arm", "seed", "step"]].drop_duplicates().sort_values(["arm", "seed", "step"])
    spent = spent.reindex(pd.MultiIndex.from_frame(every), fill_value=0.0)
    return spent.groupby(level=["arm", "seed"]).cumsum().groupby(level=["arm", "step"]).mean()
