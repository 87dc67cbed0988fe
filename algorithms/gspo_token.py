"""GSPO-token: GSPO with an advantage that may differ between the tokens of a response.

    J = mean_i (1/T_i) Σ_t min( s_{i,t} Â_{i,t}, clip(s_{i,t}, 1 − ε_low, 1 + ε_high) Â_{i,t} ),
    s_{i,t} = sg[s_i] · π_θ(y_{i,t}) / sg[π_θ(y_{i,t})]                                    (2507.18071, eqs. 13 and 14)

Shaper: min-clip. Differs from GSPO only if advantages differ within a response; otherwise value, clip and gradient
are equal.

Provenance: paper.
"""

from dataclasses import dataclass
from typing import ClassVar

from steadymoe.algorithms.loss import ClippedLoss


@dataclass(frozen=True, kw_only=True)
class GSPOToken(ClippedLoss):
    """Clipped surrogate with the sequence ratio on every token, and the token's own gradient."""

    ratio: str = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    UNITS: ClassVar = ("sequence",)
    TOKEN_SUM_IS: ClassVar = "luspo"
