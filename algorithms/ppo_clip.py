"""PPO's clipped surrogate on tokens, as language-model trainers use it, with an optional dual clip.

    J = Σ_i Σ_t ℓ_{i,t} / Σ_i T_i,   ℓ = min( r Â, clip(r, 1 − ε_low, 1 + ε_high) Â )     (1707.06347, eq. 7)
    with dual clip, where Â < 0:  ℓ = max( that, c Â )                                     (1912.09729, eq. 5)

Differs from GRPO in its aggregation: every token weighs the same, not every response.

Left out: 1. the value function and its loss; 2. the entropy bonus.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class PPOClip:
    """Token-level clipped surrogate, averaged over all tokens of the mini-batch."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        ops.check_band(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1 + self.clip_high:
            raise ValueError(f"dual_clip is a ratio above the band, or null for none; got {self.dual_clip}")

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch; tokens that the dual clip cuts count as clipped at the upper edge."""
        ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.old_logprobs_BT).exp()
        surrogate_BT, low_BT, high_BT = ops.clipped_surrogate(
            ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high
        )
        if self.dual_clip is not None:
            cut_BT = (batch.advantages_BT < 0) & (ratio_BT > self.dual_clip)
            surrogate_BT = surrogate_BT.where(~cut_BT, self.dual_clip * batch.advantages_BT)
            high_BT = high_BT | cut_BT
        loss = -ops.token_mean(surrogate_BT, batch.mask_BT)
        return LossOutput(loss, {"clipped_low_BT": low_BT, "clipped_high_BT": high_BT})
