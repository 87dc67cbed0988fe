"""The gradient of a loss by autograd, and the slope of its value by finite differences.

A loss may hold a part of itself constant: with a detached weight w, the gradient of sg[w] log π is w, and the value
changes by more than that. ``slopes`` therefore takes the value as it is, or with everything held that has no gradient.

Shapes: B responses, T response positions.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from steadymoe.algorithms import Batch, LossOutput, PolicyLoss
from steadymoe.bench.support.seeding import seeded_globals

# The fields computed by π_θ, through which a gradient reaches the weights.
POLICY_FIELDS = ("logprobs_BT", "top_logprobs_BTK", "router_log_ratio_LBTK")
_STEP = 1e-6
Fields = Mapping[str, Tensor]


def gradient(loss: PolicyLoss, batch: Batch) -> tuple[Tensor, LossOutput]:
    """Return ∂loss/∂log π_θ of each token, (B, T), and the loss's output; 0 for a loss without log π_θ in it."""
    by_field, output = gradients(loss, batch, ("logprobs_BT",))
    return by_field["logprobs_BT"], output


def gradients(
    loss: PolicyLoss, batch: Batch, names: Sequence[str] = POLICY_FIELDS
) -> tuple[dict[str, Tensor], LossOutput]:
    """Return the gradient with respect to each field of ``names`` that the batch holds, and the loss's output.

    A batch without a state gets the loss's initial state.
    """
    leaves = {name: _leaf(getattr(batch, name)) for name in names if getattr(batch, name) is not None}
    output = _call(loss, batch, leaves)
    if not output.loss.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}, output
    found = torch.autograd.grad(output.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True)), output


def slopes(loss: PolicyLoss, batch: Batch, directions: Sequence[Fields], hold: bool) -> list[float]:
    """Return the slope of the loss along each direction, by central differences; ``hold`` keeps constants constant.

    A direction has a tensor for every field of ``POLICY_FIELDS`` that the batch has. The batch must be in float64.
    """
    base = {name: getattr(batch, name).detach() for name in directions[0]}
    constants = _Held()
    if hold:
        with constants:
            _call(loss, batch, {name: _leaf(values) for name, values in base.items()})

    def value(direction: Fields, step: float) -> float:
        leaves = {name: _leaf(base[name] + step * direction[name]) for name in base}
        with _Held(constants.recorded) if hold else nullcontext():
            output = _call(loss, batch, leaves)
        return float(output.loss.detach())

    return [(value(direction, _STEP) - value(direction, -_STEP)) / (2 * _STEP) for direction in directions]


def random_direction(batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw normal numbers for every field of ``POLICY_FIELDS`` that the batch holds."""
    fields = {name: values for name in POLICY_FIELDS if (values := getattr(batch, name)) is not None}
    return {name: torch.randn(values.shape, generator=generator, dtype=values.dtype) for name, values in fields.items()}


class _Held(TorchFunctionMode):
    """Record all that a loss computes of π_θ without a gradient, or replay what was recorded.

    Such are the results of ``detach``, of ``no_grad`` and of every comparison.
    """

    def __init__(self, replayed: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.recorded: list[Tensor] = []
        self._replay = None if replayed is None else iter(replayed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.requires_grad:
            return result
        if not _has_gradient([*args, *(kwargs or {}).values()]):
            return result
        if self._replay is None:
            self.recorded.append(result.clone())
            return result
        held = next(self._replay, None)  # None: another path through the loss than the recorded one
        return result if held is None or held.shape != result.shape else held.clone()


def _has_gradient(argument: Any) -> bool:
    if isinstance(argument, list | tuple):
        return any(map(_has_gradient, argument))
    return isinstance(argument, Tensor) and argument.requires_grad


def _leaf(values: Tensor) -> Tensor:
    return values.detach().requires_grad_()


def _call(loss: PolicyLoss, batch: Batch, leaves: Fields) -> LossOutput:
    fields: dict[str, Any] = dict(leaves)
    with seeded_globals(0, "check"):  # a loss that draws random numbers draws the same at every call
        return loss(replace(batch, **fields, state=batch.state or loss.initial_state()))
