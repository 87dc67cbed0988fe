"""Early warning: whether a metric tells, before a run collapses, that it will.

``steps`` is ``archive.steps``: arm, seed, step, metric, value. ``runs`` has one row per run: arm, seed, and
``collapsed`` (the step of its collapse, or nan). All runs of a seed share a cold start and depend on each other, so
every interval treats a seed with all its runs as one replicate.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from steadymoe.bench.statistics.comparisons import newcombe, superiority
from steadymoe.bench.statistics.estimates import (
    LEVEL,
    MIN_FOR_INTERVAL,
    Estimate,
    t_quantile,
    within,
)


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


def area(extremes: pd.DataFrame) -> float:
    """Return the area under the ROC curve: the probability that a collapsing run looks worse before than a stable one.

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
