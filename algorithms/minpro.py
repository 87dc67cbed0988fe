"""MinPRO: CISPO's weight times the smallest ratio of the preceding tokens.

    J = Σ_i Σ_t sg[ clip(m_{i,t} r_{i,t}, 1 − ε_low, 1 + ε_high) ] Â log π_θ(y_{i,t}) / Σ_i T_i,
    m_t = min over the response's tokens u < t of r_u,  m_1 = 1      (2601.22718, as two users describe it)

Shaper: clipped weight. Differs from CISPO in m_t, a bounded stand-in for the product of the prefix's ratios. The
paper's ε is unknown; CISPO's is used here.

Provenance: reconstruction (from descriptions by two users).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
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
        # Batch puts 0 where the mask is 0, which would be a ratio of 1; +inf is neutral in a minimum.
        smallest_BT = log_ratio_BT.masked_fill(~batch.mask_BT.bool(), torch.inf).cummin(-1).values
        before_BT = pad(smallest_BT[:, :-1], (1, 0), value=torch.inf)
        return (log_ratio_BT + before_BT.masked_fill(before_BT.isposinf(), 0.0)).exp()
