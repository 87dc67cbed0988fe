"""MiniRL: REINFORCE with an importance weight to the sampler and PPO's mask, not normalised by length.

    J = mean_i Σ_t M_{i,t} sg[ π_θ/μ ] Â log π_θ(y_{i,t}),
    M = 0 where Â > 0 and r > 1 + ε_high, or Â < 0 and r < 1 − ε_low; else 1;  r = π_θ/π_old     (2512.01374, eq. 7)

The weight is capped at ``ratio_cap`` (truncated importance sampling). Shaper: mask and capped weight. Differs from
PPO's clip in the denominator μ of the weight: with μ = π_old and no cap the gradient equals the gradient of PPO's clip
with a sum over tokens. ``anchor`` and ``ratio`` belong to the mask.

Provenance: paper.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, Traits, check_band, check_cap


@dataclass(frozen=True, kw_only=True)
class MiniRL(RatioLoss):
    """Masked, weighted policy gradient, summed over the tokens of a response."""

    aggregation: str = "seq-mean-token-sum"
    clip_low: float = 0.2
    clip_high: float = 0.27
    ratio_cap: float | None = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_band(self.clip_low, self.clip_high)
        check_cap(self.ratio_cap)

    @property
    def traits(self) -> Traits:
        """The weight divides by the sampling policy, whatever the anchor of the mask."""
        return Traits(corrects_for_sampler=True)

    def surrogate(self, batch: Batch) -> Surrogate:
        """M sg[π_θ/μ] A log π; masked tokens are marked as clipped."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        low_BT, high_BT = ops.beyond(self.ratio_of(batch), batch.advantages_BT, low, high)
        weight_BT = ops.log_ratio(batch.logprobs_BT, batch.get("rollout_logprobs_BT")).exp()
        if self.ratio_cap is not None:
            weight_BT = weight_BT.clamp(max=self.ratio_cap)
        weight_BT = weight_BT.masked_fill(low_BT | high_BT, 0.0)
        return ops.weighted_logprobs(weight_BT, batch.logprobs_BT, batch.advantages_BT, low_BT, high_BT)
