"""Bearable stress: how far a dial can be turned before a loss keeps less than a share of GRPO's gain.

Outcome is the sampled accuracy at a run's last evaluation. The line is the start plus ``SHARE`` of the gain of the
reference (GRPO) at its best value of the dial; it is one line for all losses, so a loss that hardly moves bears
nothing. The crossing of a loss is where its mean curve first falls below the line beyond its own best value, between
two values by linear interpolation in the dial, or in its logarithm where the dial has one. What happens further on does
not count: a loss that hardly leaves its start on very old data may rise again, and bears nothing by that. The number is
the crossing divided by the reference's. Its interval is Student's on the logarithm, with the standard error of a
bootstrap over paired seeds: with five seeds percentiles are too narrow (``estimates.MIN_FOR_BOOTSTRAP``).

Headroom is the crossing divided by the loss's own best value. A loss that takes half the step at any rate bears twice
the rate and has the same headroom.

Shapes: D values of the dial, ascending, E of the reference's; S seeds; N draws of the bootstrap.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.statistics.comparisons import MIN_TO_DECIDE
from steadymoe.bench.statistics.estimates import LEVEL, RESAMPLES, Estimate, t_quantile

SHARE = 0.5
"""Of the reference's gain: of shares between 0.25 and 0.9 the one with the least noise (results/ruler)."""


@dataclass(frozen=True)
class Curve:
    """The levels of a loss over a dial."""

    dial_D: np.ndarray
    """Its values, ascending."""
    levels_DS: np.ndarray


@dataclass(frozen=True)
class Bearable:
    """What a loss bears of a dial."""

    crossing: float
    """nan where the curve is nowhere on the line, inf where it never leaves it on the grid."""
    ratio: float
    """The crossing in multiples of the reference's; at the end of the grid, and so a lower bound, if ``crossing`` is
    inf. nan without a crossing, or if the reference never leaves its line."""
    low: float
    high: float
    """The 95 % interval of ``ratio``, nan below five seeds; 0 or inf if more draws than a tail holds have no ratio or,
    for ``high``, never leave the line."""
    p: float
    """Of a ratio of 1, by the same distribution; at least twice the share of draws without a ratio."""
    n: int
    headroom: Estimate
    """The crossing in multiples of the loss's own best value (``tops``).

    nan, and n = 0, without a crossing, if the dial has a 0, or if its best value is the first of the dial, below which
    a better one may lie.
    """

    def __str__(self) -> str:
        if not np.isfinite(self.ratio):
            return "–" if np.isnan(self.crossing) else "reference > grid"
        if np.isinf(self.crossing):
            return f"> {self.ratio:.2f}"
        if np.isnan(self.low) or self.low == self.high:  # the reference itself
            return f"{self.ratio:.2f}"
        high = "> grid" if np.isinf(self.high) else f"{self.high:.2f}"
        return f"{self.ratio:.2f} [{self.low:.2f}, {high}]"


def crossings(curves_ND: np.ndarray, dial_D: np.ndarray, line_N: np.ndarray) -> np.ndarray:
    """Return where each curve, beyond its best value, first falls below its line, (N,).

    nan if it is nowhere on the line, inf if it does not fall below it. The dial ascends; it is interpolated
    in its logarithm if all of its values are positive.
    """
    scale_D = np.log(dial_D) if dial_D[0] > 0 else dial_D
    best_N1 = curves_ND.argmax(1)[:, None]
    below_ND = (curves_ND < line_N[:, None]) & (np.arange(len(dial_D)) > best_N1)
    is_on_N = curves_ND.max(1) >= line_N
    found_N = np.where(is_on_N, np.inf, np.nan)
    leaves = np.flatnonzero(is_on_N & below_ND.any(1))
    after = below_ND[leaves].argmax(1)
    before = after - 1
    above, below = curves_ND[leaves, before], curves_ND[leaves, after]
    part = (above - line_N[leaves]) / (above - below)
    place = scale_D[before] + part * (scale_D[after] - scale_D[before])
    found_N[leaves] = np.exp(place) if dial_D[0] > 0 else place
    return found_N


def tops(curves_ND: np.ndarray, dial_D: np.ndarray) -> np.ndarray:
    """Return where each curve is highest, (N,): the top of the parabola through its highest value and both neighbours.

    In the logarithm of the dial, which must be positive. At an end of the dial it is that end.
    """
    best_N, each = curves_ND.argmax(1), np.arange(len(curves_ND))
    scale_D = np.log(dial_D)
    top_N = scale_D[best_N]
    inside = (best_N > 0) & (best_N < len(dial_D) - 1)
    at, each = best_N[inside], each[inside]
    left, right = scale_D[at] - scale_D[at - 1], scale_D[at + 1] - scale_D[at]
    rise, fall = curves_ND[each, at] - curves_ND[each, at - 1], curves_ND[each, at] - curves_ND[each, at + 1]
    curvature = left * fall + right * rise
    is_flat = curvature == 0
    shift = (right**2 * rise - left**2 * fall) / np.where(is_flat, 1, 2 * curvature)
    top_N[inside] += np.where(is_flat, 0, shift)
    return np.exp(top_N)


def line(reference: Curve, start_N: np.ndarray, levels_NE: np.ndarray, at: float | None = None) -> np.ndarray:
    """Return the start plus ``SHARE`` of the reference's gain, (N,), at the value ``at`` of its dial, or at its best.

    ``levels_NE`` are its mean levels in each draw. Raises ValueError if it did not run at ``at``.
    """
    if at is not None and at not in reference.dial_D:
        raise ValueError(f"the reference did not run at {at:g}, where its gain draws the line")
    best_N = levels_NE.max(1) if at is None else levels_NE[:, reference.dial_D.tolist().index(at)]
    return start_N + SHARE * (best_N - start_N)


def bearable(
    ours: Curve, reference: Curve, start_S: np.ndarray, rng: np.random.Generator, at: float | None = None
) -> Bearable:
    """Return what a loss bears, from its levels and the reference's at the same seeds, and their common starts.

    The line, the reference's best value included, is found anew in every draw; ``at``: see ``line``. Raises ValueError
    for a dial with one value, for one without ``at``, or if the reference gains nothing.
    """
    seeds = len(start_S)
    if len(ours.dial_D) < 2 or len(reference.dial_D) < 2:
        raise ValueError("a dial with one value has no crossing: sweep two values at least")

    has_logarithm = ours.dial_D[0] > 0

    def at_draws(draws_NS: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Crossing and best value of the loss, crossing of the reference, and gain to the line, in each draw."""
        ours_ND, theirs_NE = (each.levels_DS[:, draws_NS].mean(-1).T for each in (ours, reference))
        start_N = start_S[draws_NS].mean(1)
        line_N = line(reference, start_N, theirs_NE, at)
        crossed = crossings(ours_ND, ours.dial_D, line_N), crossings(theirs_NE, reference.dial_D, line_N)
        best_N = tops(ours_ND, ours.dial_D) if has_logarithm else np.full(len(draws_NS), np.nan)
        return crossed[0], best_N, crossed[1], line_N - start_N

    def logs(ours_N: np.ndarray, theirs_N: np.ndarray) -> np.ndarray:
        """Logarithm of the ratio, with a curve that never leaves its line at the end of the grid; nan where unknown."""
        known = ~np.isnan(ours_N) & np.isfinite(theirs_N) & (theirs_N > 0)
        found_N = np.full(len(ours_N), np.nan)
        found_N[known] = np.log(np.minimum(ours_N[known], ours.dial_D[-1]) / theirs_N[known])
        return found_N

    crossed, best, theirs, gain = at_draws(np.arange(seeds)[None])
    if not gain[0] > 0:
        raise ValueError("the reference gains nothing: there is no line")
    (log,) = logs(crossed, theirs)
    (own_log,) = np.log(crossed / best) if ours.levels_DS.mean(1).argmax() > 0 else [np.nan]
    low = high = p = own_half = np.nan
    if seeds >= MIN_TO_DECIDE and np.isfinite(log):
        ours_N, best_N, theirs_N, _ = at_draws(rng.integers(seeds, size=(RESAMPLES, seeds)))
        logs_N = logs(ours_N, theirs_N)
        unknown, tail = float(np.isnan(logs_N).mean()), (1 - LEVEL) / 2
        spread, quantile = np.sqrt(seeds / (seeds - 1)), t_quantile(LEVEL, seeds - 1)
        error = float(np.nanstd(logs_N)) * spread
        half = quantile * error
        low = 0.0 if unknown > tail else float(np.exp(log - half))
        high = np.inf if unknown + np.isinf(ours_N).mean() > tail else float(np.exp(log + half))
        beyond = float(student.sf(abs(log) / error, seeds - 1)) if error > 0 else 0.5 * (log == 0)
        p = 2 * max(beyond, unknown)
        own_N = np.log(ours_N / best_N)
        if np.isfinite(own_N).mean() >= 1 - tail:
            own_half = quantile * spread * float(np.std(own_N[np.isfinite(own_N)]))
    sides = [float(np.exp(own_log + side)) for side in (0, -own_half, own_half)]
    headroom = Estimate(*sides, seeds) if np.isfinite(own_log) else Estimate(np.nan, np.nan, np.nan, 0)
    return Bearable(float(crossed[0]), float(np.exp(log)), low, high, float(np.minimum(1.0, p)), seeds, headroom)
