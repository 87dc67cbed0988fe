"""R²VPO: no clip; a Lagrange multiplier holds the variance of the ratio below a bound.

    J = Σ_i Σ_t [ r Â − λ ((r − 1)² − δ) ] / Σ_i T_i,   λ ← max(0, λ + η (mean (r − 1)² − δ)) after each update
    (2601.03320 and 2605.26784; read in the abstracts; they say ratio variance, primal-dual and no clipping)

Shaper: variance penalty. Differs from GRPO without a clip in the penalty, and from PPO's KL penalty in the penalised
quantity. The dual update is plain gradient ascent; δ, η and the first λ are chosen by this suite. λ is the loss's
state.

Provenance: reconstruction (from the abstracts).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, Traits, check_positive


@dataclass(frozen=True, kw_only=True)
class R2VPO(RatioLoss):
    """Importance sampling with a penalty on (r − 1)²; the mean over a mini-batch changes its weight λ."""

    aggregation: str = "token-mean"
    max_variance: float = 0.04
    multiplier_start: float = 1.0
    multiplier_step: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(max_variance=self.max_variance, multiplier_step=self.multiplier_step)
        if not self.multiplier_start >= 0:
            raise ValueError(f"multiplier_start must be at least 0; got {self.multiplier_start}")

    @property
    def traits(self) -> Traits:
        """λ depends on the whole mini-batch, and the penalty has a gradient for responses with advantage 0."""
        return replace(super().traits, whole_minibatch=True, zero_advantage_is_free=False)

    def initial_state(self) -> dict[str, Tensor]:
        """Return the λ of the first update."""
        return {"multiplier": torch.tensor(self.multiplier_start, dtype=torch.float64)}

    def surrogate(self, batch: Batch) -> Surrogate:
        """r A − λ ((r − 1)² − δ); there is no clip."""
        multiplier = (batch.state or self.initial_state())["multiplier"]
        ratio_BT, mask_BT = self.ratio_of(batch), batch.mask_BT.bool()
        excess_BT = (ratio_BT - 1).square() - self.max_variance
        counted_BT = excess_BT.detach() if batch.weights_BT is None else excess_BT.detach() * batch.weights_BT
        excess = counted_BT[mask_BT].double().sum() / mask_BT.sum().clamp(min=1)
        following = (multiplier + self.multiplier_step * excess).clamp(min=0)
        values_BT = ratio_BT * batch.advantages_BT - multiplier.to(ratio_BT) * excess_BT
        return Surrogate(values_BT, number=multiplier, state={"multiplier": following})
