"""SAT, staleness-adaptive trust region: a plug-in that narrows a clip for the tokens that have moved furthest.

    J = the host's J with the edges 1 − ε_low c⁻, 1 + ε_high c⁺,   d = sg[log r],   u = the α-quantile of |d|,
    c⁺ = 1/(1 + (d/u)²) where d > u > 0,   c⁻ = the same where d < −u < 0,   else 1                    (2607.18722)

r is the ratio that the host clips. Only the end at which a token already is comes closer: an update that leads back to
1 is never clipped. Shaper: adaptive min-clip. Differs from M2PO, which also looks at the whole mini-batch: a far token
is clipped earlier, and is not always masked.

Ours: 1. the kernel's scale: the paper says a Hill kernel of exponent 2, and 1/2 at the quantile was chosen here; 2. the
quantile is over all response tokens of a mini-batch; 3. on GSPO, d is the logarithm of the response's ratio.

Provenance: reconstruction (from two close readings of the paper by others).
"""

from dataclasses import dataclass, field, replace

import torch

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.grpo import GRPO
from steadymoe.algorithms.loss import ClippedLoss, HostedLoss, Traits


@dataclass(frozen=True, kw_only=True)
class SAT(HostedLoss):
    """``host`` with a band that is narrower, on one side, beyond the quantile of |log r|."""

    quantile: float = 0.9
    host: ClippedLoss = field(default_factory=lambda: GRPO(anchor="rollout"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.host).surrogate is not ClippedLoss.surrogate:
            raise ValueError(f"host must be a plain clip, as GRPO or GSPOToken; got {type(self.host).__name__}")
        if not 0 <= self.quantile <= 1:
            raise ValueError(f"quantile must be between 0 and 1; got {self.quantile}")

    @property
    def traits(self) -> Traits:
        """The quantile is of the whole mini-batch, responses with advantage 0 included."""
        return replace(self.host.traits, whole_minibatch=True, zero_advantage_is_free=False)

    def surrogate(self, batch: Batch) -> Surrogate:
        """min(r A, clip(r) A) with each token's own edges."""
        ratio_BT = self.host.ratio_of(batch)
        moved_BT = ratio_BT.detach().log()
        moved_N = moved_BT.abs()[batch.mask_BT.bool()]
        usual = moved_N.quantile(self.quantile) if len(moved_N) else 0.0
        kernel_BT = 1 / (1 + (moved_BT / usual).square())
        high_BT, low_BT = (
            torch.where((side_BT > usual) & (usual > 0), kernel_BT, 1) for side_BT in (moved_BT, -moved_BT)
        )
        edges = self.host.clip_low * low_BT, self.host.clip_high * high_BT
        return ops.clipped_surrogate(ratio_BT, batch.advantages_BT, *edges, self.host.dual_clip)
