"""ASPO: the ratio of good tokens (Â > 0) is inverted, so that the good tokens with the smallest ratio are pushed most.

    J = Σ_i Σ_t ω_{i,t} Â / Σ_i T_i,   ω = 1/r where Â > 0,  r where Â < 0,  both at most c,
    gradient sg[ω] Â ∇log π, and none where PPO's clip removes it
    (2510.06062; the equation was read in the authors' code, not in the paper)

Shaper: flipped ratio with PPO's mask and a soft dual clip, a cap on the weight that keeps the gradient. Differs from
``ppo_clip`` in the weight of tokens with Â > 0.

Left out: 1. the wider band for tokens of high entropy (0.4 in the authors' code); 2. the KL term on the other tokens.

Provenance: peer's code (the authors', wizard-III/Archer2.0 at b08d963; with one band for all tokens the gradient equals
their code's up to rounding).
"""

from dataclasses import dataclass

import torch

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, check_band, check_cap


@dataclass(frozen=True, kw_only=True)
class ASPO(RatioLoss):
    """Masked surrogate with the flipped ratio, averaged over all tokens."""

    aggregation: str = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float | None = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_band(self.clip_low, self.clip_high)
        check_cap(self.ratio_cap)

    def surrogate(self, batch: Batch) -> Surrogate:
        """ω A; masked tokens have the value at the edge and are marked as clipped."""
        ratio_BT, advantages_BT = self.ratio_of(batch), batch.advantages_BT
        low, high = 1 - self.clip_low, 1 + self.clip_high
        low_BT, high_BT = ops.beyond(ratio_BT, advantages_BT, low, high)
        held_BT = ratio_BT.detach().clamp(low, high).where(low_BT | high_BT, ratio_BT.detach())
        weight_BT = torch.where(advantages_BT > 0, 1 / held_BT, held_BT)
        if self.ratio_cap is not None:
            weight_BT = weight_BT.clamp(max=self.ratio_cap)
        live_BT = ops.with_token_gradient(weight_BT, self.log_ratio(batch))
        return Surrogate(torch.where(low_BT | high_BT, weight_BT, live_BT) * advantages_BT, low_BT, high_BT)
