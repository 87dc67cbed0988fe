"""Figures of the choices of routers, and of their effect on importance ratios."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.measurement import columns
from steadymoe.bench.report import tables
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.curves import line_names
from steadymoe.bench.report.figures.looks import Look
from steadymoe.bench.report.figures.points import RunNumber, against
from steadymoe.bench.report.figures.style import DataFigure

# Axis of figure 10 → its label.
_AXES = {"updates_per_rollout": "updates per rollout", "learning_rate": "learning rate", "moe_layers": "MoE layers"}
# Axis of figure 11 → its label.
_DIALS = {"moe_layers": "MoE layers", "experts": "experts of a layer"}


def ratio_distributions(histograms: pd.DataFrame) -> DataFigure:
    """Token log-ratios, and their variance within a response, MoE beside dense twin (SAPO, 2511.20347, figures 2, 3).

    ``histograms`` is ``collect.histograms``.
    """
    alone = histograms["algorithm"].nunique() == 1
    names = histograms["model"] if alone else line_names(histograms, ["algorithm", "model"])
    named = histograms.assign(line=names)
    models = sorted(set(names))
    every = _ramp(models) if alone else looks.of_lines(named, "line")
    with style.figure_style():
        figure, axes = style.panels(2, 1, 3.8)
        inner = np.array(columns.LOG_RATIO_EDGES, dtype=np.float32)
        token = np.concatenate([[inner[0] - 0.05], inner, [inner[-1] + 0.05]])
        _densities(axes[0], named, "token_ratio_histogram", token, every, "share of tokens")
        axes[0].set_xlabel("log π_θ/π_old of a token")
        decades = np.array(columns.LOG10_VARIANCE_EDGES, dtype=np.float32)
        sequence = np.concatenate([[decades[0] - 0.25], decades, [decades[-1] + 0.25]])
        of_responses = "sequence_log_ratio_variance_histogram"
        _densities(axes[1], named, of_responses, sequence, every, "share of responses", log=False)
        axes[1].set_xlabel("log₁₀ of the variance of a response's token log-ratios")
        text = (
            f"Share of all updates and seeds, {style.seeds(histograms)}; no smoothing, no interval. Bins: 0.05 above, "
            "a quarter of a decade below; the outermost are open."
        )
        return style.finish(figure, axes[0], text + style.design(histograms))


def _densities(
    axis: Axes,
    named: pd.DataFrame,
    metric: str,
    edges: np.ndarray,
    every: dict[str, Look],
    label: str,
    log: bool = True,
) -> None:
    """One stairs line for each of ``every``: counts over seeds as shares; the x axis ends at the outermost counts."""
    axis.set_ylabel(label)
    chosen = named[named["metric"] == metric]
    filled = [0, len(edges) - 2]
    for line, look in every.items():
        counts = chosen[chosen["line"] == line].groupby("bin")["count"].sum().reindex(range(len(edges) - 1))
        total = counts.sum()
        if not total > 0:
            continue
        shares = (counts.fillna(0) / total).to_numpy()
        axis.stairs(shares, edges, color=look.colour, linestyle=look.dashes, linewidth=1.2, label=line, baseline=None)
        style.note(axis, line, pd.DataFrame({"x": edges[:-1], "x_end": edges[1:], "mean": shares, "count": counts}))
    seen = chosen.loc[chosen["count"] > 0, "bin"]
    if len(seen):
        filled = [int(seen.min()), int(seen.max())]
    axis.set_xlim(edges[max(0, filled[0] - 1)], edges[min(len(edges) - 1, filled[1] + 2)])
    if log:
        axis.set_yscale("log")


def drift(steps: pd.DataFrame) -> DataFigure:
    """Expert-change rate against staleness, learning rate and depth (GSPO, 2507.18071, section 5.3, asks for depth).

    Every axis that varies has one panel. The lines of a panel are the values of the next axis; a third axis is fixed
    at its middle value.
    """
    steps = steps[steps["experts"] > 0]
    varying = [axis for axis in _AXES if steps[axis].nunique() > 1]
    with style.figure_style():
        figure, axes = style.panels(len(varying), 1, 0.5 + 1.75 * len(varying))
        for place, (panel, x) in enumerate(zip(axes, varying, strict=True)):
            others = [axis for axis in [*varying[place + 1 :], *varying[:place]] if axis != x]
            by = others[0] if others else None
            shown = steps
            for other in others[1:]:
                shown = shown[shown[other] == _middle(shown[other])]
            names = line_names(shown, ["algorithm", "routing"])
            if by is not None:
                values = sorted(shown[by].unique())
                of = dict(zip(values, [f"{number} {_AXES[by]}" for number in style.numbers(values)], strict=True))
                names = shown[by].map(of) if names.nunique() == 1 else names + " " + shown[by].map(of)
            shown = shown.assign(line=names)
            ordered = by is not None and set(names) == set(of.values())
            every = _ramp(of.values()) if ordered else looks.of_lines(shown, "line")
            number = RunNumber("expert_change_rate", "median", columns.label("expert_change_rate"))
            logx = x != "moe_layers"
            against(panel, shown, x, number, every, logx=logx)
            if logx:
                panel.set_xscale("log")
            ticks = sorted(steps[x].unique())
            panel.set_xticks(ticks, style.numbers(ticks))
            panel.set_xticks([], minor=True)
            panel.set_xlabel(_AXES[x])
            panel.set_ylim(bottom=0)
            if names.nunique() > 1:
                style.legend(panel, _AXES[by] if by is not None and ordered else None)
        kept = "; a setting that no axis of a panel shows has its middle value" if len(varying) > 2 else ""
        return style.finish(figure, None, style.points_caption(steps, f"median over steps{kept}"))


def _ramp(names: Iterable[str]) -> dict[str, Look]:
    """Name → look, for lines that have an order."""
    kept = list(names)
    return {name: looks.ramp(place, len(kept)) for place, name in enumerate(kept)}


def _middle(values: pd.Series) -> float:
    """The middle one of the different values."""
    occurring = sorted(values.unique())
    return occurring[len(occurring) // 2]


def attribution(steps: pd.DataFrame) -> DataFigure:
    """How much of the log-ratio routing causes, against the depth, or at one depth against the number of experts.

    Above: 1 − E[(log r pinned)²] / E[(log r free)²] over a run. Below: E[(log r)²] of the tokens whose route changed
    in any layer, divided by E[(log r)²] of the other tokens.
    """
    steps = steps[steps["experts"] > 0]
    dial = "moe_layers" if steps["moe_layers"].nunique() > 1 else "experts"
    lines = line_names(steps, ["algorithm", "routing", "engine"])
    every = looks.of_lines(steps.assign(line=lines), "line")
    if dial == "moe_layers":
        experts = steps["experts"].astype(int)
        named = experts.astype(str) + " experts"
        one = lines.nunique() == 1
        lines = named if one else lines + " " + named
        in_order = [f"{count} experts" for count in sorted(set(experts))]
        every = _ramp(in_order) if one else looks.of_lines(steps.assign(line=lines), "line")
    steps = steps.assign(line=lines)
    with style.figure_style():
        figure, axes = style.panels(2, 1, 3.6, sharex=True)
        shares = tables.routing_share(steps, ["line", dial]).rename("value").reset_index()
        shares = shares.assign(metric="share", step=1)
        logx = dial == "experts"
        against(axes[0], shares, dial, RunNumber("share", "last", "share of routing"), every, logx=logx)
        changed = _ratio(steps, dial, "log_ratio_moment_changed", "log_ratio_moment_unchanged")
        number = RunNumber("ratio", "last", "E[(log r)²], changed/unchanged", log=True)
        against(axes[1], changed, dial, number, every, logx=logx)
        ticks = sorted(steps[dial].unique())
        if logx:
            axes[1].set_xscale("log")
        axes[1].set_xlabel(_DIALS[dial])
        axes[1].set_xticks(ticks, style.numbers(ticks))
        axes[1].set_xticks([], minor=True)
        return style.finish(figure, axes[0], style.points_caption(steps, "moments over all of its updates", log=True))


def _ratio(steps: pd.DataFrame, dial: str, above: str, below: str) -> pd.DataFrame:
    """The ratio of two metrics' means over a run, as a metric ``ratio``; runs without both metrics are left out."""
    chosen = steps[steps["metric"].isin([above, below])]
    means = chosen.groupby(["line", dial, "seed", "metric"])["value"].mean().unstack("metric")
    both = means.reindex(columns=[above, below]).dropna()
    both = both[(both > 0).all(axis=1)]
    return (both[above] / both[below]).rename("value").reset_index().assign(metric="ratio", step=1)
