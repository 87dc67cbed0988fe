"""Every figure stays legible from one arm to all algorithms: no text lies over another or over a panel."""

import itertools

import pandas as pd
import pytest
from matplotlib.legend import Legend
from matplotlib.text import Text
from test_figures import arms, long_table

from steadymoe import conf
from steadymoe.bench.report.figures import FIGURES, style
from steadymoe.bench.statistics.estimates import Estimate

# Presets too; the longest name has 40 characters.
NAMES = conf.names("algorithm")
# Few: each has a thin line.
SEEDS = 2
# The least share of a figure's area that panels have, and the most that legends have.
MIN_PANELS, MAX_LEGENDS = 0.3, 0.3
METRICS = (
    *("reward", "eval_accuracy", "tokens_sampled", "clip_fraction", "expert_change_rate", "token_ratio_variance"),
    *("rollout_kl_k3", "entropy", "log_ratio_moment_top", "log_ratio_moment_top_changed", "log_ratio_moment_free"),
    *("log_ratio_moment_changed", "log_ratio_moment_unchanged", "log_ratio_moment_pinned"),
)
# What the runs of a figure vary besides the algorithm.
VARY: dict[str, dict[str, list[object]]] = {
    "fig03": {"routing": ["off", "r2"]},
    "fig04": {"updates_per_rollout": [4, 16]},
    "fig05": {"updates_per_rollout": [4, 8, 16]},
    "fig07": {"engine": ["fp8"]},
    "fig10": {"updates_per_rollout": [4, 16], "learning_rate": [1e-4, 4e-4]},
    "fig11": {"moe_layers": [2, 4, 8]},
    "fig14": {"engine": ["router_noise"], "strength": [0.0, 0.5, 2.0]},
    "fig17": {"learning_rate": [1e-4, 2e-4, 4e-4]},
    "fig15": {"learning_rate": [1e-4, 2e-4, 4e-4], "updates_per_rollout": [4, 16]},
}


def value(metric: str, arm: dict[str, object], seed: int) -> float:
    """Return numbers that differ between arms, seeds and steps."""
    place = NAMES.index(str(arm["algorithm"])) + 0.1 * seed + 0.3 * float(str(arm.get("strength", 0)))
    share = 0.1 + 0.8 * (0.37 * place % 1) * (1 - 0.5 / float(str(arm["step"])))
    return {"tokens_sampled": 1e4 * share, "log_ratio_moment_free": 1.0}.get(metric, share)


def data(figure: str, names: list[str]) -> dict[str, pd.DataFrame]:
    """Return the tables of an experiment of these algorithms that has what ``figure`` varies."""
    vary = VARY.get(figure, {})
    values = {metric: lambda arm, seed, metric=metric: value(metric, arm, seed) for metric in METRICS}
    steps = long_table(values, arms(algorithm=names, **vary), seeds=SEEDS, steps=3)
    first = steps[(steps["metric"] == "eval_accuracy") & (steps["step"] == 1)].assign(step=0)
    steps = pd.concat([first, steps], ignore_index=True).assign(axes="")
    each = steps[["arm", "algorithm"]].drop_duplicates().to_dict("records")
    survival = pd.DataFrame({"step": [0, 10, 50], "survival": [1.0, 0.6, 0.6], "low": 0.1, "high": 1.0, "n": 5})
    grid = pd.DataFrame(arms(arm=names, x=[1e-4, 2e-4, 4e-4], y=[2, 4, 8])).assign(stable=0.67, n=3)
    metrics = ["reward", "entropy", "sequence_ratio_variance", *(f"metric_{letter}" for letter in "abcdef")]
    roc = pd.DataFrame([{"metric": name, "false_alarms": x, "detected": x} for name in metrics for x in (0, 0.5, 1)])
    tokens = {"seed": 0, "log_ratio": 1.5, "log_ratio_pinned": 0.5, "layers_changed": 1, "entropy": 0.4}
    counts = [
        {"arm": f"{name} {model}", "algorithm": name, "model": model, "seed": 0, "metric": metric, "bin": 20 + at}
        | {"count": 5 + at, "updates_per_rollout": 8, "prompts": 32}
        for name, model in itertools.product(names, ("dense_micro", "micro"))
        for metric in ("token_ratio_histogram", "sequence_log_ratio_variance_histogram")
        for at in range(3)
    ]
    return {
        "steps": steps,
        "survival_curves": pd.concat([survival.assign(arm=arm["arm"], collapsed=2) for arm in each]),
        "frontier_grid": grid,
        "frontier_line": grid[grid["y"] == 4][["arm", "x", "y"]],
        "roc": roc,
        "warnings": pd.DataFrame({"metric": metrics, "area": [Estimate(0.75, 0.6, 0.9, 4)] * len(metrics)}).assign(
            stable=9, collapsed=4
        ),
        "tails": pd.DataFrame([tokens | {"arm": arm["arm"]} for arm in each]),
        "histograms": pd.DataFrame(counts),
    }


def hidden_ticks(figure: style.DataFigure) -> set[Text]:
    """Return the labels of ticks beyond the limits of their axis, which are not drawn."""
    unseen = set()
    for axis in figure.axes:
        for each in (axis.xaxis, axis.yaxis):
            low, high = sorted(each.get_view_interval())
            every = [*each.get_major_ticks(), *each.get_minor_ticks()]
            unseen |= {
                label
                for tick in every
                for label in (tick.label1, tick.label2)
                if not low - 1e-9 <= tick.get_loc() <= high + 1e-9
            }
    return unseen


def drawn(name: str, count: int) -> style.DataFigure:
    """Return a figure of this many algorithms, laid out."""
    figure = FIGURES[name].figure(data(name, sorted(NAMES, key=len, reverse=True)[:count]))
    figure.draw_without_rendering()
    return figure


def faults(figure: style.DataFigure) -> list[str]:
    """Return what cannot be read in a figure."""
    unseen, found = hidden_ticks(figure), []
    shown = [each for each in figure.findobj(Text) if each.get_text().strip() and each.get_visible()]
    boxes = [(each.get_text(), each.get_window_extent().padded(-1)) for each in shown if each not in unseen]
    for (one, first), (other, second) in itertools.combinations(boxes, 2):
        if first.overlaps(second):
            found.append(f"{one!r} lies over {other!r}")
    panels = [axis.get_window_extent() for axis in figure.axes]
    legends = [legend.get_window_extent().padded(-1) for legend in figure.findobj(Legend)]
    found += ["a legend lies over a panel" for box, panel in itertools.product(legends, panels) if box.overlaps(panel)]
    for name, box in boxes:
        if box.x0 < -1 or box.x1 > figure.bbox.x1 + 1:
            found.append(f"{name!r} stands out")
        for panel in panels:
            inside = panel.x0 <= (box.x0 + box.x1) / 2 <= panel.x1 and panel.y0 <= (box.y0 + box.y1) / 2 <= panel.y1
            if box.overlaps(panel.padded(-1)) and not inside:
                found.append(f"{name!r} lies over a panel")
    area = figure.bbox.width * figure.bbox.height
    share = sum(panel.width * panel.height for panel in panels) / area
    if share < MIN_PANELS:
        found.append(f"panels have {share:.2f} of the figure")
    share = sum(box.width * box.height for box in legends) / area
    if share > MAX_LEGENDS:
        found.append(f"legends have {share:.2f} of the figure")
    return found


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_legible(name: str, count: int) -> None:
    assert faults(drawn(name, count)) == []


@pytest.mark.check  # minutes
@pytest.mark.parametrize("count", [3, len(NAMES)])
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_all_algorithms_is_legible(name: str, count: int) -> None:
    assert faults(drawn(name, count)) == []
