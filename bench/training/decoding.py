"""Decoding: a model with a key-value cache is fed prompts once, and then one token of each row at a time.

Shapes: P prompts, G responses to each, B = P·G rows, R ≤ B rows that the cache still holds, W width of the padded
prompts, S positions so far, T sampled positions, F positions fed, V vocabulary, L MoE layers, E experts, K experts a
token.
"""

from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from steadymoe.bench.training.forward import at_temperature
from steadymoe.bench.training.packing import causal, positions
from steadymoe.models.attention import Kept, from_kept
from steadymoe.models.routing import RouteRecorder, log_softmax
from steadymoe.models.selection import NO_ROUTE

# Responses that have ended leave the batch once no larger share of it than this goes on.
MIN_ALIVE = 0.5


class _Cached:
    """A model with its cache of keys and values; ``shares``: those of a prompt are kept once for all its rows."""

    def __init__(self, model: PreTrainedModel, shares: bool) -> None:
        self._model, self._shares = model, shares
        self._cache = DynamicCache(config=model.config)

    def begin(self, mask_PW: Tensor) -> None:
        self._kept = Kept(mask_PW)

    def repeat(self, responses: int, rows_B: Tensor) -> None:
        """Expect ``responses`` rows of each prompt from now on; ``rows_B`` is the prompt of each."""
        if self._shares:
            self._kept.begin(responses)
        else:
            self._cache.reorder_cache(rows_B)  # type: ignore[arg-type]

    def stay(self, staying_R: Tensor) -> None:
        """Drop the rows that are not among these."""
        if self._shares:
            self._kept.stay(staying_R)
        else:
            self._cache.reorder_cache(staying_R)  # type: ignore[arg-type]

    def feed(self, tokens: Tensor, mask_so_far: Tensor, position: Tensor) -> Tensor:
        """Return the logits after the last of ``tokens``, (rows, V)."""
        feed = partial(self._model, input_ids=tokens, position_ids=position, logits_to_keep=1)
        if self._shares:
            # A row that goes on sees all of its own tokens, and what a row that has ended sees does not matter: this
            # mask is read for prompts alone, and spares the model to make one.
            mask = mask_so_far[:, None, None] if self._kept.begun else causal(mask_so_far)
            with from_kept(self._model.config):
                logits = feed(attention_mask=mask, use_cache=False, kept=self._kept).logits
            if self._kept.begun:
                self._kept.next_token()
        else:
            logits = feed(attention_mask=mask_so_far, past_key_values=self._cache, use_cache=True).logits
        return logits[:, -1]


class Decoder:
    """The rows of a batch while they are sampled: their tokens, cache and routes, and which are unfinished.

    Rows that have ended ride along on padding until ``drop_finished`` takes them out of the cache. Routes and gates are
    kept if ``recorder`` watches them.
    """

    mask_BS: Tensor
    """1 on the prompts' tokens and on what was drawn, 0 on padding."""
    alive_B: Tensor
    """Which rows have not drawn their last token."""

    def __init__(self, model: PreTrainedModel, recorder: RouteRecorder, temperature: float, shares: bool) -> None:
        self._recorder, self._temperature, self._shares = recorder, temperature, shares
        self._cached = [_Cached(model, shares)]
        self._pins: RouteRecorder | None = None
        self._chosen: list[Tensor] = []
        self._executed: list[Tensor] = []
        self._gates: list[Tensor] = []
        self._router_logits: list[Tensor] = []
        self._bank_LNK: Tensor | None = None

    def draw_routes(self, bank_LNK: Tensor, generator: torch.Generator) -> None:
        """From now on force on every token fed the routes of a token drawn from ``bank_LNK``, in all layers."""
        self._bank_LNK, self._generator = bank_LNK, generator

    def pin(self, model: PreTrainedModel, recorder: RouteRecorder) -> None:
        """From now on force on every token the routes that ``model``, with a cache of its own, chooses for it.

        ``recorder`` watches it. Must be called before any token is fed.
        """
        self._pins = recorder
        self._cached.append(_Cached(model, self._shares))

    def feed_prompts(self, prompts_PW: Tensor, mask_PW: Tensor, responses: int) -> Tensor:
        """Return log-probabilities of the first token of each row, (B, V); a prompt is fed once for its rows."""
        position_PW = positions(mask_PW)
        for each in self._cached:
            each.begin(mask_PW)
        all_logprobs_PV = self._next_logprobs(prompts_PW, mask_PW, mask_PW, position_PW)
        # Not batch_repeat_interleave, which the states of linear attention (Qwen3-Next) do not have.
        rows_B = torch.arange(len(prompts_PW), device=prompts_PW.device).repeat_interleave(responses)
        for each in self._cached:
            each.repeat(responses, rows_B)
        for kept in (self._chosen, self._executed, self._gates, self._router_logits):
            kept[:] = [of_prompt.repeat_interleave(responses, 1) for of_prompt in kept]
        self._tokens = [prompts_PW.repeat_interleave(responses, 0)]
        self.mask_BS = mask_PW.repeat_interleave(responses, 0)
        self._position_B1 = position_PW[:, -1:].repeat_interleave(responses, 0)
        self.alive_B = torch.ones(len(rows_B), dtype=torch.bool, device=rows_B.device)
        self._fed_R = torch.arange(len(rows_B), device=rows_B.device)  # the rows that the cache holds
        return all_logprobs_PV.repeat_interleave(responses, 0)

    def append(self, token_B1: Tensor, ends_E: Tensor) -> None:
        """Add a token to each unfinished row, and padding to the others; each of ``ends_E`` ends a row."""
        self._tokens.append(torch.where(self.alive_B[:, None], token_B1, 0))
        self.mask_BS = torch.cat([self.mask_BS, self.alive_B[:, None].long()], dim=1)
        self.alive_B = self.alive_B & ~torch.isin(token_B1.squeeze(-1), ends_E)

    def drop_finished(self) -> None:
        """Take rows that have ended out of the cache, once ``MIN_ALIVE`` of its rows or fewer go on."""
        alive_R = self.alive_B[self._fed_R]
        if int(alive_R.sum()) <= MIN_ALIVE * len(self._fed_R):
            staying_R = alive_R.nonzero().squeeze(-1)
            for each in self._cached:
                each.stay(staying_R)
            self._fed_R = self._fed_R[staying_R]

    def feed(self, all_logprobs_BV: Tensor) -> Tensor:
        """Return log-probabilities of the next token, (B, V); rows that have left keep ``all_logprobs_BV``."""
        self._position_B1 = self._position_B1 + 1
        token_B1, alive_B1, fed_R, rows = self._tokens[-1], self.alive_B[:, None], self._fed_R, len(self.alive_B)
        if len(fed_R) == rows:
            return self._next_logprobs(token_B1, alive_B1, self.mask_BS, self._position_B1)
        fed_RV = self._next_logprobs(token_B1[fed_R], alive_B1[fed_R], self.mask_BS[fed_R], self._position_B1[fed_R])
        chosen = (self._chosen, NO_ROUTE), (self._executed, NO_ROUTE)
        for kept, missing in (*chosen, (self._gates, 0.0), (self._router_logits, 0.0)):
            if kept:
                wide_LBX = kept[-1].new_full((kept[-1].shape[0], rows, *kept[-1].shape[2:]), missing)
                kept[-1] = wide_LBX.index_copy(1, fed_R, kept[-1])
        return all_logprobs_BV.index_copy(0, fed_R, fed_RV)

    @property
    def tokens_BS(self) -> Tensor:
        """The prompts and what was appended to them; 0 on padding."""
        return torch.cat(self._tokens, 1)

    @property
    def routes_LBFK(self) -> Tensor | None:
        """Experts of each token that was fed, ``NO_ROUTE`` on padding and on a row's last token; None unless kept."""
        return torch.cat(self._chosen, dim=2) if self._chosen else None

    @property
    def executed_LBFK(self) -> Tensor | None:
        """Experts that ran, as ``routes_LBFK`` has those that the routers chose; None unless routes are pinned."""
        return torch.cat(self._executed, dim=2) if self._executed else None

    @property
    def gates_LBFK(self) -> Tensor | None:
        """Gate weights of these experts, fp32, 0 where there is no route; None unless kept."""
        return torch.cat(self._gates, dim=2) if self._gates else None

    @property
    def router_logprobs_LBTE(self) -> Tensor | None:
        """log of the routers' softmax where they led to a sampled token; None unless routes are kept."""
        return log_softmax(torch.stack(self._router_logits, 2)) if self._router_logits else None

    def _next_logprobs(self, tokens: Tensor, real: Tensor, mask_so_far: Tensor, position: Tensor) -> Tensor:
        """Return log-probabilities of the next token after ``tokens``, (rows, V).

        Keeps the routes of ``real`` tokens, and the routers' logits at the last token, which leads to the next one.
        """
        if self._bank_LNK is not None:
            tokens_in_bank = self._bank_LNK.shape[1]
            index_N = torch.randint(
                tokens_in_bank, (tokens.numel(),), generator=self._generator, device=self._bank_LNK.device
            )
            self._recorder.force(self._bank_LNK[:, index_N])
        if self._pins is not None:
            self._cached[1].feed(tokens, mask_so_far, position)
            pinned = self._pins.take(tokens.numel())
            assert pinned is not None  # of a model with routers
            self._recorder.force(pinned.live_LNK)
        logits = self._cached[0].feed(tokens, mask_so_far, position)
        routed = self._recorder.take(tokens.numel())
        if routed is not None:
            indices = routed.live_LNK.view(self._recorder.layers, *tokens.shape, -1)
            is_padding = ~real.bool()[None, ..., None]
            self._chosen.append(indices.masked_fill(is_padding, NO_ROUTE))
            if self._pins is not None:
                self._executed.append(routed.executed_LNK.view(indices.shape).masked_fill(is_padding, NO_ROUTE))
            if routed.gates_LNK is not None:
                self._gates.append(routed.gates_LNK.float().view(indices.shape).masked_fill(is_padding, 0.0))
            last_LRE = torch.stack([logits_NE.view(*tokens.shape, -1)[:, -1] for logits_NE in routed.logits_LNE])
            self._router_logits.append(last_LRE)
        return at_temperature(logits, self._temperature)
