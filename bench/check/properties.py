"""The mathematical properties of a loss.

Each property is a function of a loss that returns a sentence, or raises ``CheckFailed`` with the reason. A loss may
lack two of them on purpose if a docstring says so (of its class, its module, or a class that it derives from):
``sg[…]`` in its equation is held constant, so its gradient is not the derivative of its value; a sentence that begins
with ``At ratio 1`` says why its gradient there is not the policy gradient. Other exceptions are its ``traits``.

Shapes: B responses, T response positions, M rows of a part of a batch.
"""

import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steadymoe.algorithms import Batch, HostedLoss, PolicyLoss, RatioLoss, Surrogate, ops
from steadymoe.bench.check import batches
from steadymoe.bench.check.batches import ADVANTAGES, RESPONSES, SCALES, TOKENS, in_dtype, interleaved, padded, part
from steadymoe.bench.check.derivatives import gradient, gradients, random_direction, slopes
from steadymoe.bench.support import blame, processes
from steadymoe.bench.support.seeding import seeded_globals
from steadymoe.bench.support.text import visible

# In float64 another order of the same additions differs by less.
_RELATIVE, _ABSOLUTE = 1e-9, 1e-12
# The largest error of a slope, as a share of gradient times direction, and of the value.
_GRADIENT_ERROR, _VALUE_ERROR = 1e-6, 1e-8
# Inside a band and outside it, for properties that do not depend on how far outside.
_IN_AND_OUT = (SCALES[0], SCALES[2])
_ORDER = (3, 0, 5, 1, 4, 2)
# Where a mini-batch is cut into parts.
_CUTS = (0, 1, 3, RESPONSES)
_FAR = (30.0, 1000.0)
_DIRECTIONS = 2
# More than the updates of a run of the standard, so that a schedule hidden in the loss shows.
_LATER = 600
KEEPS_STATE = "keeps a state"
# Of the global generators, to see whether a loss draws from them.
_SEEDS = 4


class CheckFailed(Exception):
    """A property does not hold; the message says why, in one line."""


class Ends(CheckFailed):
    """A property does not hold, and without it no further property can be checked."""


@dataclass(frozen=True)
class Finding:
    """Whether a property holds."""

    name: str
    passed: bool
    sentence: str
    """What was found, or why the property does not hold."""

    @property
    def line(self) -> str:
        """The finding in one line of a terminal."""
        return visible(f"{'passes' if self.passed else 'FAILS '}  {self.name}: {self.sentence}")


def shapes(loss: PolicyLoss) -> str:
    """Check that the loss is one number, and surrogate, marks, number and state are what their docstrings say."""
    for dtype in (torch.float32, torch.float64):
        batch = in_dtype(_batch(loss), dtype)
        shape, state = tuple(batch.mask_BT.shape), loss.initial_state()
        surrogate = loss.surrogate(replace(batch, state=state))
        if not isinstance(surrogate, Surrogate):
            raise Ends(f"surrogate must return a Surrogate, as Surrogate(values_BT), got {type(surrogate).__name__}")
        _check_shape("values_BT", surrogate.values_BT, shape, Ends)
        marks = {name: getattr(surrogate, name) for name in ("clipped_low_BT", "clipped_high_BT")}
        if sum(mark_BT is None for mark_BT in marks.values()) == 1:
            raise CheckFailed("expected clipped_low_BT and clipped_high_BT, or None for both if the loss has no clip")
        for name, mark_BT in marks.items():
            if mark_BT is not None:
                _check_shape(name, mark_BT, shape)
                if mark_BT.dtype != torch.bool:
                    raise CheckFailed(f"{name} must be bool, got {mark_BT.dtype}")
        if surrogate.number is not None:
            _check_shape("number", surrogate.number, ())
        found_BT, output = gradient(loss, batch)
        _check_shape("the loss", output.loss, (), Ends)
        for name, values in (("loss", output.loss), ("gradient", found_BT)):
            if not values.isfinite().all():
                raise Ends(f"on an ordinary batch the {name} is not finite")
        if output.loss.dtype != dtype:
            raise CheckFailed(f"with log-probabilities in {dtype} the loss is in {output.loss.dtype}")
        if output.state.keys() != state.keys():
            before, after = (", ".join(sorted(names)) or "nothing" for names in (state, output.state))
            raise CheckFailed(f"the initial state has {before}, the next one has {after}")
    return f"one number, from a value for each of {TOKENS} tokens; float32 stays float32"


def derivative(loss: PolicyLoss) -> str:
    """Check that the gradient is the slope of the value, with sg[…] held constant where the docstring has it."""
    generator = torch.Generator().manual_seed(0)
    wrong = None
    for scale in SCALES:
        batch = _batch(loss, scale)
        by_field, output = gradients(loss, batch)
        directions = [random_direction(batch, generator) for _ in range(_DIRECTIONS)]
        claimed = [sum(float((by_field[name] * along[name]).sum()) for name in by_field) for along in directions]
        steep = sum(float(by_field[name].norm()) * directions[0][name].numel() ** 0.5 for name in by_field)
        bound = _GRADIENT_ERROR * steep + _VALUE_ERROR * (1 + abs(float(output.loss.detach())))
        for hold in (False, True):
            pairs = zip(slopes(loss, batch, directions, hold), claimed, strict=True)
            differing = [pair for pair in pairs if not abs(pair[0] - pair[1]) <= bound]
            if not differing:
                break
            slope, expected = differing[0]
            where = f"at log-ratios of {scale} the slope of the loss along a line"
            wrong = wrong or f"{where} is {slope:.4g}, but its gradient gives {expected:.4g}"
            if hold:
                raise CheckFailed(wrong)
    if wrong is None:
        return "the derivative of the loss, by finite differences"
    if "sg[" in _docstrings(loss):
        return "by finite differences the derivative of the loss with sg[…] held constant, as the docstring says"
    raise CheckFailed(
        f"{wrong}; they agree if detached values are held constant: if that is intended, write these as sg[…] in the "
        "docstring's equation"
    )


def padding(loss: PolicyLoss) -> str:
    """Check that numbers under padding, and more padding, change nothing."""
    for scale, garbage in zip(_IN_AND_OUT, (torch.nan, 1e3), strict=True):
        batch = _batch(loss, scale)
        tokens = (slice(None), slice(batch.mask_BT.shape[1]))
        _check_unchanged(loss, batch, padded(batch, 3, garbage), tokens, "with 3 more positions of padding")
    return "numbers under padding, and 3 more positions of it, change nothing"


def masked_tokens(loss: PolicyLoss) -> str:
    """Check that masked tokens inside a response, as those of a tool, and a response without tokens change nothing."""
    for scale, garbage in zip(_IN_AND_OUT, (torch.nan, 1e3), strict=True):
        batch = _batch(loss, scale)
        tokens = (slice(None), slice(1, None, 2))
        _check_unchanged(loss, batch, interleaved(batch, garbage), tokens, "with a masked token before every token")
        rows = slice(RESPONSES)
        _check_unchanged(loss, batch, batches.with_empty_response(batch), rows, "with a response without tokens")
    return "masked tokens inside responses, and a response without tokens, change nothing"


def no_tokens(loss: PolicyLoss) -> str:
    """Check that a batch without a token has loss and gradient 0, and leaves a state that is finite."""
    by_field, output = gradients(loss, batches.without_tokens(_batch(loss)))
    found = {"loss": output.loss.detach()} | {f"gradient in {name}": values for name, values in by_field.items()}
    for name, values in found.items():
        if values.isnan().any() or values.any():
            raise CheckFailed(f"in a batch without a token the {name} is {float(values.abs().max()):.6g}, expected 0")
    for name, values in output.state.items():
        if not values.isfinite().all():
            raise CheckFailed(f"after a batch without a token the state {name} is not finite")
    return "a batch without a token has loss and gradient 0"


def order(loss: PolicyLoss) -> str:
    """Check that the order of the responses changes nothing."""
    order_B = torch.tensor(_ORDER)
    for scale in _IN_AND_OUT:
        batch = _batch(loss, scale)
        moved = batches.reordered(batch, order_B)
        _check_unchanged(loss, batch, moved, order_B.argsort(), "with the responses in another order")
    return "responses in another order give the same loss and gradient"


def micro_batches(loss: PolicyLoss) -> str:
    """Check that the parts of a mini-batch add up to it, or that the trait ``whole_minibatch`` refuses to split it."""
    needs = False
    for scale in _IN_AND_OUT:
        batch = _batch(loss, scale)
        whole_BT, whole = gradient(loss, batch)
        parts = [gradient(loss, part(batch, torch.arange(*ends))) for ends in itertools.pairwise(_CUTS)]
        value = torch.zeros((), dtype=torch.float64)
        for _, output in parts:
            value += output.loss.detach()
        same = _close(value, whole.loss.detach()) and _close(torch.cat([part_MT for part_MT, _ in parts]), whole_BT)
        needs |= not same or any(_differing(output.state, whole.state) for _, output in parts)
    if loss.traits.whole_minibatch:
        return "never split: the trait whole_minibatch is set" + ("" if needs else ", although parts would add up here")
    if needs:
        raise CheckFailed(
            "the losses, gradients or states of parts do not add up to the whole: divide by Batch.responses and "
            "Batch.tokens, or set the trait whole_minibatch"
        )
    return "parts of a mini-batch add up to it"


def zero_advantage(loss: PolicyLoss) -> str:
    """Check that a response with advantage 0 has no gradient and may be left out, or that the trait says otherwise."""
    fault, silent = "", ADVANTAGES.index(0.0)
    others = torch.tensor([row for row in range(RESPONSES) if row != silent])
    for scale in _IN_AND_OUT:
        batch = _batch(loss, scale)
        whole, _ = gradients(loss, batch)
        without_MT, _ = gradient(loss, part(batch, others))
        if any(whole[name].select(name.rpartition("_")[2].index("B"), silent).any() for name in whole):
            fault = fault or "a response with advantage 0 has a gradient"
        elif not _close(without_MT, whole["logprobs_BT"][others]):
            fault = fault or "a response with advantage 0 changes the gradient of others"
    if not loss.traits.zero_advantage_is_free:
        said = "responses with advantage 0 count: the trait zero_advantage_is_free is False"
        return said + ("" if fault else ", although leaving them out changes nothing here")
    if fault:
        raise CheckFailed(f"{fault}; if that is intended, set the trait zero_advantage_is_free to False")
    return "a response with advantage 0 has no gradient, and may be left out"


def policy_gradient(loss: PolicyLoss) -> str:
    """Check that at ratio 1 the gradient is −A ∇log π under the loss's own aggregation, unless the docstring explains.

    A gradient that points away from it fails in any case.
    """
    batch = _batch(loss, 0.0)
    by_field, _ = gradients(loss, batch)
    found_BT = by_field.pop("logprobs_BT")
    leaf_BT = batch.logprobs_BT.detach().requires_grad_()
    plain = -loss.aggregate(batch.advantages_BT * leaf_BT, replace(batch, logprobs_BT=leaf_BT))
    (expected_BT,) = torch.autograd.grad(plain, leaf_BT)
    others = any(values.any() for values in by_field.values())
    if _close(found_BT, expected_BT) and not others:
        return "−A ∇log π under the loss's own aggregation"
    stated = re.search(r"\bAt ratio 1\b[^.]*", _docstrings(loss))
    if stated is not None:
        if (found_BT * expected_BT).sum() < 0:
            raise CheckFailed(f"the gradient points away from −A ∇log π, which no docstring can excuse: {stated[0]}")
        return f"a different gradient, as its docstring says: {stated[0]}"
    if others:
        raise CheckFailed(
            "the routers or the most likely tokens have a gradient; if that is intended, say why: At ratio 1 …"
        )
    row, token = divmod(int((found_BT - expected_BT).abs().argmax()), found_BT.shape[1])
    raise CheckFailed(
        f"the gradient of token {token} of response {row} is {float(found_BT[row, token]):.4g}, expected "
        f"{float(expected_BT[row, token]):.4g}, −A ∇log π; if intended, say why in the docstring: At ratio 1 …"
    )


def random_numbers(loss: PolicyLoss) -> str:
    """Say whether the loss draws random numbers, which is no fault: a run seeds the global generators at every step."""
    if not _draws(loss):
        return "none"
    return "draws random numbers: in a run torch's, numpy's and Python's global generators are seeded at every step"


def _draws(loss: PolicyLoss) -> bool:
    """Return whether the loss of a batch depends on the global generators."""
    batch, losses = _batch(loss), []
    for seed in range(_SEEDS):
        with seeded_globals(seed, "check"):
            losses.append(loss(replace(batch, state=loss.initial_state())).loss.detach())
    return not all(torch.equal(each, losses[0]) for each in losses)


def memory(loss: PolicyLoss) -> str:
    """Say whether the loss remembers other batches, in ``LossOutput.state`` or behind it; neither is a fault.

    What it keeps behind it is lost when a run resumes.
    """
    batch, others = _batch(loss), [_batch(loss, scale) for scale in SCALES]
    if names := loss.initial_state():
        return f"{KEEPS_STATE}: {', '.join(sorted(names))}"
    with seeded_globals(0, "check"):
        before = loss(batch).loss
    for number in range(_LATER):
        loss(others[number % len(others)])
    with seeded_globals(0, "check"):
        after = loss(batch).loss
    if torch.equal(after, before):
        return f"none: the loss of a batch is the same after {_LATER} others"
    return f"{KEEPS_STATE} that is not in LossOutput.state, so a resumed run would lose it"


def extremes(loss: PolicyLoss) -> str:
    """Check that loss, gradient and state are finite in float32 where one log-ratio or all of them run away."""
    plain = in_dtype(_batch(loss), torch.float32)
    for far, sign, tokens in itertools.product(_FAR, (1, -1), (1, plain.mask_BT.shape[1])):
        logprobs_BT = plain.logprobs_BT.detach().clone()
        logprobs_BT[:, :tokens] += sign * far
        by_field, output = gradients(loss, replace(plain, logprobs_BT=logprobs_BT))
        for name, values in {"loss": output.loss, **by_field, **output.state}.items():
            if not values.isfinite().all():
                what = f"the gradient in {name}" if name in by_field else f"the {name}"
                raise CheckFailed(
                    f"{what} is not finite where the log-ratio of {'one token' if tokens == 1 else 'every token'} of a "
                    f"response is about {sign * far:+.0f}, in float32"
                )
    return f"finite at log-ratios of ±{_FAR[0]:.0f} and ±{_FAR[1]:.0f}, in float32"


# In the order in which they are checked.
_PROPERTIES: Mapping[str, Callable[[PolicyLoss], str]] = {
    "shapes": shapes,
    "gradient": derivative,
    "padding": padding,
    "masked tokens": masked_tokens,
    "no tokens": no_tokens,
    "order": order,
    "micro-batches": micro_batches,
    "zero advantage": zero_advantage,
    "ratio 1": policy_gradient,
    "extreme ratios": extremes,
    "random numbers": random_numbers,
    "memory": memory,
}
# They compare batches, for which a loss draws other numbers.
_COMPARE = ("padding", "masked tokens", "no tokens", "order", "micro-batches", "zero advantage", "ratio 1")


def of(loss: PolicyLoss) -> dict[str, Callable[[], str]]:
    """Return a check for each property by its name. A loss that raises an error fails the property."""

    def checked(name: str) -> str:
        try:
            return _holds(_PROPERTIES[name], loss)
        except CheckFailed:
            if name in _COMPARE and _draws(loss):
                return "not checked, because the loss draws random numbers"
            raise

    return {name: partial(checked, name) for name in _PROPERTIES}


def _holds(prop: Callable[[PolicyLoss], str], loss: PolicyLoss) -> str:
    """Return the sentence of a property that holds. Raises CheckFailed otherwise, for an error of the loss too."""
    try:
        return prop(loss)
    except CheckFailed:
        raise
    except BaseException as error:  # a user's loss can raise anything, SystemExit too
        if processes.is_interrupt(error):
            raise
        # A loss that cannot be called at all would fail every other property with the same line.
        raise (Ends if prop is shapes else CheckFailed)(blame.one_line(error)) from error


def ask(properties: Mapping[str, Callable[[], str]]) -> Iterator[Finding]:
    """Yield a finding for each property, in order. A property returns what it found, or raises ``CheckFailed``.

    ``Ends`` makes the finding the last one.
    """
    for name, holds in properties.items():
        try:
            yield Finding(name, True, holds())
        except CheckFailed as why:
            yield Finding(name, False, str(why))
            if isinstance(why, Ends):
                return


_ragged = functools.cache(batches.ragged)


def _batch(loss: PolicyLoss, scale: float = 0.4) -> Batch:
    """Return a batch of ``ragged`` with as many most likely tokens as the loss reads."""
    return _ragged(scale, loss.traits.top_k or 2)


def _docstrings(loss: PolicyLoss) -> str:
    """Join the docstrings that state what a loss lacks on purpose: its own, its parents', its host's."""
    texts = []
    for cls in type(loss).__mro__[: type(loss).__mro__.index(PolicyLoss)]:
        if cls.__module__ != PolicyLoss.__module__:  # the bases of all losses explain what sg[…] means
            texts += [inspect.cleandoc(cls.__doc__ or ""), sys.modules[cls.__module__].__doc__ or ""]
    if isinstance(loss, RatioLoss) and loss.ratio == "product":  # each token has the whole's value and its own gradient
        texts.append(ops.ratio.__doc__ or "")
    if isinstance(loss, HostedLoss):
        texts.append(_docstrings(loss.host))
    return " ".join(" ".join(texts).split())


def _check_shape(name: str, values: Any, shape: tuple[int, ...], fault: type[CheckFailed] = CheckFailed) -> None:
    if not isinstance(values, Tensor) or tuple(values.shape) != shape:
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise fault(f"{name} must be {'one number' if not shape else f'a tensor of the shape {shape}'}, got {found}")


def _check_unchanged(loss: PolicyLoss, batch: Batch, changed: Batch, tokens: Any, when: str) -> None:
    """Raise CheckFailed unless a changed batch has the loss, gradients, marks and state of ``batch``, to rounding.

    ``tokens`` is the index of the tokens of ``batch`` in ``changed``; the others are masked.
    """
    (before_BT, before), (after_BT, after) = gradient(loss, batch), gradient(loss, changed)
    if after_BT[~changed.mask_BT.bool()].any():
        raise CheckFailed(f"{when} a masked token has a gradient")
    if not _close(after.loss.detach(), before.loss.detach()):
        raise CheckFailed(f"{when} the loss is {after.loss.item():.6g}, and {before.loss.item():.6g} before")
    if not _close(after_BT[tokens], before_BT):
        largest = float((after_BT[tokens] - before_BT).abs().max())
        raise CheckFailed(f"{when} the gradient differs by up to {largest:.2g}")
    metrics = {name: values[tokens] if values.ndim else values for name, values in after.metrics.items()}
    if name := _differing(metrics, before.metrics):
        raise CheckFailed(f"{when} other tokens are marked ({name})")
    if name := _differing(after.numbers, before.numbers, equal_nan=True):
        raise CheckFailed(f"{when} the loss reports another {name}")
    if name := _differing(after.state, before.state):
        raise CheckFailed(f"{when} the state differs ({name})")


def _close(one: Tensor, other: Tensor, equal_nan: bool = False) -> bool:
    return torch.allclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=equal_nan)


def _differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor], equal_nan: bool = False) -> str:
    """Return a name that only one of two holds, or whose values differ; "" if there is none."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other or not _close(one[name].double(), other[name].double(), equal_nan):
            return name
    return ""
