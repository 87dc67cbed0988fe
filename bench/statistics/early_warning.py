"""Early warning: whether a metric crosses a threshold before a run collapses, and how many steps before.

``steps`` is ``archive.steps``: arm, seed, step, metric, value. ``runs`` has one row per run: arm, seed, and
``collapsed`` (the step of its collapse, or nan). All runs of a seed share a cold start and depend on each other, so
every interval treats a seed with all its runs as one replicate.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from steadymoe.bench.statistics.comparisons import newcombe, superiority
from steadymoe.bench.statistics.estimates import (
    LEVEL,
    MIN_FOR_INTERVAL,
    POSITIVE,
    Estimate,
    clustered_share,
    over_seeds,
    t_quantile,
    within,
)


@dataclass(frozen=True)
class Alarm:
    """A threshold on one metric, and how well it warns."""

    threshold: float
    """On the metric's own scale. A value above it is a warning; for a falling metric a value below it."""
    false_alarms: Estimate
    """The share of the n stable runs that cross the threshold."""
    detected: Estimate
    """The share of the n collapsing runs that cross the threshold before the collapse."""
    lead: Estimate
    """Steps from the first crossing to the collapse: the mean over a seed's detected runs, then over n seeds."""


def extremes(
    steps: pd.DataFrame,
    runs: pd.DataFrame,
    metric: str,
    least_lead: int = 1,
    *,
    falls: bool = False,
    horizon: float | None = None,
) -> pd.DataFrame:
    """Of every run the most alarming value of a metric while a warning is still one: arm, seed, collapsed, extreme.

    A run that collapses at step c is looked at up to step c − ``least_lead``; −∞ if that is before its first
    value. A stable run is looked at up to ``horizon``, usually the last step at which any collapsing run is, and to
    its end if none collapses: it has at least as many steps to cross as those, which makes false alarms likelier.
    A metric that ``falls`` before a collapse has its sign turned, so that higher is always worse.
    """
    early = _while_early(steps, runs, metric, least_lead, falls, horizon)
    worst = early.groupby(["arm", "seed"])["alarm"].max().rename("extreme").reset_index()
    joined = runs[["arm", "seed", "collapsed"]].merge(worst, how="left", on=["arm", "seed"])
    measured = steps.loc[steps["metric"] == metric, ["arm", "seed"]].drop_duplicates()
    joined = joined.merge(measured, on=["arm", "seed"])  # runs without the metric are left out
    return joined.assign(extreme=joined["extreme"].fillna(-np.inf))


def of_seeds(
    steps: pd.DataFrame, runs: pd.DataFrame, metric: str, least_lead: int = 1, *, falls: bool = False
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return ``extremes`` as a function of all ``runs`` of some seeds; each horizon is computed once."""
    steps = steps[steps["metric"] == metric]

    @functools.cache
    def up_to(horizon: float) -> pd.DataFrame:
        return extremes(steps, runs, metric, least_lead, falls=falls, horizon=horizon)

    def worst(some: pd.DataFrame) -> pd.DataFrame:
        every = up_to(_horizon(some, least_lead))
        return every[every["seed"].isin(some["seed"].unique())]

    return worst


def roc(extremes: pd.DataFrame) -> pd.DataFrame:
    """The ROC curve: threshold, false_alarms, detected; the shares of stable and collapsing runs above the threshold.

    The threshold is on the scale of ``extremes``, the strictest first. The first point is (0, 0) and the last (1, 1).
    """
    stable = extremes.loc[extremes["collapsed"].isna(), "extreme"].to_numpy(float)
    falling = extremes.loc[extremes["collapsed"].notna(), "extreme"].to_numpy(float)
    if not len(stable) or not len(falling):
        return pd.DataFrame(columns=["threshold", "false_alarms", "detected"])
    levels = np.unique(np.concatenate([stable, falling]))[::-1]
    rows = [(level, (stable > level).mean(), (falling > level).mean()) for level in levels]
    return pd.DataFrame([*rows, (-np.inf, 1.0, 1.0)], columns=["threshold", "false_alarms", "detected"])


def area(extremes: pd.DataFrame) -> float:
    """Return the area under ``roc``: the probability that a collapsing run looks worse beforehand than a stable one.

    nan without stable or without collapsing runs.
    """
    gone = extremes["collapsed"].notna()
    values = extremes["extreme"].to_numpy(float)
    return superiority(values[gone], values[~gone]).mean


def jackknife(
    statistic: Callable[[pd.DataFrame], float], runs: pd.DataFrame, seeds: Sequence[int]
) -> tuple[float, float]:
    """Return ``statistic`` of ``runs`` and its standard error, leaving out one seed at a time with all of its runs.

    The statistic is recomputed each time, because one run can set the horizon of ``extremes`` for all others. Miller
    1974; the error is nan for fewer than two seeds, or if the statistic of the remaining runs is.
    """
    left_out = np.array([statistic(runs[runs["seed"] != seed]) for seed in seeds])
    n = len(left_out)
    error = np.sqrt((n - 1) / n * np.square(left_out - left_out.mean()).sum()) if n > 1 else np.nan
    return statistic(runs), float(error)


def auc(steps: pd.DataFrame, runs: pd.DataFrame, metric: str, *, falls: bool = False) -> Estimate:
    """Return ``area`` of a metric's ``extremes``, with a 95 % interval; n is the number of seeds.

    Interval: Student's t on the logit scale with the error of ``jackknife``; if that error is 0 or unknown,
    ``comparisons.newcombe`` with the number of seeds that have collapsing, and stable, runs. None below three seeds.
    """
    worst = of_seeds(steps, runs, metric, falls=falls)
    whole = worst(runs)
    seeds, gone = whole["seed"].unique().tolist(), whole["collapsed"].notna()
    found, error = jackknife(lambda runs: area(worst(runs)), runs, seeds)
    n = 0 if np.isnan(found) else len(seeds)
    if n < MIN_FOR_INTERVAL:
        return Estimate(found, np.nan, np.nan, n)
    if not error > 0:
        return Estimate(found, *newcombe(found, *(whole.loc[each, "seed"].nunique() for each in (gone, ~gone))), n)
    return Estimate(found, *within(found, t_quantile(LEVEL, n - 1) * error, (0.0, 1.0)), n)


def alarm(
    steps: pd.DataFrame, runs: pd.DataFrame, metric: str, false_alarm_rate: float, *, falls: bool = False
) -> Alarm | None:
    """The lowest threshold that at most ``false_alarm_rate`` of the stable runs cross, and the collapses it detects.

    None without stable or without collapsing runs. The same runs choose and judge the threshold, so new runs give more
    false alarms: with n stable runs the rate is higher by up to 1/(n + 1).
    """
    worst = extremes(steps, runs, metric, falls=falls)
    gone = worst["collapsed"].notna()
    if gone.all() or not gone.any():
        return None
    stable = np.sort(worst.loc[~gone, "extreme"].to_numpy(float))
    allowed = int(np.floor(false_alarm_rate * len(stable) + 1e-9))  # 0.29 of 100 is 29
    threshold = stable[len(stable) - 1 - allowed] if allowed < len(stable) else -np.inf
    early = _while_early(steps, runs[runs["collapsed"].notna()], metric, 1, falls)
    first = early[early["alarm"] > threshold].groupby(["arm", "seed"])[["step", "collapsed"]].min()
    return Alarm(
        threshold=float(-threshold if falls else threshold),
        false_alarms=_share(worst[~gone], threshold),
        detected=_share(worst[gone], threshold),
        lead=over_seeds((first["collapsed"] - first["step"]).groupby("seed").mean().tolist(), bounds=POSITIVE),
    )


def _share(runs: pd.DataFrame, threshold: float) -> Estimate:
    """The share of ``runs`` whose ``extreme`` is above a threshold; seeds are the clusters of the interval."""
    beyond = (runs["extreme"] > threshold).groupby(runs["seed"]).agg(["sum", "count"])
    return clustered_share(beyond["sum"].tolist(), beyond["count"].tolist())


def _horizon(runs: pd.DataFrame, least_lead: int) -> float:
    until = runs["collapsed"] - least_lead
    return float(until.max()) if until.notna().any() else np.inf


def _while_early(
    steps: pd.DataFrame, runs: pd.DataFrame, metric: str, least_lead: int, falls: bool, horizon: float | None = None
) -> pd.DataFrame:
    """The rows of ``extremes``: arm, seed, step, collapsed, and the metric as ``alarm``, where higher is worse."""
    until = runs["collapsed"] - least_lead
    horizon = _horizon(runs, least_lead) if horizon is None else horizon
    chosen = steps.loc[steps["metric"] == metric, ["arm", "seed", "step", "value"]].dropna(subset="value")
    chosen = chosen.merge(runs[["arm", "seed", "collapsed"]].assign(until=until.fillna(horizon)), on=["arm", "seed"])
    chosen = chosen[chosen["step"] <= chosen["until"]]
    return chosen.assign(alarm=-chosen["value"] if falls else chosen["value"])
