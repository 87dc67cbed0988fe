"""Signal, noise and bias of a stochastic gradient, from the inner products of sums over groups of mini-batches.

A mini-batch's gradient g_m is drawn with mean ḡ and covariance Σ. With s = Σ_m g_m, q = Σ_m ‖g_m‖² and M mini-batches:

- U = (‖s‖² − q) / (M (M − 1)) estimates ‖ḡ‖². The plain ‖s / M‖² would be too large by tr Σ / M.
- tr Σ = q / M − U, and SNR = U / tr Σ.
- I = ⟨s_a, s_R⟩ / (M_a M_R) estimates ⟨ḡ_a, ḡ_R⟩ for a reference R from other prompts, whose noise is independent.
- cosine = I / √(U_a U_R). Usefulness = I / √(U_R · tr Σ_a): what a mini-batch brings in the direction of the reference,
  over its noise. It has a sign: a gradient in the wrong direction has a negative usefulness and the same SNR.
- Gain = I / √(U_R (U_a + tr Σ_a)) = usefulness / √(1 + SNR), over the second moment E‖g‖² in place of the noise. One
  step η g of the best size lowers a quadratic of curvature c by I² / (2c E‖g‖²) in expectation, and a step along the
  true gradient by U_R / (2c): the squared gain is the share of the decrease that one mini-batch brings.
- bias² = U_a + U_R − 2 I estimates ‖ḡ_a − ḡ_R‖². The scale of a loss is a convention (aggregation, standard
  deviation); after the least-squares rescaling of ḡ_a it is U_R − I² / U_a. Both are told as a share of U_R.

U, tr Σ, I and the first bias² are unbiased; the others are ratios of unbiased estimates. The jackknife leaves out one
group of mini-batches after the other, of the algorithm and of the reference together. Shapes: G groups, P weights, M
mini-batches.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steadymoe.bench.statistics import estimates


@dataclass(frozen=True)
class Gradients:
    """What is kept of the gradients of one algorithm on M mini-batches in G groups."""

    gram_GG: np.ndarray
    """The inner products of the groups' sums."""
    squares_G: np.ndarray
    """Σ ‖g_m‖² of each group."""
    counts_G: np.ndarray
    """The number of mini-batches of each group."""

    def squared_norm(self, kept_G: np.ndarray) -> float:
        """U: the squared norm of the mean gradient, unbiased; it may be negative."""
        n = self.counts_G[kept_G].sum()
        return float((self.gram_GG[np.ix_(kept_G, kept_G)].sum() - self.squares_G[kept_G].sum()) / (n * (n - 1)))

    def trace(self, kept_G: np.ndarray) -> float:
        """tr Σ: the variance of a mini-batch's gradient, summed over weights."""
        return float(self.squares_G[kept_G].sum() / self.counts_G[kept_G].sum()) - self.squared_norm(kept_G)


@dataclass(frozen=True)
class Beside:
    """An algorithm's gradients beside a reference's, in the same number of groups."""

    own: Gradients
    reference: Gradients
    cross_GG: np.ndarray
    """The inner products of the groups' sums: rows are the algorithm's, columns the reference's."""

    def inner(self, kept_G: np.ndarray) -> float:
        """I: the inner product of the two mean gradients, unbiased."""
        products = self.own.counts_G[kept_G].sum() * self.reference.counts_G[kept_G].sum()
        return float(self.cross_GG[np.ix_(kept_G, kept_G)].sum() / products)


Statistic = Callable[[np.ndarray], float]


@dataclass(frozen=True)
class Jackknifed:
    """An estimate over mini-batches, its 95 % interval, and the estimate without each group."""

    value: float
    low: float
    high: float
    replicates: tuple[float, ...]

    @property
    def is_above_zero(self) -> bool:
        """Whether the interval lies above 0; false without an interval."""
        return self.low > 0

    def __sub__(self, other: "Jackknifed") -> "Jackknifed":
        """The difference of two estimates from the same mini-batches, paired by mini-batch."""
        pairs = zip(self.replicates, other.replicates, strict=True)
        return of_replicates(self.value - other.value, [mine - others for mine, others in pairs])


def jackknife(statistic: Statistic, groups: int) -> Jackknifed:
    """``statistic`` of all groups, with Student's interval from the grouped jackknife (Tukey 1958; Wolter 2007, 4.2).

    The variance is (G − 1)/G Σ_g (θ_(−g) − θ̄)², with G − 1 degrees of freedom. For U of a gradient whose mean is 0 this
    variance is too large, and the interval too wide: U is then a degenerate U-statistic.
    """
    everything_G = np.ones(groups, dtype=bool)
    replicates = []
    for left_out in range(groups):
        kept_G = everything_G.copy()
        kept_G[left_out] = False
        replicates.append(statistic(kept_G))
    return of_replicates(statistic(everything_G), replicates)


def of_replicates(value: float, replicates: Sequence[float], level: float = 0.95) -> Jackknifed:
    """An estimate with the interval of its replicates; without one where there are none, or one is not finite."""
    found_G, groups = np.asarray(replicates, dtype=float), len(replicates)
    half = math.nan
    if groups > 1 and np.isfinite(found_G).all():
        error = math.sqrt((groups - 1) / groups * float(np.square(found_G - found_G.mean()).sum()))
        half = estimates.t_quantile(level, groups - 1) * error
    return Jackknifed(value, value - half, value + half, tuple(found_G.tolist()))


def of_gradients(own: Gradients) -> dict[str, Jackknifed]:
    """Signal and noise of one algorithm: ``squared_norm`` (U), ``trace`` (tr Σ) and ``snr``."""
    statistics: dict[str, Statistic] = {
        "squared_norm": own.squared_norm,
        "trace": own.trace,
        "snr": lambda kept_G: _over(own.squared_norm(kept_G), own.trace(kept_G)),
    }
    return {name: jackknife(each, len(own.counts_G)) for name, each in statistics.items()}


def beside_truth(pair: Beside) -> dict[str, Jackknifed]:
    """An algorithm beside the policy gradient of fresh samples: ``inner``, ``usefulness``, ``cosine``, ``bias``.

    ``bias`` is after the least-squares rescaling, as a share of the reference's squared norm. Where the interval of the
    reference's squared norm holds 0, there is ``inner`` alone; where the algorithm's does, neither cosine nor bias.
    """
    own, reference, groups = pair.own, pair.reference, len(pair.own.counts_G)

    def usefulness(kept_G: np.ndarray) -> float:
        return _over(pair.inner(kept_G), _root(reference.squared_norm(kept_G) * own.trace(kept_G)))

    def cosine(kept_G: np.ndarray) -> float:
        return _over(pair.inner(kept_G), _root(reference.squared_norm(kept_G) * own.squared_norm(kept_G)))

    def bias(kept_G: np.ndarray) -> float:
        products = reference.squared_norm(kept_G) * own.squared_norm(kept_G)
        return 1 - _over(pair.inner(kept_G) ** 2, products)

    has_reference = jackknife(reference.squared_norm, groups).is_above_zero
    has_signal = has_reference and jackknife(own.squared_norm, groups).is_above_zero
    return {
        "inner": jackknife(pair.inner, groups),
        "usefulness": jackknife(usefulness if has_reference else _undefined, groups),
        "cosine": jackknife(cosine if has_signal else _undefined, groups),
        "bias": jackknife(bias if has_signal else _undefined, groups),
    }


def gain(usefulness: Jackknifed, snr: Jackknifed) -> Jackknifed:
    """The root of the gain of a step of the best size, signed, from the two estimates of one algorithm's gradients."""

    def of(useful: float, ratio: float) -> float:
        return _over(useful, _root(1 + ratio))

    pairs = zip(usefulness.replicates, snr.replicates, strict=False)  # none where an archive dropped one's
    return of_replicates(of(usefulness.value, snr.value), [of(*pair) for pair in pairs])


def beside_itself(pair: Beside) -> dict[str, Jackknifed]:
    """An algorithm beside its own gradient on fresh samples: ``staleness_bias`` and ``staleness_cosine``.

    ``staleness_bias`` is the raw bias² as a share of the reference's squared norm, which is undefined where its
    interval holds 0.
    """
    own, reference, groups = pair.own, pair.reference, len(pair.own.counts_G)

    def bias(kept_G: np.ndarray) -> float:
        apart = own.squared_norm(kept_G) + reference.squared_norm(kept_G) - 2 * pair.inner(kept_G)
        return _over(apart, reference.squared_norm(kept_G))

    def cosine(kept_G: np.ndarray) -> float:
        return _over(pair.inner(kept_G), _root(reference.squared_norm(kept_G) * own.squared_norm(kept_G)))

    has_reference = jackknife(reference.squared_norm, groups).is_above_zero
    has_signal = has_reference and jackknife(own.squared_norm, groups).is_above_zero
    return {
        "staleness_bias": jackknife(bias if has_reference else _undefined, groups),
        "staleness_cosine": jackknife(cosine if has_signal else _undefined, groups),
    }


def shares(of_blocks: Mapping[str, Gradients], whole: Gradients) -> dict[str, Jackknifed]:
    """The share of each block of weights in the squared norm of the mean gradient; undefined without a signal."""
    groups = len(whole.counts_G)
    has_signal = jackknife(whole.squared_norm, groups).is_above_zero

    def share_of(block: Gradients) -> Statistic:
        return lambda kept_G: _over(block.squared_norm(kept_G), whole.squared_norm(kept_G))

    return {name: jackknife(share_of(each) if has_signal else _undefined, groups) for name, each in of_blocks.items()}


def _undefined(kept_G: np.ndarray) -> float:
    return math.nan


def _over(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.nan


def _root(value: float) -> float:
    return math.sqrt(value) if value > 0 else math.nan
