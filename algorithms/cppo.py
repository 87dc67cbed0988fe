"""CPPO: DPPO with a threshold that depends on the token's position and on how far the tokens before it have moved.

    J = DPPO's J, with M = 0 where the update leads further out and w_t D_t > min(δ, δ + δ_b W_{t−1} − S_{t−1}), else 1;
    S_t = Σ_{u ≤ t} w_u D_u,   W_t = Σ_{u ≤ t} w_u,   w_t falls linearly from 1 to w_min over the response
                                                                                          (2606.10968, eqs. 8 to 11)

D is DPPO's divergence, δ its ``max_divergence``, δ_b ``prefix_budget``: once the mean of the prefix exceeds δ_b, the
threshold of a token is smaller than δ.

Shaper: cumulative divergence mask. Differs from DPPO in the weight, stricter on early tokens, and in the budget.

Left out: the authors' own code replaces δ_b by the 0.9-quantile of the response's D, within [δ_b, 2 δ_b].

Provenance: paper.
"""

from dataclasses import dataclass

from torch import Tensor

from steadymoe.algorithms.batch import Batch
from steadymoe.algorithms.dppo import DPPO
from steadymoe.algorithms.loss import check_positive


@dataclass(frozen=True, kw_only=True)
class CPPO(DPPO):
    """Token ratio under a mask on position-weighted, accumulated divergence."""

    prefix_budget: float = 0.02
    least_weight: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(prefix_budget=self.prefix_budget)
        if not 0 < self.least_weight <= 1:
            raise ValueError(f"least_weight is w of the last token, 0 < least_weight <= 1; got {self.least_weight}")

    def _divergence(self, batch: Batch) -> Tensor:
        """w_t D_t − min(0, δ_b W_{t−1} − S_{t−1}), (B, T), which DPPO compares with δ."""
        mask_BT = batch.mask_BT.to(batch.logprobs_BT.dtype)
        place_BT, last_B1 = mask_BT.cumsum(-1) - 1, (mask_BT.sum(-1, keepdim=True) - 1).clamp(min=1)
        weight_BT = (1 - (1 - self.least_weight) * place_BT / last_B1) * mask_BT
        weighted_BT = weight_BT * super()._divergence(batch)
        left_BT = self.prefix_budget * weight_BT - weighted_BT
        before_BT = left_BT.cumsum(-1) - left_BT
        return weighted_BT - before_BT.clamp(max=0)
