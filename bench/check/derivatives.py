"""The gradient of a loss by autograd, and the slope of its value by finite differences.

A loss may hold a part of itself constant: with a detached weight w, the gradient of sg[w] log π is w, and the value
changes by more than that. ``slopes`` therefore has two forms: of the value as it is, and of the value with everything
held that has no gradient.

Shapes: B responses, T response positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from steadymoe.algorithms import Batch, LossOutput, PolicyLoss

# What π_θ, the model that is trained, computes for a loss, and through which a gradient reaches its weights.
OF_POLICY = ("logprobs_BT", "top_logprobs_BTK", "router_log_ratio_LBTK")
_STEP = 1e-6
Fields = Mapping[str, Tensor]


def gradient(loss: PolicyLoss, batch: Batch) -> tuple[Tensor, LossOutput]:
    """∂loss/∂log π_θ of each token, (B, T), and what the loss returned; 0 for a loss without log π_θ in it."""
    found, output = gradients(loss, batch, ("logprobs_BT",))
    return found["logprobs_BT"], output


def gradients(loss: PolicyLoss, batch: Batch, names: Sequence[str] = OF_POLICY) -> tuple[dict[str, Tensor], LossOutput]:
    """The gradient with respect to each field of ``names`` that the batch holds, and what the loss returned.

    A batch without a state gets the loss's initial state.
    """
    leaves = {name: _leaf(getattr(batch, name)) for name in names if getattr(batch, name) is not None}
    output = _called(loss, batch, leaves)
    if not output.loss.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}, output
    found = torch.autograd.grad(output.loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if each is None else each
        for (name, leaf), each in zip(leaves.items(), found, strict=True)
    }, output


def slopes(loss: PolicyLoss, batch: Batch, directions: Sequence[Fields], hold: bool) -> list[float]:
    """The slope of the loss along each direction, by central differences; with ``hold``, constants stay what they are.

    A direction holds a tensor for every field of ``OF_POLICY`` that the batch has. The batch must be in float64.
    """
    held = _Held() if hold else nullcontext()
    base = {name: getattr(batch, name).detach() for name in directions[0]}

    def value(direction: Fields, step: float) -> float:
        leaves = {name: _leaf(base[name] + step * direction[name]) for name in base}
        with held:
            output = _called(loss, batch, leaves)
        return float(output.loss.detach())

    if hold:
        value(directions[0], 0.0)  # what is held is what this evaluation finds
    return [(value(each, _STEP) - value(each, -_STEP)) / (2 * _STEP) for each in directions]


def direction(batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
    """Normal numbers for every field of ``OF_POLICY`` that the batch holds."""
    given = {name: values for name in OF_POLICY if (values := getattr(batch, name)) is not None}
    return {name: torch.randn(values.shape, generator=generator, dtype=values.dtype) for name, values in given.items()}


class _Held(TorchFunctionMode):
    """Keeps, in its first use, all that a loss computes of π_θ without a gradient, and gives it back in later uses.

    That is what ``detach`` and ``no_grad`` make, and every comparison.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Tensor] = []
        self._later: Iterator[Tensor] | None = None
        self._uses = 0

    def __enter__(self) -> Self:
        self._later = iter(self._kept) if self._uses else None
        self._uses += 1
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not isinstance(made, Tensor) or made.requires_grad or not _has_gradient([*args, *(kwargs or {}).values()]):
            return made
        if self._later is None:
            self._kept.append(made.clone())
            return made
        held = next(self._later, None)  # None: another way through the loss than the first time
        return made if held is None or held.shape != made.shape else held.clone()


def _has_gradient(given: Any) -> bool:
    """Whether an argument of a call, or a member of a list of tensors, has a gradient."""
    if isinstance(given, list | tuple):
        return any(_has_gradient(each) for each in given)
    return isinstance(given, Tensor) and given.requires_grad


def _leaf(values: Tensor) -> Tensor:
    return values.detach().requires_grad_()


def _called(loss: PolicyLoss, batch: Batch, leaves: Fields) -> LossOutput:
    changed: dict[str, Any] = dict(leaves)
    return loss(replace(batch, **changed, state=batch.state or loss.initial_state()))
