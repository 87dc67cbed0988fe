"""The share of tokens that a clip takes, predicted from moments of the log-ratios: "is a clip fraction of 0.4 normal?".

A clip with the band [1 − ε_low, 1 + ε_high] takes a token at the lower edge if its ratio is below the band and its
advantage negative, at the upper edge if its ratio is above and its advantage positive (PPO, 1707.06347, eq. 7). With
the distribution of the log-ratio x among tokens of either sign,

    low = P(A < 0) · P(x < log(1 − ε_low) | A < 0),   high = P(A > 0) · P(x > log(1 + ε_high) | A > 0).

Measured log-ratios have far heavier tails than a normal distribution of their variance (most tokens hardly move), and
a longer one on the left. The distribution here is variance-gamma (Madan, Carr and Chang 1998): normal, with a variance
and a shift that a gamma variable multiplies,

    x = c + θ g + σ √g z,   z normal, g gamma with mean 1 and variance ν.

Four measured moments fix its four numbers. Without excess kurtosis and skewness it is normal. The mean of T independent
values is variance-gamma again, with variance, skewness² and kurtosis divided by T: the log of a sequence ratio.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammainc, gammaincinv, ndtr

# Points of the sum over g; the kurtosis below which the distribution counts as normal; the σ below which it is a gamma
# distribution.
_POINTS, _LEAST_KURTOSIS, _LEAST_SIGMA = 8000, 1e-6, 1e-4


@dataclass(frozen=True)
class Moments:
    """Moments of log-ratios. Raises ValueError for a number that is not finite or a negative variance.

    Attributes:
        mean: in nats.
        variance: in nats².
        skewness: the third standardised moment.
        kurtosis: the fourth standardised moment less 3 (the excess).
    """

    mean: float
    variance: float
    skewness: float = 0.0
    kurtosis: float = 0.0

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.mean, self.variance, self.skewness, self.kurtosis))):
            raise ValueError(f"moments must be finite; got {self}")
        if self.variance < 0:
            raise ValueError(f"a variance is at least 0; got {self.variance}")

    def of_sequences(self, length: int, correlation: float = 0.0) -> "Moments":
        """Moments of the mean over the tokens of responses of one ``length``, the log of the sequence ratio.

        ``correlation`` is between two tokens of a response, at least 0: a part of each response that all its tokens
        share, taken as normal, with that share of the variance. Raises ValueError outside [0, 1] and below one token.
        """
        if length < 1 or not 0 <= correlation <= 1:
            raise ValueError(f"a length is at least 1 and a correlation in [0, 1]; got {length} and {correlation}")
        variance = self.variance * (1 + (length - 1) * correlation) / length
        # A token's own part has all of the third and fourth cumulant; of a mean they fall with length² and length³.
        narrower = self.variance / variance if variance > 0 else 0.0
        return Moments(
            self.mean,
            variance,
            self.skewness * narrower**1.5 / length**2,
            self.kurtosis * narrower**2 / length**3,
        )


@dataclass(frozen=True)
class ClipShare:
    """Predicted shares of all tokens (or responses) that a clip takes at either edge."""

    low: float
    high: float

    @property
    def both(self) -> float:
        """The clip fraction."""
        return self.low + self.high


def measured(log_ratios: np.ndarray) -> Moments:
    """The moments of log-ratios, (N,). Raises ValueError for none, or one that is not finite."""
    values = np.asarray(log_ratios, dtype=float)
    if not values.size:
        raise ValueError("there are no log-ratios to take moments of")
    centred = values - values.mean()
    variance = float(np.square(centred).mean())
    if variance == 0:
        return Moments(float(values.mean()), 0.0)
    standard = centred / math.sqrt(variance)
    return Moments(float(values.mean()), variance, float((standard**3).mean()), float((standard**4).mean() - 3))


def clip_share(
    positive: Moments,
    negative: Moments,
    clip_low: float,
    clip_high: float,
    share_positive: float,
    share_negative: float,
) -> ClipShare:
    """The shares that a band [1 − ``clip_low``, 1 + ``clip_high``] clips.

    ``positive`` and ``negative`` are the moments among tokens (for a sequence ratio: responses) with a positive and a
    negative advantage, which an update moves in opposite directions; ``share_positive`` and ``share_negative`` are
    their shares of all, and the rest has advantage 0. Raises ValueError for an impossible band or share.
    """
    if not 0 <= clip_low < 1 or not clip_high >= 0:
        raise ValueError(f"a band has 0 <= clip_low < 1 and clip_high >= 0; got {clip_low} and {clip_high}")
    if min(share_positive, share_negative) < 0 or share_positive + share_negative > 1 + 1e-9:
        raise ValueError(f"shares are at least 0 and at most 1 together; got {share_positive} and {share_negative}")
    return ClipShare(
        share_negative * below(negative, math.log1p(-clip_low)),
        share_positive * above(positive, math.log1p(clip_high)),
    )


def below(moments: Moments, edge: float) -> float:
    """P(x < edge) of the variance-gamma distribution with these moments.

    If the kurtosis is below 3/2 skewness², which no variance-gamma distribution has, it counts as that limit.
    """
    if moments.variance == 0:
        return float(moments.mean < edge)
    z = (edge - moments.mean) / math.sqrt(moments.variance)
    kurtosis = max(moments.kurtosis, 1.5 * moments.skewness**2)
    if kurtosis < _LEAST_KURTOSIS:
        return float(ndtr(z))
    drift, nu = _shape(moments.skewness, kurtosis)
    theta = math.copysign(math.sqrt(drift / nu), moments.skewness)
    return _below(z + theta, theta, math.sqrt(1 - drift), nu)


def above(moments: Moments, edge: float) -> float:
    """P(x > edge): ``below`` of the mirrored distribution."""
    mirrored = Moments(-moments.mean, moments.variance, -moments.skewness, moments.kurtosis)
    return below(mirrored, -edge)


def _shape(skewness: float, kurtosis: float) -> tuple[float, float]:
    """a = θ²ν, the share of the variance that the shift makes, and ν.

    With unit variance, skewness² = aν(3 − a)² and kurtosis = 3ν(1 + 2a − a²); their quotient rises in a from 0 to 2/3.
    """
    quotient = skewness**2 / kurtosis

    def missing(drift: float) -> float:
        return drift * (3 - drift) ** 2 / (3 + 6 * drift - 3 * drift**2) - quotient

    drift = 1.0 if missing(1.0) <= 0 else float(brentq(missing, 0.0, 1.0, xtol=1e-14))
    return drift, kurtosis / (3 + 6 * drift - 3 * drift**2)


def _below(edge: float, theta: float, sigma: float, nu: float) -> float:
    """P(θ g + σ √g z < edge), as a sum over g on a logarithmic grid, each piece with its exact probability."""
    shape = 1 / nu
    if sigma < _LEAST_SIGMA:
        reached = float(gammainc(shape, max(edge / theta, 0.0) / nu))
        return reached if theta > 0 else 1 - reached
    most = float(gammaincinv(shape, 1 - 1e-15)) * nu
    grid = np.geomspace(most * 1e-20, most, _POINTS)
    probability = np.diff(gammainc(shape, grid / nu), prepend=0.0)
    middle = np.sqrt(grid * np.concatenate([grid[:1], grid[:-1]]))
    conditional = ndtr((edge - theta * middle) / (sigma * np.sqrt(middle)))
    return float(min(1.0, probability @ conditional / probability.sum()))
