"""GMPO: the geometric mean of a response's token ratios, each clipped before the mean is taken.

    J = mean_i exp( (1/T_i) Σ_t c(log r_{i,t}) ) Â_i,
    c(x) = min(x, ε_high) where Â > 0,  max(x, −ε_low) where Â < 0
    (2507.20673; equation not seen, verl's code was)

Differs from GSPO in the clip: tokens one by one, on log-ratios, and not the response as a whole. The band
is one on log r: ``log_clip_low``, ``log_clip_high``.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class GMPO:
    """Geometric-mean ratio of tokens clipped in log space; the advantage must be constant along a response."""

    log_clip_low: float = 0.4
    log_clip_high: float = 0.4

    def __post_init__(self) -> None:
        if not (self.log_clip_low >= 0 and self.log_clip_high >= 0):
            raise ValueError(
                "log_clip_low and log_clip_high are distances from 0 on the log-ratio, >= 0; "
                f"got {self.log_clip_low} and {self.log_clip_high}"
            )

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch."""
        log_ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.old_logprobs_BT)
        low_BT = (log_ratio_BT < -self.log_clip_low) & (batch.advantages_BT < 0)
        high_BT = (log_ratio_BT > self.log_clip_high) & (batch.advantages_BT > 0)
        clipped_BT = log_ratio_BT.clamp(-self.log_clip_low, self.log_clip_high)
        mean_B = ops.sequence_log_ratio(clipped_BT.where(low_BT | high_BT, log_ratio_BT), batch.mask_BT)
        advantages_B = ops.masked_mean_T(batch.advantages_BT, batch.mask_BT)
        loss = -ops.sequence_mean(mean_B.exp() * advantages_B, batch.mask_BT)
        return LossOutput(loss, {"clipped_low_BT": low_BT, "clipped_high_BT": high_BT})
