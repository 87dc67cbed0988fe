"""Tables over seeds, made from ``collect.steps`` (the long form, with a column ``arm``)."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pandas as pd

from steadymoe.bench.measurement import columns
from steadymoe.bench.report.write import to_latex, to_markdown, to_number, to_numbers, to_text
from steadymoe.bench.statistics.comparisons import ranking
from steadymoe.bench.statistics.estimates import INTERVAL, Estimate, over_seeds

# Names that other rooms use until they use ``write``.
__all__ = ["to_latex", "to_markdown", "to_number", "to_numbers", "to_text"]

# Steps at the end of a run over which its final numbers are averaged.
LAST_STEPS = 5

# Column → (metric, statistic of ``one_number``).
SUMMARY = {
    "final reward": ("reward", "last"),
    "final held-out accuracy": ("eval_accuracy", "end"),
    "best minus final reward": ("reward", "fall"),
    columns.short("expert_change_rate"): ("expert_change_rate", "median"),
    columns.short("expert_change_per_update"): ("expert_change_per_update", "mean"),
    columns.short("token_ratio_variance"): ("token_ratio_variance", "median"),
    columns.short("sequence_ratio_variance"): ("sequence_ratio_variance", "median"),
    columns.short("clip_fraction"): ("clip_fraction", "mean"),
}
# The same for the table of models.
MODELS = {
    columns.short("expert_change_per_update"): ("expert_change_per_update", "mean"),
    columns.short("rollout_expert_disagreement"): ("rollout_expert_disagreement", "mean"),
    "final reward": ("reward", "last"),
}
# The words of a caption for the columns of collapses.
COLLAPSED = (
    "Collapsed: runs that collapsed or met a number that is not finite, by today's rule (– if the runs are too short "
    "for the rule); recorded: the verdict that the runs recorded when they ended, by the rule of that day."
)
# Averaged over seeds on a logarithmic scale.
GEOMETRIC = ("token_ratio_variance", "sequence_ratio_variance")
CAPTION = (
    f"Mean over seeds (geometric mean for variances) with {INTERVAL}; n is the number of seeds. Numbers of a run: "
    f"final reward is the mean of the last {LAST_STEPS} steps, final held-out accuracy is the last evaluation, "
    f"best minus final compares means over {LAST_STEPS} steps, expert change and the variances are medians "
    "over steps, expert change per update and clip fraction are means over steps. "
    f"{COLLAPSED} Falling: runs whose reward or entropy falls, or whose gradient norm explodes, too near the end to be "
    "judged. All runs are part of every mean; after a number that is not finite a run counts with a reward and an "
    "accuracy of 0."
)
MODELS_CAPTION = (
    f"Mean over seeds with {INTERVAL}. Active parameters: the parameters that one token uses. Numbers of a run: expert "
    "change per update is the mean over steps of the expert-change rate from before to after one gradient update; "
    "sampler–trainer disagreement is the mean over steps of the expert-change rate between the sampling forward and "
    "the training forward at the same weights; share of routing is 1 − E[(log r pinned)²] / E[(log r free)²] over all "
    f"updates; final reward is the mean of the last {LAST_STEPS} steps."
)


def one_number(curve: pd.Series, how: str) -> float:
    """One number of a run from its curve over steps (values in the order of the steps).

    ``how`` is ``last`` or ``best`` (the last or the highest mean over ``LAST_STEPS`` steps), ``fall`` (best minus
    last), ``first`` or ``end`` (the first or the last value), ``median`` or ``mean`` (over steps), or ``area`` (under
    the curve, divided by the number of steps). Raises ValueError for any other word.
    """

    def smooth() -> pd.Series:
        return curve.rolling(min(LAST_STEPS, len(curve))).mean().dropna()

    numbers: dict[str, Callable[[], Any]] = {
        "last": lambda: smooth().iloc[-1],
        "best": lambda: smooth().max(),
        "fall": lambda: (means := smooth()).max() - means.iloc[-1],
        "first": lambda: curve.iloc[0],
        "end": lambda: curve.iloc[-1],
        "median": curve.median,
        "mean": curve.mean,
        "area": lambda: np.trapezoid(curve) / (len(curve) - 1) if len(curve) > 1 else curve.iloc[-1],
    }
    if how not in numbers:
        raise ValueError(f"a curve has no number {how!r}; choose from {', '.join(numbers)}")
    return float(numbers[how]())


def final_rewards(steps: pd.DataFrame) -> pd.DataFrame:
    """The final reward of every run: arm, seed, value."""
    rewards = steps[steps["metric"] == "reward"].sort_values("step")
    of_runs = rewards.groupby(["arm", "seed"], observed=True)["value"]
    return of_runs.agg(lambda curve: one_number(curve, "last")).reset_index()


def summary(steps: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """One row per arm, the highest final reward first: n, collapses, an ``Estimate`` for each column of ``SUMMARY``.

    ``runs`` has the columns of ``collapse.judged``.
    """
    rows = []
    for arm in sorted(runs["arm"].unique()):
        ours = runs[runs["arm"] == arm]
        row: dict[str, object] = {
            "arm": arm,
            "n": len(ours),
            "collapsed": _judged(ours, "collapsed_step").sum(min_count=1),
            "collapsed (recorded)": int((ours["status"] != "finished").sum()),
            "falling": _judged(ours, "falling_since").sum(min_count=1),
        }
        rows.append(row | _estimates(steps, arm, SUMMARY))
    rows.sort(key=lambda row: -cast(Estimate, row["final reward"]).mean if row["n"] else 0.0)
    return pd.DataFrame(rows, columns=["arm", "n", "collapsed", "collapsed (recorded)", "falling", *SUMMARY])


def _judged(runs: pd.DataFrame, column: str) -> pd.Series:
    """1.0 or 0.0 for each run that the rule of collapse could judge: whether ``column`` has a value.

    A run that met a number that is not finite counts as judged, however short it is.
    """
    verdicts = runs.loc[(runs["judged_until"] > 0) | runs["collapsed_step"].notna(), column]
    return verdicts.notna().astype(float)


LEADERBOARD = {
    "start": ("reward", "first"),
    "final reward": SUMMARY["final reward"],
    f"drift ({columns.short('expert_change_rate')})": ("expert_change_rate", "median"),
    columns.short("token_ratio_variance"): ("token_ratio_variance", "median"),
}
LEADERBOARD_CAPTION = (
    f"Ranked by final reward. Mean over seeds (geometric mean for variances) with {INTERVAL}; n is the number of "
    "seeds. p: exact sign-flip test of the paired differences in final reward from the best arm, Holm-corrected for "
    "all pairs of arms. Numbers of a run: start is the reward of the first step, before any update, final reward is "
    f"the mean of the last {LAST_STEPS} steps, drift and variance are medians over steps. {COLLAPSED} Both columns are "
    "shares of runs. Reward IQM: interquartile mean of final rewards over seeds. Steps of H: restricted mean of the "
    "steps without a collapse among the first H; a collapse that begins at step H can still be seen in every run. "
    "Frontier area: the stable share of a grid of learning rates and updates per rollout."
)


def leaderboard(steps: pd.DataFrame, runs: pd.DataFrame, more: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row per arm, ranked by final reward: n, start, final reward, p, shares of collapses, drift, ratio variance.

    p comes from ``comparisons.ranking`` against the best arm; the best arm's p is nan. ``more`` has further columns by
    arm (reward IQM, restricted mean time to collapse, frontier area); they stand after the shares of collapses.
    ``runs`` has the columns of ``collapse.judged``.
    """
    ranked = ranking(final_rewards(steps), bounds=columns.bounds("reward"))
    p_values = dict(zip(ranked["arm"], ranked["p_corrected"], strict=True))
    rows = []
    for arm, ours in runs.groupby("arm"):
        estimates = _estimates(steps, str(arm), LEADERBOARD)
        row: dict[str, object] = {"arm": arm, "n": len(ours)}
        row |= {column: estimates.pop(column) for column in ("start", "final reward")}
        row |= {"p (Holm)": p_values[str(arm)], "collapsed": float(_judged(ours, "collapsed_step").mean())}
        row |= {"collapsed (recorded)": float((ours["status"] != "finished").mean())}
        rows.append(row | ({} if more is None else more.loc[str(arm)].to_dict()) | estimates)
    rows.sort(key=lambda row: -cast(Estimate, row["final reward"]).mean)
    table = pd.DataFrame(rows)
    table.insert(0, "rank", range(1, len(rows) + 1))
    return table


def models(steps: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The table of an experiment that compares models: one row per arm with a router, sizes, the columns ``MODELS``.

    Empty if fewer than two models have routers.
    """
    routed = runs[runs["experts"] > 0]
    if routed["model"].nunique() < 2:
        return pd.DataFrame()
    rows = []
    for arm, ours in routed.groupby("arm"):
        sizes = {name: int(ours[name].iloc[0]) for name in ("parameters", "active_parameters", "moe_layers")}
        chosen = f"{int(ours['top_k'].iloc[0])} of {int(ours['experts'].iloc[0])}"
        row = {"arm": arm, "n": len(ours)} | sizes | {"experts": chosen}
        shares = routing_share(steps[steps["arm"] == arm], [])
        estimates = _estimates(steps, str(arm), MODELS)
        reward = estimates.pop("final reward")
        rows.append(row | estimates | {"share of routing": over_seeds(shares.tolist()), "final reward": reward})
    return pd.DataFrame(rows).rename(columns=lambda name: str(name).replace("_", " "))


def routing_share(steps: pd.DataFrame, keys: list[str]) -> pd.Series:
    """1 − E[(log r pinned)²] / E[(log r free)²] of each run, E over all of its updates, by ``keys`` and seed.

    The share is a ratio of the run's means, not the mean of the steps' shares: in most steps few tokens change their
    route, and the other steps carry the effect of routing. Runs without the moments (dense models) are left out.
    """
    names = ["log_ratio_moment_free", "log_ratio_moment_pinned"]
    chosen = steps[steps["metric"].isin(names)]
    means = chosen.groupby([*keys, "seed", "metric"])["value"].mean().unstack("metric").reindex(columns=names).dropna()
    return 1 - means[names[1]] / means[names[0]]


def _estimates(steps: pd.DataFrame, arm: str, wanted: dict[str, tuple[str, str]]) -> dict[str, object]:
    """Column → ``Estimate`` over the seeds of an arm; ``wanted`` is like ``SUMMARY``."""
    ours = steps[steps["arm"] == arm].sort_values("step")
    estimates: dict[str, object] = {}
    for column, (metric, how) in wanted.items():
        curves = ours[ours["metric"] == metric].groupby("seed")["value"]
        numbers = [one_number(curve, how) for _, curve in curves]
        estimates[column] = over_seeds(numbers, log=metric in GEOMETRIC, bounds=columns.bounds(metric))
    return estimates
