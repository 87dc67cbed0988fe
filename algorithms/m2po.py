"""M2PO: tokens are masked, the largest log-ratios first, until the second moment of the log-ratio is small.

    J = Σ_i Σ_t M_{i,t} r Â / Σ_i T_i,
    candidates are the tokens that lead further out (Â > 0 and r > 1, or Â < 0 and r < 1); M = 0 for as many
    candidates, those of largest (log r)² first, as bring the mean of (log r)² over the others to at most τ; else M = 1
                                                                                            (2510.01161, algorithm 1)

Candidates of equal (log r)² are masked together, as all tokens of a response are under a sequence ratio.

Shaper: second-moment mask. Differs from PPO's clip: the bound depends on the whole mini-batch, and nothing is masked
while the policy is close to the old one. The authors' own code turns τ into one clip band for PPO's min; AReaL masks
without regard to signs. Both differ from the paper; this is the paper's version.

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
        """The mask depends on the whole mini-batch; a token with advantage 0 is never a candidate."""
        return replace(super().traits, whole_minibatch=True)

    def surrogate(self, batch: Batch) -> Surrogate:
        """M r A; masked tokens are marked as clipped."""
        ratio_BT = self.ratio_of(batch)
        moment_BT = ratio_BT.detach().log().square()
        low_BT, high_BT = ops.beyond(ratio_BT, batch.advantages_BT * batch.mask_BT, 1.0, 1.0)
        candidates_N = moment_BT[low_BT | high_BT].sort().values
        mean_N = candidates_N.cumsum(0) / torch.arange(1, len(candidates_N) + 1, device=candidates_N.device)
        masked_N = candidates_N[mean_N > self.max_second_moment]  # the terms are sorted, so mean_N never falls
        limit = masked_N[0] if len(masked_N) else torch.inf
        low_BT, high_BT = low_BT & (moment_BT >= limit), high_BT & (moment_BT >= limit)
        values_BT = (ratio_BT * batch.advantages_BT).masked_fill(low_BT | high_BT, 0.0)
        return Surrogate(values_BT, low_BT, high_BT)
