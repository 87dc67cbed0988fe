"""Tolerance: how far a dial can be turned before a loss keeps less than a share of GRPO's gain.

The outcome is the sampled accuracy at a run's last evaluation. The *threshold* is the start plus ``SHARE`` of the gain
of the reference (GRPO) at its best value of the dial; it is the same for all losses, so a loss that hardly moves
tolerates nothing. A loss crosses where its mean curve first falls below the threshold beyond its own best value,
interpolated linearly between two values of the dial, or in their logarithm if all are positive. What happens further
on does not count: a loss that hardly leaves its start on very old data may rise again, and tolerates no more for it.
The tolerance is the crossing divided by the reference's. Its interval is Student's on the logarithm, with the standard
error of a bootstrap over paired seeds: with five seeds percentiles are too narrow (``estimates.MIN_FOR_BOOTSTRAP``).

Shapes: D values of the dial; S seeds; N draws of the bootstrap, the first of which is all seeds. A *curve* is a table
of levels, value of the dial (ascending) × seed.

A table of *levels* has a row for each run: arm, algorithm, value (of the dial), seed, start and sampled (its accuracy
before and after training), and panel if there are several settings, each with its own reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pandas as pd
from scipy.stats import t as student  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.statistics.comparisons import MIN_TO_DECIDE
from steadymoe.bench.statistics.estimates import LEVEL, RESAMPLES, Estimate, half_of_draws, t_quantile

REFERENCE = "grpo"
SHARE = 0.5
"""Of the reference's gain: of shares between 0.25 and 0.9 the one with the least noise (results/log.md)."""


def best_value(values: pd.Series, levels: pd.Series) -> tuple[float, str]:
    """Return the value of the dial with the highest mean level; a row of both is a run.

    Second ``lowest`` or ``highest`` if no value was tried beyond it, else empty.
    """
    means = levels.groupby(values).mean()
    place = int(means.argmax())
    return float(means.index[place]), {0: "lowest", len(means) - 1: "highest"}.get(place, "")


@dataclass(frozen=True)
class Tolerance:
    """How much of a dial a loss tolerates."""

    crossing: float
    """nan if the curve is below the threshold everywhere, inf if it never falls below it on the grid; 0 if it reaches
    it at a dial of 0 alone."""
    ratio: float
    """The crossing in multiples of the reference's; at the end of the grid, and so a lower bound, if ``crossing`` is
    inf. nan without a crossing above 0, or if the reference never falls below the threshold."""
    low: float
    high: float
    """The 95 % interval of ``ratio``, nan below five seeds; 0 or inf if more draws than a tail holds have no ratio or,
    for ``high``, never fall below the threshold."""
    p: float
    """Of a ratio of 1, by the same distribution; at least twice the share of draws without a ratio."""
    n: int

    def __str__(self) -> str:
        if not np.isfinite(self.ratio):
            return "reference > grid" if self.crossing > 0 else "–"
        if np.isinf(self.crossing):
            return f"> {self.ratio:.2f}"
        if np.isnan(self.low) or self.low == self.high:  # the reference itself
            return f"{self.ratio:.2f}"
        high = "> grid" if np.isinf(self.high) else f"{self.high:.2f}"
        return f"{self.ratio:.2f} [{self.low:.2f}, {high}]"


def crossings(curves_ND: np.ndarray, values_D: np.ndarray, threshold_N: np.ndarray) -> np.ndarray:
    """Return where each curve, beyond its best value, first falls below its threshold, (N,).

    nan if it is below everywhere, inf if it does not fall below. The values ascend; they are interpolated in their
    logarithm if all are positive.
    """
    scale_D = np.log(values_D) if values_D[0] > 0 else values_D
    best_N1 = curves_ND.argmax(1)[:, None]
    below_ND = (curves_ND < threshold_N[:, None]) & (np.arange(len(values_D)) > best_N1)
    reaches_N = curves_ND.max(1) >= threshold_N
    found_N = np.where(reaches_N, np.inf, np.nan)
    leaves = np.flatnonzero(reaches_N & below_ND.any(1))
    after = below_ND[leaves].argmax(1)
    before = after - 1
    above, below = curves_ND[leaves, before], curves_ND[leaves, after]
    part = (above - threshold_N[leaves]) / (above - below)
    place = scale_D[before] + part * (scale_D[after] - scale_D[before])
    found_N[leaves] = np.exp(place) if values_D[0] > 0 else place
    return found_N


def threshold(start_N: np.ndarray, levels_ND: np.ndarray) -> np.ndarray:
    """Return the start plus ``SHARE`` of the reference's gain at its best value, (N,), from its mean levels."""
    return start_N + SHARE * (levels_ND.max(1) - start_N)


def draws(seeds: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Return the places of all seeds, and of those in each draw of a bootstrap, (N, S); the same without ``rng``."""
    generator = np.random.default_rng(0) if rng is None else rng
    return np.vstack([np.arange(seeds), generator.integers(seeds, size=(RESAMPLES, seeds))])


def in_draws(
    curves: Sequence[pd.DataFrame], reference: pd.DataFrame, start_S: np.ndarray, draws_NS: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the ``crossings`` of each curve, (N,), and the reference's gain up to the threshold, (N,).

    The curves and the reference have the same seeds. The threshold is found anew in every draw, the reference's best
    value included.
    """
    theirs_ND, *means = (each.to_numpy(float)[:, draws_NS].mean(-1).T for each in (reference, *curves))
    start_N = start_S[draws_NS].mean(-1)
    threshold_N = threshold(start_N, theirs_ND)
    values = [each.index.to_numpy(float) for each in curves]
    crossed = [crossings(*pair, threshold_N) for pair in zip(means, values, strict=True)]
    return crossed, threshold_N - start_N


def of_curves(
    ours: pd.DataFrame, reference: pd.DataFrame, start_S: np.ndarray, base: pd.DataFrame | None = None
) -> Tolerance | None:
    """Return the tolerance of a loss from its curve and the reference's at the same seeds, and their common starts.

    The reference sets the threshold. Ratios are over the reference, or over ``base``. None for a dial with one value,
    or if the reference gains nothing.
    """
    seeds, base = len(start_S), reference if base is None else base
    (ours_N, base_N), gain_N = in_draws((ours, base), reference, start_S, draws(seeds))
    if min(map(len, (ours, reference, base))) < 2 or not gain_N[0] > 0:
        return None
    # A curve that never falls below counts with the end of its grid; one that reaches its threshold only where the dial
    # is 0 tolerates nothing, like one that never does.
    known_N = (ours_N > 0) & np.isfinite(base_N) & (base_N > 0)
    logs_N = np.full(len(ours_N), np.nan)
    logs_N[known_N] = np.log(np.minimum(ours_N[known_N], ours.index[-1]) / base_N[known_N])
    log, low, high, p = logs_N[0], np.nan, np.nan, np.nan
    if seeds >= MIN_TO_DECIDE and np.isfinite(log):
        unknown, tail = float(np.isnan(logs_N[1:]).mean()), (1 - LEVEL) / 2
        half = half_of_draws(logs_N[1:][known_N[1:]], seeds)
        low = 0.0 if unknown > tail else float(np.exp(log - half))
        high = np.inf if unknown + np.isinf(ours_N[1:]).mean() > tail else float(np.exp(log + half))
        quantile = t_quantile(LEVEL, seeds - 1)
        beyond = float(student.sf(quantile * abs(log) / half, seeds - 1)) if half > 0 else 0.5 * (log == 0)
        p = 2 * max(beyond, unknown)
    return Tolerance(float(ours_N[0]), float(np.exp(log)), low, high, float(np.minimum(1.0, p)), seeds)


def _reference_arm(levels: pd.DataFrame) -> str | None:
    """Return the arm of the reference: the one with the fewest further choices, if there are several."""
    arms = sorted(set(levels.loc[levels["algorithm"] == REFERENCE, "arm"]), key=lambda arm: (arm.count(" "), arm))
    return arms[0] if arms else None


def _by_seed(levels: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Return the sampled accuracy of an arm, value × seed, at the seeds that it has at every value."""
    return levels[levels["arm"] == arm].pivot_table(index="value", columns="seed", values="sampled").dropna(axis=1)


def _paired(levels: pd.DataFrame, *arms: str) -> tuple[list[pd.DataFrame], np.ndarray]:
    """Return the curves of arms at the seeds that all of them have, and the starts of the first, (S,)."""
    curves = [_by_seed(levels, arm) for arm in arms]
    seeds = reduce(pd.Index.intersection, [curve.columns for curve in curves])
    starts = levels[levels["arm"] == arms[0]].groupby("seed")["start"].first()
    return [curve[seeds] for curve in curves], starts[seeds].to_numpy()


def of_arm(levels: pd.DataFrame, arm: str, over: str | None = None) -> tuple[Tolerance | None, float]:
    """Return the tolerance of an arm of one setting, None where there is no threshold, and its best value.

    Its ratio is over the reference, or over the arm ``over``.
    """
    ours, reference = _by_seed(levels, arm), _reference_arm(levels)
    means = ours.mean(axis=1) if ours.size else levels[levels["arm"] == arm].groupby("value")["sampled"].mean()
    best = float(means.index.to_numpy(float)[means.argmax()])
    if reference is None:
        return None, best
    (theirs, own, base), start_S = _paired(levels, reference, arm, reference if over is None else over)
    return of_curves(own, theirs, start_S, base) if len(start_S) else None, best


def gap_closed(levels: pd.DataFrame, arm: str, pinned: str | None, reference_pinned: str) -> Estimate:
    """Return how much of what moving routes cost the reference a change of it does not pay, in one setting.

    Of logarithms of what is tolerated: [(m − GRPO) free − (m − GRPO) pinned] / (GRPO pinned − GRPO free), which is
    1 − log R(m) / log R(GRPO) for the routing costs R. What helps with pinned routes alike closes nothing; None for
    ``pinned`` is a change that means nothing with pinned routes. All arms share seeds and the threshold of the
    reference's free runs. nan, n = 0, where a mean curve has no crossing on its grid or the gap is not above 0; no
    interval below five seeds, if more than 2.5 % of the draws have no number, or if the gap's interval reaches 0.
    """
    none = Estimate(np.nan, np.nan, np.nan, 0)
    if (reference := _reference_arm(levels)) is None:
        return none
    curves, start_S = _paired(levels, reference, reference_pinned, arm, pinned or reference_pinned)
    if not (n := len(start_S)):
        return none
    crossed, _ = in_draws(curves, curves[0], start_S, draws(n))
    # nan for a curve that never falls below its threshold.
    free_N, pinned_N, ours_N, ours_pinned_N = (np.log(np.where(np.isinf(each), np.nan, each)) for each in crossed)
    gap_N = pinned_N - free_N
    with np.errstate(divide="ignore", invalid="ignore"):  # draws without a gap are left out
        closed_N = 1 - (ours_pinned_N - ours_N) / gap_N
    if not (gap_N[0] > 0 and np.isfinite(closed_N[0])):
        return none
    half, known = np.nan, np.isfinite(closed_N[1:]) & np.isfinite(gap_N[1:])
    if n >= MIN_TO_DECIDE and known.mean() >= (1 + LEVEL) / 2:
        of_gap = half_of_draws(gap_N[1:][known], n)
        half = half_of_draws(closed_N[1:][known], n) if of_gap < gap_N[0] else np.nan
    return Estimate(closed_N[0], closed_N[0] - half, closed_N[0] + half, n)


def heights(levels: pd.DataFrame) -> tuple[float, float] | None:
    """Return the mean start and the threshold of a setting, over all of its seeds; None without the reference."""
    if (reference := _reference_arm(levels)) is None:
        return None
    start, theirs = levels.groupby("seed")["start"].first().mean(), _by_seed(levels, reference)
    return start, float(threshold(np.array([start]), theirs.mean(axis=1).to_numpy()[None])[0])


def order(tolerance: Tolerance | None) -> float:
    """Return the crossing for ranks, largest first: a loss that tolerates nothing, or is not known, comes last."""
    return -1.0 if tolerance is None or np.isnan(tolerance.crossing) else tolerance.crossing
