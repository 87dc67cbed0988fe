"""TRM, trust-region masking: importance sampling on the responses that stayed close to the sampler, 0 on the others.

    J = mean_i M_i Â_i Σ_t E_{i,t},   E = π_θ/μ,
    M = 1 where max_t KL_t ≤ δ_max and (1/T_i) Σ_t KL_t ≤ δ_mean, else 0,   KL_t = KL(μ‖π_θ) at token t    (2512.23075)

Shaper: sequence mask. Differs from DPPO in its unit, a whole response whatever its advantage. Differs from GRPO:
nothing is clipped. KL_t is over the K tokens most likely under μ, the sampled token and the rest; for a vocabulary of
at most K tokens this is exact. With ``top_k`` null KL_t is estimated from the sampled token, as in the paper's form
without logits: ½ (log E)² for the maximum and E − 1 − log E for the mean.

Provenance: paper.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, Traits, check_positive


@dataclass(frozen=True, kw_only=True)
class TRM(RatioLoss):
    """Token ratio to the sampler, summed over the tokens of the kept responses."""

    anchor: str = "rollout"
    aggregation: str = "seq-mean-token-sum"
    max_kl: float | None = 0.05
    mean_kl: float | None = None
    top_k: int | None = 20

    UNITS: ClassVar = ("token",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_kl", "mean_kl", "top_k"):
            if getattr(self, name) is not None:
                check_positive(**{name: getattr(self, name)})
        if self.max_kl is None and self.mean_kl is None:
            raise ValueError("max_kl and mean_kl are both null: nothing would be masked")

    @property
    def traits(self) -> Traits:
        """The loss reads top-K log-probabilities if ``top_k`` is set."""
        return replace(super().traits, top_k=self.top_k or 0)

    def surrogate(self, batch: Batch) -> Surrogate:
        """M E A; a token of a masked response is marked as clipped at the edge to which its ratio moved."""
        log_ratio_BT = self.log_ratio(batch)
        largest_BT, average_BT = self._kl(batch, log_ratio_BT.detach())
        masked_B = torch.zeros(len(largest_BT), dtype=torch.bool, device=largest_BT.device)
        if self.max_kl is not None:
            masked_B = masked_B | ((largest_BT * batch.mask_BT).amax(-1) > self.max_kl)
        if self.mean_kl is not None:
            masked_B = masked_B | (ops.masked_mean_T(average_BT, batch.mask_BT) > self.mean_kl)
        values_BT = (log_ratio_BT.exp() * batch.advantages_BT).masked_fill(masked_B[:, None], 0.0)
        below_BT = log_ratio_BT < 0
        return Surrogate(values_BT, below_BT & masked_B[:, None], ~below_BT & masked_B[:, None])

    def _kl(self, batch: Batch, log_ratio_BT: Tensor) -> tuple[Tensor, Tensor]:
        """KL_t for the maximum and KL_t for the mean, (B, T) each, in nats."""
        if self.top_k is None:
            return log_ratio_BT.square() / 2, log_ratio_BT.expm1() - log_ratio_BT
        sampler_BTK, policy_BTK = batch.get("rollout_top_logprobs_BTK"), batch.get("top_logprobs_BTK")
        policy_BTK = policy_BTK.masked_fill(sampler_BTK == -float("inf"), -float("inf"))
        kl_BT = ops.divergence(sampler_BTK, policy_BTK, "kl")
        return kl_BT, kl_BT
