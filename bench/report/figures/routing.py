"""Figures of the choices of routers, and of their effect on importance ratios."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.report import tables
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.looks import Look
from steadymoe.bench.report.figures.points import against
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.statistics.estimates import over_seeds
from steadymoe.bench.training import columns

# Axis of figure 10 → its label.
AXES = {"updates_per_rollout": "updates per rollout", "learning_rate": "learning rate", "moe_layers": "MoE layers"}
# Axis of figure 11 → its label.
SIZES = {"moe_layers": "MoE layers", "experts": "experts of a layer"}
# Figure 16: the colours of tokens with a changed and an unchanged route, and how many tokens it shows.
_CHANGED, _UNCHANGED = looks.COLOURS[1], looks.COLOURS[0]
_LARGEST = 100


def ratio_distributions(histograms: pd.DataFrame) -> DataFigure:
    """Token log-ratios, and their variance within a response, MoE beside dense twin (SAPO, 2511.20347, figures 2, 3).

    ``histograms`` is ``archive.histograms``.
    """
    alone = histograms["algorithm"].nunique() == 1
    names = histograms["model"] if alone else tables.line_names(histograms, ["model"])
    named = histograms.assign(line=names)
    lines = looks.ordered(sorted(set(names))) if alone else looks.of_lines(named, "line")
    groups = looks.groups(lines)
    with style.figure_style():
        figure, stacks = style.stacks(len(groups), 2, 1.9)
        token = np.array(columns.LOG_RATIO_EDGES, dtype=np.float32)
        decades = np.array(columns.LOG10_VARIANCE_EDGES, dtype=np.float32)
        metric = "sequence_log_ratio_variance_histogram"
        for (of_tokens, of_responses), group in zip(stacks, groups, strict=True):
            _densities(of_tokens, named, "token_ratio_histogram", token, 0.05, group, "share of tokens")
            of_tokens.set_yscale("log")
            of_tokens.set_xlabel("log π_θ/π_old of a token")
            _densities(of_responses, named, metric, decades, 0.25, group, "share of responses")
            of_responses.set_xlabel("log₁₀ of the variance of a response's token log-ratios")
        text = (
            f"Share of all updates and seeds, {style.seeds(histograms)}; no smoothing, no interval. Bins: 0.05 above, "
            "a quarter of a decade below; the outermost are open."
        )
        return style.finish(figure, of_tokens, text + style.design(histograms))


def _densities(
    axis: Axes, named: pd.DataFrame, metric: str, inner: np.ndarray, width: float, lines: dict[str, Look], label: str
) -> None:
    """Draw one stairs line per name: counts over seeds as shares; the x axis ends at the outermost counts.

    ``inner`` are the edges between bins; the two outermost bins are open, and drawn as wide as ``width``.
    """
    axis.set_ylabel(label)
    edges = np.concatenate([[inner[0] - width], inner, [inner[-1] + width]])
    chosen = named[named["metric"] == metric]
    for line, look in lines.items():
        counts = chosen[chosen["line"] == line].groupby("bin")["count"].sum().reindex(range(len(edges) - 1))
        total = counts.sum()
        if not total > 0:
            continue
        shares = (counts.fillna(0) / total).to_numpy()
        axis.stairs(shares, edges, color=look.colour, linestyle=look.dashes, linewidth=1.2, label=line, baseline=None)
        style.note(axis, line, pd.DataFrame({"x": edges[:-1], "x_end": edges[1:], "mean": shares, "count": counts}))
    filled = chosen.loc[chosen["count"] > 0, "bin"].astype(int)
    if len(filled):
        axis.set_xlim(edges[max(0, filled.min() - 1)], edges[min(len(edges) - 1, filled.max() + 2)])


def drift(steps: pd.DataFrame) -> DataFigure:
    """Expert-change rate against staleness, learning rate and depth (GSPO, 2507.18071, section 5.3, asks for depth).

    Every axis that varies has one panel. The lines of a panel are the values of the next axis; a third axis is fixed
    at its middle value.
    """
    steps = steps[steps["experts"] > 0]
    varying = [axis for axis in AXES if steps[axis].nunique() > 1]
    metric = "expert_change_rate"
    with style.figure_style():
        found = []
        for place, x in enumerate(varying):
            others = [*varying[place + 1 :], *varying[:place]]
            by, fixed = (others[0], others[1:]) if others else (None, [])
            shown = steps
            for key in fixed:
                occurring = sorted(shown[key].unique())
                shown = shown[shown[key] == occurring[len(occurring) // 2]]
            names = tables.line_names(shown, ["routing"])
            is_one = names.nunique() == 1
            if by is not None:
                values = sorted(shown[by].unique())
                texts = dict(zip(values, [f"{text} {AXES[by]}" for text in style.numbers(values)], strict=True))
                names = shown[by].map(texts) if is_one else names + " " + shown[by].map(texts)
            shown = shown.assign(line=names)
            in_order = by is not None and is_one
            lines = looks.ordered(texts.values()) if in_order else looks.of_lines(shown, "line")
            numbers = tables.run_numbers(shown, metric, "median", ["line", x, "seed"])
            title = AXES[by] if by is not None and in_order else None
            found += [(x, numbers, group, title) for group in looks.groups(lines)]
        across = 1 if len(found) == len(varying) else 2
        rows = -(-len(found) // across)
        is_wide = across > 1 or any(style.is_long(name) for _, _, group, _ in found for name in group)
        width = style.TWO_COLUMNS if is_wide else style.ONE_COLUMN
        figure, axes = style.panels(rows, across, 0.5 + 1.75 * rows, width)
        legends = []
        for axis, (x, numbers, group, title) in zip(axes, found, strict=False):
            against(axis, numbers, columns.label(metric), group, bounds=columns.bounds(metric))
            style.ticks_at(axis, steps[x], log=x != "moe_layers")
            axis.set_xlabel(AXES[x])
            axis.set_ylim(bottom=0)
            if len(group) > 1 or across > 1:
                legends.append(style.legend(axis, title, width / across))
        style.leave_room(figure, legends, rows)
        for axis in axes[len(found) :]:
            axis.remove()
        middle = "; a setting that no axis of a panel shows has its middle value" if len(varying) > 2 else ""
        return style.finish(figure, None, style.points_caption(steps, f"median over steps{middle}"))


def attribution(steps: pd.DataFrame) -> DataFigure:
    """How much of the log-ratio routing causes, against the depth, or at one depth against the number of experts.

    Above: 1 − E[(log r pinned)²] / E[(log r free)²] over a run. Below: E[(log r)²] of the tokens whose route changed
    in any layer, divided by E[(log r)²] of the other tokens.
    """
    steps = steps[steps["experts"] > 0]
    x = "moe_layers" if steps["moe_layers"].nunique() > 1 else "experts"
    names, experts, lines = tables.line_names(steps, ["routing", "engine"]), steps["experts"].astype(int), None
    if x == "moe_layers" and names.nunique() == 1:
        names = experts.astype(str) + " experts"
        lines = looks.ordered(f"{count} experts" for count in sorted(set(experts)))
    elif x == "moe_layers":
        names = names + " " + experts.astype(str) + " experts"
    steps = steps.assign(line=names)
    lines = lines or looks.of_lines(steps, "line")
    groups = looks.groups(lines)
    wide = tables.run_means(steps, ["line", x], ["log_ratio_moment_changed", "log_ratio_moment_unchanged"])
    wide = wide[(wide > 0).all(axis=1)]
    with style.figure_style():
        figure, stacks = style.stacks(len(groups), 2, 1.8, sharex=True)
        for axes, group in zip(stacks, groups, strict=True):
            against(axes[0], tables.routing_share(steps, ["line", x]), "share of routing", group)
            against(axes[1], wide.iloc[:, 0] / wide.iloc[:, 1], "E[(log r)²], changed/unchanged", group, log=True)
            for axis in style.lowest(axes):
                style.ticks_at(axis, steps[x], log=x == "experts")
                axis.set_xlabel(SIZES[x])
        return style.finish(figure, axes[0], style.points_caption(steps, "moments over all of its updates", log=True))


def tail(steps: pd.DataFrame, tails: pd.DataFrame) -> DataFigure:
    """Where the tail of the token ratio comes from: the weight of 0.1 % of the tokens, and the largest tokens.

    Left: the share of the second moment of the log-ratio in the 0.1 % of tokens that moved most, split by whether their
    route changed in any layer. Right: the largest recorded tokens (the table ``tails``) over their entropy before the
    updates, and the same with their old routes forced. GSPO (2507.18071, section 5.3) blames changed routes.
    """
    runs = tables.run_means(steps, ["arm"], ["log_ratio_moment_top_changed", "log_ratio_moment_top"])
    runs["log_ratio_moment_top_unchanged"] = runs["log_ratio_moment_top"] - runs["log_ratio_moment_top_changed"]
    runs["all tokens with a changed route"] = _changed(steps)
    arms = {str(arm): ours for arm, ours in runs.groupby(level="arm")}
    names = _distinct(list(arms))
    largest = tails.sort_values("log_ratio", key=abs, ascending=False, kind="stable").head(_LARGEST)
    is_changed = largest["layers_changed"] > 0
    with style.figure_style():
        figure, axes = style.panels(1, 2, 1.4 + style.height_of(names), style.TWO_COLUMNS)
        bars, tokens = axes
        for row, (arm, ours) in enumerate(arms.items()):
            means = {str(name): over_seeds(ours[name].dropna().tolist(), bounds=(0.0, 1.0)) for name in ours}
            changed, whole, unchanged, of_all = means.values()
            bars.barh(row, changed.mean, 0.6, color=_CHANGED, alpha=0.6)
            bars.barh(row, unchanged.mean, 0.6, changed.mean, color=_UNCHANGED, alpha=0.6)
            bars.plot(of_all.mean * whole.mean, row, "|", color="white", markersize=11, markeredgewidth=1.5)
            bars.plot([whole.low, whole.high], [row, row], color="black", linewidth=1.1)
            bars.plot(ours["log_ratio_moment_top"], [row + 0.18] * whole.n, ".", color="black", markersize=2.5)
            for name, mean in means.items():
                style.note(bars, arm, pd.DataFrame([vars(mean)]), name)
        bars.axvline(0.001, color="black", linestyle=":", linewidth=1.2, label="share of tokens: 0.1 %")
        bars.spines["left"].set_visible(False)
        bars.set_xlim(0, 1)
        bars.set_xlabel("share of Σ (log π_θ/π_old)² in 0.1 % of tokens")
        style.named_rows(bars, names, top_down=True)
        for name, colour, chosen in (
            ("route changed", _CHANGED, largest[is_changed]),
            ("route unchanged", _UNCHANGED, largest[~is_changed]),
        ):
            x, free, pinned = (chosen[key] for key in ("entropy", "log_ratio", "log_ratio_pinned"))
            tokens.vlines(x, free, pinned, color=colour, linewidth=0.5, alpha=0.5)
            tokens.plot(x, pinned, "o", color=colour, markerfacecolor="white", markersize=2.5, markeredgewidth=0.6)
            tokens.plot(x, free, "o", color=colour, markersize=3)
            bars.plot([], [], "o", color=colour, markersize=4, label=name)
            style.note(tokens, name, chosen.rename(columns={"entropy": "x", "log_ratio": "mean"}))
        bars.plot([], [], "o", color="black", markerfacecolor="white", markersize=3, label="old routes forced")
        tokens.axhline(0, color="#999999", linewidth=0.6, zorder=0)
        tokens.set_xlabel("entropy before the updates (nats)")
        tokens.set_ylabel("log π_θ/π_old of a token")
        text = (
            f"Left: mean over steps and seeds, {style.seeds(steps[steps['arm'].isin(arms)])}; line: nominal 95 % "
            "interval from three seeds on; dots: seeds; white tick: where the bar would split if changed routes did "
            f"not matter. Right: the {len(largest)} tokens that moved most, of all arms and seeds; the routes of "
            f"{is_changed.sum()} changed. Open: the same tokens with the old routes of their whole sequences."
        )
        return style.finish(figure, bars, text)


def _changed(steps: pd.DataFrame) -> pd.Series:
    """Return the share of a sample's tokens whose route changed, p, mean over steps, by arm and seed.

    It follows from E[f²] = p E[f² | changed] + (1 − p) E[f² | unchanged]; a step averages each over its updates.
    """
    names = [f"log_ratio_moment_{name}" for name in ("free", "changed", "unchanged")]
    chosen = steps[steps["metric"].isin(names)]
    wide = chosen.set_index(["arm", "seed", "step", "metric"])["value"].unstack("metric").reindex(columns=names)
    free, changed, unchanged = (wide[name] for name in names)
    share = ((free - unchanged) / (changed - unchanged)).clip(0, 1)
    return share.fillna(changed.notna().astype(float)).groupby(["arm", "seed"]).mean()


def _distinct(arms: list[str]) -> list[str]:
    """Return the names of arms, wrapped, without the words after the first that all of them share."""
    shared = set.intersection(*(set(arm.split()[1:]) for arm in arms)) if len(arms) > 1 else set()
    return style.wrapped(" ".join(word for word in arm.split() if word not in shared) for arm in arms)
