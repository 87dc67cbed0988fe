"""DIS, direct double-sided importance sampling: the ratio to the sampler as a weight, 0 outside a wide band.

    J = Σ_i Σ_t sg[f(r)] Â log π_θ(y_{i,t}) / Σ_i T_i,   r = π_θ/μ,
    f(r) = r where 1 − ε_low < r < 1 + ε_high, else 0                           (2602.15763; 2607.07508, eqs. 1 to 3)

Shaper: ratio mask. Differs from CISPO outside the band, where a token loses its gradient, and from PPO's clip: the mask
acts whatever the sign of Â. The sampler is the only other policy, so the ratio covers staleness and the sampling engine
at once. A masked token still counts in the denominator.

Ours: the sum over the tokens of a mini-batch in the denominator, and the advantage, which were not seen.

Provenance: paper.
"""

from dataclasses import dataclass
from typing import ClassVar

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, check_band


@dataclass(frozen=True, kw_only=True)
class DIS(RatioLoss):
    """Policy gradient weighted by the ratio of the tokens inside the band."""

    anchor: str = "rollout"
    aggregation: str = "token-mean"
    clip_low: float = 0.3
    clip_high: float = 5.0

    UNITS: ClassVar = ("token",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_band(self.clip_low, self.clip_high)

    def surrogate(self, batch: Batch) -> Surrogate:
        """sg[f(r)] A log π; masked tokens are marked as clipped."""
        ratio_BT = self.ratio_of(batch)
        low_BT, high_BT = ratio_BT <= 1 - self.clip_low, ratio_BT >= 1 + self.clip_high
        weight_BT = ratio_BT.masked_fill(low_BT | high_BT, 0.0)
        return ops.weighted_logprobs(weight_BT, batch.logprobs_BT, batch.advantages_BT, low_BT, high_BT)
