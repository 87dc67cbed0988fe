"""GSPO-token: the value and the clip of GSPO, open to an advantage that differs between tokens.

    J = mean_i (1/T_i) Σ_t min( s_{i,t} Â_{i,t}, clip(s_{i,t}, 1 − ε_low, 1 + ε_high) Â_{i,t} ),
    s_{i,t} = sg[s_i] · π_θ(y_{i,t}) / sg[π_θ(y_{i,t})]                                    (2507.18071, eqs. 13 and 14)

Differs from GSPO only where advantages differ within a response; otherwise value, clip and gradient agree.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class GSPOToken:
    """The sequence ratio on every token, with the gradient of that token."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        ops.check_band(self.clip_low, self.clip_high)

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch."""
        log_ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.old_logprobs_BT)
        sequence_B1 = ops.sequence_log_ratio(log_ratio_BT, batch.mask_BT).exp().detach()[:, None]
        ratio_BT = sequence_B1 * (batch.logprobs_BT - batch.logprobs_BT.detach()).exp()
        surrogate_BT, low_BT, high_BT = ops.clipped_surrogate(
            ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high
        )
        loss = -ops.seq_mean_token_mean(surrogate_BT, batch.mask_BT)
        return LossOutput(loss, {"clipped_low_BT": low_BT, "clipped_high_BT": high_BT})
