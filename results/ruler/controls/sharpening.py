"""Sharpening: a control that reads no reward and pushes the entropy down.

    J = mean_i (1/T_i) Σ_t sg[log π_θ(y_{i,t}) + H_{i,t}] · log π_θ(y_{i,t})

Ours. On policy its gradient is that of −H, the negative entropy of the next token's distribution, with H as the
baseline. What a sampled accuracy gains under it is no learning; a greedy one should gain nothing.
"""

from dataclasses import dataclass

from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import TokenLoss, Traits


@dataclass(frozen=True, kw_only=True)
class Sharpening(TokenLoss):
    """Policy gradient of the negative entropy; no reward appears."""

    @property
    def traits(self) -> Traits:
        """Every response counts, whatever its advantage."""
        return Traits(zero_advantage_is_free=False)

    def surrogate(self, batch: Batch) -> Surrogate:
        """Log-likelihood above its mean, as the advantage of the log-likelihood."""
        surprise_BT = (batch.logprobs_BT + batch.get("entropy_BT")).detach()
        return Surrogate(surprise_BT * batch.logprobs_BT)
