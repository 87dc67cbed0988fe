"""Score centering (SC): REINFORCE whose score has mean 0 under the sampler, alone or with a weight on the ratio.

    J = Σ_i Σ_t Â { sg[w(r)] log π_θ(y_{i,t}) − Σ_v sg[ q_v w(p_v/q_v) ] log p_v } / Σ_i T_i,
    w = 1 (SC),  min(r, C) (``tis``),  r where C_low ≤ r ≤ C_high, else 0 (``mis``),  r = π_θ/μ        (2609.20807)

p_v and q_v are the probabilities of token v at this position under π_θ and μ. By E_μ[Â s] = E_μ[Â] E_μ[s] + Cov_μ(Â, s)
the first term pulls towards the sampler and carries no reward; subtracting the mean of the score s removes it. On the
sampler's ``top_k`` most likely tokens and the sampled one, the head H, the sum over the vocabulary is

    Σ_{v∈H} sg[ q_v w(p_v/q_v) − α p_v ] log p_v,   α = ρ w(1/ρ),   ρ = (1 − Σ_H q)/(1 − Σ_H p)           (eq. 12)

where the tail of μ is taken as proportional to the tail of π_θ; Σ_v p_v ∇log p_v = 0 turns the sum over the tail into
one over the head. A head of the whole vocabulary is exact, with α = 0.

Shaper: centred score. Differs from REINFORCE in the subtracted mean, which reaches tokens that were not sampled.

Ours: 1. the aggregation, the advantage and the head's size, which were not seen; 2. the sampled token is in H, as
``Batch`` lists it; 3. a tail of less than 1e-6 under μ counts as empty, and no tail of π_θ as smaller than that.

Provenance: paper (as quoted in peers' code, with the equation's number).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, Traits, check_positive, one_of

# Probabilities that are sums of fp32 numbers miss 1 by about this much.
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class ScoreCentering(RatioLoss):
    """Weighted log-likelihood minus its mean under the sampler.

    Attributes:
        weight: w, one of ``one``, ``tis`` and ``mis``.
        ratio_low: C_low of ``mis``; None for no lower edge.
        ratio_high: C of ``tis``, C_high of ``mis``; None with the weight ``one``.
        top_k: the number of the sampler's most likely tokens; the vocabulary's size or more is exact.
    """

    anchor: str = "rollout"
    aggregation: str = "token-mean"
    weight: str = "one"
    ratio_low: float | None = None
    ratio_high: float | None = None
    top_k: int = 20

    UNITS: ClassVar = ("token",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor != "rollout":
            raise ValueError(f"the score has mean 0 under the sampler only: anchor must be rollout; got {self.anchor}")
        one_of("weight", self.weight, ("one", "tis", "mis"))
        check_positive(top_k=self.top_k)
        if (self.ratio_high is None) != (self.weight == "one") or (self.ratio_low is not None and self.weight != "mis"):
            raise ValueError(
                "ratio_high bounds the weights tis and mis, ratio_low the weight mis; the others are null: got "
                f"weight={self.weight}, ratio_low={self.ratio_low} and ratio_high={self.ratio_high}"
            )
        if not 0 <= (self.ratio_low or 0) <= 1 <= (self.ratio_high or 1):
            raise ValueError(f"0 <= ratio_low <= 1 <= ratio_high is needed; got {self.ratio_low} and {self.ratio_high}")

    @property
    def traits(self) -> Traits:
        """The loss reads the log-probabilities of the head."""
        return replace(super().traits, top_k=self.top_k)

    def surrogate(self, batch: Batch) -> Surrogate:
        """A (sg[w] log π − Σ sg[…] log p); tokens of a capped or masked weight are marked as clipped."""
        ratio_BT = self.log_ratio(batch).detach().exp()
        sampler_BTK, policy_BTK = batch.get("rollout_top_logprobs_BTK"), batch.get("top_logprobs_BTK")
        mean_BT = (self._coefficients(sampler_BTK, policy_BTK.detach()) * policy_BTK).sum(-1)
        values_BT = (self._weight(ratio_BT) * batch.logprobs_BT - mean_BT) * batch.advantages_BT
        if self.ratio_high is None:
            return Surrogate(values_BT)
        return Surrogate(values_BT, ratio_BT < (self.ratio_low or 0), ratio_BT > self.ratio_high)

    def _weight(self, ratio: Tensor) -> Tensor:
        """w(r), elementwise."""
        if self.ratio_high is None:
            return torch.ones_like(ratio)
        if self.weight == "tis":
            return ratio.clamp(max=self.ratio_high)
        return ratio.masked_fill((ratio < (self.ratio_low or 0)) | (ratio > self.ratio_high), 0.0)

    def _coefficients(self, sampler_BTK: Tensor, policy_BTK: Tensor) -> Tensor:
        """q w(p/q) − α p of the tokens in the head, (B, T, K); 0 for the sampled token if it is listed twice."""
        q_BTK = sampler_BTK.double().exp()
        p_BTK = policy_BTK.double().exp().masked_fill(sampler_BTK == -torch.inf, 0.0)
        weight_BTK = self._weight(ops.log_ratio(policy_BTK.double(), sampler_BTK.double()).exp())
        tail_q_BT1, tail_p_BT1 = (1 - each.sum(-1, keepdim=True) for each in (q_BTK, p_BTK))
        rho_BT1 = (tail_q_BT1 / tail_p_BT1.clamp(min=_ROUNDING)).masked_fill(tail_q_BT1 < _ROUNDING, 0.0)
        alpha_BT1 = rho_BT1 * self._weight(1 / rho_BT1)
        return (q_BTK * weight_BTK - alpha_BT1 * p_BTK).to(policy_BTK.dtype)
