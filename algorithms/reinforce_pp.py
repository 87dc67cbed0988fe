"""REINFORCE++: PPO's clip with an advantage whitened over the whole batch; no group is needed.

    J = Σ_i Σ_t min( r Â, clip(r, 1 − ε_low, 1 + ε_high) Â ) / Σ_i T_i,   Â = (r_i − mean) / std over the batch
    (2501.03262; the equation was read in verl's code, not in the paper)

Shaper: min-clip. Differs from ``ppo_clip`` only in the advantage (``BatchWhitened``). ``reinforce_pp_baseline``
subtracts the group's mean first.

Left out: 1. the KL penalty in the reward of every token (a switch here: ``algorithm.kl``); 2. discounting.

Provenance: peer's code (verl's).
"""

from dataclasses import dataclass

from steadymoe.algorithms.ppo_clip import PPOClip


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(PPOClip):
    """Token-level clipped surrogate, averaged over all tokens."""
