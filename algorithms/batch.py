"""What a loss is given and what it returns.

Shapes: B responses of a mini-batch, T response positions (padded on the right), G responses to one prompt.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One mini-batch of whole groups, on response positions only.

    What stands on padding, inf and nan too, is replaced by 0 when a batch is made: it reaches no value and
    no gradient.

    Attributes:
        logprobs_BT: log π_θ of the sampled tokens under the weights being trained; carries the gradient.
        old_logprobs_BT: log π_old of the same tokens: the training forward at the weights that sampled.
        rollout_logprobs_BT: log μ of the same tokens as the sampling engine computed them.
        mask_BT: 1 on response tokens (the end token included), 0 on padding.
        advantages_BT: the advantage of each token; constant along a response for outcome rewards.
    """

    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    rollout_logprobs_BT: Tensor
    mask_BT: Tensor
    advantages_BT: Tensor

    def __post_init__(self) -> None:
        mask_BT = self.mask_BT.bool()
        for name in ("logprobs_BT", "old_logprobs_BT", "rollout_logprobs_BT", "advantages_BT"):
            object.__setattr__(self, name, torch.where(mask_BT, getattr(self, name), 0.0))


@dataclass(frozen=True)
class LossOutput:
    """A scalar loss to minimise, and what the loss did to each token.

    ``metrics`` holds tensors that are reduced in one place, ``steadymoe.bench.metrics``:
    ``clipped_low_BT`` and ``clipped_high_BT`` (bool) mark response tokens that lose their gradient, or are
    capped, at the lower and at the upper edge; a loss without a clip leaves both out.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
