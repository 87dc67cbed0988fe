"""GRPO: group relative policy optimisation, the clipped ratio of every token.

    J = mean_i (1/T_i) Σ_t min( w_{i,t} Â_{i,t}, clip(w_{i,t}, 1 − ε_low, 1 + ε_high) Â_{i,t} ),
    w_{i,t} = π_θ(y_{i,t}) / π_old(y_{i,t})      (2402.03300, eq. 3; without KL, 2507.18071, eq. 2)

Differs from GSPO in the unit of the ratio: each token has its own, and is clipped on its own.

Left out: 1. the KL term to a reference policy (GSPO's paper leaves it out "for brevity"; its first author says
to turn it off, verl pull request 2775).
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class GRPO:
    """Token-level clipped surrogate, averaged over each response and then over responses."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        ops.check_band(self.clip_low, self.clip_high)

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch."""
        ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.old_logprobs_BT).exp()
        surrogate_BT, low_BT, high_BT = ops.clipped_surrogate(
            ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high
        )
        loss = -ops.seq_mean_token_mean(surrogate_BT, batch.mask_BT)
        return LossOutput(loss, {"clipped_low_BT": low_BT, "clipped_high_BT": high_BT})
