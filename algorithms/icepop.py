"""IcePop as a loss: importance sampling from the sampler, without the tokens whose ratio is outside a band.

    J = Σ_i Σ_t M(r) Â / Σ_i T_i,   r = π_θ/μ,   M(r) = r where C_low ≤ r ≤ C_high, else 0       (2512.16144, eq. 1)

Shaper: ratio mask. Differs from the correction of that name (``correction=icepop``, 2510.18855), whose ratio is π_old/μ
and multiplies a clipped loss. Differs from ``dis`` in the value and the band: through r or with sg[r] in front of
log π, the gradient of a token inside the band is r Â ∇log π.

Provenance: peer's code (prime-rl, pull requests 2401 and 3526).
"""

from dataclasses import dataclass
from typing import ClassVar

from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss


@dataclass(frozen=True, kw_only=True)
class IcePop(RatioLoss):
    """The token ratio inside the band, averaged over tokens."""

    anchor: str = "rollout"
    aggregation: str = "token-mean"
    ratio_low: float = 0.2
    ratio_high: float = 5.0

    UNITS: ClassVar = ("token",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ratio_low <= 1 <= self.ratio_high:
            raise ValueError(f"0 <= ratio_low <= 1 <= ratio_high is needed; got {self.ratio_low} and {self.ratio_high}")

    def surrogate(self, batch: Batch) -> Surrogate:
        """M(r) A; masked tokens are marked as clipped."""
        ratio_BT = self.ratio_of(batch)
        low_BT, high_BT = ratio_BT < self.ratio_low, ratio_BT > self.ratio_high
        return Surrogate((ratio_BT * batch.advantages_BT).masked_fill(low_BT | high_BT, 0.0), low_BT, high_BT)
