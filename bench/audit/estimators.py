"""Signal, noise and bias of a stochastic gradient, from the inner products of sums over groups of mini-batches.

A mini-batch's gradient g_m is drawn with mean ḡ and covariance Σ. With s = Σ_m g_m, q = Σ_m ‖g_m‖² and M mini-batches:

- U = (‖s‖² − q) / (M (M − 1)) estimates ‖ḡ‖². The plain ‖s / M‖² would be too large by tr Σ / M.
- tr Σ = q / M − U, and SNR = U / tr Σ.
- I = ⟨s_a, s_R⟩ / (M_a M_R) estimates ⟨ḡ_a, ḡ_R⟩ for a reference R from other prompts, whose noise is independent.
- cosine = I / √(U_a U_R). Usefulness = I / √(U_R · tr Σ_a): what a mini-batch brings in the direction of the reference,
  over its noise. It is signed: a gradient in the wrong direction has a negative usefulness and the same SNR.
- Gain = I / √(U_R (U_a + tr Σ_a)) = usefulness / √(1 + SNR), over the second moment E‖g‖² in place of the noise. One
  step η g of the best size lowers a quadratic of curvature c by I² / (2c E‖g‖²) in expectation, and a step along the
  true gradient by U_R / (2c): the squared gain is the share of the decrease that one mini-batch brings.
- bias² = U_a + U_R − 2 I estimates ‖ḡ_a − ḡ_R‖². The scale of a loss is a convention (aggregation, standard
  deviation); after the least-squares rescaling of ḡ_a it is U_R − I² / U_a. Both are given as a share of U_R.

U, tr Σ, I and the first bias² are unbiased; the others are ratios of unbiased estimates. The jackknife leaves out one
group of mini-batches after the other, of the algorithm and of the reference together. Shapes: G groups, P weights, M
mini-batches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from steadymoe.bench.statistics import estimates

Statistic = Callable[[np.ndarray], float]


@dataclass(frozen=True)
class Gradients:
    """The inner products and squares that remain of one algorithm's gradients on M mini-batches in G groups."""

    gram_GG: np.ndarray
    """The inner products of the groups' sums."""
    squares_G: np.ndarray
    """Σ ‖g_m‖² of each group."""
    counts_G: np.ndarray
    """The number of mini-batches of each group."""

    def squared_norm(self, kept_G: np.ndarray) -> float:
        """Return U, the squared norm of the mean gradient, unbiased; it may be negative."""
        n = self.counts_G[kept_G].sum()
        return float((self.gram_GG[np.ix_(kept_G, kept_G)].sum() - self.squares_G[kept_G].sum()) / (n * (n - 1)))

    def trace(self, kept_G: np.ndarray) -> float:
        """Return tr Σ, the variance of a mini-batch's gradient, summed over weights."""
        return float(self.squares_G[kept_G].sum() / self.counts_G[kept_G].sum()) - self.squared_norm(kept_G)

    def snr(self, kept_G: np.ndarray) -> float:
        """Return U / tr Σ."""
        return _ratio(self.squared_norm(kept_G), self.trace(kept_G))

    @property
    def has_signal(self) -> bool:
        """Whether the interval of U lies above 0."""
        return jackknife(self.squared_norm, len(self.counts_G)).low > 0


@dataclass(frozen=True)
class Pair:
    """An algorithm's gradients and a reference's, in the same number of groups."""

    own: Gradients
    reference: Gradients
    cross_GG: np.ndarray
    """The inner products of the groups' sums: rows are the algorithm's, columns the reference's."""

    def inner(self, kept_G: np.ndarray) -> float:
        """Return I, the inner product of the two mean gradients, unbiased."""
        products = self.own.counts_G[kept_G].sum() * self.reference.counts_G[kept_G].sum()
        return float(self.cross_GG[np.ix_(kept_G, kept_G)].sum() / products)

    def usefulness(self, kept_G: np.ndarray) -> float:
        """Return I / √(U_R · tr Σ)."""
        return _ratio(self.inner(kept_G), _root(self.reference.squared_norm(kept_G) * self.own.trace(kept_G)))

    def cosine(self, kept_G: np.ndarray) -> float:
        """Return I / √(U_R · U)."""
        return _ratio(self.inner(kept_G), _root(self.reference.squared_norm(kept_G) * self.own.squared_norm(kept_G)))

    def bias(self, kept_G: np.ndarray) -> float:
        """Return bias² after the least-squares rescaling, as a share of U_R."""
        products = self.reference.squared_norm(kept_G) * self.own.squared_norm(kept_G)
        return 1 - _ratio(self.inner(kept_G) ** 2, products)

    def raw_bias(self, kept_G: np.ndarray) -> float:
        """Return bias² without a rescaling, as a share of U_R."""
        apart = self.own.squared_norm(kept_G) + self.reference.squared_norm(kept_G) - 2 * self.inner(kept_G)
        return _ratio(apart, self.reference.squared_norm(kept_G))


@dataclass(frozen=True)
class Jackknifed:
    """An estimate over mini-batches, its 95 % interval, and the estimate without each group."""

    value: float
    low: float
    high: float
    replicates: tuple[float, ...]

    def __sub__(self, other: "Jackknifed") -> "Jackknifed":
        """Return the difference of two estimates from the same mini-batches, paired by mini-batch."""
        pairs = zip(self.replicates, other.replicates, strict=True)
        return from_replicates(self.value - other.value, [mine - others for mine, others in pairs])


def jackknife(statistic: Statistic, groups: int, is_defined: bool = True) -> Jackknifed:
    """Estimate ``statistic`` of all groups, with Student's interval from the grouped jackknife; nan if undefined.

    The variance is (G − 1)/G Σ_g (θ_(−g) − θ̄)², with G − 1 degrees of freedom (Tukey 1958; Wolter 2007, 4.2). For U of
    a gradient whose mean is 0 it is too large, and the interval too wide: U is then a degenerate U-statistic.
    """
    if not is_defined:
        return from_replicates(math.nan, [math.nan] * groups)
    replicates = [statistic(np.arange(groups) != left_out) for left_out in range(groups)]
    return from_replicates(statistic(np.ones(groups, dtype=bool)), replicates)


def from_replicates(value: float, replicates: Sequence[float]) -> Jackknifed:
    """Return an estimate with its 95 % interval; without one if there are no replicates or one is not finite."""
    replicates_G, groups = np.asarray(replicates, dtype=float), len(replicates)
    half = math.nan
    if groups > 1 and np.isfinite(replicates_G).all():
        error = math.sqrt((groups - 1) / groups * float(np.square(replicates_G - replicates_G.mean()).sum()))
        half = estimates.t_quantile(0.95, groups - 1) * error
    return Jackknifed(value, value - half, value + half, tuple(replicates_G.tolist()))


def signal(own: Gradients) -> dict[str, Jackknifed]:
    """Estimate signal and noise of one algorithm: ``squared_norm`` (U), ``trace`` (tr Σ) and ``snr``."""
    statistics = {"squared_norm": own.squared_norm, "trace": own.trace, "snr": own.snr}
    return {name: jackknife(statistic, len(own.counts_G)) for name, statistic in statistics.items()}


def share(block: Gradients, whole: Gradients) -> Jackknifed:
    """Estimate the share of a block of weights in U; undefined without a signal."""

    def statistic(kept_G: np.ndarray) -> float:
        return _ratio(block.squared_norm(kept_G), whole.squared_norm(kept_G))

    return jackknife(statistic, len(whole.counts_G), whole.has_signal)


def against_truth(pair: Pair) -> dict[str, Jackknifed]:
    """Compare an algorithm with the policy gradient of fresh samples: ``inner``, ``usefulness``, ``cosine``, ``bias``.

    Only ``inner`` is defined if the interval of the reference's U contains 0; cosine and bias also need a signal of the
    algorithm.
    """
    groups, has_reference = len(pair.own.counts_G), pair.reference.has_signal
    has_both = has_reference and pair.own.has_signal
    return {
        "inner": jackknife(pair.inner, groups),
        "usefulness": jackknife(pair.usefulness, groups, has_reference),
        "cosine": jackknife(pair.cosine, groups, has_both),
        "bias": jackknife(pair.bias, groups, has_both),
    }


def against_itself(pair: Pair) -> dict[str, Jackknifed]:
    """Compare an algorithm with its own gradient on fresh samples: ``staleness_bias`` (raw), ``staleness_cosine``."""
    groups, has_reference = len(pair.own.counts_G), pair.reference.has_signal
    return {
        "staleness_bias": jackknife(pair.raw_bias, groups, has_reference),
        "staleness_cosine": jackknife(pair.cosine, groups, has_reference and pair.own.has_signal),
    }


def gain(usefulness: Jackknifed, snr: Jackknifed) -> Jackknifed:
    """Return the signed root of the gain of a step of the best size: usefulness / √(1 + SNR)."""
    pairs = zip(usefulness.replicates, snr.replicates, strict=False)  # an archive may have dropped those of one
    gains = [_ratio(useful, _root(1 + noise)) for useful, noise in [(usefulness.value, snr.value), *pairs]]
    return from_replicates(gains[0], gains[1:])


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.nan


def _root(value: float) -> float:
    return math.sqrt(value) if value > 0 else math.nan
