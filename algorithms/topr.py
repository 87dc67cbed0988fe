"""TOPR, tapered off-policy REINFORCE: good responses count in full, bad ones less once they have become unlikely.

    J = mean_i (1/T_i) Σ_t sg[ω_i] Â_i log π_θ(y_{i,t}),   ω = 1 where Â > 0,  clip(Π_t r_t, 0, 1) where Â < 0
    (2503.14286, eqs. 7 and 8; the equations were read in a close reading of the paper by others)

Shaper: capped weight. Differs from CISPO in the unit, the product over a whole response, and in the weight of a good
response, always 1. The advantage is a reward of ±1 without baseline. ROLL takes the token ratio (``ratio``: token).

Provenance: reconstruction (from a close reading of the paper by others).
"""

from dataclasses import dataclass

import torch

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss


@dataclass(frozen=True, kw_only=True)
class TOPR(RatioLoss):
    """Policy gradient, tapered where the advantage is negative."""

    ratio: str = "product"

    def surrogate(self, batch: Batch) -> Surrogate:
        """sg[ω] A log π; capped tokens are marked as clipped."""
        ratio_BT, good_BT = self.ratio_of(batch), batch.advantages_BT > 0
        weight_BT = torch.where(good_BT, 1.0, ratio_BT.clamp(0, 1))
        capped_BT = (batch.advantages_BT < 0) & (ratio_BT > 1)
        return ops.weighted_logprobs(
            weight_BT, batch.logprobs_BT, batch.advantages_BT, torch.zeros_like(capped_BT), capped_BT
        )
