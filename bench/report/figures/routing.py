"""Figures of the choices of routers, and of their effect on importance ratios."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.report import tables
from steadymoe.bench.report.figures import colours, style
from steadymoe.bench.report.figures.colours import Look
from steadymoe.bench.report.figures.points import against
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.training import columns

CHANGE, CHANGED, UNCHANGED = columns.names(
    "expert_change_rate", "log_ratio_moment_changed", "log_ratio_moment_unchanged"
)
TOKENS, RESPONSES = columns.names("token_ratio_histogram", "sequence_log_ratio_variance_histogram")
# Axis of figure 10 → its label.
AXES = {"updates_per_rollout": "updates per rollout", "learning_rate": "learning rate", "moe_layers": "MoE layers"}
_DIALS = (*AXES, "optimizer.learning_rate", "num_hidden_layers", "minibatch_prompts")
# Axis of figure 11 → its label.
SIZES = {"moe_layers": "MoE layers", "experts": "experts of a layer"}


def ratio_distributions(histograms: pd.DataFrame) -> DataFigure:
    """Token log-ratios, and their variance within a response, MoE beside dense twin (SAPO, 2511.20347, figures 2, 3).

    ``histograms`` is that of ``Results.joined``.
    """
    alone = histograms["algorithm"].nunique() == 1
    names = histograms["model"] if alone else tables.arm_names(histograms, ["model"])
    named = histograms.assign(arm=names)
    lines = colours.ordered(sorted(set(names))) if alone else colours.of_lines(named)
    groups = colours.groups(lines)
    with style.figure_style():
        figure, stacks = style.stacks(len(groups), 2, 1.9)
        token = np.array(columns.LOG_RATIO_EDGES, dtype=np.float32)
        decades = np.array(columns.LOG10_VARIANCE_EDGES, dtype=np.float32)
        for (of_tokens, of_responses), group in zip(stacks, groups, strict=True):
            _densities(of_tokens, named, TOKENS, token, 0.05, group, "share of tokens")
            of_tokens.set_yscale("log")
            of_tokens.set_xlabel("log π_θ/π_old of a token")
            _densities(of_responses, named, RESPONSES, decades, 0.25, group, "share of responses")
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
        counts = chosen[chosen["arm"] == line].groupby("bin")["count"].sum().reindex(range(len(edges) - 1))
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
    varying = [axis for axis in AXES if steps[axis].nunique() > 1]
    with style.figure_style():
        panels = [(x, *panel) for x in varying for panel in _panels_over(x, varying, steps)]
        across = 1 if len(panels) == len(varying) else 2
        rows = -(-len(panels) // across)
        is_wide = across > 1 or any(style.is_long(name) for _, _, group, _ in panels for name in group)
        width = style.TWO_COLUMNS if is_wide else style.ONE_COLUMN
        figure, axes = style.panels(rows, across, 0.5 + 1.75 * rows, width)
        legends = []
        for axis, (x, numbers, group, title) in zip(axes, panels, strict=False):
            against(axis, numbers, columns.label(CHANGE), group, bounds=columns.bounds(CHANGE))
            style.ticks_at(axis, steps[x], log=x != "moe_layers")
            axis.set_xlabel(AXES[x])
            axis.set_ylim(bottom=0)
            if len(group) > 1 or across > 1:
                legends.append(style.legend(axis, title, width=width / across))
        style.leave_room(figure, legends, rows)
        for axis in axes[len(panels) :]:
            axis.remove()
        middle = "; a setting that no axis of a panel shows has its middle value" if len(varying) > 2 else ""
        return style.finish(figure, None, style.describe(steps, f"median over steps{middle}"))


def _panels_over(
    x: str, varying: list[str], steps: pd.DataFrame
) -> Iterator[tuple[pd.Series, dict[str, Look], str | None]]:
    """Yield the panels over one of the axes that vary: the numbers of its lines, their looks, and their legend's title.

    A panel holds lines for the values of the next axis. They are in an order if nothing else tells lines apart.
    """
    place = varying.index(x)
    others = [*varying[place + 1 :], *varying[:place]]
    by, fixed = (others[0], others[1:]) if others else (None, [])
    for key in fixed:
        occurring = sorted(steps[key].unique())
        steps = steps[steps[key] == occurring[len(occurring) // 2]]
    names, texts = tables.arm_names(steps, ["model", "routing"], _DIALS), {}
    is_one = names.nunique() == 1
    if by is not None:
        values = sorted(steps[by].unique())
        texts = dict(zip(values, [f"{text} {AXES[by]}" for text in style.numbers(values)], strict=True))
        names = steps[by].map(texts) if is_one else names + " " + steps[by].map(texts)
    steps = steps.assign(arm=names)
    title = AXES[by] if is_one and by is not None else None
    lines = colours.ordered(texts.values()) if title else colours.of_lines(steps)
    numbers = tables.run_numbers(steps, CHANGE, "median", ["arm", x, "seed"])
    for group in colours.groups(lines):
        yield numbers, group, title


def attribution(steps: pd.DataFrame) -> DataFigure:
    """How much of the log-ratio routing causes, against the depth, or at one depth against the number of experts.

    Above: 1 − E[(log r pinned)²] / E[(log r free)²] over a run. Below: E[(log r)²] of the tokens whose route changed
    in any layer, divided by E[(log r)²] of the other tokens.
    """
    x = "moe_layers" if steps["moe_layers"].nunique() > 1 else "experts"
    names, experts, lines = tables.arm_names(steps, ["routing", "engine"]), steps["experts"].astype(int), None
    if x == "moe_layers" and names.nunique() == 1:
        names = experts.astype(str) + " experts"
        lines = colours.ordered(f"{count} experts" for count in sorted(set(experts)))
    elif x == "moe_layers":
        names = names + " " + experts.astype(str) + " experts"
    named = steps.assign(arm=names)
    lines = lines or colours.of_lines(named)
    groups = colours.groups(lines)
    wide = tables.run_means(named, ["arm", x], [CHANGED, UNCHANGED])
    wide = wide[(wide > 0).all(axis=1)]
    with style.figure_style():
        figure, stacks = style.stacks(len(groups), 2, 1.8, sharex=True)
        for axes, group in zip(stacks, groups, strict=True):
            against(axes[0], tables.routing_share(named, ["arm", x]), "share of routing", group)
            against(axes[1], wide.iloc[:, 0] / wide.iloc[:, 1], "E[(log r)²], changed/unchanged", group, log=True)
            for axis in style.lowest(axes):
                style.ticks_at(axis, steps[x], log=x == "experts")
                axis.set_xlabel(SIZES[x])
        return style.finish(figure, axes[0], style.describe(steps, "moments over all of its updates", log=True))
