"""What ``steadymoe check`` asks: every shipped algorithm passes, and a fault made on purpose fails in its own line."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import faulty_losses
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from steadymoe.algorithms import Batch, ClippedLoss, RatioLoss, Surrogate, TokenLoss, Traits, load, names, ops
from steadymoe.bench.check import properties
from steadymoe.bench.check.batches import ragged
from steadymoe.bench.check.derivatives import gradient, random_direction, slopes
from steadymoe.bench.check.properties import ask

# The algorithms that lack a property on purpose, by the words in which they say so.
HELD = {"aspo", "cispo", "minirl", "minpro", "rspo", "rspo_grpo", "rspo_gspo", "topr", "vespo"}
HELD |= {"score_centering", "score_centering_tis", "score_centering_mis", "dis", "dis_code", "flash_reinforce"}
HELD |= {"up_grpo", "up_gspo"}
# ``ipo`` with its penalty; the batches here do not show what ``sat`` and ``sat_gspo`` need, test_objective.py does.
NOT_FREE = {"gepo", "r2vpo", "r2vpo_fixed", "ipo@prime-rl-3418", "sat", "sat_gspo"}
STATED = {
    "gradient": ("sg[…] held constant, as the docstring says", HELD),
    "micro-batches": ("never split: the trait whole_minibatch is set", {"gepo", "m2po", "r2vpo", "sat", "sat_gspo"}),
    "zero advantage": ("responses with advantage 0 count: the trait zero_advantage_is_free is False", NOT_FREE),
    "memory": (properties.KEEPS_STATE, {"r2vpo"}),
    "random numbers": ("draws random numbers", set()),
    "ratio 1": ("a different gradient, as its docstring says: At ratio 1 the policy gradient is multiplied", {"gepo"}),
}


UNSHOWN = {"sat": {"zero advantage"}, "sat_gspo": {"zero advantage", "micro-batches"}}


@pytest.mark.parametrize("name", names(presets=True))
def test_every_shipped_algorithm_passes_or_states_why_it_differs(name: str) -> None:
    found = list(ask(properties.of(load(name))))
    assert [each.line for each in found if not each.passed] == []
    told = {each.name: each.sentence for each in found}
    assert len(told) == 12
    for line, (words, who) in STATED.items():
        assert (words in told[line]) == (name in who or name.partition("@")[0] in who), told[line]
    unneeded = {line for line, sentence in told.items() if "though" in sentence}
    assert unneeded == UNSHOWN.get(name, set())  # no trait without a need


@pytest.mark.parametrize(
    ("numbers", "held"),
    [
        ({"ratio": "sequence", "aggregation": "token-mean"}, False),
        ({"ratio": "product", "dual_clip": 3.0}, True),
        ({"anchor": "rollout", "aggregation": "constant", "constant_length": 7}, False),
    ],
)
def test_an_algorithm_with_other_numbers_passes_too(numbers: dict[str, Any], held: bool) -> None:
    """A product ratio gives each token the value of the whole and its own gradient: the docstring of ``ops.ratio``."""
    found = {each.name: each for each in ask(properties.of(load("grpo", **numbers)))}
    assert [each.line for each in found.values() if not each.passed] == []
    assert ("sg[…] held constant" in found["gradient"].sentence) == held


# --- faults ------------------------------------------------------------------------------------------


def made(
    values: Callable[[Any, Batch], Any], doc: str = "", base: type[TokenLoss] = RatioLoss, **methods: Any
) -> TokenLoss:
    """A loss whose objective of every token is ``values(loss, batch)``, or its whole surrogate."""

    def surrogate(self: TokenLoss, batch: Batch) -> Surrogate:
        found = values(self, batch)
        return found if isinstance(found, Surrogate) else Surrogate(found)

    cls = type("Made", (base,), {"surrogate": surrogate, "__doc__": doc, **methods})
    return dataclass(frozen=True, kw_only=True)(cls)()


def push(self: Any, batch: Batch) -> Tensor:
    return torch.as_tensor(self.ratio_of(batch) * batch.advantages_BT)


def penalty(self: Any, batch: Batch) -> Tensor:
    return torch.as_tensor((self.ratio_of(batch) - 1).square())


class _Cube(torch.autograd.Function):
    """r³ with the derivative of r."""

    @staticmethod
    def forward(context: Any, ratio_BT: Tensor) -> Tensor:
        return ratio_BT**3

    @staticmethod
    def backward(context: Any, *slopes_BT: Tensor) -> Tensor:
        return slopes_BT[0]


def half_lost(self: Any, batch: Batch) -> Tensor:
    return self.ratio_of(batch).detach() * push(self, batch)


def reads_the_last_position(self: Any, batch: Batch) -> Tensor:
    return push(self, batch) + self.log_ratio(batch)[:, -1:] ** 2 * batch.advantages_BT


def reads_masked_tokens(self: Any, batch: Batch) -> Tensor:
    """sg[r_{t−1}] r_t Â, where a masked token is a ratio of 1."""
    before_BT = pad(self.log_ratio(batch).detach()[:, :-1], (1, 0))
    return before_BT.exp() * push(self, batch)


def first_row_is_apart(self: Any, batch: Batch) -> Tensor:
    first_B1 = (torch.arange(len(batch.mask_BT)) == 0)[:, None]
    return push(self, batch) - first_B1 * penalty(self, batch)


def marks_in_numbers(self: Any, batch: Batch) -> Surrogate:
    found = ClippedLoss.surrogate(self, batch)
    assert found.clipped_low_BT is not None
    return replace(found, clipped_low_BT=found.clipped_low_BT.long())


def mean_over_all_rows(self: Any, values_BT: Tensor, batch: Batch) -> Tensor:
    """Also over rows without tokens."""
    return ops.masked_mean_T(values_BT, batch.mask_BT).mean()


def mean_over_signals(self: Any, values_BT: Tensor, batch: Batch) -> Tensor:
    """Over the responses with a signal that are there, not over those of the mini-batch."""
    signals_B = batch.advantages_BT.any(-1)
    return ops.masked_mean_T(values_BT, batch.mask_BT)[signals_B].sum() / signals_B.sum().clamp(min=1)


def mean_over_tokens(self: Any, values_BT: Tensor, batch: Batch) -> Tensor:
    """nan without tokens."""
    return values_BT[batch.mask_BT.bool()].mean()


WHOLE = property(lambda self: Traits(whole_minibatch=True, zero_advantage_is_free=False))
DOUBLED = "At ratio 1 the gradient is doubled, which the learning rate takes back. Nothing else."
# Fault → the loss, and the property that it fails, if any.
FAULTS: dict[str, tuple[TokenLoss, str]] = {
    "detached": (made(half_lost), "gradient"),
    "held on purpose": (made(half_lost, "J = sg[r] r Â."), ""),
    "wrong backward, whatever is held": (
        made(lambda self, batch: _Cube.apply(self.ratio_of(batch)) * batch.advantages_BT, "J = sg[w] r Â"),
        "gradient",
    ),
    "reads padding": (made(reads_the_last_position), "padding"),
    "reads masked tokens": (made(reads_masked_tokens, "J = sg[r] r Â"), "masked tokens"),
    "counts empty responses": (made(push, aggregate=mean_over_all_rows, traits=WHOLE), "masked tokens"),
    "mean of nothing": (made(push, aggregate=mean_over_tokens, traits=WHOLE), "no tokens"),
    "first row is apart": (made(first_row_is_apart, traits=WHOLE), "order"),
    "own denominator": (made(push, aggregate=mean_over_signals), "micro-batches"),
    "penalised without signal": (made(lambda self, batch: push(self, batch) - penalty(self, batch)), "zero advantage"),
    "doubled": (made(lambda self, batch: 2 * push(self, batch)), "ratio 1"),
    "doubled on purpose": (made(lambda self, batch: 2 * push(self, batch), DOUBLED), ""),
    "unclamped": (
        made(lambda _, batch: (batch.logprobs_BT - batch.get("old_logprobs_BT")).exp() * batch.advantages_BT),
        "extreme ratios",
    ),
    "in double": (made(lambda self, batch: push(self, batch).double()), "shapes"),
    "marks in numbers": (made(marks_in_numbers, base=ClippedLoss), "shapes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_fails_exactly_one_property(fault: str) -> None:
    loss, expected = FAULTS[fault]
    assert [each.name for each in ask(properties.of(loss)) if not each.passed] == [expected] * bool(expected)


def test_hidden_schedule_is_reported_but_not_a_fault() -> None:
    updates = iter(range(10**6))
    fading = made(lambda self, batch: push(self, batch) * (1.0 if next(updates) < 500 else 0.5))
    assert properties.memory(fading).startswith(f"{properties.KEEPS_STATE} that is not in LossOutput.state")
    assert properties.memory(made(push)).startswith("none")


def test_loss_that_raises_or_has_the_wrong_shape_fails_in_one_line() -> None:
    def raises(self: Any, batch: Batch) -> Tensor:
        raise KeyError("no such\nthing")

    (finding,) = ask(properties.of(made(raises)))
    assert finding.line.startswith(f"FAILS   shapes: KeyError: 'no such\\nthing' ({__file__}, line ")
    finding, *_ = ask(properties.of(made(lambda self, batch: self.ratio_of(batch).mean(-1))))
    assert finding.line.startswith("FAILS   shapes: ")


def test_loss_with_random_numbers_says_so_and_is_not_blamed_for_them() -> None:
    found = {each.name: each for each in ask(properties.of(faulty_losses.TokenDropout()))}
    assert all(each.passed for each in found.values()), [each.line for each in found.values()]
    assert found["random numbers"].sentence.startswith("draws random numbers")
    assert found["padding"].sentence == "not checked, because the loss draws random numbers"
    assert found["memory"].sentence.startswith("none")
    assert properties.random_numbers(made(push)) == "none"


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (faulty_losses.InPlace(), "in place: advantages_BT"),
        (faulty_losses.InPlaceOfTheGraph(), "inplace"),
        (faulty_losses.OneValueARow(), "values_BT"),
        (faulty_losses.NotANumber(), "not finite"),
    ],
)
def test_fault_that_spoils_every_property_is_the_only_line(loss: TokenLoss, words: str) -> None:
    (finding,) = ask(properties.of(loss))
    assert not finding.passed
    assert words in finding.line


# --- batches and derivatives -------------------------------------------------------------------------


def test_finite_differences_hold_detached_values_and_comparisons() -> None:
    class Compared(TokenLoss):
        def surrogate(self, batch: Batch) -> Surrogate:
            with torch.no_grad():
                weight_BT = batch.logprobs_BT.exp()
            return Surrogate(weight_BT * torch.where(batch.logprobs_BT > -2, batch.logprobs_BT, 0.0))

    batch, loss = ragged(), Compared()
    along = random_direction(batch, torch.Generator().manual_seed(1))
    found_BT, _ = gradient(loss, batch)
    expected = (found_BT * along["logprobs_BT"]).sum().item()
    assert slopes(loss, batch, [along], hold=True) == [pytest.approx(expected, rel=1e-7)]
    assert slopes(loss, batch, [along], hold=False) != [pytest.approx(expected, rel=1e-3)]
