"""FSPO: the product ratio of a response, clipped to a band that grows with the square root of its length.

    J = mean_i min( e^{S_i} Â_i, e^{clip(S_i, −c_low √T_i, c_high √T_i)} Â_i ),   S_i = Σ_t log r_{i,t}
    (2509.09177; the equation was read in the paper's abstracts and in a re-implementation)

Shaper: min-clip on log-ratios. Differs from GSPO in the sum instead of the mean, and in the band. If token log-ratios
are roughly independent, responses of all lengths are clipped equally often. The band is on log r: ``log_clip_low`` and
``log_clip_high``, times √T.

Left out: the drift term of the paper's first version, estimated from the KL (0 here, as in the re-implementation).

Provenance: reconstruction (from the abstracts and a re-implementation).
"""

from dataclasses import dataclass
from typing import ClassVar

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, check_positive


@dataclass(frozen=True, kw_only=True)
class FSPO(RatioLoss):
    """Sequence-level clipped surrogate of the product ratio: one term for each response."""

    ratio: str = "product"
    aggregation: str = "seq-mean-token-sum"
    log_clip_low: float = 0.03
    log_clip_high: float = 0.03

    UNITS: ClassVar = ("product",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(log_clip_low=self.log_clip_low, log_clip_high=self.log_clip_high)

    def surrogate(self, batch: Batch) -> Surrogate:
        """Return the term of a response, spread over its tokens; all tokens of a clipped response are marked."""
        return self._terms(batch)

    def _terms(self, batch: Batch, dual_clip: float | None = None) -> Surrogate:
        root_B1 = batch.mask_BT.sum(-1, keepdim=True).to(batch.logprobs_BT.dtype).sqrt()
        low_B1, high_B1 = 1 - (-self.log_clip_low * root_B1).exp(), (self.log_clip_high * root_B1).exp() - 1
        advantages_B1 = ops.masked_mean_T(batch.advantages_BT, batch.mask_BT)[:, None]
        made = ops.clipped_surrogate(self.ratio_of(batch), advantages_B1, low_B1, high_B1, dual_clip)
        return Surrogate(ops.spread(made.values_BT, batch.mask_BT), made.clipped_low_BT, made.clipped_high_BT)
