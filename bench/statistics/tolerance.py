"""Tolerance: how far a dial can be turned before a loss keeps less than a share of GRPO's gain.

Outcome is the sampled accuracy at a run's last evaluation. The line is the start plus ``SHARE`` of the gain of the
reference (GRPO) at its best value of the dial; it is one line for all losses, so a loss that hardly moves tolerates
nothing. The crossing of a loss is where its mean curve first falls below the line beyond its own best value, between
two values by linear interpolation in the dial, or in its logarithm where the dial has one. What happens further on does
not count: a loss that hardly leaves its start on very old data may rise again, and tolerates nothing by that. The number is
the crossing divided by the reference's. Its interval is Student's on the logarithm, with the standard error of a
bootstrap over paired seeds: with five seeds percentiles are too narrow (``estimates.MIN_FOR_BOOTSTRAP``).

The number has two factors: how much higher the loss's own best value is than the reference's, and how far beyond it the
loss goes, its *headroom*, over the reference's. A loss that takes half the step at any rate tolerates twice the rate, is
best at twice the rate, and has the same headroom.

Shapes: D values of the dial, ascending, E of the reference's; S seeds; N draws of the bootstrap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t as student  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.statistics.comparisons import MIN_TO_DECIDE
from steadymoe.bench.statistics.estimates import LEVEL, RESAMPLES, Estimate, half_of_draws, t_quantile

SHARE = 0.5
"""Of the reference's gain: of shares between 0.25 and 0.9 the one with the least noise (results/ruler)."""


class Best(NamedTuple):
    """Where the mean level over a dial is highest."""

    value: float
    end: str
    """``lowest`` or ``highest`` if no value was tried beyond it, else empty."""


def best_value(dial: pd.Series, levels: pd.Series) -> Best:
    """Return the value of the dial with the highest mean level; a row of both is a run."""
    means = levels.groupby(dial).mean()
    place = int(means.argmax())
    return Best(float(means.index[place]), {0: "lowest", len(means) - 1: "highest"}.get(place, ""))


@dataclass(frozen=True)
class Curve:
    """The levels of a loss over a dial."""

    dial_D: np.ndarray
    """Its values, ascending."""
    levels_DS: np.ndarray


@dataclass(frozen=True)
class Tolerance:
    """What a loss tolerates of a dial."""

    crossing: float
    """nan where the curve is nowhere on the line, inf where it never leaves it on the grid; 0 where it is on the line
    at a dial of 0 alone."""
    ratio: float
    """The crossing in multiples of the reference's; at the end of the grid, and so a lower bound, if ``crossing`` is
    inf. nan without a crossing above 0, or if the reference never leaves its line."""
    low: float
    high: float
    """The 95 % interval of ``ratio``, nan below five seeds; 0 or inf if more draws than a tail holds have no ratio or,
    for ``high``, never leave the line."""
    p: float
    """Of a ratio of 1, by the same distribution; at least twice the share of draws without a ratio."""
    n: int
    own_best: Estimate
    """The loss's best value (``tops``) over the reference's."""
    headroom: Estimate
    """``ratio`` over ``own_best``: both are nan, with n = 0, where one of the two curves is highest at an end of its
    dial, ``headroom`` also without a crossing. No interval if more draws than a tail holds have no number."""

    def __str__(self) -> str:
        if not np.isfinite(self.ratio):
            return "reference > grid" if self.crossing > 0 else "–"
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

    In the logarithm of the dial; nan at an end, beyond which a better value may lie, and if the dial has a 0.
    """
    best_N, each_N = curves_ND.argmax(1), np.arange(len(curves_ND))
    top_N = np.full(len(curves_ND), np.nan)
    inside = (best_N > 0) & (best_N < len(dial_D) - 1) & (dial_D[0] > 0)
    at, each = best_N[inside], each_N[inside]
    if len(at):
        scale_D = np.log(dial_D)
        left, right = scale_D[at] - scale_D[at - 1], scale_D[at + 1] - scale_D[at]
        rise, fall = curves_ND[each, at] - curves_ND[each, at - 1], curves_ND[each, at] - curves_ND[each, at + 1]
        top_N[inside] = np.exp(scale_D[at] + (right**2 * rise - left**2 * fall) / (2 * (left * fall + right * rise)))
    return top_N


def line(reference: Curve, start_N: np.ndarray, levels_NE: np.ndarray, at: float | None = None) -> np.ndarray:
    """Return the start plus ``SHARE`` of the reference's gain, (N,), at the value ``at`` of its dial, or at its best.

    ``levels_NE`` are its mean levels in each draw. Raises ValueError if it did not run at ``at``.
    """
    if at is not None and at not in reference.dial_D:
        raise ValueError(f"the reference has no run at {at:g}, which sets the line")
    best_N = levels_NE.max(1) if at is None else levels_NE[:, reference.dial_D.tolist().index(at)]
    return start_N + SHARE * (best_N - start_N)


def ranked_in_draws(
    curves: Sequence[Curve], start_S: np.ndarray, draws_NS: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the crossing and the best level of each of L losses in each draw of seeds, both (N, L), for their ranks.

    The first curve is the reference's. A loss that is nowhere on the line has the crossing 0; one that never falls
    below it has the end of its dial.
    """
    means = [curve.levels_DS[:, draws_NS].mean(-1).T for curve in curves]
    line_N = line(curves[0], start_S[draws_NS].mean(1), means[0])
    crossed = [
        np.minimum(crossings(mean_ND, curve.dial_D, line_N), curve.dial_D[-1])
        for mean_ND, curve in zip(means, curves, strict=True)
    ]
    return np.nan_to_num(np.stack(crossed, 1), nan=0.0), np.stack([each.max(1) for each in means], 1)


def tolerance(
    ours: Curve, reference: Curve, start_S: np.ndarray, rng: np.random.Generator, at: float | None = None
) -> Tolerance:
    """Return what a loss tolerates, from its levels and the reference's at the same seeds, and their common starts.

    The line, the reference's best value included, is found anew in every draw; ``at``: see ``line``. Raises ValueError
    for a dial with one value, for one without ``at``, or if the reference gains nothing.
    """
    seeds = len(start_S)
    if len(ours.dial_D) < 2 or len(reference.dial_D) < 2:
        raise ValueError("a dial with one value has no crossing: sweep at least two values")

    def at_draws(draws_NS: np.ndarray) -> tuple[np.ndarray, ...]:
        """Crossings of the loss and of the reference, the gain that the line asks for, and both best values."""
        ours_ND, theirs_NE = (each.levels_DS[:, draws_NS].mean(-1).T for each in (ours, reference))
        start_N = start_S[draws_NS].mean(1)
        line_N = line(reference, start_N, theirs_NE, at)
        crossed = crossings(ours_ND, ours.dial_D, line_N), crossings(theirs_NE, reference.dial_D, line_N)
        return *crossed, line_N - start_N, tops(ours_ND, ours.dial_D), tops(theirs_NE, reference.dial_D)

    def logs(ours_N: np.ndarray, theirs_N: np.ndarray) -> np.ndarray:
        """Logarithm of the ratio, with a curve that never leaves its line at the end of the grid; nan where unknown.

        A curve that is on its line only where the dial is 0 tolerates nothing, as one that is nowhere on it.
        """
        known = (ours_N > 0) & np.isfinite(theirs_N) & (theirs_N > 0)
        found_N = np.full(len(ours_N), np.nan)
        found_N[known] = np.log(np.minimum(ours_N[known], ours.dial_D[-1]) / theirs_N[known])
        return found_N

    crossed, theirs, gain, *bests = at_draws(np.arange(seeds)[None])
    if not gain[0] > 0:
        raise ValueError("the reference gains nothing: there is no line")
    (log,), (best_log,) = logs(crossed, theirs), np.log(bests[0] / bests[1])
    low = high = p = np.nan
    logs_N = best_logs_N = np.empty(0)
    if seeds >= MIN_TO_DECIDE and np.isfinite(log):
        ours_N, theirs_N, _, *bests = at_draws(rng.integers(seeds, size=(RESAMPLES, seeds)))
        logs_N, best_logs_N = logs(ours_N, theirs_N), np.log(bests[0] / bests[1])
        unknown, tail = float(np.isnan(logs_N).mean()), (1 - LEVEL) / 2
        half = half_of_draws(logs_N[~np.isnan(logs_N)], seeds)
        low = 0.0 if unknown > tail else float(np.exp(log - half))
        high = np.inf if unknown + np.isinf(ours_N).mean() > tail else float(np.exp(log + half))
        quantile = t_quantile(LEVEL, seeds - 1)
        beyond = float(student.sf(quantile * abs(log) / half, seeds - 1)) if half > 0 else 0.5 * (log == 0)
        p = 2 * max(beyond, unknown)
        logs_N[np.isinf(ours_N)] = np.nan
    is_inside = np.isfinite(crossed[0])
    factors = (
        _ratio(best_log, best_logs_N, seeds),
        _ratio(log - best_log if is_inside else np.nan, logs_N - best_logs_N, seeds),
    )
    return Tolerance(float(crossed[0]), float(np.exp(log)), low, high, float(np.minimum(1.0, p)), seeds, *factors)


def _ratio(log: float, logs_N: np.ndarray, seeds: int) -> Estimate:
    """Return a ratio from its logarithm, with Student's interval by the spread over the draws, as in ``tolerance``."""
    if not np.isfinite(log):
        return Estimate(np.nan, np.nan, np.nan, 0)
    known_N, half = logs_N[np.isfinite(logs_N)], np.nan
    if len(known_N) and len(known_N) >= (1 + LEVEL) / 2 * len(logs_N) and np.ptp(known_N) > 0:
        half = half_of_draws(known_N, seeds)
    return Estimate(float(np.exp(log)), float(np.exp(log - half)), float(np.exp(log + half)), seeds)
