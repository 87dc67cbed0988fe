"""VESPO: the true product ratio of a response through a kernel that falls off on both sides.

    J = Σ_i Σ_t sg[φ(W_i)] Â_i log π_θ(y_{i,t}) / Σ_i T_i,   W_i = Π_t r_{i,t},   φ(W) = W^{c1} e^{c2 (1 − W)}
                                                                                                   (2602.10693)

(c1, c2) depends on the sign of the advantage; φ(1) = 1 and φ is largest at W = c1/c2. Differs from GSPO in
the ratio, not normalised by length, and in that nothing is clipped. log W is clamped to ±20.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class VESPO:
    """Policy gradient weighted by a gamma kernel of the product ratio."""

    c1_pos: float = 2.0
    c2_pos: float = 3.0
    c1_neg: float = 3.0
    c2_neg: float = 2.0

    def __post_init__(self) -> None:
        if not min(self.c1_pos, self.c2_pos, self.c1_neg, self.c2_neg) > 0:
            raise ValueError("c1_pos, c2_pos, c1_neg and c2_neg are the exponents of VESPO's kernel, all > 0")

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch; reports no clip metrics, for there is no clip."""
        log_ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.old_logprobs_BT).detach()
        log_product_B = (log_ratio_BT * batch.mask_BT).sum(-1).clamp(-ops.MAX_LOG_RATIO, ops.MAX_LOG_RATIO)
        advantages_B = ops.masked_mean_T(batch.advantages_BT, batch.mask_BT)
        c1_B = ops.by_sign(advantages_B, self.c1_pos, self.c1_neg)
        c2_B = ops.by_sign(advantages_B, self.c2_pos, self.c2_neg)
        weight_B1 = (c1_B * log_product_B + c2_B * (1 - log_product_B.exp())).exp()[:, None]
        return LossOutput(-ops.token_mean(weight_B1 * batch.advantages_BT * batch.logprobs_BT, batch.mask_BT))
