"""The stability frontier of a sweep over two axes: the line up to which runs stay stable, and the area below it.

``runs`` has one row per run: seed, the columns of the two axes (numbers above 0), and ``stable`` (true without a
collapse). The frontier is a value of the second axis for each value of the first: with learning rate and updates per
rollout it is the highest number of updates that keeps a learning rate stable.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from steadymoe.bench.statistics.estimates import (
    LEAST_FOR_BOOTSTRAP,
    LEAST_FOR_INTERVAL,
    LEVEL,
    Estimate,
    bootstrap_interval,
    t_quantile,
)

# The share of seeds that must be stable.
STABLE = 0.5


@dataclass(frozen=True)
class Frontier:
    """The part of a grid in which at least half of the seeds stay stable."""

    shares: pd.DataFrame
    """One row per point of the grid: x, y, stable (the share of stable seeds), n."""
    line: pd.DataFrame
    """One row per x: x and the frontier y. The grid's lowest y means that no y is stable; its highest y means that all
    are, so the true frontier may lie higher."""
    area: Estimate
    """Share of the grid, both axes logarithmic, below the line; n is the number of seeds."""


def frontier(runs: pd.DataFrame, x: str, y: str, resamples: int = 2000) -> Frontier:
    """Return the frontier of one algorithm over columns ``x`` and ``y`` of its runs. Ours; there is no paper.

    For each x the frontier is the lowest y at which the share of stable seeds falls below one half, interpolated
    linearly over log y between two points of the grid; stability that returns at a higher y does not count. If the
    lowest y is not stable, the frontier is the lowest y; if every y is stable, it is the highest y.

    The area is the integral of (log y − log y_min)/(log y_max − log y_min) over log x, divided by the range of log x:
    0 if no point is stable, 1 if every point is. Its interval treats a seed with all its points as one replicate: BCa
    bootstrap from ten seeds on, t with the jackknife's variance (Efron 1982, chapter 3) from three, none below.

    Raises ValueError for a grid with fewer than two values of y, for values not above 0, for points without runs, and
    for two runs of one seed at a point, which differ in a third axis.
    """
    if (runs[[x, y]] <= 0).any(axis=None) or runs[y].nunique() < 2:
        raise ValueError(f"{x} and {y} need values above 0, and {y} at least two of them")
    if runs.duplicated([x, y, "seed"]).any():
        raise ValueError(f"two runs of one seed share {x} and {y}: the grid has a third axis")
    cells = runs.assign(stable=runs["stable"].astype(float)).pivot(index="seed", columns=[x, y], values="stable")
    cells = cells.sort_index(axis="columns")
    xs, ys = np.sort(runs[x].unique()).astype(float), np.sort(runs[y].unique()).astype(float)
    missing = [(a, b) for a in xs for b in ys if (a, b) not in cells.columns]
    if missing:
        raise ValueError(f"no run at {x}={missing[0][0]:g}, {y}={missing[0][1]:g}, and the grid must be full")
    stable_SXY = cells.to_numpy().reshape(-1, len(xs), len(ys))
    share_XY, n_XY = np.nanmean(stable_SXY, axis=0), (~np.isnan(stable_SXY)).sum(axis=0)
    points = {"x": np.repeat(xs, len(ys)), "y": np.tile(ys, len(xs))}
    shares = pd.DataFrame(points | {"stable": share_XY.ravel(), "n": n_XY.ravel()})
    line = pd.DataFrame({"x": xs, "y": np.exp(_line(share_XY, np.log(ys)))})
    return Frontier(shares, line, _area(stable_SXY, np.log(xs), np.log(ys), resamples))


def _line(share_XY: np.ndarray, log_ys: np.ndarray) -> np.ndarray:
    """log y of the frontier, (…, X), from the shares of stable seeds, (…, X, Y)."""
    line = np.full(share_XY.shape[:-1], log_ys[-1])
    for j in range(len(log_ys) - 1, 0, -1):  # downwards, so that the lowest crossing overwrites the others
        before, after = share_XY[..., j - 1], share_XY[..., j]
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = log_ys[j - 1] + (log_ys[j] - log_ys[j - 1]) * (before - STABLE) / (before - after)
        line = np.where((before >= STABLE) & (after < STABLE), crossing, line)
    return np.where(share_XY[..., 0] < STABLE, log_ys[0], line)


def _below(share_XY: np.ndarray, log_xs: np.ndarray, log_ys: np.ndarray) -> np.ndarray:
    """The share of the grid below the frontier, (…), from the shares of stable seeds, (…, X, Y)."""
    height = (_line(share_XY, log_ys) - log_ys[0]) / (log_ys[-1] - log_ys[0])
    if len(log_xs) == 1:
        return height[..., 0]
    return np.trapezoid(height, log_xs, axis=-1) / (log_xs[-1] - log_xs[0])


def _area(stable_SXY: np.ndarray, log_xs: np.ndarray, log_ys: np.ndarray, resamples: int) -> Estimate:
    n = len(stable_SXY)
    everywhere = np.nanmean(stable_SXY, axis=0)

    def of_seeds(seeds: np.ndarray, axis: int = -1) -> np.ndarray:
        """The area of resampled seeds (…, S); a point of the grid without a resampled run keeps its share."""
        chosen = stable_SXY[np.moveaxis(np.atleast_1d(seeds).astype(int), axis, 0)]
        count = (~np.isnan(chosen)).sum(axis=0)
        drawn = np.where(count > 0, np.nansum(chosen, axis=0) / np.maximum(count, 1), everywhere)
        return _below(drawn, log_xs, log_ys)

    area = float(_below(everywhere, log_xs, log_ys))
    left_out = np.array([of_seeds(np.delete(np.arange(n), seed)) for seed in range(n)]) if n > 1 else np.zeros(1)
    if n < LEAST_FOR_INTERVAL:
        return Estimate(area, np.nan, np.nan, n)
    if np.ptp(left_out) == 0:  # all seeds alike
        return Estimate(area, area, area, n)
    if n >= LEAST_FOR_BOOTSTRAP:
        return Estimate(area, *bootstrap_interval(np.arange(n), of_seeds, resamples), n)
    error = np.sqrt((n - 1) / n * np.square(left_out - left_out.mean()).sum())
    half = t_quantile(LEVEL, n - 1) * float(error)
    return Estimate(area, max(area - half, 0.0), min(area + half, 1.0), n)
