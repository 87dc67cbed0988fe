"""GEPO: one denominator for a whole group, the expected likelihood of its responses.

    J = mean_i min( c_i Â_i, clip(c_i, 1 − ε_low, 1 + ε_high) Â_i ),   c_i = p_i / E,   E = Σ_j q_j² / Σ_j q_j,
    p_i = exp( (1/T_i) Σ_t log π_θ ),  q_j = exp( (1/T_j) Σ_t log μ ),  j over the group    (2508.17850, authors' code)

Shaper: min-clip. Differs from GSPO in the denominator: at the old policy c_i is not 1, unless the responses of the
group are equally likely. (The GEPO of another paper, 2607.16850, shapes advantages and is a different algorithm.)

Left out: ``gepo+``, a variant that keeps q_i for responses close to the sampler. The authors' recipes give no ε.

Provenance: peer's code (the authors').
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import ClippedLoss, Traits


@dataclass(frozen=True, kw_only=True)
class GEPO(ClippedLoss):
    """Group-normalised sequence likelihood, clipped; all responses of a group must be in the mini-batch.

    At ratio 1 the policy gradient is multiplied by c_i, and c_i is 1 only in a group of equally likely responses.
    """

    ratio: str = "sequence"
    anchor: str = "rollout"

    UNITS: ClassVar = ("sequence",)
    TOKEN_SUM_IS: ClassVar = "luspo"

    @property
    def traits(self) -> Traits:
        """E depends on all responses of a group, also on responses with advantage 0."""
        return replace(super().traits, whole_minibatch=True, zero_advantage_is_free=False)

    def surrogate(self, batch: Batch) -> Surrogate:
        """min(c A, clip(c) A); all tokens of a clipped response are marked as clipped."""
        expected_B1 = self._log_expected(batch)[:, None]
        log_ratio_BT = ops.log_ratio(batch.logprobs_BT, expected_B1) * batch.mask_BT
        advantages_B1 = ops.masked_mean_T(batch.advantages_BT, batch.mask_BT)[:, None]
        return self.clipped(ops.ratio(log_ratio_BT, batch.mask_BT, self.ratio), advantages_B1)

    def _log_expected(self, batch: Batch) -> Tensor:
        """log E of each response's group, (B,), at any likelihood; responses without tokens do not count, and get 0.

        q² underflows in fp32 below a mean log-probability of −44 a token, and the quotient is then 0/0. Therefore, in a
        group below −20, every q is divided by the group's largest q, and log E is shifted back by its log.
        """
        mean_B = ops.masked_mean_T(self.anchor_logprobs(batch), batch.mask_BT)
        some_B = batch.mask_BT.bool().any(-1)
        mean_M = mean_B[some_B]
        numbers, group_M = batch.get("groups_B")[some_B].unique(return_inverse=True)
        largest_G = mean_M.new_full((len(numbers),), -torch.inf).scatter_reduce(0, group_M, mean_M, "amax")
        shift_M = torch.where(largest_G < -20, largest_G, 0.0)[group_M]
        shifted_M = (mean_M - shift_M).exp()
        sums_2G = mean_M.new_zeros(2, len(numbers))
        sums_2G.index_add_(1, group_M, torch.stack([shifted_M, shifted_M.square()]))
        log_M = shift_M + (sums_2G[1] / sums_2G[0])[group_M].log()
        return torch.zeros_like(mean_B).masked_scatter(some_B, log_M)
