"""GRPO without its clip: the token ratio with an infinite band, a control.

    J = mean_i (1/T_i) Σ_t w_{i,t} Â_{i,t},   w_{i,t} = π_θ(y_{i,t}) / π_old(y_{i,t})

Shaper: none. Differs from GRPO: nothing bounds the step. Differs from REINFORCE: the ratio corrects for data from an
older policy. This is not a published algorithm.

Provenance: paper (GRPO's equation without its clip).
"""

from dataclasses import dataclass

from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss


@dataclass(frozen=True, kw_only=True)
class GRPOUnclipped(RatioLoss):
    """Importance sampling, averaged over each response and then over responses."""

    def surrogate(self, batch: Batch) -> Surrogate:
        """w A; there is no clip."""
        return Surrogate(self.ratio_of(batch) * batch.advantages_BT)
