"""M2PO: tokens are masked, the furthest first, until the second moment of the log-ratio is small.

    J = Σ_i Σ_t M_{i,t} r Â / Σ_i T_i,
    M = 0 for the tokens of largest (log r)² among those that lead further out (Â > 0 and r > 1, or Â < 0 and r < 1),
    as many as it takes to bring the mean of (log r)² over the rest of these to τ; else 1   (2510.01161, algorithm 1)

Shaper: second-moment mask. Differs from PPO's clip in that the band follows the batch: none while it is close, and
what is masked is decided together. The authors' own code turns τ into one clip band for PPO's min; AReaL masks
without looking at signs. Both differ from the paper, which is followed here.

Provenance: paper.
"""

from dataclasses import dataclass, replace

import torch

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.loss import RatioLoss, Traits, check_positive


@dataclass(frozen=True, kw_only=True)
class M2PO(RatioLoss):
    """Importance sampling under a mask that bounds a second moment over the mini-batch."""

    aggregation: str = "token-mean"
    max_second_moment: float = 0.04

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(max_second_moment=self.max_second_moment)

    @property
    def traits(self) -> Traits:
        """The mask is one of the whole mini-batch; a token without advantage is never part of it."""
        return replace(super().traits, whole_minibatch=True)

    def surrogate(self, batch: Batch) -> Surrogate:
        """M r A; masked tokens are those marked as clipped."""
        ratio_BT = self.ratio_of(batch)
        moment_BT = ratio_BT.detach().log().square()
        low_BT, high_BT = ops.beyond(ratio_BT, batch.advantages_BT * batch.mask_BT, 1.0, 1.0)
        candidates_N = moment_BT[low_BT | high_BT].sort().values
        mean_N = candidates_N.cumsum(0) / torch.arange(1, len(candidates_N) + 1, device=candidates_N.device)
        kept = int((mean_N <= self.max_second_moment).sum())  # mean_N never falls, its terms being sorted
        limit = candidates_N[kept - 1] if kept else -1.0
        low_BT, high_BT = low_BT & (moment_BT > limit), high_BT & (moment_BT > limit)
        values_BT = (ratio_BT * batch.advantages_BT).masked_fill(low_BT | high_BT, 0.0)
        return Surrogate(values_BT, low_BT, high_BT)
