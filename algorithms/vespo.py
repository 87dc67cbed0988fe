"""VESPO: the product ratio of a response, weighted by a kernel that falls off on both sides.

    J = Σ_i Σ_t sg[φ(W_i)] Â_i log π_θ(y_{i,t}) / Σ_i T_i,   W_i = Π_t r_{i,t},   φ(W) = W^{c1} e^{c2 (1 − W)}
                                                                                                   (2602.10693)

(c1, c2) depends on the sign of the advantage; φ(1) = 1 and φ is largest at W = c1/c2. Shaper: gamma kernel.
Differs from GSPO in the ratio: it is not normalised by length. Nothing is clipped. log W is clamped to ±20.

Provenance: paper.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, check_positive


@dataclass(frozen=True, kw_only=True)
class VESPO(RatioLoss):
    """Policy gradient weighted by a gamma kernel of the product ratio."""

    ratio: str = "product"
    aggregation: str = "token-mean"
    c1_pos: float = 2.0
    c2_pos: float = 3.0
    c1_neg: float = 3.0
    c2_neg: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(c1_pos=self.c1_pos, c2_pos=self.c2_pos, c1_neg=self.c1_neg, c2_neg=self.c2_neg)

    def surrogate(self, batch: Batch) -> Surrogate:
        """sg[φ(W)] A log π; there is no clip."""
        ratio_BT = self.ratio_of(batch).detach()
        c1_BT = ops.by_sign(batch.advantages_BT, self.c1_pos, self.c1_neg)
        c2_BT = ops.by_sign(batch.advantages_BT, self.c2_pos, self.c2_neg)
        weight_BT = (c1_BT * ratio_BT.log() + c2_BT * (1 - ratio_BT)).exp()
        return ops.weighted_logprobs(weight_BT, batch.logprobs_BT, batch.advantages_BT, None, None)
