"""What a loss is given, a ``Batch``, and what it returns, a ``LossOutput``.

Shapes: B responses of a mini-batch, T response positions (padded on the right), G responses to one prompt,
L MoE layers, K experts a token or most likely tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from steadymoe.algorithms.parts import LEFT_OUT, dimensions, dimensions_of, joined_by


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One mini-batch of whole groups, or a part of one, on response positions only.

    The metadata of a field names the dimensions of its tensor. A tensor with response positions is masked: where the
    mask is 0 its values, inf and nan too, are replaced by 0 when the batch is made, and reach no value and no gradient.
    bfloat16 and float16 become float32.

    Raises ValueError, with the name of the field, for a tensor of another shape than its field says (a vector of B
    advantages would be taken for T positions where B = T), for a mask with values other than 0 and 1, for whole
    numbers where log-probabilities or advantages belong, and, in ``get``, for a field that a loss reads and the batch
    does not hold. Raises TypeError for a field without metadata.

    Attributes:
        logprobs_BT: log π_θ of the sampled tokens under the weights being trained; carries the gradient.
        mask_BT: 1 on response tokens (the end token included), 0 on padding and on tokens that the policy did not
            sample, such as a tool's output inside a response.
        advantages_BT: the advantage of each token; constant along a response for outcome rewards.
        old_logprobs_BT: log π_old of the same tokens: the training forward at the weights that sampled.
        rollout_logprobs_BT: log μ of the same tokens as the sampling engine computed them.
        weights_BT: a factor on each token's objective, without gradient (a correction); None for 1.
        groups_B: a number that the responses to one prompt share.
        reference_logprobs_BT: log-probabilities of the same tokens at the cold start.
        entropy_BT: entropy of the policy's distribution at each token, in nats, with its gradient.
        router_log_ratio_LBTK: log p_θ(e) − log p_old(e) of the routers' softmax for the K experts that π_old chose.
        top_logprobs_BTK: log π_θ of the tokens that are most likely under μ and, in the last place, of the sampled
            token.
        old_top_logprobs_BTK: log π_old of the same tokens.
        rollout_top_logprobs_BTK: log μ of the same tokens; −inf in the last place where the sampled token is among
            the others.
        responses: the number of responses with a token in the whole mini-batch, if this batch is a part of it; None
            for a batch that is whole.
        tokens: the number of response tokens in the whole mini-batch, if this batch is a part of it; else None.
        state: the ``LossOutput.state`` of the last update; empty before the first, for the loss's ``initial_state``.
    """

    logprobs_BT: Tensor = field(metadata=dimensions("BT"))
    mask_BT: Tensor = field(metadata=dimensions("BT"))
    advantages_BT: Tensor = field(metadata=dimensions("BT"))
    old_logprobs_BT: Tensor | None = field(default=None, metadata=dimensions("BT"))
    rollout_logprobs_BT: Tensor | None = field(default=None, metadata=dimensions("BT"))
    weights_BT: Tensor | None = field(default=None, metadata=dimensions("BT"))
    groups_B: Tensor | None = field(default=None, metadata=dimensions("B"))
    reference_logprobs_BT: Tensor | None = field(default=None, metadata=dimensions("BT"))
    entropy_BT: Tensor | None = field(default=None, metadata=dimensions("BT"))
    router_log_ratio_LBTK: Tensor | None = field(default=None, metadata=dimensions("LBTK"))
    top_logprobs_BTK: Tensor | None = field(default=None, metadata=dimensions("BTK"))
    old_top_logprobs_BTK: Tensor | None = field(default=None, metadata=dimensions("BTK"))
    rollout_top_logprobs_BTK: Tensor | None = field(default=None, metadata=dimensions("BTK"))
    responses: int | None = field(default=None, metadata=LEFT_OUT)
    tokens: int | None = field(default=None, metadata=LEFT_OUT)
    state: Mapping[str, Tensor] = field(default_factory=dict, metadata=LEFT_OUT)

    def __post_init__(self) -> None:
        if self.mask_BT.ndim != 2:
            raise ValueError(f"mask_BT must have two dimensions, (B, T); got {tuple(self.mask_BT.shape)}")
        mask_BT = self.mask_BT.bool()
        if not torch.equal(mask_BT.to(self.mask_BT.dtype), self.mask_BT):
            raise ValueError("mask_BT must hold 0 and 1 alone: 1 on response tokens, 0 on padding")
        sizes = dict(zip("BT", mask_BT.shape, strict=True))
        for each in fields(self):
            letters, values = dimensions_of(each), getattr(self, each.name)
            if letters is None or values is None or each.name == "mask_BT":
                continue
            _check_shape(each.name, values, letters, sizes)
            if "T" not in letters:
                continue
            if not values.is_floating_point():
                raise ValueError(f"{each.name} must hold floating-point numbers; got {values.dtype}")
            values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
            behind = letters.partition("T")[2]
            mask = mask_BT.view(*mask_BT.shape, *[1] * len(behind))
            object.__setattr__(self, each.name, torch.where(mask, values, 0.0))

    def get(self, name: str) -> Tensor:
        """Return an optional field by name. Raises ValueError where the batch does not hold it."""
        values: Tensor | None = getattr(self, name)
        if values is None:
            raise ValueError(f"the loss reads {name}, which this batch does not hold")
        return values

    def changes(self) -> dict[str, int]:
        """Return how often each tensor was changed in place, by its name."""
        tensors = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: values._version for name, values in tensors.items() if isinstance(values, Tensor)}


def _check_shape(name: str, values: Tensor, letters: str, sizes: dict[str, int]) -> None:
    """Raise ValueError unless a tensor has the dimensions of ``letters``; L and K may be any number."""
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
    """The objective of every token, to be maximised, and marks of the tokens at the edges of a trust region.

    Attributes:
        values_BT: the objective of every token.
        clipped_low_BT: bool, true for tokens that lose their gradient, or are capped, at the lower edge; None for a
            loss without a clip.
        clipped_high_BT: the same at the upper edge.
        number: a scalar that the loss reports about itself (the column ``loss_number``), if any.
        numbers: further numbers by name, each a scalar, or a mask or value of every token, (B, T), whose mean over
            response tokens is reported; ``{"hot": hot_BT}`` becomes the column ``loss/hot``.
        state: what the loss wants back as ``Batch.state`` next time.
    """

    values_BT: Tensor
    clipped_low_BT: Tensor | None = None
    clipped_high_BT: Tensor | None = None
    number: Tensor | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, Tensor | float] = field(default_factory=dict)


# The most numbers that a loss may report at once, and the longest name of one.
MAX_NUMBERS, LONGEST_NAME = 16, 40


@torch.no_grad()
def summed(numbers: Mapping[str, Tensor | float], mask_BT: Tensor) -> dict[str, Tensor]:
    """Return name → (sum over response tokens, number of response tokens), (2,) in float64: these add over parts.

    A scalar counts once for every response token, so it is averaged over micro-batches by their tokens. Raises
    ValueError for what is no mapping of names to real scalars or tensors of the shape (B, T), and for too many.
    """
    if not isinstance(numbers, Mapping) or len(numbers) > MAX_NUMBERS:
        raise ValueError(f"numbers must be a dict of at most {MAX_NUMBERS} scalars or (B, T) tensors, by name")
    mask_BT, sums = mask_BT.bool(), {}
    for name, value in numbers.items():
        if not (isinstance(name, str) and name.isascii() and name.isidentifier() and len(name) <= LONGEST_NAME):
            raise ValueError(
                f"a number's name has ASCII letters, digits and _ alone, at most {LONGEST_NAME}; got {str(name)[:80]!r}"
            )
        if not isinstance(value, Tensor | float | int) or (isinstance(value, Tensor) and value.is_complex()):
            raise ValueError(f"the number {name} must be real, a scalar or a tensor; got {type(value).__name__}")
        values = torch.as_tensor(value, dtype=torch.float64, device=mask_BT.device)
        if values.ndim and values.shape != mask_BT.shape:
            raise ValueError(
                f"the number {name} must be a scalar or have the shape (B, T) = {tuple(mask_BT.shape)}; got "
                f"{tuple(values.shape)}"
            )
        sums[name] = torch.stack([torch.where(mask_BT, values, 0.0).sum(), mask_BT.sum().double()])
    return sums


def _added(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Add the sums of the parts; a name that a part lacks adds nothing there."""
    whole: dict[str, Tensor] = {}
    for name, sums in (pair for part in parts for pair in part.items()):
        whole[name] = whole[name] + sums if name in whole else sums
    return whole


def _joined_metrics(metrics: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors with rows one below the other, and the mean of scalars."""
    whole = {}
    for name, first in metrics[0].items():
        values = [each[name].detach() for each in metrics]
        whole[name] = torch.cat(values) if first.ndim else torch.stack(values).mean()
    return whole


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns. When the parts of a mini-batch are joined, their losses are added up.

    Attributes:
        loss: a scalar to minimise.
        metrics: tensors that ``steadymoe.bench.training.token_metrics`` reduces to columns: ``clipped_low_BT`` and
            ``clipped_high_BT`` from a loss with a clip, ``weights_BT`` under a correction, ``loss_number``.
        state: what the loss wants back as ``Batch.state`` next time.
        numbers: what ``summed`` makes of ``Surrogate.numbers``: name → (sum, response tokens), (2,). Other trainers
            ignore it.
    """

    loss: Tensor = field(metadata=joined_by(lambda losses: torch.stack([each.detach() for each in losses]).sum()))
    metrics: dict[str, Tensor] = field(default_factory=dict, metadata=joined_by(_joined_metrics))
    state: Mapping[str, Tensor] = field(default_factory=dict, metadata=LEFT_OUT)
    numbers: Mapping[str, Tensor] = field(default_factory=dict, metadata=joined_by(_added))
