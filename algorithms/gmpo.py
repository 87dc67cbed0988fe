"""GMPO: the geometric mean of a response's token ratios, each clipped before the mean is taken.

    J = mean_i exp( (1/T_i) Σ_t c(log r_{i,t}) ) Â_i,
    c(x) = min(x, ε_high) where Â > 0,  max(x, −ε_low) where Â < 0
    (2507.20673, eq. 4; the equation was read in verl's and TRL's code, not in the paper)

Shaper: min-clip on log-ratios. Differs from GSPO in the clip: it clips each token's log-ratio instead of the whole
response. The band is on log r: ``log_clip_low``, ``log_clip_high``.

Provenance: peer's code (verl's, TRL's and the authors', callsys/GMPO at 205b2bf; value and gradient equal the
authors' code up to rounding).
"""

from dataclasses import dataclass
from typing import ClassVar

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss


@dataclass(frozen=True, kw_only=True)
class GMPO(RatioLoss):
    """Geometric-mean ratio of tokens clipped in log space; the advantage must be constant along a response."""

    log_clip_low: float = 0.4
    log_clip_high: float = 0.4

    UNITS: ClassVar = ("token",)  # the geometric mean comes after the clip
    TOKEN_SUM_IS: ClassVar = "luspo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.log_clip_low >= 0 and self.log_clip_high >= 0):
            raise ValueError(
                "log_clip_low and log_clip_high are distances from 0 on the log-ratio, >= 0; "
                f"got {self.log_clip_low} and {self.log_clip_high}"
            )

    @property
    def unit(self) -> str:
        """The geometric mean over a response, taken after the clip."""
        return "sequence"

    def surrogate(self, batch: Batch) -> Surrogate:
        """Return the sequence ratio of the clipped log-ratios, times A; a clipped token has no gradient."""
        log_ratio_BT, advantages_BT = self.log_ratio(batch), batch.advantages_BT
        low_BT, high_BT = ops.beyond(log_ratio_BT, advantages_BT, -self.log_clip_low, self.log_clip_high)
        clipped_BT = log_ratio_BT.clamp(-self.log_clip_low, self.log_clip_high)
        kept_BT = clipped_BT.where(low_BT | high_BT, log_ratio_BT)
        return Surrogate(ops.ratio(kept_BT, batch.mask_BT, self.unit) * advantages_BT, low_BT, high_BT)
