"""RLOO: REINFORCE with the mean reward of the other responses as baseline.

    J = mean_i Σ_t Â_i · log π_θ(y_{i,t}),   Â_i = r_i − mean of the other G − 1 rewards     (2402.14740, eq. 7)

Shaper: none. Differs from ``reinforce`` in two ways: 1. the baseline (``LeaveOneOut``) makes the gradient unbiased;
2. the log-likelihood of a response is a sum over its tokens, not divided by its length.

Left out: the KL penalty in the reward; it is a switch here (``algorithm.kl``).

Provenance: paper.
"""

from dataclasses import dataclass

from steadymoe.algorithms.reinforce import Reinforce


@dataclass(frozen=True, kw_only=True)
class RLOO(Reinforce):
    """REINFORCE, summed over the tokens of a response."""

    aggregation: str = "seq-mean-token-sum"
