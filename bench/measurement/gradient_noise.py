"""The gradient noise scale: how many prompts a mini-batch needs before its gradient says more than its noise.

The simple noise scale of McCandlish et al. (1812.06162, eq. 2.9) is B = tr Σ / |G|². G is the expected gradient, and Σ
the covariance of the gradients of single prompts (each with its group of responses). A mini-batch of B prompts has as
much noise as signal: noise over signal is tr Σ / (M |G|²) for M prompts.

The estimates of both parts are unbiased, as in the paper's appendix A.1 with batches of 1 and of n prompts: from the n
gradients g_i with the mean ḡ, tr Σ = Σ_i |g_i − ḡ|² / (n − 1) and |G|² = |ḡ|² − tr Σ / n. Shapes: N prompts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from steadymoe.bench.statistics.estimates import Estimate, mean_over_seeds


@dataclass(frozen=True)
class Noise:
    """Signal and noise of the gradients of single prompts."""

    trace: float
    """tr Σ."""
    squared_norm: float
    """|G|²; unbiased, so it may be negative where the signal is lost in the noise."""

    @property
    def signal_over_noise(self) -> float:
        """|G|² / tr Σ of one prompt, the inverse of the noise scale; nan without any gradient."""
        return self.squared_norm / self.trace if self.trace > 0 else (math.inf if self.squared_norm > 0 else math.nan)


def gram(gradients_NP: list[Tensor]) -> Tensor:
    """The inner products of the prompts' gradients, (N, N), from one flat vector for each prompt, in double."""
    stacked_NP = torch.stack(gradients_NP)
    return (stacked_NP @ stacked_NP.T).double()


def noise(gram_NN: Tensor) -> Noise:
    """The unbiased estimates from the inner products of the gradients of at least two prompts."""
    n = len(gram_NN)
    of_mean = float(gram_NN.sum()) / n**2
    trace = (float(gram_NN.trace()) - n * of_mean) / (n - 1)
    return Noise(trace, of_mean - trace / n)


def noise_scale(gram_NN: Tensor) -> Estimate:
    """B = tr Σ / |G|² in prompts with a 95 % interval, from the inner products of at least three prompts' gradients.

    The interval is Student's on the jackknife's pseudo-values of |G|²/tr Σ, which has no pole, and is turned over at
    the end. B and the upper end are infinite where |G|² is not above 0; n is the number of prompts.
    """
    n, whole = len(gram_NN), noise(gram_NN).signal_over_noise
    if not math.isfinite(whole):
        return Estimate(0.0 if whole > 0 else math.nan, math.nan, math.nan, n)
    without = [noise(gram_NN[keep][:, keep]).signal_over_noise for keep in ~torch.eye(n, dtype=torch.bool)]
    of_signal = mean_over_seeds([n * whole - (n - 1) * each for each in without])
    return Estimate(_inverse(whole), _inverse(of_signal.high), _inverse(of_signal.low), n)


def _inverse(signal: float) -> float:
    return math.nan if math.isnan(signal) else 1 / signal if signal > 0 else math.inf
