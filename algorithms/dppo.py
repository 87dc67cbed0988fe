"""DPPO: PPO's clip with a bound on the divergence of two distributions instead of a band on the ratio.

    J = mean_i Σ_t M_{i,t} min(r, C) Â,   r = π_θ/μ,
    M = 0 where D > δ and the update would lead further out (Â > 0 and r > 1, or Â < 0 and r < 1), else 1
                                                                   (2602.04879; the equation numbers were not seen)

D is a divergence of μ and π_θ at the token: over two outcomes, the sampled token and the rest, |μ − π| (``tv``) or
D(μ‖π) (``kl``); with ``top_k`` over the K tokens most likely under μ, the sampled token and the rest.

Shaper: divergence mask. Differs from PPO's clip in two ways: 1. the probability is bounded, so a rare token may move
far in ratio and a likely token may not; 2. the anchor is μ, and the paper finds this decisive.

Left out: the paper's separate thresholds for LoRA (δ = 0.15 for tv).

Provenance: paper.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, Traits, check_cap, check_positive, one_of


@dataclass(frozen=True, kw_only=True)
class DPPO(RatioLoss):
    """Token ratio under a divergence mask, summed over the tokens of a response.

    With ``ratio_cap`` C the gradient is sg[min(r, C)] Â ∇log π, above the cap too.
    """

    anchor: str = "rollout"
    aggregation: str = "seq-mean-token-sum"
    divergence: str = "tv"
    max_divergence: float = 0.2
    top_k: int | None = None
    ratio_cap: float | None = None

    UNITS: ClassVar = ("token",)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("divergence", self.divergence, ("tv", "kl"))
        if not self.max_divergence > 0:  # infinite is no mask
            raise ValueError(f"max_divergence must be above 0; got {self.max_divergence}")
        check_cap(self.ratio_cap)
        if self.top_k is not None:
            check_positive(top_k=self.top_k)

    @property
    def traits(self) -> Traits:
        """The loss reads top-K log-probabilities if ``top_k`` is set."""
        return replace(super().traits, top_k=self.top_k or 0)

    def surrogate(self, batch: Batch) -> Surrogate:
        """M min(r, C) A, with the same factor on the gradient of log π; masked tokens are marked as clipped."""
        log_ratio_BT, advantages_BT = self.log_ratio(batch), batch.advantages_BT
        outside_BT = self._divergence(batch) > self.max_divergence
        low_BT, high_BT = (beyond_BT & outside_BT for beyond_BT in ops.beyond(log_ratio_BT, advantages_BT, 0.0, 0.0))
        ratio_BT = log_ratio_BT.exp()
        if self.ratio_cap is not None:
            ratio_BT = ops.with_token_gradient(ratio_BT.clamp(max=self.ratio_cap), log_ratio_BT)
        return Surrogate((ratio_BT * advantages_BT).masked_fill(low_BT | high_BT, 0.0), low_BT, high_BT)

    def _divergence(self, batch: Batch) -> Tensor:
        """D of every token, (B, T)."""
        if self.top_k is None:
            return ops.divergence(self.anchor_logprobs(batch)[..., None], batch.logprobs_BT[..., None], self.divergence)
        duplicate_BTK = batch.get("rollout_top_logprobs_BTK") == -float("inf")
        anchor_BTK, policy_BTK = (
            batch.get(name).masked_fill(duplicate_BTK, -float("inf"))
            for name in (f"{self.anchor}_top_logprobs_BTK", "top_logprobs_BTK")
        )
        return ops.divergence(anchor_BTK, policy_BTK, self.divergence)
