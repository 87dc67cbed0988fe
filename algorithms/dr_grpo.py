"""Dr. GRPO: GRPO without the two normalisations that bias it, by length and by standard deviation.

    J = (1/B) Σ_i (1/L) Σ_t min( r Â, clip(r, 1 − ε_low, 1 + ε_high) Â ),   Â_i = r_i − mean_G     (2503.20783)

Differs from GRPO in the constant L in place of T_i, and in the advantage (``GroupMean``).
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class DrGRPO:
    """Token-level clipped surrogate, summed over a response and divided by a constant length."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    constant_length: int = 10

    def __post_init__(self) -> None:
        ops.check_band(self.clip_low, self.clip_high)
        if self.constant_length < 1:
            raise ValueError(f"constant_length is a number of tokens, >= 1; got {self.constant_length}")

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch."""
        ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.old_logprobs_BT).exp()
        surrogate_BT, low_BT, high_BT = ops.clipped_surrogate(
            ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high
        )
        loss = -ops.seq_mean_token_sum(surrogate_BT, batch.mask_BT) / self.constant_length
        return LossOutput(loss, {"clipped_low_BT": low_BT, "clipped_high_BT": high_BT})
