"""MIS-PO: REINFORCE without the tokens and the responses on which trainer and sampler disagree.

    J = Σ_i Σ_t 1[C_low ≤ x_{i,t} ≤ C_high] · 1[R_low ≤ (Π_t x_{i,t})^{1/T_i} ≤ R_high] Â log π_θ(y_{i,t}) / Σ_i T_i,
    x = π_old/μ                                                                         (2602.10604, section 5.2.1)

Shaper: engine mask. Differs from ``geo_rs`` on REINFORCE in the second mask, on tokens; a kept token has the weight 1.
Both masks read the engine's mismatch alone: nothing corrects for data from an older policy, and with an exact sampler
nothing is masked. The published band on the geometric mean suits responses of a thousand tokens and more: on short ones
it rejects nearly all of them as soon as the sampler is mismatched.

Ours: the aggregation and the advantage, which were not seen; a masked token counts in the denominator.

Provenance: paper.
"""

from dataclasses import dataclass

import torch

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import TokenLoss, Traits


@dataclass(frozen=True, kw_only=True)
class MISPO(TokenLoss):
    """Policy gradient of the log-likelihood on kept tokens of kept responses."""

    aggregation: str = "token-mean"
    ratio_low: float = 0.5
    ratio_high: float = 2.0
    sequence_low: float = 0.996
    sequence_high: float = 1.001

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high in (("ratio_low", "ratio_high"), ("sequence_low", "sequence_high")):
            found = getattr(self, low), getattr(self, high)
            if not 0 <= found[0] <= 1 <= found[1]:
                raise ValueError(f"0 <= {low} <= 1 <= {high} is needed; got {found[0]} and {found[1]}")

    @property
    def traits(self) -> Traits:
        """The masks are a correction for the sampler already."""
        return Traits(corrects_for_sampler=True)

    def surrogate(self, batch: Batch) -> Surrogate:
        """A log π of kept tokens; the others are marked as clipped."""
        log_BT = ops.log_ratio(batch.get("old_logprobs_BT"), batch.get("rollout_logprobs_BT"))
        token_BT, mean_BT = (ops.ratio(log_BT, batch.mask_BT, unit) for unit in ("token", "sequence"))
        low_BT = (token_BT < self.ratio_low) | (mean_BT < self.sequence_low)
        high_BT = ~low_BT & ((token_BT > self.ratio_high) | (mean_BT > self.sequence_high))
        kept_BT = torch.ones_like(log_BT).masked_fill(low_BT | high_BT, 0.0)
        return ops.weighted_logprobs(kept_BT, batch.logprobs_BT, batch.advantages_BT, low_BT, high_BT)
