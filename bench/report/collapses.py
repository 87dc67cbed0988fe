"""Tables about the collapses in an experiment, for reports and figures.

``runs`` is ``archive.runs`` of one experiment with the columns of ``collapse.judged``; ``steps`` is its
``archive.steps``.
"""

from contextlib import suppress

import pandas as pd

from steadymoe.bench.report.tables import line_names
from steadymoe.bench.statistics import survival
from steadymoe.bench.statistics.collapse import Rule, judged
from steadymoe.bench.statistics.frontier import frontier

# The rule for a frontier of short runs: a fifth of the usual window and patience.
SHORT_RULE = Rule(window_updates=Rule().window_updates // 5, patience_updates=Rule().patience_updates // 5)
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
