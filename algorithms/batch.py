"""What a loss is given and what it returns.

Shapes: B responses of a mini-batch, T response positions (padded on the right), G responses to one prompt,
L MoE layers, K experts a token or most likely tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One mini-batch of whole groups, or a part of one, on response positions only.

    What stands on padding, inf and nan too, is replaced by 0 when a batch is made: it reaches no value and
    no gradient. bfloat16 and float16 become float32. A field that a loss needs and the batch lacks is
    answered with a ValueError that names it. So is a field of another shape than its name says, with both shapes
    (a vector of B advantages would be taken for T positions where B = T), a mask with values other than 0 and 1,
    and whole numbers where log-probabilities or advantages belong.

    Attributes:
        logprobs_BT: log π_θ of the sampled tokens under the weights being trained; carries the gradient.
        mask_BT: 1 on response tokens (the end token included), 0 on padding.
        advantages_BT: the advantage of each token; constant along a response for outcome rewards.
        old_logprobs_BT: log π_old of the same tokens: the training forward at the weights that sampled.
        rollout_logprobs_BT: log μ of the same tokens as the sampling engine computed them.
        weights_BT: a factor on each token's objective, without gradient (a correction); None for 1.
        groups_B: a number that the responses to one prompt share.
        reference_logprobs_BT: log-probabilities of the same tokens at the cold start.
        entropy_BT: entropy of the distribution that each token was drawn from, with its gradient.
        router_log_ratio_LBTK: log p_θ(e) − log p_old(e) of the routers' softmax for the K experts that π_old chose.
        top_logprobs_BTK, old_top_logprobs_BTK, rollout_top_logprobs_BTK: log-probabilities under π_θ, π_old and
            μ of the tokens that are most likely under μ and, last, of the sampled one; the last is −inf in
            rollout_top_logprobs_BTK where the sampled token is among the others.
        responses: responses with a token in the whole mini-batch that this is a part of; None: this is whole.
        tokens: likewise, response tokens.
        state: what the loss returned as ``LossOutput.state`` last time; empty for its ``initial_state``.
    """

    logprobs_BT: Tensor
    mask_BT: Tensor
    advantages_BT: Tensor
    old_logprobs_BT: Tensor | None = None
    rollout_logprobs_BT: Tensor | None = None
    weights_BT: Tensor | None = None
    groups_B: Tensor | None = None
    reference_logprobs_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
    router_log_ratio_LBTK: Tensor | None = None
    top_logprobs_BTK: Tensor | None = None
    old_top_logprobs_BTK: Tensor | None = None
    rollout_top_logprobs_BTK: Tensor | None = None
    responses: int | None = None
    tokens: int | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mask_BT.ndim != 2:
            raise ValueError(f"mask_BT must have two dimensions, (B, T); got {tuple(self.mask_BT.shape)}")
        mask_BT = self.mask_BT.bool()
        if not torch.equal(mask_BT.to(self.mask_BT.dtype), self.mask_BT):
            raise ValueError("mask_BT must hold 0 and 1 alone: 1 on response tokens, 0 on padding")
        sizes = dict(zip("BT", mask_BT.shape, strict=True))
        for name, values in vars(self).items():
            if not isinstance(values, Tensor) or name == "mask_BT":
                continue
            _check_shape(name, values, sizes)
            if "BT" not in name:
                continue
            if not values.is_floating_point():
                raise ValueError(f"{name} must hold floating-point numbers; got {values.dtype}")
            values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
            mask = mask_BT[..., None] if name.endswith("BTK") else mask_BT
            object.__setattr__(self, name, torch.where(mask, values, 0.0))

    def get(self, name: str) -> Tensor:
        """An optional field by name. Raises ValueError where the batch does not hold it."""
        values = getattr(self, name)
        if values is None:
            raise ValueError(f"the loss reads {name}, which this batch does not hold")
        return values

    @staticmethod
    def join(parts: Sequence["Batch"]) -> "Batch":
        """The parts of a mini-batch as one batch, detached, without their shared denominators and state."""
        together: dict[str, Any] = {}
        for each in fields(Batch):
            if each.name in ("responses", "tokens", "state") or getattr(parts[0], each.name) is None:
                continue
            dim = 1 if "_LBTK" in each.name else 0
            together[each.name] = torch.cat([getattr(part, each.name).detach() for part in parts], dim)
        return Batch(**together)


def _check_shape(name: str, values: Tensor, sizes: dict[str, int]) -> None:
    """Raise ValueError unless a field has the shape that the end of its name says; L and K may be any number."""
    letters = name.rpartition("_")[2]
    fits = values.ndim == len(letters) and all(
        sizes.get(letter, size) == size for letter, size in zip(letters, values.shape, strict=True)
    )
    if not fits:
        expected = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
        raise ValueError(
            f"{name} must have the shape ({', '.join(letters)}) = ({expected}), as mask_BT has "
            f"{tuple(sizes.values())}; got {tuple(values.shape)}"
        )


@dataclass(frozen=True)
class Surrogate:
    """The objective of every token, to be maximised, and what became of it at the edges of a trust region.

    ``clipped_low_BT`` and ``clipped_high_BT`` (bool) mark response tokens that lose their gradient, or are
    capped, at the lower and at the upper edge; None for a loss without a clip. ``number`` is a scalar that the
    loss reports of itself, if any (the column ``loss_number``), ``state`` what it wants back next time.
    """

    values_BT: Tensor
    clipped_low_BT: Tensor | None = None
    clipped_high_BT: Tensor | None = None
    number: Tensor | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """A scalar loss to minimise, and what the loss did to each token.

    ``metrics`` holds tensors that are reduced in one place, ``steadymoe.bench.measurement.token_metrics``:
    ``clipped_low_BT`` and ``clipped_high_BT`` of a loss with a clip, ``weights_BT`` of one under a correction,
    ``loss_number``.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)
