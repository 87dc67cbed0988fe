"""The stability frontier of a sweep over two axes: the line up to which runs stay stable.

``runs`` has one row per run: seed, the columns of the two axes (numbers above 0), and ``stable`` (true without a
collapse). The frontier is a value of the second axis for each value of the first: with learning rate and updates per
rollout it is the highest number of updates that keeps a learning rate stable.

Shapes: X, Y values of the two axes.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd

# The share of seeds that must be stable.
STABLE = 0.5


class Frontier(NamedTuple):
    """The part of a grid in which at least half of the seeds stay stable."""

    shares: pd.DataFrame
    """One row per point of the grid: x, y, stable (the share of stable seeds), n."""
    line: pd.DataFrame
    """One row per x: x and the frontier y. The grid's lowest y means that no y is stable; its highest y means that all
    are, so the true frontier may lie higher."""


def frontier(runs: pd.DataFrame, x: str, y: str) -> Frontier:
    """Return the frontier of one algorithm over columns ``x`` and ``y`` of its runs. Ours; there is no paper.

    For each x the frontier is the lowest y at which the share of stable seeds falls below one half, interpolated
    linearly over log y between two points of the grid; stability that returns at a higher y does not count. If the
    lowest y is not stable, the frontier is the lowest y; if every y is stable, it is the highest y.

    Raises ValueError for a grid with fewer than two values of y, for values not above 0, for points without runs, and
    for two runs of one seed at a point, which differ in a third axis.
    """
    if (runs[[x, y]] <= 0).any(axis=None) or runs[y].nunique() < 2:
        raise ValueError(f"{x} and {y} need values above 0, and {y} at least two of them")
    if runs.duplicated([x, y, "seed"]).any():
        raise ValueError(f"two runs of one seed share {x} and {y}: the grid has a third axis")
    xs, ys = (np.sort(runs[name].unique()).astype(float) for name in (x, y))
    points = pd.MultiIndex.from_product([xs, ys], names=["x", "y"])
    cells = runs.groupby([x, y])["stable"].agg(stable="mean", n="size").reindex(points)
    if len(missing := cells.index[cells["n"].isna()]):
        raise ValueError(f"no run at {x}={missing[0][0]:g}, {y}={missing[0][1]:g}, but the grid must be full")
    share_XY = cells["stable"].to_numpy(float).reshape(len(xs), len(ys))
    return Frontier(cells.reset_index(), pd.DataFrame({"x": xs, "y": np.exp(_line(share_XY, np.log(ys)))}))


def _line(share_XY: np.ndarray, log_ys: np.ndarray) -> np.ndarray:
    """Return log y of the frontier, (X,), from the shares of stable seeds."""
    line_X = np.full(len(share_XY), log_ys[-1])
    for j in range(len(log_ys) - 1, 0, -1):  # downwards, so that the lowest crossing overwrites the others
        before, after = share_XY[:, j - 1], share_XY[:, j]
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = log_ys[j - 1] + (log_ys[j] - log_ys[j - 1]) * (before - STABLE) / (before - after)
        line_X = np.where((before >= STABLE) & (after < STABLE), crossing, line_X)
    return np.where(share_XY[:, 0] < STABLE, log_ys[0], line_X)
