"""CISPO: the ratio as a clipped, detached weight, so that no token ever loses its gradient.

    J = Σ_i Σ_t sg[ clip(r, 1 − ε_low, 1 + ε_high) ] Â log π_θ(y_{i,t}) / Σ_i T_i          (2506.13585, eqs. 4 and 5)

The paper divides by Σ_i T_i over the responses to one prompt, and then averages over prompts. Here, as in the
trainers (verl, TRL, NeMo-RL), both sums run over the whole mini-batch: a prompt with longer responses weighs more.

Shaper: clipped weight. Differs from PPO's clip at the edge: it caps the gradient's weight instead of removing the
gradient.

Left out: 1. dynamic sampling (``algorithm.sampling``); 2. the length penalty (``algorithm.overlong``); 3. the
paper's unified form with a PPO mask (eqs. 6 and 7).

Provenance: paper.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss


@dataclass(frozen=True, kw_only=True)
class CISPO(RatioLoss):
    """Policy gradient weighted by the clipped importance ratio; with ``clip_low`` of 1 or more without a lower edge."""

    aggregation: str = "token-mean"
    clip_low: float = 1.0
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.clip_low >= 0:
            raise ValueError(f"clip_low is an ε on the ratio, >= 0 (from 1 on: no lower edge); got {self.clip_low}")
        if not self.clip_high > 0:
            raise ValueError(f"clip_high is an ε on the ratio, > 0: the cap is 1 + clip_high; got {self.clip_high}")

    def surrogate(self, batch: Batch) -> Surrogate:
        """sg[clip(r)] A log π; tokens outside the band are marked as clipped, whatever their advantage."""
        low, high = max(1 - self.clip_low, 0.0), 1 + self.clip_high
        ratio_BT = self.ratio_of(batch)
        return ops.weighted_logprobs(
            ratio_BT.clamp(low, high), batch.logprobs_BT, batch.advantages_BT, ratio_BT < low, ratio_BT > high
        )
