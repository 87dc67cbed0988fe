"""Rollout: G responses to each of P prompts, sampled by the policy with a key-value cache.

Shapes: B = P·G sequences, T sampled positions, W width of the padded prompts, S = W + T positions in all,
F = S − 1 positions fed, V vocabulary, L MoE layers, E experts, K experts a token or most likely tokens.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import BatchEncoding, PreTrainedModel

from steadymoe.algorithms import parts
from steadymoe.algorithms.parts import dimensions, joined, joined_by
from steadymoe.bench.tasks import Task, decoded, end_ids, score
from steadymoe.bench.training.decoding import Decoder
from steadymoe.bench.training.forward import Sequences, autocast, sharing_refusal
from steadymoe.models.engine import Engine, Exact
from steadymoe.models.routing import RouteRecorder
from steadymoe.models.selection import NO_ROUTE


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How tokens are drawn, and what is kept of them."""

    precision: str = "fp32"
    """``fp32`` or ``bf16``, of the model's forwards."""
    engine: Engine = field(default_factory=Exact)
    """Tokens are drawn from the tokens it keeps, and log μ is that of the draw."""
    temperature: float = 1.0
    """Tokens are drawn, and log μ is taken, at this times the engine's temperature."""
    top_k: int = 0
    """The log-probabilities of so many most likely tokens are kept beside the sampled token's."""
    routes: bool = True
    """Whether the routes of the tokens are kept."""
    gates: bool = False
    """Whether the gate weights of these routes are kept, too."""
    greedy: bool = False
    """Whether the most likely token is taken in place of a draw."""
    pinned: PreTrainedModel | None = None
    """Every token runs the experts that this model chooses for it, not its own."""
    bank_LNK: Tensor | None = None
    """Every token runs the experts of a token drawn from these routes, by ``generator``, not its own."""


@dataclass(frozen=True)
class Rollout:
    """Responses as the sampling policy made them. Rows of one prompt are adjacent."""

    sequences: Sequences = field(metadata=joined_by(joined))
    logprobs_BT: Tensor = field(metadata=dimensions("BT"))
    """log μ of each sampled token, 0 on padding."""
    routes_LBFK: Tensor | None = field(metadata=dimensions("LBFK"))
    """Experts chosen while sampling, ``NO_ROUTE`` on padding and for the last sampled token of a row."""
    scores_B: Tensor = field(metadata=dimensions("B"))
    """The task's score of each response; 0 before scoring."""
    top_tokens_BTK: Tensor | None = field(default=None, metadata=dimensions("BTK"))
    """The most likely tokens at each position and, in the last place, the sampled one."""
    top_logprobs_BTK: Tensor | None = field(default=None, metadata=dimensions("BTK"))
    """log μ of these tokens; −inf in the last place where the sampled one is among the others already."""
    router_logprobs_LBTE: Tensor | None = field(default=None, metadata=dimensions("LBTE"))
    """log of the sampler's routers' softmax over all experts, where they led to a sampled token."""
    kept_BTV: Tensor | None = field(default=None, metadata=dimensions("BTV"))
    """Which tokens could be drawn, bool, true for all on padding; None unless the engine replays its mask. A byte for
    each token of the vocabulary is little at the tens of tokens of the tasks here; 100,000 would call for lists."""
    gates_LBFK: Tensor | None = field(default=None, metadata=dimensions("LBFK"))
    """The gate weights of ``routes_LBFK`` that the sampler used, 0 where there is no route; None unless kept."""
    pinned_LBFK: Tensor | None = field(default=None, metadata=dimensions("LBFK"))
    """Experts that ran in place of ``routes_LBFK``; None unless routes are pinned."""

    def rows(self, index_B: Tensor) -> "Rollout":
        """Return a part of the rollout, with the same padding."""
        return replace(parts.rows(self, index_B), sequences=self.sequences.rows(index_B))

    def padded(self, left: int, right: int) -> "Rollout":
        """Return the same with more padding: ``left`` positions before the prompts, ``right`` after the responses."""
        both, after = (left, right), (0, right)
        fills = {"routes_LBFK": NO_ROUTE, "pinned_LBFK": NO_ROUTE, "kept_BTV": True}
        tokens_BS, mask_BS = (pad(each, both) for each in (self.sequences.tokens_BS, self.sequences.mask_BS))
        made: dict[str, Any] = {"sequences": Sequences(tokens_BS, mask_BS, self.sequences.response_width + right)}
        for each in fields(self):
            letters, values = parts.dimensions_of(each) or "", getattr(self, each.name)
            if letters and values is not None:
                amounts = [by for letter in reversed(letters) for by in {"T": after, "F": both}.get(letter, (0, 0))]
                made[each.name] = pad(values, amounts, value=fills.get(each.name, 0))
        return replace(self, **made)


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """Concatenate rollouts, padded to the longest prompt and the longest response."""
    if len(rollouts) == 1:
        return rollouts[0]
    prompts = [part.sequences.tokens_BS.shape[1] - part.sequences.response_width for part in rollouts]
    responses = [part.sequences.response_width for part in rollouts]
    return joined(
        [
            part.padded(max(prompts) - prompt, max(responses) - response)
            for part, prompt, response in zip(rollouts, prompts, responses, strict=True)
        ]
    )


@torch.no_grad()
def roll_out(
    model: PreTrainedModel,
    task: Task,
    prompts: Sequence[str],
    responses: int,
    generator: torch.Generator,
    decoding: Decoding = Decoding(),
) -> Rollout:
    """Sample ``responses`` answers to each prompt and score them. Raises as ``sample`` and ``score`` do."""
    repeated = [prompt for prompt in prompts for _ in range(responses)]
    ends = end_ids(task.tokenizer)
    encoded = task.tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt").to(model.device)
    rollout = sample(model, encoded, responses, ends, task.max_new_tokens, generator, decoding)
    sequences = rollout.sequences
    responses_BT = sequences.tokens_BS[:, -sequences.response_width :]
    lengths_B = sequences.response_mask_BT.sum(-1)
    scores = []
    prompts_B = encoded["input_ids"].repeat_interleave(responses, 0)
    for prompt, row_W, row_T, length in zip(
        repeated, prompts_B.tolist(), responses_BT.tolist(), lengths_B.tolist(), strict=True
    ):
        scores.append(score(task, prompt, *decoded(task.tokenizer, row_W, row_T[:length])))
    return replace(rollout, scores_B=torch.tensor(scores, device=model.device))


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    encoded: BatchEncoding,
    responses: int,
    ends: Sequence[int],
    max_new_tokens: int,
    generator: torch.Generator,
    decoding: Decoding = Decoding(),
) -> Rollout:
    """Sample ``responses`` rows per prompt until each has drawn an end token or ``max_new_tokens``; no scores yet.

    ``encoded`` holds ``input_ids`` and ``attention_mask`` of the prompts, (P, W) each, padded on the left. ``ends`` are
    the ids that end a row. That rows leave the batch changes no draw, except for an engine's own noise. Padding tokens
    have id 0. Raises RuntimeError if the routes do not fall on the tokens they belong to, and FloatingPointError if the
    policy's distribution is not finite.
    """
    logprobs, top, kept, engine = [], [], [], decoding.engine
    ends_E = torch.tensor(ends, device=model.device)
    pinned, shares = decoding.pinned, sharing_refusal(model) is None
    recorder = RouteRecorder(model, decoding.routes or pinned is not None, decoding.gates)
    pins = None if pinned is None else RouteRecorder(pinned)
    with recorder, pins or nullcontext(), autocast(model.device.type, decoding.precision):
        decoder = Decoder(model, recorder, decoding.temperature * engine.temperature, shares)
        if pinned is not None and pins is not None:
            decoder.pin(pinned, pins)
        if decoding.bank_LNK is not None:
            decoder.draw_routes(decoding.bank_LNK, generator)
        all_logprobs_BV = decoder.feed_prompts(encoded["input_ids"], encoded["attention_mask"], responses)
        while True:
            if not all_logprobs_BV.isfinite().all():
                raise FloatingPointError("the sampling policy's distribution is not finite")
            drawn_BV, kept_BV = all_logprobs_BV, engine.kept(all_logprobs_BV)
            if kept_BV is not None:
                drawn_BV = all_logprobs_BV.masked_fill(~kept_BV, -torch.inf).log_softmax(-1)
                if engine.replays_mask:
                    kept.append(kept_BV | ~decoder.alive_B[:, None])
            if decoding.greedy:
                token_B1 = drawn_BV.argmax(-1, keepdim=True)
            else:
                token_B1 = torch.multinomial(drawn_BV.exp(), 1, generator=generator)
            logprobs.append(torch.where(decoder.alive_B, drawn_BV.gather(-1, token_B1).squeeze(-1), 0.0))
            if decoding.top_k:
                top.append(_most_likely(drawn_BV, token_B1, decoding.top_k))
            decoder.append(token_B1, ends_E)
            if len(logprobs) == max_new_tokens or not decoder.alive_B.any():
                break
            decoder.drop_finished()
            all_logprobs_BV = decoder.feed(all_logprobs_BV)
    sequences = Sequences(decoder.tokens_BS, decoder.mask_BS, len(logprobs))
    check_routes(decoder.routes_LBFK, sequences)
    return Rollout(
        sequences,
        torch.stack(logprobs, 1),
        decoder.routes_LBFK,
        torch.zeros(len(sequences.tokens_BS), device=model.device),
        torch.stack([tokens_BK for tokens_BK, _ in top], 1) if top else None,
        torch.stack([logprobs_BK for _, logprobs_BK in top], 1) if top else None,
        decoder.router_logprobs_LBTE,
        torch.stack(kept, 1) if kept else None,
        decoder.gates_LBFK,
        decoder.executed_LBFK,
    )


def _most_likely(all_logprobs_BV: Tensor, token_B1: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the ``top_tokens`` and ``top_logprobs`` of one position, (B, K + 1) each."""
    top = all_logprobs_BV.topk(min(top_k, all_logprobs_BV.shape[-1]))
    among_B1 = (top.indices == token_B1).any(-1, keepdim=True)
    sampled_B1 = all_logprobs_BV.gather(-1, token_B1).masked_fill(among_B1, -torch.inf)
    return torch.cat([top.indices, token_B1], -1), torch.cat([top.values, sampled_B1], -1)


def check_routes(routes_LBFK: Tensor | None, sequences: Sequences) -> None:
    """Raise RuntimeError unless there is a route exactly where ``sequences`` has a token that another follows."""
    if routes_LBFK is None:
        return
    placed_BF = (routes_LBFK != NO_ROUTE).all(-1).all(0)
    empty_BF = (routes_LBFK == NO_ROUTE).all(-1).all(0)
    mask_BF = sequences.route_mask_BF
    if placed_BF.shape != mask_BF.shape or not (placed_BF == mask_BF).all() or not (empty_BF == ~mask_BF).all():
        raise RuntimeError(
            f"recorded routes {tuple(routes_LBFK.shape)} do not fall on the tokens of sequences {tuple(mask_BF.shape)}"
        )
