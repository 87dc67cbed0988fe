"""Bearable stress: how far a dial can be turned before a loss keeps less than a share of GRPO's gain.

Outcome is the sampled accuracy at a run's last evaluation. The line is the start plus ``SHARE`` of the gain of the
reference (GRPO) at its best value of the dial; it is one line for all losses, so a loss that hardly moves bears
nothing. The crossing of a loss is the largest value of the dial at which its mean curve still lies on or above the
line, between two values by linear interpolation in the dial, or in its logarithm where the dial has one. The number is
the crossing divided by the reference's, with a percentile bootstrap over paired seeds.

Shapes: D values of the dial, ascending; S seeds; N draws of the bootstrap.
"""

from dataclasses import dataclass

import numpy as np

from steadymoe.bench.statistics.comparisons import MIN_TO_DECIDE
from steadymoe.bench.statistics.estimates import LEVEL, RESAMPLES

SHARE = 0.75
"""Of the reference's gain. Nearer to 1 the plateau of a loss may touch the line, and its crossing means nothing."""


@dataclass(frozen=True)
class Bearable:
    """What a loss bears of a dial. ``crossing`` and ``ratio`` are nan where the curve is nowhere on the line, and inf
    where it never leaves it on the grid."""

    crossing: float
    ratio: float
    """The crossing in multiples of the reference's; nan without one, or if the reference never leaves its line."""
    low: float
    high: float
    """The 95 % interval of ``ratio``; nan below five seeds. A draw whose ratio is not known counts as 0 for the lower
    end and as inf for the upper one."""
    n: int

    def __str__(self) -> str:
        if not np.isfinite(self.crossing):
            return "–" if np.isnan(self.crossing) else "> grid"
        if np.isnan(self.ratio):
            return "reference > grid"
        if np.isnan(self.low):
            return f"{self.ratio:.2f}"
        high = "> grid" if np.isinf(self.high) else f"{self.high:.2f}"
        return f"{self.ratio:.2f} [{self.low:.2f}, {high}]"


def crossings(curves_ND: np.ndarray, dial_D: np.ndarray, line_N: np.ndarray) -> np.ndarray:
    """Return where each curve leaves its line for good, (N,): nan if it is nowhere on it, inf if it never leaves it.

    The dial ascends; it is interpolated in its logarithm if all of its values are positive.
    """
    scale_D = np.log(dial_D) if dial_D[0] > 0 else dial_D
    on_ND = curves_ND >= line_N[:, None]
    last = len(dial_D) - 1
    at_N = last - on_ND[:, ::-1].argmax(1)
    found_N = np.full(len(curves_ND), np.nan)
    found_N[on_ND.any(1)] = np.inf
    leaves = np.flatnonzero(on_ND.any(1) & (at_N < last))
    before, after = at_N[leaves], at_N[leaves] + 1
    above, below = curves_ND[leaves, before], curves_ND[leaves, after]
    part = (above - line_N[leaves]) / (above - below)
    place = scale_D[before] + part * (scale_D[after] - scale_D[before])
    found_N[leaves] = np.exp(place) if dial_D[0] > 0 else place
    return found_N


def line(reference_ND: np.ndarray, start_N: np.ndarray) -> np.ndarray:
    """Return the start plus ``SHARE`` of the gain at the reference's best value of the dial, (N,)."""
    return start_N + SHARE * (reference_ND.max(1) - start_N)


def bearable(
    levels_DS: np.ndarray, reference_DS: np.ndarray, start_S: np.ndarray, dial_D: np.ndarray, rng: np.random.Generator
) -> Bearable:
    """Return what a loss bears, from its levels and the reference's at the same seeds, and their common starts.

    The line, the reference's best value included, is found anew in every draw. Raises ValueError for a dial with one
    value, or if the reference gains nothing.
    """
    seeds = len(start_S)
    if len(dial_D) < 2:
        raise ValueError("a dial with one value has no crossing: sweep two values at least")
    if not reference_DS.mean(1).max() > start_S.mean():
        raise ValueError("the reference gains nothing at any value of the dial: there is no line")

    def at(draws_NS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Crossing of the loss and of the reference in each draw of seeds."""
        ours_ND, theirs_ND = (each[:, draws_NS].mean(-1).T for each in (levels_DS, reference_DS))
        line_N = line(theirs_ND, start_S[draws_NS].mean(1))
        return crossings(ours_ND, dial_D, line_N), crossings(theirs_ND, dial_D, line_N)

    (crossing,), (of_reference,) = at(np.arange(seeds)[None])
    low = high = np.nan
    if seeds >= MIN_TO_DECIDE:
        ours_N, theirs_N = at(rng.integers(seeds, size=(RESAMPLES, seeds)))
        # A curve that is nowhere on the line bears less than any other.
        ratios_N = _ratios(np.where(np.isnan(ours_N), 0.0, ours_N), theirs_N)
        low = np.quantile(np.nan_to_num(ratios_N, nan=0.0, posinf=np.inf), (1 - LEVEL) / 2, method="inverted_cdf")
        high = np.quantile(np.nan_to_num(ratios_N, nan=np.inf, posinf=np.inf), (1 + LEVEL) / 2, method="inverted_cdf")
    (ratio,) = _ratios(np.array([crossing]), np.array([of_reference]))
    return Bearable(float(crossing), float(ratio), float(low), float(high), seeds)


def _ratios(ours_N: np.ndarray, reference_N: np.ndarray) -> np.ndarray:
    """The crossings in multiples of the reference's; nan where the reference's is not known."""
    known = np.isfinite(reference_N) & (reference_N > 0)
    return np.where(known, ours_N / np.where(known, reference_N, 1.0), np.nan)
