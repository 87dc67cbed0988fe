"""UP, unbounded positive: a plug-in that frees good tokens of their ratio and clip; bad ones keep the host's.

    J_t = Â_t π_θ/sg[π_θ] where Â_t > 0,   the host's J_t elsewhere                     (2607.06987, eqs. 14 and 15)

A good token has the value Â and the gradient Â ∇log π, whatever the ratio. Shaper: one-sided clip. Where Â > 0 its
gradient is TOPR's; where Â < 0 TOPR caps a weight and UP clips a ratio: next to its host and TOPR, UP tells which half
of TOPR matters. Differs from a host with ``clip_high`` = ∞, which weighs a good token by its ratio.

Left out: the paper's numbers, which were not seen. ``host`` has its own algorithm's, without the dual clip of verl's
pull request.

Provenance: peer's code (TRL's issue 6407 and verl's pull request 7022, which quote the paper's equations).
"""

from dataclasses import dataclass, field, replace

import torch

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.grpo import GRPO
from steadymoe.algorithms.loss import ClippedLoss, HostedLoss


@dataclass(frozen=True, kw_only=True)
class UP(HostedLoss):
    """``host`` where the advantage is not above 0, else the policy gradient."""

    host: ClippedLoss = field(default_factory=GRPO)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.host, ClippedLoss):
            raise ValueError(f"host must be a loss with a clip, as GRPO or GSPO; got {type(self.host).__name__}")

    def surrogate(self, batch: Batch) -> Surrogate:
        """Return A π/sg[π] where A > 0, never clipped, and the host's surrogate elsewhere."""
        made, good_BT = self.host.surrogate(batch), batch.advantages_BT > 0
        free_BT = ops.with_token_gradient(batch.advantages_BT, batch.logprobs_BT)
        low_BT, high_BT = (
            None if marks_BT is None else marks_BT & ~good_BT
            for marks_BT in (made.clipped_low_BT, made.clipped_high_BT)
        )
        values_BT = torch.where(good_BT, free_BT, made.values_BT)
        return replace(made, values_BT=values_BT, clipped_low_BT=low_BT, clipped_high_BT=high_BT)
