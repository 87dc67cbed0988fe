"""R²VPO with a fixed weight of its penalty, as others run it.

    J = Σ_i Σ_t [ r Â − λ (r − 1)² ] / Σ_i T_i,   λ fixed                                      (2601.03320, its penalty)

Shaper: variance penalty. Differs from ``r2vpo`` in λ: there a multiplier follows the variance, and how the paper
updates it was not seen.

Provenance: peer's code (an open re-implementation).
"""

from dataclasses import dataclass, replace

from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, Traits, check_positive


@dataclass(frozen=True, kw_only=True)
class R2VPOFixed(RatioLoss):
    """Importance sampling with a penalty on (r − 1)²."""

    aggregation: str = "token-mean"
    multiplier: float = 0.04

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(multiplier=self.multiplier)

    @property
    def traits(self) -> Traits:
        """The penalty has a gradient for responses with advantage 0."""
        return replace(super().traits, zero_advantage_is_free=False)

    def surrogate(self, batch: Batch) -> Surrogate:
        """r A − λ (r − 1)²; there is no clip."""
        ratio_BT = self.ratio_of(batch)
        return Surrogate(ratio_BT * batch.advantages_BT - self.multiplier * (ratio_BT - 1).square())
