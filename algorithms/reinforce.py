"""REINFORCE with a group baseline: no ratio and no clip.

    J = mean_i (1/T_i) Σ_t Â_i · log π_θ(y_{i,t})          (Williams 1992, eq. 6)

Shaper: none. Differs from GRPO: the old policy does not appear, so nothing corrects for data from an older policy, and
nothing bounds the step. It is the control that should break first.

Left out: the learned value baseline of actor-critic forms (the baseline is the group's mean).

Provenance: paper.
"""

from dataclasses import dataclass

from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import TokenLoss


@dataclass(frozen=True, kw_only=True)
class Reinforce(TokenLoss):
    """Policy gradient of the log-likelihood; the sampling policy does not appear."""

    def surrogate(self, batch: Batch) -> Surrogate:
        """Advantage times log-likelihood; there is no clip."""
        return Surrogate(batch.advantages_BT * batch.logprobs_BT)
