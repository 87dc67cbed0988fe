"""MinPRO: CISPO's weight times the smallest ratio among the tokens before.

    J = Σ_i Σ_t sg[ clip(m_{i,t} r_{i,t}, 1 − ε_low, 1 + ε_high) ] Â log π_θ(y_{i,t}) / Σ_i T_i,
    m_t = min over u < t of r_u,  m_1 = 1      (2601.22718; the equation was read in descriptions by two users)

Shaper: clipped weight. Differs from CISPO in m_t, a bounded stand-in for the product of the prefix's ratios. The
paper's ε is not known; CISPO's is used here.

Provenance: reconstruction (from descriptions by two users).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import pad

from steadymoe.algorithms.batch import Batch
from steadymoe.algorithms.cispo import CISPO


@dataclass(frozen=True, kw_only=True)
class MinPRO(CISPO):
    """Policy gradient weighted by the clipped product of the token's ratio and the smallest ratio before it."""

    UNITS: ClassVar = ("token",)

    def ratio_of(self, batch: Batch) -> Tensor:
        """m_t r_t, (B, T)."""
        log_ratio_BT = self.log_ratio(batch).detach()
        smallest_BT = log_ratio_BT.cummin(-1).values
        return (log_ratio_BT + pad(smallest_BT[:, :-1], (1, 0))).exp()
