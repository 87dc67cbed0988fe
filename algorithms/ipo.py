"""IPO, prime-rl's default: importance sampling from the sampler on tokens whose probability has moved little.

    J = Σ_i Σ_t [ M min(r, C) Â − τ (log r)² ] / Σ_i T_i,   r = π_θ/μ,   M = 1 where |π_θ − μ| ≤ ε, else 0

Shaper: divergence mask. Differs from DPPO: the mask acts whatever the sign of Â, so a token that has moved far is not
pulled back by its advantage. With ``log_ratio_penalty`` τ > 0 the square of the log-ratio pulls back every token, also
the masked ones and those with Â = 0. Above the cap C the gradient is C Â ∇log π. The name stands for INTELLECT policy
optimization, not for the preference loss.

Provenance: peer's code (prime-rl, pull requests 3418 and 3586).
"""

from dataclasses import dataclass, replace

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.dppo import DPPO
from steadymoe.algorithms.loss import Traits


@dataclass(frozen=True, kw_only=True)
class IPO(DPPO):
    """Token ratio under a mask on the divergence, blind to the sign of the advantage."""

    aggregation: str = "token-mean"
    max_divergence: float = 0.3
    ratio_cap: float | None = 1.0e4
    log_ratio_penalty: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.log_ratio_penalty >= 0:
            raise ValueError(f"log_ratio_penalty must be at least 0; got {self.log_ratio_penalty}")

    @property
    def traits(self) -> Traits:
        """The penalty has a gradient for responses with advantage 0."""
        return replace(super().traits, zero_advantage_is_free=self.log_ratio_penalty == 0)

    def surrogate(self, batch: Batch) -> Surrogate:
        """M min(r, C) A − τ (log r)²; masked tokens are marked as clipped at the edge to which they moved."""
        log_ratio_BT = self.log_ratio(batch)
        outside_BT, below_BT = self._divergence(batch) > self.max_divergence, log_ratio_BT < 0
        ratio_BT = log_ratio_BT.exp()
        if self.ratio_cap is not None:
            ratio_BT = ops.with_token_gradient(ratio_BT.clamp(max=self.ratio_cap), log_ratio_BT)
        values_BT = (ratio_BT * batch.advantages_BT).masked_fill(outside_BT, 0.0)
        if self.log_ratio_penalty:
            values_BT = values_BT - self.log_ratio_penalty * log_ratio_BT.square()
        return Surrogate(values_BT, outside_BT & below_BT, outside_BT & ~below_BT)
