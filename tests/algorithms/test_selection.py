"""Losses and corrections that choose tokens or responses: what their docstrings promise holds for those that are kept.

The batches have ties, ratios that are constant within a response, one token that moved, one token in all, or none that
moved. Each promise is computed here from the batch alone. Shapes: B responses, T response positions.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from surrogates import run
from torch import Tensor

from steadymoe.algorithms import Batch, PolicyLoss, load
from steadymoe.algorithms.corrections import BinaryKL, Correction, GeometricRejection, MaskedIS

STEPS = torch.tensor([-0.9, -0.3, -0.05, 0.0, 0.05, 0.3, 0.9], dtype=torch.float64)
SHAPE = (4, 5)
KINDS = ("ties", "constant", "one moved", "one token", "none moved")
DRAWS = 40


def drawn(kind: str, generator: torch.Generator) -> Tensor:
    """Log-ratios of a few sizes, (B, T)."""
    log_BT = STEPS[torch.randint(len(STEPS), SHAPE, generator=generator)]
    if kind == "constant":
        return log_BT[:, :1].expand(SHAPE)
    if kind in ("ties", "one token"):
        return log_BT
    place = int(torch.randint(log_BT.numel(), (1,), generator=generator))
    moved_BT = torch.zeros(SHAPE, dtype=torch.float64)
    if kind == "one moved":
        moved_BT.view(-1)[place] = log_BT.view(-1)[place]
    return moved_BT


def batches(kind: str) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    for _ in range(DRAWS):
        lengths_B1 = torch.randint(1, SHAPE[1] + 1, (SHAPE[0], 1), generator=generator)
        mask_BT = (torch.arange(SHAPE[1]) < lengths_B1).long()
        if kind == "one token":
            mask_BT = torch.zeros_like(mask_BT)
            mask_BT[1, 2] = 1
        signs_B1 = torch.randint(2, (SHAPE[0], 1), generator=generator).double() * 2 - 1
        old_BT = torch.full(SHAPE, -2.0, dtype=torch.float64)
        yield Batch(
            logprobs_BT=old_BT + drawn(kind, generator),
            old_logprobs_BT=old_BT,
            rollout_logprobs_BT=old_BT - drawn(kind, generator),
            mask_BT=mask_BT,
            advantages_BT=signs_B1.expand(SHAPE),
        )


def rows(batch: Batch, values_BT: Tensor) -> list[list[float]]:
    """The values of each response's tokens."""
    return [row[mask].tolist() for row, mask in zip(values_BT, batch.mask_BT.bool(), strict=True)]


def log_ratios(batch: Batch, anchor: str = "old") -> list[list[float]]:
    return rows(batch, batch.logprobs_BT - batch.get(f"{anchor}_logprobs_BT"))


to_sampler = partial(log_ratios, anchor="rollout")


def binary(p: float, q: float, kind: str) -> float:
    """A divergence of two probabilities of the sampled token, from their logarithms."""
    p, q = math.exp(p), math.exp(q)
    return abs(p - q) if kind == "tv" else p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def divergences(batch: Batch, kind: str = "kl", of: str = "rollout", to: str = "") -> list[list[float]]:
    pairs = (rows(batch, batch.get(f"{name}{'_' if name else ''}logprobs_BT")) for name in (of, to))
    return [[binary(p, q, kind) for p, q in zip(*both, strict=True)] for both in zip(*pairs, strict=True)]


def average(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


Marks = list[list[bool]]


def by_token(numbers: Callable[[Batch], list[list[float]]], allowed: Callable[[float], bool]) -> Any:
    return lambda batch: [[allowed(x) for x in row] for row in numbers(batch)]


def by_response(numbers: Callable[[Batch], list[list[float]]], allowed: Callable[[list[float]], bool]) -> Any:
    return lambda batch: [[allowed(row)] * len(row) if row else [] for row in numbers(batch)]


def outward(batch: Batch, anchor: str) -> Marks:
    """Tokens whose update leads further out."""
    signs_B = batch.advantages_BT.sign().amax(-1) + batch.advantages_BT.sign().amin(-1)
    return [[sign * x > 0 for x in row] for sign, row in zip(signs_B.tolist(), log_ratios(batch, anchor), strict=True)]


def unless_outward(numbers: Callable[[Batch], list[list[float]]], most: float) -> Callable[[Batch], Marks]:
    """Kept: at most ``most``, or on the way back to the sampler."""

    def allowed(batch: Batch) -> Marks:
        pairs = zip(numbers(batch), outward(batch, "rollout"), strict=True)
        return [[x <= most or not out for x, out in zip(*pair, strict=True)] for pair in pairs]

    return allowed


def over_budget(batch: Batch) -> list[list[float]]:
    """CPPO: by how much w D exceeds the least of 0.1 and what the prefix leaves of it."""
    excess = []
    for row in divergences(batch, "tv"):
        spent, budget, line = 0.0, 0.0, []
        for t, moved in enumerate(row):
            w = 1 - 0.2 * t / max(len(row) - 1, 1)
            line.append(w * moved - min(0.1, 0.1 + 0.02 * budget - spent))
            spent, budget = spent + w * moved, budget + w
        excess.append(line)
    return excess


def geometric(batch: Batch) -> list[list[float]]:
    return rows(batch, batch.get("old_logprobs_BT") - batch.get("rollout_logprobs_BT"))


def band(low: float, high: float, of: Callable[[Any], float] = float) -> Callable[[Any], bool]:
    return lambda x: math.log(low) <= of(x) <= math.log(high)


def both(*parts: Callable[[Batch], Marks]) -> Callable[[Batch], Marks]:
    def allowed(batch: Batch) -> Marks:
        marks = [part(batch) for part in parts]
        return [[all(each) for each in zip(*row, strict=True)] for row in zip(*marks, strict=True)]

    return allowed


def far_and_bad(batch: Batch) -> Marks:
    signs_B = (batch.advantages_BT.sum(-1) < 0).tolist()
    pairs = zip(signs_B, log_ratios(batch, "rollout"), strict=True)
    return [[not (bad and -average(row) > 0.2)] * len(row) if row else [] for bad, row in pairs]


# Loss → the tokens that it must keep; it must drop all others. No bound is one of the sizes that can occur.
KEPT: dict[str, tuple[dict[str, Any], Callable[[Batch], Marks]]] = {
    "trm": (
        {"top_k": None, "max_kl": 0.1, "mean_kl": 0.05},
        by_response(
            to_sampler,
            lambda row: max(x * x / 2 for x in row) <= 0.1 and average([math.expm1(x) - x for x in row]) <= 0.05,
        ),
    ),
    "flash_reinforce": ({"max_mean_kl": 0.01}, by_response(divergences, lambda row: average(row) <= 0.01)),
    "opsm": ({"max_divergence": 0.2, "host": {"clip_low": 0.99, "clip_high": 99.0}}, far_and_bad),
    "mis_po": (
        {"sequence_low": 0.8, "sequence_high": 1.3, "ratio_low": 0.5, "ratio_high": 2.0},
        both(by_token(geometric, band(0.5, 2.0)), by_response(geometric, band(0.8, 1.3, average))),
    ),
    "dppo": ({"max_divergence": 0.02}, unless_outward(lambda batch: divergences(batch, "tv"), 0.02)),
    "dppo_kl": ({"max_divergence": 0.01}, unless_outward(divergences, 0.01)),
    "cppo": ({"max_divergence": 0.1, "prefix_budget": 0.02}, unless_outward(over_budget, 0.0)),
    "ipo": ({"max_divergence": 0.02}, by_token(lambda batch: divergences(batch, "tv"), lambda x: x <= 0.02)),
    "dis": ({}, by_token(to_sampler, band(0.7, 6.0))),
    "icepop": ({"ratio_low": 0.5, "ratio_high": 2.0}, by_token(to_sampler, band(0.5, 2.0))),
}
CORRECTED: dict[Correction, Callable[[Batch], Marks]] = {
    MaskedIS(ratio_low=0.8, ratio_high=1.3): by_token(geometric, band(0.8, 1.3)),
    MaskedIS(unit="sequence", ratio_low=0.8, ratio_high=1.3): by_response(geometric, band(0.8, 1.3, average)),
    MaskedIS(unit="product", ratio_low=0.8, ratio_high=1.3): by_response(geometric, band(0.8, 1.3, math.fsum)),
    GeometricRejection(ratio_low=0.8, ratio_high=1.3): by_response(geometric, band(0.8, 1.3, average)),
    BinaryKL(max_kl=0.02): both(
        by_token(lambda batch: divergences(batch, "kl", "old", "rollout"), lambda x: x <= 0.02),
        by_token(lambda batch: divergences(batch, "kl", "rollout", "old"), lambda x: x <= 0.02),
    ),
}


def kept_by(loss: PolicyLoss, batch: Batch) -> Marks:
    """Tokens with a gradient; every advantage is 1 or −1."""
    _, grad_BT, output = run(loss, batch)
    low_BT, high_BT = output.metrics["clipped_low_BT"], output.metrics["clipped_high_BT"]
    assert torch.equal(low_BT | high_BT, (grad_BT == 0) & batch.mask_BT.bool())
    return rows(batch, grad_BT != 0)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", KEPT)
def test_loss_keeps_the_documented_tokens(name: str, kind: str) -> None:
    numbers, allowed = KEPT[name]
    for batch in batches(kind):
        assert kept_by(load(name, **numbers), batch) == allowed(batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correction", CORRECTED, ids=str)
def test_correction_rejects_the_documented_tokens(correction: Correction, kind: str) -> None:
    for batch in batches(kind):
        weights_BT = correction.weights(batch)
        assert weights_BT is not None
        assert rows(batch, weights_BT != 0) == CORRECTED[correction](batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", ["token", "sequence", "product"])
def test_m2po_masks_no_more_than_its_bound_requires(unit: str, kind: str) -> None:
    dropped = 0
    for batch, most in ((batch, most) for batch in batches(kind) for most in (0.003, 0.04, 0.3)):
        loss = load("m2po", ratio=unit, max_second_moment=most)
        log_BT = loss.ratio_of(batch).log()  # type: ignore[attr-defined]
        moments = [x**2 for row in rows(batch, log_BT) for x in row]
        out = [x > 0 for row in rows(batch, log_BT * batch.advantages_BT) for x in row]
        marks = [mark for row in kept_by(loss, batch) for mark in row]
        kept = [x for x, is_out, mark in zip(moments, out, marks, strict=True) if is_out and mark]
        masked = [x for x, is_out, mark in zip(moments, out, marks, strict=True) if is_out and not mark]
        assert all(mark for is_out, mark in zip(out, marks, strict=True) if not is_out)
        assert not kept or average(kept) <= most * (1 + 1e-12)
        assert not kept or not masked or max(kept) < min(masked)
        if masked:  # the smallest of them, ties together, would be too much
            assert average(kept + [x for x in masked if x == min(masked)]) > most
        dropped += len(masked)
    assert bool(dropped) == (kind != "none moved")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["sat", "sat_gspo"])
def test_sat_narrows_only_tokens_beyond_its_quantile(name: str, kind: str) -> None:
    for batch, quantile in ((batch, quantile) for batch in batches(kind) for quantile in (0.0, 0.5, 0.9, 1.0)):
        # So wide a band clips only a token whose edge came closer: at 1 + 2 c⁺ or 1 − 0.6 c⁻.
        loss = load(name, quantile=quantile, host={"clip_low": 0.6, "clip_high": 2.0})
        moved = [x for row in rows(batch, loss.host.ratio_of(batch).log()) for x in row]  # type: ignore[attr-defined]
        sizes = sorted(map(abs, moved))
        place = quantile * (len(sizes) - 1)
        below, above = sizes[math.floor(place)], sizes[math.ceil(place)]
        usual = below + (place - math.floor(place)) * (above - below)
        beyond = [abs(x) > usual > 0 for x in moved]
        assert sum(beyond) <= len(moved) - 1 - math.floor(place)
        signs_BT = rows(batch, batch.advantages_BT)
        expected = []
        for x, is_beyond, sign in zip(moved, beyond, [s for row in signs_BT for s in row], strict=True):
            narrow = 1 / (1 + (x / usual) ** 2) if is_beyond else 1.0
            high, low = 1 + 2 * (narrow if x > 0 else 1), 1 - 0.6 * (narrow if x < 0 else 1)
            expected.append(not ((sign > 0 and math.exp(x) > high) or (sign < 0 and math.exp(x) < low)))
        assert [mark for row in kept_by(loss, batch) for mark in row] == expected


def test_sat_narrows_nothing_if_all_ratios_are_equal() -> None:
    """It lies at the quantile, and not beyond it."""
    for batch in batches("none moved"):
        shifted = replace(batch, logprobs_BT=batch.logprobs_BT + 0.15)  # inside the host's band, outside a narrower one
        assert all(mark for row in kept_by(load("sat"), shifted) for mark in row)
