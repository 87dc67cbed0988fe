"""Dr. GRPO: GRPO without two biases, the division by a response's length and by the group's standard deviation.

    J = (1/B) Σ_i (1/L) Σ_t min( r Â, clip(r, 1 − ε_low, 1 + ε_high) Â ),   Â_i = r_i − mean_G     (2503.20783)

Shaper: min-clip. Differs from GRPO in the constant L instead of T_i, and in the advantage (``GroupMean``).

Provenance: paper.
"""

from dataclasses import dataclass

from steadymoe.algorithms.loss import ClippedLoss


@dataclass(frozen=True, kw_only=True)
class DrGRPO(ClippedLoss):
    """Token-level clipped surrogate, summed over a response and divided by a constant length."""

    aggregation: str = "constant"
    constant_length: int | None = 10
