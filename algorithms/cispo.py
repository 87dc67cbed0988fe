"""CISPO: the ratio as a clipped, detached weight, so that no token ever loses its gradient.

    J = Σ_i Σ_t sg[ clip(r, 1 − ε_low, 1 + ε_high) ] Â log π_θ(y_{i,t}) / Σ_i T_i          (2506.13585)

Differs from PPO's clip in what the edge does: it caps the weight of the gradient in place of removing it.

Left out: 1. dynamic sampling; 2. the length penalty; 3. the paper's unified form with a PPO mask.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class CISPO:
    """Policy gradient weighted by the clipped importance ratio; ``clip_low`` = 1 is no lower edge."""

    clip_low: float = 1.0
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ValueError(
                f"clip_low is an ε on the ratio, 0 <= clip_low <= 1 (1: no lower edge); got {self.clip_low}"
            )
        if not self.clip_high >= 0:
            raise ValueError(f"clip_high is an ε on the ratio, clip_high >= 0; got {self.clip_high}")

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch; capped tokens are those marked as clipped, whatever their advantage."""
        ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.old_logprobs_BT).exp().detach()
        weight_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -ops.token_mean(weight_BT * batch.advantages_BT * batch.logprobs_BT, batch.mask_BT)
        low_BT, high_BT = ratio_BT < 1 - self.clip_low, ratio_BT > 1 + self.clip_high
        return LossOutput(loss, {"clipped_low_BT": low_BT, "clipped_high_BT": high_BT})
