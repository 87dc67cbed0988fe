"""Attention in two parts for prompts that are fed once: prompts attend to themselves, responses to prompt and self.

In training a row holds a prompt and, behind it, all responses to it; no score between two responses is computed. In
decoding the responses to a prompt share its keys and values (``Kept``).

Shapes: P rows of X = W + G·N positions: W of the prompt, N of each of G responses; B = P·G responses; A heads of
queries, M of keys and values, of width D.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME, _DECODING = "two_parts", "kept_keys"


class TwoParts(NamedTuple):
    """The terms added to attention scores in each part. Their shapes say how a row is divided."""

    prompts_P1WW: Tensor
    """Of the prompts' positions to each other."""
    responses_B1NS: Tensor
    """Of a response's positions to the S = W + N positions of its prompt and of itself."""


def in_two_parts(config: PretrainedConfig) -> AbstractContextManager[None]:
    """Let the model of ``config`` attend in two parts; its forward then needs the keyword ``two_parts``."""
    return _attending(config, _NAME)


def from_kept(config: PretrainedConfig) -> AbstractContextManager[None]:
    """Let the model of ``config`` decode from ``Kept``; its forward then needs the keyword ``kept``."""
    return _attending(config, _DECODING)


@contextmanager
def _attending(config: PretrainedConfig, name: str) -> Iterator[None]:
    usual, config._attn_implementation = config._attn_implementation, name
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


class Kept:
    """The keys and values of decoding: a prompt's once for all its responses, and those of each response's own tokens.

    Shapes: R rows that are decoded, R = P·G while all responses to the prompts go on; T own tokens so far; W, A, M and
    D as above.
    """

    def __init__(self, mask_PW: Tensor) -> None:
        unseen_P11W = ~mask_PW.bool()[:, None, None]
        terms_P11W = torch.zeros(unseen_P11W.shape, device=mask_PW.device)
        terms_P11W.masked_fill_(unseen_P11W, torch.finfo(torch.float32).min)
        self._terms_P11W = terms_P11W if unseen_P11W.any() else None
        self._prompts: dict[int, tuple[Tensor, Tensor]] = {}  # by layer
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._tokens = 0
        self._rows: int | None = None

    @property
    def begun(self) -> bool:
        """Whether tokens of responses are fed now, not prompts."""
        return self._rows is not None

    def begin(self, responses: int) -> None:
        """Continue from the prompts with ``responses`` rows each."""
        self._rows = responses * len(next(iter(self._prompts.values()))[0])

    def next_token(self) -> None:
        """Count a token that all layers have been fed."""
        self._tokens += 1

    def stay(self, rows_R: Tensor) -> None:
        """Keep these of the rows; from now on each has its prompt's keys and values to itself."""
        assert self._rows is not None
        for layer, pair in self._prompts.items():
            prompt_R = rows_R // (self._rows // len(pair[0]))
            self._prompts[layer] = pair[0][prompt_R], pair[1][prompt_R]
        if self._terms_P11W is not None:
            self._terms_P11W = self._terms_P11W[rows_R // (self._rows // len(self._terms_P11W))]
        self._own = {layer: (keys[rows_R], values[rows_R]) for layer, (keys, values) in self._own.items()}
        self._rows = len(rows_R)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any
    ) -> tuple[Tensor, None]:
        """Return the attention of the tokens fed, (rows, tokens, A, D), and keep their keys and values."""
        layer: Any = module.layer_idx
        if not self.begun:
            self._prompts[layer] = key, value
            attention, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **others)
            return attention, None
        return self._attend_with_one(query, *self._grown(layer, key, value), layer, others.get("scaling")), None

    def _grown(self, layer: int, key_RM1D: Tensor, value_RM1D: Tensor) -> tuple[Tensor, Tensor]:
        """Add the token's keys and values, and return those of all own tokens, (R, M, T, D) each."""
        keys, values = self._own.get(layer, (key_RM1D[:, :, :0], value_RM1D[:, :, :0]))
        if keys.shape[2] == self._tokens:  # twice the room, so that each token is moved but once or twice
            room = (0, 0, 0, max(self._tokens, 16))
            keys, values = self._own[layer] = pad(keys, room), pad(values, room)
        keys[:, :, self._tokens], values[:, :, self._tokens] = key_RM1D[:, :, 0], value_RM1D[:, :, 0]
        return keys[:, :, : self._tokens + 1], values[:, :, : self._tokens + 1]

    def _attend_with_one(
        self, query_RA1D: Tensor, key_RMTD: Tensor, value_RMTD: Tensor, layer: int, scaling: float | None
    ) -> Tensor:
        """Return the attention of one new token a row, (R, 1, A, D)."""
        prompt_key_PMWD, prompt_value_PMWD = self._prompts[layer]
        prompts, heads, width = prompt_key_PMWD.shape[:3]
        scale = scaling or query_RA1D.shape[-1] ** -0.5
        # Queries that share keys stand together: U = A / M of a row, G·U of a prompt.
        query_RMUD = (query_RA1D * scale).unflatten(1, (heads, -1)).squeeze(3)

        def of_prompts(values_RMUX: Tensor) -> Tensor:
            return values_RMUX.unflatten(0, (prompts, -1)).transpose(1, 2).flatten(2, 3)

        def of_rows(values_PMVX: Tensor) -> Tensor:
            uses = query_RMUD.shape[2]
            return values_PMVX.unflatten(2, (-1, uses)).transpose(1, 2).flatten(0, 1)

        to_prompt_PMVW = of_prompts(query_RMUD) @ prompt_key_PMWD.mT
        if self._terms_P11W is not None:
            to_prompt_PMVW = to_prompt_PMVW + self._terms_P11W
        weights_RMUS = torch.cat([of_rows(to_prompt_PMVW), query_RMUD @ key_RMTD.mT], -1).softmax(-1)
        weights_RMUS = weights_RMUS.to(value_RMTD.dtype)
        seen_PMVD = of_prompts(weights_RMUS[..., :width]) @ prompt_value_PMWD
        seen_RMUD = of_rows(seen_PMVD) + weights_RMUS[..., width:] @ value_RMTD
        return seen_RMUD.flatten(1, 2)[:, None]


def _decode(*inputs: Any, kept: Kept, **others: Any) -> tuple[Tensor, None]:
    return kept.attend(*inputs, **others)


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
ALL_ATTENTION_FUNCTIONS.register(_DECODING, _decode)
