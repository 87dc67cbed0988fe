"""The batches on which a loss is checked: random, seeded, small, with every field that a loss may read.

Shapes: B responses, T response positions, L MoE layers, K most likely tokens or experts of a token, V vocabulary.
"""

import math
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from steadymoe.algorithms import Batch
from steadymoe.algorithms.parts import dimensions_of

LENGTHS = (5, 1, 3, 4, 2, 5)
# The advantage of each response: both signs, and one response without signal.
ADVANTAGES = (0.7, -1.2, 1.5, -0.4, 0.0, -2.0)
GROUPS = (4, 4, 4, 9, 9, 9)
RESPONSES, TOKENS = len(LENGTHS), sum(LENGTHS)
# About how far log-ratios are from 0: inside the narrowest band of a shipped algorithm, outside it, and far outside.
SCALES = (0.0005, 0.02, 0.4, 1.5)


def ragged(scale: float = 0.4, top_k: int = 2) -> Batch:
    """Draw six responses of several lengths in two groups, in float64; log-ratios to π_old and μ are about ``scale``.

    At a scale of 0 all policies and routers are the same. The fields of most likely tokens have ``top_k`` tokens and
    the sampled one.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (RESPONSES, max(LENGTHS))

    def normal(*size: int) -> Tensor:
        return torch.randn(size or shape, generator=generator, dtype=torch.float64)

    mask_BT = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    old_BT = (normal() - 2).clamp(max=-0.1)
    new_BT = (old_BT + scale * normal()).clamp(max=-0.05)
    vocabulary = 3 * top_k
    base_BTV = normal(*shape, vocabulary)
    top_BTK, old_top_BTK, rollout_top_BTK = (
        (base_BTV + scale * part * normal(*shape, vocabulary)).log_softmax(-1)[..., : top_k + 1]
        for part in (1, 0.5, 0.3)
    )
    # The sampled token, in the last place, is one of the others every other time.
    rollout_top_BTK[:, ::2, -1] = -math.inf
    return Batch(
        logprobs_BT=new_BT.requires_grad_(),
        old_logprobs_BT=old_BT,
        rollout_logprobs_BT=(old_BT + 0.3 * scale * normal()).clamp(max=-0.05),
        mask_BT=mask_BT,
        advantages_BT=torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None] * mask_BT,
        groups_B=torch.tensor(GROUPS),
        router_log_ratio_LBTK=scale * normal(2, *shape, 3),
        top_logprobs_BTK=top_BTK,
        old_top_logprobs_BTK=old_top_BTK,
        rollout_top_logprobs_BTK=rollout_top_BTK,
        reference_logprobs_BT=(old_BT + scale * normal()).clamp(max=-0.05),
        entropy_BT=normal().exp(),
    )


def part(batch: Batch, rows_M: Tensor) -> Batch:
    """Return some rows of a batch, with the denominators of the whole."""
    cut: Any = {name: values.index_select(letters.index("B"), rows_M) for name, letters, values in _tensors(batch)}
    return Batch(**cut, responses=RESPONSES, tokens=TOKENS, state=batch.state)


def reordered(batch: Batch, order_B: Tensor) -> Batch:
    """Return the batch with its rows in another order."""
    return replace(part(batch, order_B), responses=batch.responses, tokens=batch.tokens)


def padded(batch: Batch, spare: int, garbage: float) -> Batch:
    """Return the batch with ``spare`` more positions on the right, and ``garbage`` on all of its padding."""
    mask_BT = pad(batch.mask_BT, (0, spare))
    changed: dict[str, Any] = {}
    for name, letters, values in _tensors(batch):
        if "T" not in letters or name == "mask_BT":
            continue
        behind = len(letters.partition("T")[2])
        wider = pad(values, (*[0] * 2 * behind, 0, spare))
        changed[name] = torch.where(mask_BT.bool().view(*mask_BT.shape, *[1] * behind), wider, garbage)
    return replace(batch, mask_BT=mask_BT, **changed)


def interleaved(batch: Batch, garbage: float) -> Batch:
    """Return the batch, (B, 2T), with a masked token of ``garbage`` before every token: token t moves to 2t + 1."""
    mask_BT = torch.stack([torch.zeros_like(batch.mask_BT), batch.mask_BT], -1).flatten(1)
    changed: dict[str, Any] = {}
    for name, letters, values in _tensors(batch):
        if "T" in letters and name != "mask_BT":
            place = letters.index("T")
            between = torch.full_like(values, garbage)
            changed[name] = torch.stack([between, values], place + 1).flatten(place, place + 1)
    return replace(batch, mask_BT=mask_BT, **changed)


def with_empty_response(batch: Batch) -> Batch:
    """Return a batch of ``ragged`` with one more response, (B + 1, T), all of whose tokens are masked."""
    longer = reordered(batch, torch.tensor([*range(RESPONSES), 0]))
    mask_BT = longer.mask_BT.clone()
    mask_BT[-1] = 0
    return replace(longer, mask_BT=mask_BT)


def without_tokens(batch: Batch) -> Batch:
    """Return the batch with all of its tokens masked."""
    return replace(batch, mask_BT=torch.zeros_like(batch.mask_BT))


def in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with its floating-point numbers in ``dtype``."""
    changed: Any = {name: values.to(dtype) for name, _, values in _tensors(batch) if values.is_floating_point()}
    return replace(batch, **changed)


def _tensors(batch: Batch) -> list[tuple[str, str, Tensor]]:
    """Return name, letters of the dimensions, and values without gradient of every tensor with rows."""
    return [
        (field.name, letters, values.detach())
        for field in fields(batch)
        if (letters := dimensions_of(field)) is not None and (values := getattr(batch, field.name)) is not None
    ]
