"""MiniRL: REINFORCE with a token weight to the sampler and PPO's mask, not normalised by length.

    J = mean_i Σ_t M_{i,t} sg[ π_θ/μ ] Â log π_θ(y_{i,t}),
    M = 0 where Â > 0 and r > 1 + ε_high, or Â < 0 and r < 1 − ε_low; else 1;  r = π_θ/π_old     (2512.01374, eq. 7)

The weight is capped at ``ratio_cap`` (truncated importance sampling). Differs from PPO's clip in the
weight's anchor μ: with μ = π_old and no cap its gradient is that of PPO's clip with a sum over tokens.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class MiniRL:
    """Masked, weighted policy gradient, summed over the tokens of a response."""

    clip_low: float = 0.2
    clip_high: float = 0.27
    ratio_cap: float | None = 5.0

    def __post_init__(self) -> None:
        ops.check_band(self.clip_low, self.clip_high)
        if self.ratio_cap is not None and not self.ratio_cap > 1:
            raise ValueError(f"ratio_cap bounds a ratio from above, > 1, or null for none; got {self.ratio_cap}")

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch; masked tokens are those marked as clipped."""
        ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.old_logprobs_BT).exp()
        _, low_BT, high_BT = ops.clipped_surrogate(ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high)
        weight_BT = ops.log_ratio(batch.logprobs_BT, batch.rollout_logprobs_BT).exp().detach()
        if self.ratio_cap is not None:
            weight_BT = weight_BT.clamp(max=self.ratio_cap)
        kept_BT = weight_BT.masked_fill(low_BT | high_BT, 0.0)
        loss = -ops.seq_mean_token_sum(kept_BT * batch.advantages_BT * batch.logprobs_BT, batch.mask_BT)
        return LossOutput(loss, {"clipped_low_BT": low_BT, "clipped_high_BT": high_BT})
