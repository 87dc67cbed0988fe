"""GSPO: group sequence policy optimisation, one clipped ratio for a whole response.

    J = mean_i min( s_i Â_i, clip(s_i, 1 − ε_low, 1 + ε_high) Â_i ),
    s_i = exp( (1/T_i) Σ_t log π_θ(y_{i,t}) / π_old(y_{i,t}) )          (2507.18071, eqs. 5 and 7)

Differs from GRPO in the unit of the ratio: its geometric mean over the response, clipped as a whole.

Not in the paper, off by default: ``scale_band_with_length``. If the token log-ratios are about
independent, the standard deviation of log s_i falls with √T_i, so the paper's band, made for responses of
thousands of tokens, is too narrow for twenty. The option multiplies both edges by
√(reference_length / T_i). The reference of 4096 tokens is an assumption: the paper gives no length.
"""

from dataclasses import dataclass

from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class GSPO:
    """Sequence-level clipped surrogate; the advantage must be constant along a response."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    scale_band_with_length: bool = False
    reference_length: int = 4096

    def __post_init__(self) -> None:
        ops.check_band(self.clip_low, self.clip_high)
        if self.reference_length < 1:
            raise ValueError(f"reference_length is a number of tokens, >= 1; got {self.reference_length}")

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch; the tokens of a clipped response are all marked as clipped."""
        log_ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.old_logprobs_BT)
        ratio_B = ops.sequence_log_ratio(log_ratio_BT, batch.mask_BT).exp()
        advantages_B = ops.masked_mean_T(batch.advantages_BT, batch.mask_BT)
        width = self._width(batch.mask_BT)
        surrogate_B, low_B, high_B = ops.clipped_surrogate(
            ratio_B, advantages_B, self.clip_low * width, self.clip_high * width
        )
        loss = -ops.sequence_mean(surrogate_B, batch.mask_BT)
        mask_BT = batch.mask_BT.bool()
        return LossOutput(
            loss, {"clipped_low_BT": low_B[:, None] & mask_BT, "clipped_high_BT": high_B[:, None] & mask_BT}
        )

    def _width(self, mask_BT: Tensor) -> Tensor | float:
        """The factor on the band of each response, (B,), or 1."""
        if not self.scale_band_with_length:
            return 1.0
        return (self.reference_length / mask_BT.sum(-1).clamp(min=1)).sqrt()
