"""Figures: pure functions of tables; none reads the disk. The registry: each figure, its needs, and its experiment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd

from steadymoe.bench.report.figures import curves, looks, points, routing, stability, style
from steadymoe.bench.report.figures.style import FORMATS, SMOOTHED_OVER, DataFigure, save
from steadymoe.bench.support.text import without_mathematics

__all__ = ["FIGURES", "FORMATS", "SMOOTHED_OVER", "DataFigure", "FigureSpec", "looks", "save", "style"]

Need = Callable[[pd.DataFrame], str | None]
# More lines than this cannot be told apart.
_MOST_LINES = 8


def _varies(key: str, least: int = 2) -> Need:
    def need(steps: pd.DataFrame) -> str | None:
        return None if key in steps and steps[key].nunique() >= least else f"runs with {least} values of {key}"

    return need


def _varies_one_of(*keys: str) -> Need:
    def need(steps: pd.DataFrame) -> str | None:
        missing = [lack for key in keys if (lack := _varies(key)(steps)) is not None]
        return f"runs with 2 values of {' or '.join(keys)}" if len(missing) == len(keys) else None

    return need


def _records(*metrics: str) -> Need:
    def need(steps: pd.DataFrame) -> str | None:
        lacking = [metric for metric in metrics if not (steps["metric"] == metric).any()]
        return f"runs that record {', '.join(lacking)}" if lacking else None

    return need


def _few_arms(steps: pd.DataFrame) -> str | None:
    arms = steps["arm"].nunique()
    return (
        None
        if arms <= _MOST_LINES
        else f"at most {_MOST_LINES} arms ({arms} are too many lines): choose some with --arms"
    )


def _few_lines(*shown: str) -> Need:
    """At most as many lines as can be told apart, one for each combination of ``shown``."""

    def need(steps: pd.DataFrame) -> str | None:
        lines = len(steps[list(shown)].drop_duplicates())
        too_many = f"at most {_MOST_LINES} lines ({lines} are too many): choose some with --arms"
        return None if lines <= _MOST_LINES else too_many

    return need


def _one_engine(steps: pd.DataFrame) -> str | None:
    return None if len(set(steps["engine"]) - {"exact"}) == 1 else "runs of one engine, at several strengths"


def _mismatched(steps: pd.DataFrame) -> str | None:
    return "runs whose sampler differs from the trainer (engine=…)" if set(steps["engine"]) == {"exact"} else None


def _twins(steps: pd.DataFrame) -> str | None:
    routed = set((steps["experts"] > 0).tolist())
    return None if routed == {True, False} else "runs of a model with experts and of one without"


def _one_model(steps: pd.DataFrame) -> str | None:
    return None if steps["model"].nunique() == 1 else "runs of one model alone, at several depths"


def _nothing_else(*shown: str) -> Need:
    """The runs at one point of the figure are one arm: every difference between runs is shown by a line or an axis."""

    def need(steps: pd.DataFrame) -> str | None:
        there = [key for key in shown if key in steps]  # an archive of before a column came in has none
        arms = steps.groupby(there, dropna=False)["arm"].nunique().max()
        return None if arms == 1 else f"runs that differ in nothing but {', '.join(shown)} and the seed"

    return need


def _any_of_drift(steps: pd.DataFrame) -> str | None:
    keys = ("updates_per_rollout", "learning_rate", "moe_layers")
    varies = any(key in steps and steps[key].nunique() > 1 for key in keys)
    return None if varies else f"runs with 2 values of {', '.join(keys)}, or one of them"


@dataclass(frozen=True)
class FigureSpec:
    """One figure: its drawing function, the tables that it takes, and the experiment that makes their data."""

    id: str
    name: str
    draw: Callable[..., DataFigure]
    experiment: str
    """The experiment that makes its data: a file of ``conf/experiment``, or a row of ``study/experiments.py``."""
    needs: tuple[Need, ...] = ()
    """Conditions on the table ``steps``; a condition returns the words for the missing data, or None."""
    takes: tuple[str, ...] = ("steps",)
    """The tables that ``draw`` is called with."""

    @property
    def caption(self) -> str:
        """The caption: the first paragraph of the docstring of ``draw``."""
        return " ".join((self.draw.__doc__ or "").partition("\n\n")[0].split())

    def lacks(self, data: Mapping[str, pd.DataFrame]) -> str | None:
        """The words for the data that ``data`` (name → table) lacks for this figure; None if nothing is missing."""
        absent = [name for name in self.takes if name not in data or data[name].empty]
        if absent:
            return f"the table {', '.join(absent)}"
        return next((missing for need in self.needs if (missing := need(data["steps"]))), None)

    def figure(self, data: Mapping[str, pd.DataFrame]) -> DataFigure:
        """The figure drawn from ``data``, if ``lacks(data)`` is None. A ``$`` in a name begins no formula."""
        tables = [data[name] for name in self.takes]
        if "runs" not in data or without_mathematics(data["runs"]) is not data["runs"]:  # ``runs`` has every name
            tables = [without_mathematics(table) for table in tables]
        return self.draw(*tables)


_COMPARED = (_varies("arm"), _records("reward"), _few_arms)
_MISMATCH = _records("reward", "rollout_kl_k3")
_LIST = [
    FigureSpec("overview", "overview", curves.overview, "quickstart", (_records("reward"), _few_arms)),
    FigureSpec("fig01", "reward_compute", curves.reward_compute, "quickstart", (*_COMPARED, _varies("algorithm"))),
    FigureSpec("fig02", "clip_fraction", points.clip_fraction, "quickstart", (_records("clip_fraction"), _few_arms)),
    FigureSpec("fig03", "replay", curves.replay, "replay", (_varies("routing"), _records("reward"), _few_arms)),
    FigureSpec(
        "fig04",
        "staleness_panels",
        curves.staleness_panels,
        "minirl",
        (_varies("updates_per_rollout"), _MISMATCH, _few_lines("algorithm", "routing", "correction")),
    ),
    FigureSpec(
        "fig05",
        "staleness_grid",
        curves.staleness_grid,
        "staleness",
        (_varies("updates_per_rollout"), _varies("algorithm")),
    ),
    FigureSpec(
        "fig06",
        "survival",
        stability.survival,
        "collapse",
        needs=(_few_arms,),
        takes=("survival_curves", "collapse_steps", "steps"),
    ),
    FigureSpec(
        "fig07", "mismatch", curves.mismatch, "mismatch", (*_COMPARED, _varies("algorithm"), _MISMATCH, _mismatched)
    ),
    FigureSpec("fig08", "ratio_distributions", routing.ratio_distributions, "twins", (_twins,), ("histograms",)),
    FigureSpec("fig09", "best_last", points.best_last, "best_last", (_varies("arm"), _records("reward"))),
    FigureSpec("fig10", "drift", routing.drift, "drift", (_any_of_drift, _records("expert_change_rate"))),
    FigureSpec(
        "fig11",
        "attribution",
        routing.attribution,
        "attribution",
        (
            _varies_one_of("moe_layers", "experts"),
            _records("log_ratio_moment_free", "log_ratio_moment_pinned"),
            _one_model,
            _nothing_else("algorithm", "routing", "engine", "moe_layers", "experts"),
        ),
    ),
    FigureSpec("fig12", "frontier", stability.frontier, "frontier", takes=("frontier_grid", "frontier_line", "steps")),
    FigureSpec("fig13", "early_warning", stability.early_warning, "frontier", takes=("roc", "warnings")),
    FigureSpec(
        "fig14",
        "dose_response",
        points.dose_response,
        "dose",
        (
            _varies("strength"),
            _MISMATCH,
            _one_engine,
            _nothing_else("algorithm", "routing", "correction", "model", "strength"),
            _few_lines("algorithm", "routing", "correction", "model"),
        ),
    ),
    FigureSpec(
        "fig15",
        "gain_map",
        stability.gain_map,
        "frontier_stale",
        (
            _records("reward", "eval_accuracy"),
            _varies("learning_rate"),
            _varies("updates_per_rollout"),
            _nothing_else("algorithm", "model", "learning_rate", "updates_per_rollout"),
        ),
    ),
]
# By id, in the order of the paper.
FIGURES: dict[str, FigureSpec] = {each.id: each for each in _LIST}
