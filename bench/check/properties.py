"""The mathematical properties of a loss, each computed here and nowhere else.

A property is a function of a loss. It returns a sentence on what it found, or raises ``Fails`` with the reason. Two
properties may be lacking on purpose, and a loss states this in its docstring (of the class, its module, or a class
that it derives from): ``sg[…]`` in its equation is held constant, so its gradient is not the derivative of its value;
a sentence that begins with ``At ratio 1`` says why its gradient there is not the policy gradient. Other exceptions are
its ``traits``.

Shapes: B responses, T response positions, M rows of a part of a batch.
"""

import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steadymoe.algorithms import Batch, HostedLoss, LossOutput, PolicyLoss, RatioLoss, Surrogate, ops
from steadymoe.bench.check.batches import (
    ADVANTAGES,
    RESPONSES,
    SCALES,
    TOKENS,
    in_dtype,
    interleaved,
    padded,
    part,
    ragged,
    reordered,
    with_empty_response,
)
from steadymoe.bench.check.derivatives import direction, gradient, gradients, slopes
from steadymoe.bench.support import blame
from steadymoe.bench.support.findings import Ends, Fails

# In float64 another order of the same additions differs by less.
_RELATIVE, _ABSOLUTE = 1e-9, 1e-12
# The largest error of a slope, as a share of gradient times direction, and of the value.
_OF_GRADIENT, _OF_VALUE = 1e-6, 1e-8
# Inside a band and outside it, for properties that do not depend on how far outside.
_IN_AND_OUT = (SCALES[0], SCALES[2])
_ORDER = (3, 0, 5, 1, 4, 2)
_CUTS = (0, 1, 3, RESPONSES)
_FAR = (30.0, 1000.0)
_DIRECTIONS = 2


def shapes(loss: PolicyLoss) -> str:
    """Surrogate, marks, number and state are what their docstrings say, and the loss is one number."""
    for dtype in (torch.float32, torch.float64):
        batch = in_dtype(_batch(loss), dtype)
        shape, state = tuple(batch.mask_BT.shape), loss.initial_state()
        made = loss.surrogate(replace(batch, state=state))
        if not isinstance(made, Surrogate):
            raise Ends(f"surrogate must return a Surrogate, as Surrogate(values_BT); got {type(made).__name__}")
        _shaped("values_BT", made.values_BT, shape)
        marks = (made.clipped_low_BT, made.clipped_high_BT)
        if (marks[0] is None) != (marks[1] is None):
            raise Fails("clipped_low_BT and clipped_high_BT are both given, or both None for a loss without a clip")
        for name, mark_BT in zip(("clipped_low_BT", "clipped_high_BT"), marks, strict=True):
            if mark_BT is not None:
                _shaped(name, mark_BT, shape)
                if mark_BT.dtype != torch.bool:
                    raise Fails(f"{name} must be bool; got {mark_BT.dtype}")
        if made.number is not None:
            _shaped("number", made.number, ())
        _, output = gradient(loss, batch)
        _shaped("the loss", output.loss, ())
        if output.loss.dtype != dtype:
            raise Fails(f"from log-probabilities in {dtype} the loss is in {output.loss.dtype}")
        if output.state.keys() != state.keys():
            raise Fails(f"the state begins with {_listed(state)} and goes on with {_listed(output.state)}")
    return f"one number, from a value for each of {TOKENS} tokens; float32 stays float32"


def derivative(loss: PolicyLoss) -> str:
    """The gradient is the slope of the value, or of the value with sg[…] held constant where the docstring says so."""
    drawn = torch.Generator().manual_seed(0)
    wrong = None
    for scale in SCALES:
        batch = _batch(loss, scale)
        found, output = gradients(loss, batch)
        directions = [direction(batch, drawn) for _ in range(_DIRECTIONS)]
        said = [sum(float((found[name] * each[name]).sum()) for name in found) for each in directions]
        steep = sum(float(found[name].norm()) * directions[0][name].numel() ** 0.5 for name in found)
        bound = _OF_GRADIENT * steep + _OF_VALUE * (1 + abs(float(output.loss.detach())))
        for hold in (False, True):
            seen = slopes(loss, batch, directions, hold)
            apart = [pair for pair in zip(seen, said, strict=True) if not abs(pair[0] - pair[1]) <= bound]
            if not apart:
                break
            slope, claimed = apart[0]
            wrong = wrong or (
                f"along a line, at log-ratios of {scale}, the loss has the slope {slope:.4g} and the gradient says "
                f"{claimed:.4g}"
            )
            if hold:
                raise Fails(wrong)
    if wrong is None:
        return "the derivative of the loss, by finite differences"
    if "sg[" in _docstrings(loss):
        return "by finite differences the derivative of the loss with sg[…] held constant, as the docstring says"
    raise Fails(
        f"{wrong}; they agree where all that is detached is held constant: if this is meant, write it as sg[…] in the "
        "equation of the docstring"
    )


def padding(loss: PolicyLoss) -> str:
    """Numbers under padding, and more padding, change nothing."""
    for scale, garbage in zip(_IN_AND_OUT, (torch.nan, 1e3), strict=True):
        batch = _batch(loss, scale)
        wide = padded(batch, 3, garbage)
        (before_BT, before), (after_BT, after) = gradient(loss, batch), gradient(loss, wide)
        width = batch.mask_BT.shape[1]
        if after_BT[~wide.mask_BT.bool()].any():
            raise Fails("padding has a gradient")
        cut = {name: each[:, :width] if each.ndim else each for name, each in after.metrics.items()}
        _same(before, before_BT, replace(after, metrics=cut), after_BT[:, :width], "with 3 more positions of padding")
    return "numbers under padding, and 3 more positions of it, change nothing"


def masked_tokens(loss: PolicyLoss) -> str:
    """Masked tokens inside a response, as those of a tool, and a response without tokens change nothing."""
    for scale, garbage in zip(_IN_AND_OUT, (torch.nan, 1e3), strict=True):
        batch = _batch(loss, scale)
        before_BT, before = gradient(loss, batch)
        for masked, tokens, when in (
            (interleaved(batch, garbage), (slice(None), slice(1, None, 2)), "with a masked token before every token"),
            (with_empty_response(batch), slice(RESPONSES), "with a response without tokens"),
        ):
            after_BT, after = gradient(loss, masked)
            if after_BT[~masked.mask_BT.bool()].any():
                raise Fails(f"{when} a masked token has a gradient")
            cut = {name: each[tokens] if each.ndim else each for name, each in after.metrics.items()}
            _same(before, before_BT, replace(after, metrics=cut), after_BT[tokens], when)
    return "masked tokens inside responses, and a response without tokens, change nothing"


def order(loss: PolicyLoss) -> str:
    """The order of the responses changes nothing."""
    order_B = torch.tensor(_ORDER)
    for scale in _IN_AND_OUT:
        batch = _batch(loss, scale)
        (before_BT, before), (after_BT, after) = gradient(loss, batch), gradient(loss, reordered(batch, order_B))
        moved = {name: each[order_B] if each.ndim else each for name, each in before.metrics.items()}
        _same(
            replace(before, metrics=moved), before_BT[order_B], after, after_BT, "with the responses in another order"
        )
    return "responses in another order give the same loss and gradient"


def micro_batches(loss: PolicyLoss) -> str:
    """The parts of a mini-batch add up to it, or the trait ``whole_minibatch`` refuses to split it."""
    needs = any(needs_the_whole(loss, _batch(loss, scale)) for scale in _IN_AND_OUT)
    if loss.traits.whole_minibatch:
        return "refused by the trait whole_minibatch" + ("" if needs else ", though parts would add up here")
    if needs:
        raise Fails(
            "the losses, gradients or states of parts do not add up to the whole: divide by Batch.responses and "
            "Batch.tokens, or set the trait whole_minibatch"
        )
    return "parts of a mini-batch add up to it"


def needs_the_whole(loss: PolicyLoss, batch: Batch) -> bool:
    """Whether parts of a batch of ``ragged`` have another sum of losses than the whole, other gradients or states."""
    whole_BT, whole = gradient(loss, batch)
    rows = [torch.arange(first, last) for first, last in itertools.pairwise(_CUTS)]
    value, summed_BT, states = of_parts(loss, batch, rows)
    same = _close(value, whole.loss.detach()) and _close(summed_BT, whole_BT)
    return not same or not all(_close_states(state, whole.state) for state in states)


def of_parts(
    loss: PolicyLoss, batch: Batch, rows: Sequence[Tensor]
) -> tuple[Tensor, Tensor, list[Mapping[str, Tensor]]]:
    """The sum of the losses of the parts of a batch of ``ragged``, their gradients, (B, T), and their states.

    Each member of ``rows`` has the numbers of the rows of one part, (M,).
    """
    summed_BT, value, states = torch.zeros_like(batch.logprobs_BT), torch.zeros((), dtype=batch.logprobs_BT.dtype), []
    for rows_M in rows:
        found_MT, output = gradient(loss, part(batch, rows_M))
        summed_BT[rows_M] += found_MT
        value += output.loss.detach()
        states.append(output.state)
    return value, summed_BT, states


def zero_advantage(loss: PolicyLoss) -> str:
    """A response with advantage 0 has no gradient and may be left out, or the trait says that it is not free."""
    faults = [fault for scale in _IN_AND_OUT if (fault := cost_of_zero(loss, _batch(loss, scale))) is not None]
    if not loss.traits.zero_advantage_is_free:
        return "not free, as the trait zero_advantage_is_free says" + ("" if faults else ", though it is free here")
    if faults:
        raise Fails(f"{faults[0]}; if this is meant, set the trait zero_advantage_is_free to False")
    return "a response with advantage 0 has no gradient, and may be left out"


def cost_of_zero(loss: PolicyLoss, batch: Batch) -> str | None:
    """What is not free about the response with advantage 0 in a batch of ``ragged``; None if it is free."""
    silent = ADVANTAGES.index(0.0)
    whole, _ = gradients(loss, batch)
    row = {name: each.select(name.rpartition("_")[2].index("B"), silent) for name, each in whole.items()}
    if any(each.any() for each in row.values()):
        return "a response with advantage 0 has a gradient"
    kept = torch.tensor([i for i in range(RESPONSES) if i != silent])
    without_MT, _ = gradient(loss, part(batch, kept))
    if not _close(without_MT, whole["logprobs_BT"][kept]):
        return "a response with advantage 0 changes the gradient of others"
    return None


def policy_gradient(loss: PolicyLoss) -> str:
    """At ratio 1 the gradient is −A ∇log π under the loss's own aggregation, or the docstring says why it is not."""
    batch = _batch(loss, 0.0)
    found, _ = gradients(loss, batch)
    leaf_BT = batch.logprobs_BT.detach().requires_grad_()
    plain = -loss.aggregate(batch.advantages_BT * leaf_BT, replace(batch, logprobs_BT=leaf_BT))
    (expected_BT,) = torch.autograd.grad(plain, leaf_BT)
    others = any(each.any() for name, each in found.items() if name != "logprobs_BT")
    if _close(found["logprobs_BT"], expected_BT) and not others:
        return "−A ∇log π under the loss's own aggregation"
    stated = re.search(r"\bAt ratio 1\b[^.]*", _docstrings(loss))
    if stated is not None:
        if (found["logprobs_BT"] * expected_BT).sum() < 0:
            raise Fails(f"the gradient points away from −A ∇log π, which no statement excuses: {stated[0]}")
        return f"another gradient, as its docstring says: {stated[0]}"
    if others:
        raise Fails("the routers or the most likely tokens have a gradient; if this is meant, say why: At ratio 1 …")
    apart_BT = (found["logprobs_BT"] - expected_BT).abs()
    row, place = divmod(int(apart_BT.argmax()), apart_BT.shape[1])
    raise Fails(
        f"the gradient of token {place} of response {row} is {float(found['logprobs_BT'][row, place]):.4g} in place of "
        f"{float(expected_BT[row, place]):.4g}, −A ∇log π; if this is meant, say why in the docstring: At ratio 1 …"
    )


def extremes(loss: PolicyLoss) -> str:
    """Loss, gradient and state are finite in float32 where a log-ratio, or every log-ratio, has run away."""
    plain = in_dtype(_batch(loss), torch.float32)
    for far, sign, tokens in itertools.product(_FAR, (1, -1), (1, plain.mask_BT.shape[1])):
        logprobs_BT = plain.logprobs_BT.detach().clone()
        logprobs_BT[:, :tokens] += sign * far
        found, output = gradients(loss, replace(plain, logprobs_BT=logprobs_BT))
        for name, each in {"loss": output.loss, **found, **output.state}.items():
            if not each.isfinite().all():
                what = f"the gradient in {name}" if name in found else f"the {name}"
                raise Fails(
                    f"{what} is not finite where the log-ratio of {'one token' if tokens == 1 else 'every token'} of a "
                    f"response is about {sign * far:+.0f}, in float32"
                )
    return f"finite at log-ratios of ±{_FAR[0]:.0f} and ±{_FAR[1]:.0f}, in float32"


# In the order in which they are told.
_PROPERTIES: Mapping[str, Callable[[PolicyLoss], str]] = {
    "shapes": shapes,
    "gradient": derivative,
    "padding": padding,
    "masked tokens": masked_tokens,
    "order": order,
    "micro-batches": micro_batches,
    "zero advantage": zero_advantage,
    "ratio 1": policy_gradient,
    "extreme ratios": extremes,
}


def of(loss: PolicyLoss) -> dict[str, Callable[[], str]]:
    """Every property of a loss, by its name. An error in the loss counts as a property that is not there."""
    return {name: partial(_asked, holds, loss) for name, holds in _PROPERTIES.items()}


def _asked(holds: Callable[[PolicyLoss], str], loss: PolicyLoss) -> str:
    try:
        return holds(loss)
    except Fails:
        raise
    except Exception as error:  # the loss is anybody's code
        # A loss that cannot be called at all would fail every other property with the same line.
        raise (Ends if holds is shapes else Fails)(blame.sentence(error)) from error


def _batch(loss: PolicyLoss, scale: float = 0.4) -> Batch:
    """A batch of ``ragged`` with as many most likely tokens as the loss reads."""
    return _drawn(scale, loss.traits.top_k or 2)


@functools.cache
def _drawn(scale: float, top_k: int) -> Batch:
    return ragged(scale, top_k=top_k)


def _docstrings(loss: PolicyLoss) -> str:
    """The docstrings that state what a loss lacks on purpose, in one line: its own, its parents', its host's."""
    classes = type(loss).__mro__[: type(loss).__mro__.index(PolicyLoss)]
    texts = []
    for cls in classes:
        if cls.__module__ != PolicyLoss.__module__:  # the bases of all losses say what sg[…] is to them
            texts += [inspect.cleandoc(cls.__doc__ or ""), sys.modules[cls.__module__].__doc__ or ""]
    if isinstance(loss, RatioLoss) and loss.ratio == "product":  # each token has the whole's value and its own gradient
        texts.append(ops.ratio.__doc__ or "")
    if isinstance(loss, HostedLoss):
        texts.append(_docstrings(loss.host))
    return " ".join(" ".join(texts).split())


def _shaped(name: str, values: Any, shape: tuple[int, ...]) -> None:
    """Raise Fails unless ``values`` is a tensor of a shape."""
    if not isinstance(values, Tensor) or tuple(values.shape) != shape:
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise Fails(f"{name} must be {'one number' if not shape else f'a tensor of the shape {shape}'}; got {found}")


def _same(before: LossOutput, before_BT: Tensor, after: LossOutput, after_BT: Tensor, when: str) -> None:
    """Raise Fails unless two outputs and their gradients are the same to rounding."""
    one, other = before.loss.detach(), after.loss.detach()
    if not _close(other, one):
        raise Fails(f"{when} the loss is {float(other):.6g}, and {float(one):.6g} before")
    if not _close(after_BT, before_BT):
        raise Fails(f"{when} the gradient differs by up to {float((after_BT - before_BT).abs().max()):.2g}")
    if not _close_states(after.metrics, before.metrics):
        raise Fails(f"{when} other tokens are marked as clipped, or the loss reports another number")
    if not _close_states(after.state, before.state):
        raise Fails(f"{when} the state is another")


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE)


def _close_states(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether the same names hold the same values."""
    return one.keys() == other.keys() and all(_close(one[name].double(), other[name].double()) for name in one)


def _listed(state: Mapping[str, Tensor]) -> str:
    return ", ".join(sorted(state)) or "nothing"
