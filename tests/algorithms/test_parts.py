"""What the fields of a batch declare: the dimensions of their tensors, hence their mask and how parts are joined."""

import itertools
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from steadymoe.algorithms import Batch, LossOutput
from steadymoe.algorithms.parts import dimensions, dimensions_of, joined
from steadymoe.bench.check.batches import part, ragged

FIELDS = [each for each in fields(Batch) if dimensions_of(each)]


def full() -> Batch:
    """A batch with a number in every field."""
    weights_BT = torch.randn((6, 5), generator=torch.Generator().manual_seed(1), dtype=torch.float64).exp()
    batch = replace(ragged(), weights_BT=weights_BT)
    assert all(value is not None for name, value in vars(batch).items() if name not in ("responses", "tokens"))
    return batch


@pytest.mark.parametrize(
    "each", [each for each in FIELDS if "T" in each.name.rpartition("_")[2]], ids=lambda each: each.name
)
def test_every_field_with_response_positions_is_masked(each: Field[Any]) -> None:
    if each.name == "mask_BT":
        return  # it is the mask
    batch, letters = full(), each.name.rpartition("_")[2]
    before = getattr(batch, each.name).detach()
    mask = batch.mask_BT.bool().view(*batch.mask_BT.shape, *[1] * len(letters.partition("T")[2])).expand(before.shape)
    changed: dict[str, Any] = {each.name: before.masked_fill(~mask, torch.nan)}
    after = getattr(replace(batch, **changed), each.name)
    assert (~mask).any()
    assert (after[~mask] == 0).all()
    assert torch.equal(after[mask], before[mask])


@dataclass(frozen=True, kw_only=True)
class _Renamed(Batch):
    surprise: Tensor | None = field(default=None, metadata=dimensions("LBT"))


@dataclass(frozen=True, kw_only=True)
class _Silent(Batch):
    surprise_BT: Tensor | None = None


def test_field_handling_does_not_depend_on_its_name() -> None:
    common: dict[str, Any] = {
        name: getattr(ragged(), name).detach() for name in ("logprobs_BT", "mask_BT", "advantages_BT")
    }
    made = _Renamed(**common, surprise=torch.full((3, 6, 5), torch.nan).double())
    assert made.surprise is not None
    assert torch.equal(made.surprise == 0, ~made.mask_BT.bool().expand(3, 6, 5))
    together = joined([made, made])
    assert type(together) is _Renamed
    assert together.surprise is not None
    assert together.surprise.shape == (3, 12, 5)
    with pytest.raises(ValueError, match=r"surprise must have the shape \(L, B, T\) = \(L, 6, 5\)"):
        _Renamed(**common, surprise=torch.zeros(6, 5))


def test_a_field_without_metadata_is_refused() -> None:
    common: dict[str, Any] = {name: torch.ones(2, 2) for name in ("logprobs_BT", "mask_BT", "advantages_BT")}
    with pytest.raises(TypeError, match="the field surprise_BT must say in its metadata how parts are joined"):
        _Silent(**common)

    @dataclass(frozen=True)
    class Loose:
        values: Tensor

    with pytest.raises(TypeError, match="the field values must say"):
        joined([Loose(torch.ones(1)), Loose(torch.ones(1))])


@pytest.mark.parametrize("cuts", [(0, 6), (0, 2, 6), (0, 1, 3, 6)])
def test_parts_of_a_batch_joined_are_the_batch_without_gradient(cuts: tuple[int, ...]) -> None:
    batch = full()
    together = joined([part(batch, torch.arange(first, last)) for first, last in itertools.pairwise(cuts)])
    for each in FIELDS:
        values = getattr(together, each.name)
        assert torch.equal(values, getattr(batch, each.name))
        assert not values.requires_grad
    # The denominators and the state belong to the whole mini-batch.
    assert (together.responses, together.tokens, together.state) == (None, None, {})


def test_joined_outputs_add_losses_align_tokens_and_average_numbers() -> None:
    low_BT, high_BT = torch.tensor([[True, False]]), torch.tensor([[False, False], [True, True]])
    one = LossOutput(
        torch.tensor(1.0, requires_grad=True), {"clipped_low_BT": low_BT, "loss_number": torch.tensor(3.0)}
    )
    other = LossOutput(torch.tensor(0.5), {"clipped_low_BT": high_BT, "loss_number": torch.tensor(4.0)}, {"x": low_BT})
    together = joined([one, other])
    assert together.loss == 1.5
    assert not together.loss.requires_grad
    assert torch.equal(together.metrics["clipped_low_BT"], torch.cat([low_BT, high_BT]))
    assert together.metrics["loss_number"] == 3.5
    assert together.state == {}
