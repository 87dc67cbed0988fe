"""DAPO: a higher upper edge, equal weight for every token, dynamic sampling, a soft penalty for overlong responses.

    J = Σ_i Σ_t min( r Â, clip(r, 1 − ε_low, 1 + ε_high) Â ) / Σ_i T_i,   ε_high > ε_low     (2503.14476, eq. 8)
    over groups with 0 < correct responses < G,
    a penalty on the reward: 0 up to L − buffer tokens, then rising linearly to 1 at L       (2503.14476, eq. 13)

The paper divides by Σ_i T_i over the responses to one prompt, and then averages over prompts. Here, as in the
trainers (verl, TRL, NeMo-RL), both sums run over the whole mini-batch: a prompt with longer responses weighs more.

Shaper: min-clip. Differs from ``ppo_clip`` in the higher upper edge and in the responses on which it is trained.
Dynamic sampling replaces groups without signal. It is ``algorithm.sampling``, and overlong shaping is
``algorithm.overlong``; every algorithm can use both.

Provenance: paper.
"""

from dataclasses import dataclass

from steadymoe.algorithms.ppo_clip import PPOClip


@dataclass(frozen=True, kw_only=True)
class DAPO(PPOClip):
    """Token-level clipped surrogate with a higher upper edge."""

    clip_high: float = 0.28
