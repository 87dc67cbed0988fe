"""LitePPO: PPO's clip on tokens; the advantage uses the group's mean and the batch's standard deviation.

    J = Σ_i Σ_t min( r Â, clip(r, 1 − ε, 1 + ε) Â ) / Σ_i T_i,   Â_i = (r_i − mean_G) / std over the batch
    (2508.08221; we read the paper in part, and ROLL's and TRL's code)

Shaper: min-clip. Differs from ``ppo_clip`` only in the advantage (``GroupMeanBatchStd``).

Provenance: peer's code (ROLL's and TRL's).
"""

from dataclasses import dataclass

from steadymoe.algorithms.ppo_clip import PPOClip


@dataclass(frozen=True, kw_only=True)
class LitePPO(PPOClip):
    """Token-level clipped surrogate, averaged over all tokens."""
