"""PPO's clipped surrogate on tokens, as trainers of language models use it, with an optional dual clip.

    J = Σ_i Σ_t ℓ_{i,t} / Σ_i T_i,   ℓ = min( r Â, clip(r, 1 − ε_low, 1 + ε_high) Â )     (1707.06347, eq. 7)
    with dual clip, where Â < 0:  max( ℓ, c Â ) instead of ℓ                               (1912.09729, eq. 5)

Shaper: min-clip. Differs from GRPO in its aggregation: PPO weighs all tokens alike, GRPO all responses.

Left out: 1. the value function and its loss; 2. the entropy bonus; it is a switch here (``algorithm.entropy_bonus``).

Provenance: paper.
"""

from dataclasses import dataclass

from steadymoe.algorithms.loss import ClippedLoss


@dataclass(frozen=True, kw_only=True)
class PPOClip(ClippedLoss):
    """Token-level clipped surrogate, averaged over all tokens of the mini-batch."""

    aggregation: str = "token-mean"
