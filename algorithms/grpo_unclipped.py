"""GRPO without its clip: the token ratio with an infinite band, a control.

    J = mean_i (1/T_i) Σ_t w_{i,t} Â_{i,t},   w_{i,t} = π_θ(y_{i,t}) / π_old(y_{i,t})

Differs from GRPO in that nothing bounds the step, and from REINFORCE in that the ratio corrects for data
that the policy has moved away from. Not a published algorithm.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class GRPOUnclipped:
    """Token-level importance sampling, averaged over each response and then over responses."""

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch; reports no clip metrics, for there is no clip."""
        ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.old_logprobs_BT).exp()
        return LossOutput(-ops.seq_mean_token_mean(ratio_BT * batch.advantages_BT, batch.mask_BT))
