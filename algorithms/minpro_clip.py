"""MinPRO under PPO's clip instead of a clipped weight.

    J = Σ_i Σ_t min( m r Â, clip(m r, 1 − ε_low, 1 + ε_high) Â ) / Σ_i T_i,   m_t = sg[ min over u < t of r_u ]

Shaper: min-clip. Differs from ``minpro`` at the edge: a token beyond it loses its gradient.

Provenance: reconstruction (from a description of xorl's preset).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch
from steadymoe.algorithms.loss import ClippedLoss
from steadymoe.algorithms.minpro import MinPRO


@dataclass(frozen=True, kw_only=True)
class MinPROClip(ClippedLoss):
    """PPO's surrogate of the token's ratio times the smallest ratio before it."""

    aggregation: str = "token-mean"
    clip_high: float = 0.28

    UNITS: ClassVar = ("token",)

    def ratio_of(self, batch: Batch) -> Tensor:
        """m_t r_t, (B, T), with the gradient of the token's own log-probability."""
        return ops.with_token_gradient(MinPRO(anchor=self.anchor).ratio_of(batch), self.log_ratio(batch))
