"""Moments add up: those of unequal parts of a mini-batch give the suite's own columns of the whole. Needs no TRL.

Shapes: B responses, T response positions.
"""

import pytest
import torch
from torch.testing import assert_close

from steadymoe.algorithms import Batch, load
from steadymoe.bench.training import token_metrics
from steadymoe.integrations.trl import moments

PARTS = [slice(0, 1), slice(1, 5), slice(5, 7)]


def batch(rows: slice) -> Batch:
    generator = torch.Generator().manual_seed(1)
    old_BT = -0.1 - 2 * torch.rand(7, 5, generator=generator)
    new_BT = old_BT + 0.4 * torch.randn(old_BT.shape, generator=generator)
    advantages_BT = torch.randn(7, 1, generator=generator).expand_as(old_BT)
    mask_BT = (torch.arange(5) < torch.tensor([5, 1, 3, 4, 2, 5, 3])[:, None]).long()
    return Batch(
        logprobs_BT=new_BT[rows],
        mask_BT=mask_BT[rows],
        advantages_BT=advantages_BT[rows],
        old_logprobs_BT=old_BT[rows],
        entropy_BT=-old_BT[rows],
    )


def test_moments_of_parts_give_the_columns_of_the_whole() -> None:
    loss = load("grpo")
    parts = [moments.update_moments(batch(rows), loss(batch(rows))) for rows in PARTS]
    found = moments.update_columns(moments.pooled(parts))
    whole = batch(slice(None))
    numbers, histograms = token_metrics.of_update(whole, loss(whole))
    assert numbers.keys() <= found.overall.keys()
    for name, number in numbers.items():
        assert_close(found.overall[name].float(), number, rtol=1e-5, atol=1e-7)
    assert_close(found.overall["entropy"].float(), whole.get("entropy_BT")[whole.mask_BT.bool()].mean())
    for name, counts in histograms.items():
        assert found.histograms[name].tolist() == counts.tolist()


def test_column_without_moments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_median(*arguments: object) -> object:
        numbers, histograms = measured(*arguments)
        return numbers | {"token_ratio_median": torch.tensor(1.0)}, histograms

    measured = token_metrics.of_update
    monkeypatch.setattr(token_metrics, "of_update", with_median)
    whole = batch(slice(None))
    with pytest.raises(ValueError, match="token_ratio_median"):
        moments.update_moments(whole, load("grpo")(whole))
