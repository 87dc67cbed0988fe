"""SAPO: a soft gate instead of the clip.

    J = mean_i (1/T_i) Σ_t f(r_{i,t}) Â,   f(r) = (4/τ) σ(τ (r − 1)),   τ = τ_pos where Â > 0, else τ_neg
    (2511.20347, eqs. 5 and 6; the equations were read in a digest and in TRL's code, not in the paper)

Shaper: sigmoid gate. Differs from GRPO in the weight of a token's gradient: 4σ(1 − σ) = sech²(τ(r − 1)/2) falls off
smoothly on both sides of r = 1 and is never 0.

Provenance: peer's code (TRL's and verl's). Two other papers quote the paper's equations as given above.
"""

from dataclasses import dataclass

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, check_positive


@dataclass(frozen=True, kw_only=True)
class SAPO(RatioLoss):
    """Token ratio through a sigmoid whose temperature depends on the sign of the advantage."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(tau_pos=self.tau_pos, tau_neg=self.tau_neg)

    def surrogate(self, batch: Batch) -> Surrogate:
        """f(r) A; there is no clip."""
        tau_BT = ops.by_sign(batch.advantages_BT, self.tau_pos, self.tau_neg)
        gate_BT = (tau_BT * (self.ratio_of(batch) - 1)).sigmoid() * 4 / tau_BT
        return Surrogate(gate_BT * batch.advantages_BT)
