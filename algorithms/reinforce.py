"""REINFORCE with a group baseline: no ratio and no clip.

    J = mean_i (1/T_i) Σ_t Â_i · log π_θ(y_{i,t})          (Williams 1992, eq. 6)

Differs from GRPO in that the old policy does not appear: nothing corrects for data that the policy has
moved away from, and nothing bounds the step. The control that should break first.

Left out: the learned value baseline of actor-critic forms (the advantage is the group's).
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class Reinforce:
    """Policy gradient of the log-likelihood, whatever policy sampled."""

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch; reports no clip metrics, for there is no clip."""
        return LossOutput(-ops.seq_mean_token_mean(batch.logprobs_BT * batch.advantages_BT, batch.mask_BT))
