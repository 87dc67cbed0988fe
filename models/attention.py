"""Attention in two parts for prompts that are fed once: prompts attend to themselves, responses to prompt and self.

A row holds a prompt and, behind it, all responses to it. No score between two responses is computed.

Shapes: P rows of X = W + G·N positions: W of the prompt, N of each of G responses; B = P·G responses; A heads of
queries, M of keys and values, of width D.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "two_parts"


class TwoParts(NamedTuple):
    """The terms added to attention scores in each part. Their shapes say how a row is divided."""

    prompts_P1WW: Tensor
    """Of the prompts' positions to each other."""
    responses_B1NS: Tensor
    """Of a response's positions to the S = W + N positions of its prompt and of itself."""


@contextmanager
def in_two_parts(config: PretrainedConfig) -> Iterator[None]:
    """Let the model of ``config`` attend in two parts; its forward then needs the keyword ``two_parts``."""
    usual, config._attn_implementation = config._attn_implementation, _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual


def _attend(
    module: nn.Module,
    query_PAXD: Tensor,
    key_PMXD: Tensor,
    value_PMXD: Tensor,
    attention_mask: Tensor | None,
    *,
    two_parts: TwoParts,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention of all positions, (P, X, A, D), and no weights. ``attention_mask`` is not read."""
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    rows, width, own = len(query_PAXD), two_parts.prompts_P1WW.shape[-1], two_parts.responses_B1NS.shape[-2]
    of_prompt = [each[:, :, :width] for each in (query_PAXD, key_PMXD, value_PMXD)]
    prompts_PWAD, _ = attend(module, *of_prompt, two_parts.prompts_P1WW, **others)
    if own == 0:
        return prompts_PWAD, None

    def of_responses(values_PAXD: Tensor) -> Tensor:
        """Return the responses' own values, (B, A, N, D)."""
        return values_PAXD[:, :, width:].unflatten(2, (-1, own)).transpose(1, 2).flatten(0, 1)

    def behind_prompts(values_PMXD: Tensor) -> Tensor:
        """Return the values of each response's prompt and its own, (B, M, S, D)."""
        own_BMND = of_responses(values_PMXD)
        prompt_PGMWD = values_PMXD[:, None, :, :width].expand(-1, len(own_BMND) // rows, -1, -1, -1)
        return torch.cat([prompt_PGMWD.flatten(0, 1), own_BMND], 2)

    parts = of_responses(query_PAXD), behind_prompts(key_PMXD), behind_prompts(value_PMXD)
    responses_BNAD, _ = attend(module, *parts, two_parts.responses_B1NS, **others)
    responses_PXAD = responses_BNAD.unflatten(0, (rows, -1)).flatten(1, 2)
    return torch.cat([prompts_PWAD, responses_PXAD], 1), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
