"""What collapses say of the arms of an experiment, as the tables that figures and the leaderboard take.

``runs`` is ``collect.runs`` of one experiment, ``steps`` its ``collect.steps``.
"""

import pandas as pd

from steadymoe.bench import survival, tables, warning
from steadymoe.bench.frontier import Frontier, frontier
from steadymoe.bench.stats import iqm, over_seeds

# Metrics that are asked whether they tell of a collapse beforehand.
WARNINGS = (
    "grad_norm",
    "entropy",
    "token_ratio_variance",
    "clip_fraction",
    "expert_change_rate",
    "rollout_kl_k3",
    "routing_share",
)
# The two dials of the frontier, as ``collect.runs`` calls them.
X, Y = "learning_rate", "updates_per_rollout"


def survival_curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Kaplan–Meier curves: arm, step, survival, low, high, n; no rows where no run collapsed."""
    if runs["diverged_step"].isna().all():
        return pd.DataFrame()
    parts = []
    for arm, ours in runs.groupby("arm"):
        curve = survival.kaplan_meier(ours["steps"].tolist(), _collapsed(ours))
        if curve["step"].iloc[-1] < ours["steps"].max():  # all have collapsed: to the end of what was meant to be seen
            curve = pd.concat([curve, curve.iloc[[-1]].assign(step=ours["steps"].max())], ignore_index=True)
        parts.append(curve.assign(arm=arm, n=len(ours)))
    return pd.concat(parts, ignore_index=True)[["arm", "step", "survival", "low", "high", "n"]]


def collapse_steps(runs: pd.DataFrame) -> pd.DataFrame:
    """How often and when: arm, n, collapsed, and the restricted mean of steps without a collapse as text."""
    rows = [
        {
            "arm": arm,
            "n": len(ours),
            "collapsed": int(ours["diverged_step"].notna().sum()),
            f"steps without, of {_horizon(runs)}": str(_restricted_mean(ours, _horizon(runs))),
        }
        for arm, ours in runs.groupby("arm")
    ]
    return pd.DataFrame(rows)


def frontiers(runs: pd.DataFrame) -> dict[str, Frontier]:
    """The frontier of each algorithm (with its routing and the like, where these differ) over a full grid of X and Y.

    Empty where the runs are no such grid.
    """
    if runs[X].nunique() < 2 or runs[Y].nunique() < 2:
        return {}
    found = {}
    for name, ours in runs.groupby(_names(runs)):
        try:
            found[str(name)] = frontier(ours.assign(stable=ours["diverged_step"].isna()), X, Y)
        except ValueError:
            continue  # a grid with holes: runs are still to come
    return found


def _names(runs: pd.DataFrame) -> pd.Series:
    """What a frontier is of: the algorithm, and its routing and the like where these differ."""
    keys = ("algorithm", "routing", "correction", "engine", "model")
    varying = [key for key in keys if key == "algorithm" or runs[key].nunique() > 1]
    return runs[varying].agg(" ".join, axis=1)


def frontier_tables(found: dict[str, Frontier]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The grid (arm, x, y, stable, n) and the line (arm, x, y) of every frontier."""
    grids = [
        each.shares.assign(arm=arm, stable=[share.mean for share in each.shares["stable"]])
        for arm, each in found.items()
    ]
    lines = [each.line.assign(arm=arm) for arm, each in found.items()]
    if not found:
        return pd.DataFrame(), pd.DataFrame()
    return pd.concat(grids, ignore_index=True), pd.concat(lines, ignore_index=True)


def early_warnings(steps: pd.DataFrame, runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series]:
    """ROC curves (metric, false_alarms, detected) and areas by metric.

    Both are empty unless some runs collapsed and others did not.
    """
    runs = runs.assign(collapsed=runs["diverged_step"].astype(float))
    if runs["collapsed"].isna().all() or runs["collapsed"].notna().all():
        return pd.DataFrame(), pd.Series(dtype=float)
    curves, areas = [], {}
    for metric in WARNINGS:
        if not (steps["metric"] == metric).any():
            continue
        extremes = warning.extremes(steps, runs, metric)
        curves.append(warning.roc(extremes).rename(columns={"caught": "detected"}).assign(metric=metric))
        areas[metric] = warning.auc(extremes).mean
    return pd.concat(curves, ignore_index=True), pd.Series(areas)


def by_arm(steps: pd.DataFrame, runs: pd.DataFrame, found: dict[str, Frontier]) -> pd.DataFrame:
    """Columns of the leaderboard by arm: reward IQM, restricted mean of steps without a collapse, frontier area.

    The area is that of the frontier which the arm is a point of; n = 0 where it is of none.
    """
    names, none = _names(runs), tables.Estimate(float("nan"), float("nan"), float("nan"), 0)
    horizon, rewards = _horizon(runs), steps[steps["metric"] == "reward"].sort_values("step")
    rows = {}
    for arm, ours in runs.groupby("arm"):
        finals = rewards[rewards["arm"] == arm].groupby("seed")["value"].agg(lambda c: tables.one_number(c, "last"))
        row = {"reward IQM": over_seeds(finals.tolist(), iqm), f"steps of {horizon}": _restricted_mean(ours, horizon)}
        of_arm = found.get(str(names[ours.index[0]]))
        rows[str(arm)] = row | ({"frontier area": none if of_arm is None else of_arm.area} if found else {})
    return pd.DataFrame.from_dict(rows, orient="index")


def _collapsed(runs: pd.DataFrame) -> list[float | None]:
    return [None if pd.isna(step) else float(step) for step in runs["diverged_step"]]


def _horizon(runs: pd.DataFrame) -> int:
    """As far as every run was meant to be seen."""
    return int(runs["steps"].min())


def _restricted_mean(runs: pd.DataFrame, horizon: int) -> tables.Estimate:
    return survival.restricted_mean(runs["steps"].tolist(), _collapsed(runs), horizon)
