"""LUSPO: GSPO with each response's term multiplied by its length.

    J = mean_i T_i min( s_i Â_i, clip(s_i, 1 − ε_low, 1 + ε_high) Â_i )
    (2602.05261; the equation was read in TRL's code, not in the paper)

Shaper: min-clip. Differs from GSPO in the factor T_i. The factor cancels the weight 1/T_i of a token in GSPO's
gradient: LUSPO is GSPO-token with a sum over tokens.

Provenance: peer's code (TRL's).
"""

from dataclasses import dataclass
from typing import ClassVar

from steadymoe.algorithms.loss import ClippedLoss


@dataclass(frozen=True, kw_only=True)
class LUSPO(ClippedLoss):
    """Length-weighted, sequence-level clipped surrogate."""

    ratio: str = "sequence"
    aggregation: str = "seq-mean-token-sum"
    clip_low: float = 2e-3
    clip_high: float = 2.5e-3

    UNITS: ClassVar = ("sequence",)
