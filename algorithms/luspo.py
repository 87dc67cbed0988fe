"""LUSPO: GSPO with each response's term times its length.

    J = mean_i T_i min( s_i Â_i, clip(s_i, 1 − ε_low, 1 + ε_high) Â_i )
    (2602.05261; equation not seen, TRL's code was)

Differs from GSPO in the factor T_i, which removes the weight 1/T_i that GSPO's gradient gives a token.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class LUSPO:
    """Length-weighted, sequence-level clipped surrogate."""

    clip_low: float = 2e-3
    clip_high: float = 2.5e-3

    def __post_init__(self) -> None:
        ops.check_band(self.clip_low, self.clip_high)

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch; the tokens of a clipped response are all marked as clipped."""
        log_ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.old_logprobs_BT)
        ratio_B = ops.sequence_log_ratio(log_ratio_BT, batch.mask_BT).exp()
        advantages_B = ops.masked_mean_T(batch.advantages_BT, batch.mask_BT)
        surrogate_B, low_B, high_B = ops.clipped_surrogate(ratio_B, advantages_B, self.clip_low, self.clip_high)
        loss = -ops.sequence_mean(surrogate_B * batch.mask_BT.sum(-1), batch.mask_BT)
        mask_BT = batch.mask_BT.bool()
        return LossOutput(
            loss, {"clipped_low_BT": low_B[:, None] & mask_BT, "clipped_high_BT": high_B[:, None] & mask_BT}
        )
