"""FlashREINFORCE: REINFORCE with the ratio to the sampler as a weight, on the responses that stayed close to it.

    J = mean_i (1/T_i) 1[ (1/T_i) Σ_t D_{i,t} ≤ δ ] Σ_t sg[r] Â log π_θ(y_{i,t}),   r = π_θ/μ,   Â = reward − batch mean
                                                                                     (OpenRLHF pull request 1339)

D is the binary KL(μ‖π_θ) of the sampled token and the rest, as in DPPO.

Shaper: sequence mask. Differs from TRM, which sums over a response and bounds the KL of the most likely tokens. The
denominators keep rejected responses.

Left out: 1. the single response to each prompt; 2. an optional filter of failed responses by entropy. The method is
made for one update on a rollout.

Provenance: peer's code (OpenRLHF's description and a reference implementation).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, check_positive


@dataclass(frozen=True, kw_only=True)
class FlashReinforce(RatioLoss):
    """Policy gradient weighted by the ratio, averaged over each response and then over responses."""

    anchor: str = "rollout"
    max_mean_kl: float = 3e-3

    UNITS: ClassVar = ("token",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(max_mean_kl=self.max_mean_kl)

    def surrogate(self, batch: Batch) -> Surrogate:
        """sg[r] A log π; tokens of a rejected response are marked as clipped at the edge to which they moved."""
        ratio_BT = self.ratio_of(batch)
        kl_BT = ops.divergence(self.anchor_logprobs(batch)[..., None], batch.logprobs_BT[..., None], "kl")
        far_B1 = ops.masked_mean_T(kl_BT, batch.mask_BT)[:, None] > self.max_mean_kl
        below_BT, weight_BT = ratio_BT < 1, ratio_BT.masked_fill(far_B1, 0.0)
        marks = far_B1 & below_BT, far_B1 & ~below_BT
        return ops.weighted_logprobs(weight_BT, batch.logprobs_BT, batch.advantages_BT, *marks)


@dataclass(frozen=True)
class BatchMean:
    """Â = r − the mean reward of the rollout, without a standard deviation."""

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Return the advantages, (P, G); a group of equal rewards may have one, a rollout of equal rewards has none."""
        above_PG = rewards_PG - rewards_PG.min()  # rounding is then relative to the spread of the rewards
        return above_PG - above_PG.mean()
