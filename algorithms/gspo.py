"""GSPO, group sequence policy optimisation: a whole response has one ratio, and it is clipped as a whole.

    J = mean_i min( s_i Â_i, clip(s_i, 1 − ε_low, 1 + ε_high) Â_i ),
    s_i = exp( (1/T_i) Σ_t log π_θ(y_{i,t}) / π_old(y_{i,t}) )          (2507.18071, eqs. 5 and 7)

Shaper: min-clip. Differs from GRPO in the unit of the ratio: the geometric mean of the token ratios over the response.
The code computes it token by token; by eqs. 13 and 14 value, clip and gradient are the same.

Not in the paper, off by default: ``scale_band_with_length``. If the token log-ratios are roughly independent, the
standard deviation of log s_i falls with √T_i. The paper's band, made for responses of thousands of tokens, is then too
narrow for twenty. The option multiplies both clip distances by √(reference_length / T_i). The reference of 4096 tokens
is an assumption: the paper gives no length.

Provenance: paper.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import ClippedLoss


@dataclass(frozen=True, kw_only=True)
class GSPO(ClippedLoss):
    """Sequence-level clipped surrogate; an advantage that differs within a response is averaged over it."""

    ratio: str = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    scale_band_with_length: bool = False
    reference_length: int = 4096

    UNITS: ClassVar = ("sequence",)
    TOKEN_SUM_IS: ClassVar = "luspo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference_length < 1:
            raise ValueError(f"reference_length is a number of tokens, >= 1; got {self.reference_length}")

    def surrogate(self, batch: Batch) -> Surrogate:
        """min(s A, clip(s) A); all tokens of a clipped response are marked as clipped."""
        advantages_B1 = ops.masked_mean_T(batch.advantages_BT, batch.mask_BT)[:, None]
        width = self._width(batch.mask_BT.to(batch.logprobs_BT.dtype))
        return ops.clipped_surrogate(
            self.ratio_of(batch), advantages_B1, self.clip_low * width, self.clip_high * width, self.dual_clip
        )

    def _width(self, mask_BT: Tensor) -> Tensor | float:
        """Return the factor on the clip distances of each response, (B, 1), or 1 for all."""
        if not self.scale_band_with_length:
            return 1.0
        return (self.reference_length / mask_BT.sum(-1, keepdim=True).clamp(min=1)).sqrt()
