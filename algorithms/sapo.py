"""SAPO: a soft gate in place of the clip.

    J = mean_i (1/T_i) Σ_t f(r_{i,t}) Â,   f(r) = (4/τ) σ(τ (r − 1)),   τ = τ_pos where Â > 0, else τ_neg
    (2511.20347; equation not seen, a digest and TRL's code were)

Differs from GRPO in that the weight of a token, 4σ(1 − σ) = sech²(τ(r − 1)/2), falls off smoothly on both
sides of r = 1 and is nowhere cut to 0.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput


@dataclass(frozen=True)
class SAPO:
    """Token ratio through a sigmoid whose temperature depends on the sign of the advantage."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        if not (self.tau_pos > 0 and self.tau_neg > 0):
            raise ValueError(f"tau_pos and tau_neg are temperatures, > 0; got {self.tau_pos} and {self.tau_neg}")

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch; reports no clip metrics, for there is no clip."""
        ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.old_logprobs_BT).exp()
        tau_BT = ops.by_sign(batch.advantages_BT, self.tau_pos, self.tau_neg)
        gate_BT = (tau_BT * (ratio_BT - 1)).sigmoid() * 4 / tau_BT
        return LossOutput(-ops.seq_mean_token_mean(gate_BT * batch.advantages_BT, batch.mask_BT))
