"""Tables about the collapses in an experiment, for reports and figures.

``runs`` is ``archive.runs`` of one experiment with the columns of ``collapse.judged``; ``steps`` is its
``archive.steps``.
"""

from contextlib import suppress
from typing import Any

import pandas as pd

from steadymoe.bench.report.tables import line_names
from steadymoe.bench.statistics import early_warning, survival
from steadymoe.bench.statistics.collapse import Rule, judged
from steadymoe.bench.statistics.frontier import frontier
from steadymoe.bench.training import columns

# The metrics that may warn of a collapse.
WARNINGS = (
    "reward",  # the baseline: everybody watches reward, and the rule dates a collapse by it
    "grad_norm",
    "entropy",
    "token_ratio_variance",
    "sequence_ratio_variance",
    "clip_fraction",
    "expert_change_rate",
    "rollout_kl_k3",
    "routing_share",
)
# The highest rate of false alarms of a threshold.
FALSE_ALARMS = 0.1
WARNINGS_CAPTION = (
    "How early a metric warns of a collapse. Area: the area under the ROC curve of the most alarming value of a run "
    f"before its collapse, with a nominal 95 % interval. Threshold: the lowest one that at most {FALSE_ALARMS:.0%} of "
    "the stable runs cross, chosen on these very runs; a metric whose fall warns crosses it downwards. Detected: "
    "the share of collapsing runs that cross the threshold before the collapse; steps ahead: the steps from the "
    "crossing to the collapse, mean over the detected runs. Reward is the baseline: a metric with a smaller area tells "
    "nothing new. Runs that fall too near their end to be judged are left out. Runs of all arms are pooled, and an "
    "interval treats a seed with all its runs as one replicate. If some arms collapse more often than others, a metric "
    "that merely tells arms apart has a large area too."
)
# The rule for a frontier of short runs: a fifth of the usual window and patience.
SHORT_RULE = Rule(window_updates=16, patience_updates=32)
# The two axes of the frontier: columns of ``archive.runs``.
X, Y = "learning_rate", "updates_per_rollout"


def survival_curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Return Kaplan–Meier curves: arm, step, survival, low, high, n, collapsed; empty if no run was seen to collapse.

    A curve ends at the last step at which a collapse could be seen.
    """
    runs = runs[runs["judged_until"] > 0]
    if not survival.of_runs(runs)[1].any():
        return pd.DataFrame()
    parts = []
    for arm, ours in runs.groupby("arm"):
        curve, last = survival.kaplan_meier(*survival.of_runs(ours)), ours["judged_until"].max()
        if curve["step"].iloc[-1] < last:  # all runs have collapsed: extend the curve to the last judged step
            curve = pd.concat([curve, curve.iloc[[-1]].assign(step=last)], ignore_index=True)
        parts.append(curve.assign(arm=arm, n=len(ours), collapsed=ours["collapsed_step"].count()))
    return pd.concat(parts, ignore_index=True)[["arm", "step", "survival", "low", "high", "n", "collapsed"]]


def frontiers(runs: pd.DataFrame, steps: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return two tables over a full grid of X and Y: each algorithm's share of stable runs, and its frontier.

    Shares: x, y, stable, n, arm. Frontiers: x, y, arm. ``arm`` is a name of ``tables.line_names``.

    A grid often consists of many short runs. If a run is too short for the rule of its config, ``SHORT_RULE`` judges
    all runs. Empty if the runs are no such grid, or if they are too short for ``SHORT_RULE``. An algorithm whose grid
    has holes, or a third axis with a column of its own (a strength), has no frontier.
    """
    none = pd.DataFrame(), pd.DataFrame()
    if runs[X].nunique() < 2 or runs[Y].nunique() < 2:
        return none
    if (runs["judged_until"] == 0).any():
        runs = judged(runs, steps, SHORT_RULE)
    if (runs["judged_until"] == 0).any():
        return none
    found = []
    for name, ours in runs.groupby(line_names(runs, ("routing", "correction", "engine", "optimizer", "model"))):
        with suppress(ValueError):  # a grid with holes (some runs have not ended), or with a third axis
            own = frontier(ours.assign(stable=ours["collapsed_step"].isna()), X, Y)
            found.append([table.assign(arm=str(name)) for table in own])
    if not found:
        return none
    shares, lines = (pd.concat(tables, ignore_index=True) for tables in zip(*found, strict=True))
    return shares, lines


def early_warnings(steps: pd.DataFrame, runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return two tables: the ROC curves of the metrics ``WARNINGS``, and one row per metric, the largest area first.

    Curves: metric, false_alarms, detected. Rows: metric, area (under the curve), threshold (crossed by at most
    ``FALSE_ALARMS`` of the stable runs), false alarms, detected (both shares of runs), steps ahead, and the numbers of
    runs stable and collapsed. A run that falls too near its end to be judged, or is too short to be judged, is neither
    stable nor collapsed and is left out. Both tables are empty unless some runs collapsed and some are stable.
    """
    is_judged = runs["collapsed_step"].notna() | ((runs["judged_until"] > 0) & runs["falling_since"].isna())
    runs = runs[is_judged].assign(collapsed=runs["collapsed_step"])
    curves: list[pd.DataFrame] = []
    rows: list[dict[str, Any]] = []
    for metric in WARNINGS:
        extremes = early_warning.extremes(steps, runs, metric, falls=columns.falls(metric))
        alarm = early_warning.alarm(steps, runs, metric, FALSE_ALARMS, falls=columns.falls(metric))
        if alarm is None:
            continue
        curves.append(early_warning.roc(extremes).assign(metric=metric))
        area = early_warning.auc(steps, runs, metric, falls=columns.falls(metric))
        row: dict[str, Any] = {"metric": metric, "area": area, "threshold": alarm.threshold}
        row |= {"false alarms": alarm.false_alarms, "detected": alarm.detected, "steps ahead": alarm.lead}
        rows.append(row | {"stable": alarm.false_alarms.n, "collapsed": alarm.detected.n})
    rows.sort(key=lambda row: -row["area"].mean)
    return pd.concat(curves, ignore_index=True) if curves else pd.DataFrame(), pd.DataFrame(rows)
