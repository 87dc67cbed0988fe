"""Rollout: G responses to each of P prompts, sampled by the policy with a key-value cache.

Shapes: B = P·G sequences, T sampled positions, W width of the padded prompts, S = W + T positions in all,
F = S − 1 positions fed, V vocabulary, L MoE layers, E experts, K experts a token or most likely tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from steadymoe.algorithms.parts import dimensions, joined, joined_by
from steadymoe.bench.tasks import Task
from steadymoe.bench.training.forward import Sequences, autocast
from steadymoe.bench.training.packing import additive, positions, refusal
from steadymoe.models.routing import NO_ROUTE, RouteRecorder, log_softmax

# Responses that have ended leave the batch once no larger share of it than this goes on.
LEAST_ALIVE = 0.5


@dataclass(frozen=True)
class Rollout:
    """Responses as the sampling policy made them. Rows of one prompt stand together."""

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

    def rows(self, index_B: Tensor) -> "Rollout":
        """A part of the rollout, with the same padding."""
        return Rollout(
            self.sequences.rows(index_B),
            self.logprobs_BT[index_B],
            None if self.routes_LBFK is None else self.routes_LBFK[:, index_B],
            self.scores_B[index_B],
            None if self.top_tokens_BTK is None else self.top_tokens_BTK[index_B],
            None if self.top_logprobs_BTK is None else self.top_logprobs_BTK[index_B],
            None if self.router_logprobs_LBTE is None else self.router_logprobs_LBTE[:, index_B],
        )

    def padded(self, left: int, right: int) -> "Rollout":
        """The same with more padding: ``left`` positions before the prompts, ``right`` after the responses."""
        sequences, routes = self.sequences, self.routes_LBFK
        return Rollout(
            Sequences(
                pad(sequences.tokens_BS, (left, right)),
                pad(sequences.mask_BS, (left, right)),
                sequences.response_width + right,
            ),
            pad(self.logprobs_BT, (0, right)),
            None if routes is None else pad(routes, (0, 0, left, right), value=NO_ROUTE),
            self.scores_B,
            None if self.top_tokens_BTK is None else pad(self.top_tokens_BTK, (0, 0, 0, right)),
            None if self.top_logprobs_BTK is None else pad(self.top_logprobs_BTK, (0, 0, 0, right)),
            None if self.router_logprobs_LBTE is None else pad(self.router_logprobs_LBTE, (0, 0, 0, right)),
        )


def join(parts: Sequence[Rollout]) -> Rollout:
    """Rollouts one below the other, padded to the longest prompt and the longest response."""
    if len(parts) == 1:
        return parts[0]
    prompts = [part.sequences.tokens_BS.shape[1] - part.sequences.response_width for part in parts]
    responses = [part.sequences.response_width for part in parts]
    return joined(
        [
            part.padded(max(prompts) - prompt, max(responses) - response)
            for part, prompt, response in zip(parts, prompts, responses, strict=True)
        ]
    )


@torch.no_grad()
def roll_out(
    model: PreTrainedModel,
    task: Task,
    prompts: Sequence[str],
    responses: int,
    generator: torch.Generator,
    precision: str = "fp32",
    top_k: int = 0,
    temperature: float = 1.0,
    routes: bool = True,
) -> Rollout:
    """Sample ``responses`` answers to each prompt and score them; the last four arguments as in ``sample``."""
    repeated = [prompt for prompt in prompts for _ in range(responses)]
    encoded = task.tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt").to(model.device)
    made = sample(
        model,
        encoded["input_ids"],
        encoded["attention_mask"],
        responses=responses,
        end=task.tokenizer.eos_token_id,
        max_new_tokens=task.max_new_tokens,
        generator=generator,
        precision=precision,
        top_k=top_k,
        temperature=temperature,
        routes=routes,
    )
    sequences = made.sequences
    responses_BT = sequences.tokens_BS[:, -sequences.response_width :]
    lengths_B = sequences.response_mask_BT.sum(-1)
    scores = []
    for prompt, row_T, length in zip(repeated, responses_BT.tolist(), lengths_B.tolist(), strict=True):
        finished = row_T[length - 1] == task.tokenizer.eos_token_id
        text = task.tokenizer.decode(row_T[: length - finished])
        scores.append(task.score(prompt, str(text), finished))
    return replace(made, scores_B=torch.tensor(scores, device=model.device))


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts_PW: Tensor,
    prompt_mask_PW: Tensor,
    *,
    responses: int,
    end: int,
    max_new_tokens: int,
    generator: torch.Generator,
    precision: str = "fp32",
    top_k: int = 0,
    temperature: float = 1.0,
    routes: bool = True,
) -> Rollout:
    """Sample ``responses`` rows per prompt until each has drawn ``end`` or ``max_new_tokens`` tokens; no scores yet.

    log μ is taken from the distribution that was sampled, at ``temperature``. A prompt is fed once and its cache
    repeated for its rows. Rows that have ended leave the batch once they are half of it; the draws stay the same, but
    for an engine's own noise. Without ``routes`` none are recorded. With
    ``top_k`` the log-probabilities of that many most likely tokens are kept beside the sampled one's. Padding tokens
    have id 0. Raises RuntimeError if the routes do not fall on the tokens they belong to, and FloatingPointError if
    the policy's distribution is not finite.
    """
    cache = DynamicCache(config=model.config)
    attends_to_all = refusal(model.config) is None
    chosen: list[Tensor] = []
    router_logits: list[Tensor] = []

    def feed(tokens: Tensor, real: Tensor, mask_so_far: Tensor, position: Tensor) -> Tensor:
        """Next-token log-probabilities after ``tokens`` (rows, V); keeps the routes of the ``real`` ones.

        Of the last of them, which leads to the next token, also the routers' logits.
        """
        # A single token sees all that came before: the model need not work that out. Without padding it takes no mask.
        known = attends_to_all and tokens.shape[1] == 1 and not mask_so_far.all()
        logits = model(
            input_ids=tokens,
            attention_mask=additive(mask_so_far) if known else mask_so_far,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        routed = recorder.take(tokens.numel())
        if routed is not None:
            indices = routed.live_LNK.view(recorder.layers, *tokens.shape, -1)
            chosen.append(indices.masked_fill(~real.bool()[None, ..., None], NO_ROUTE))
            last_LRE = torch.stack([logits_NE.view(*tokens.shape, -1)[:, -1] for logits_NE in routed.logits_LNE])
            router_logits.append(last_LRE)
        return (logits.float() / temperature).log_softmax(-1)

    with RouteRecorder(model, routes) as recorder, autocast(model.device.type, precision):
        position_PW = positions(prompt_mask_PW)
        all_logprobs_PV = feed(prompts_PW, prompt_mask_PW, prompt_mask_PW, position_PW)
        # Not batch_repeat_interleave, which the states of linear attention (Qwen3-Next) do not have.
        rows_B = torch.arange(len(prompts_PW), device=model.device).repeat_interleave(responses)
        cache.reorder_cache(rows_B)  # type: ignore[arg-type]
        all_logprobs_BV = all_logprobs_PV.repeat_interleave(responses, 0)
        chosen = [of_prompt.repeat_interleave(responses, 1) for of_prompt in chosen]
        router_logits = [of_prompt.repeat_interleave(responses, 1) for of_prompt in router_logits]
        tokens, masks = (
            [prompts_PW.repeat_interleave(responses, 0)],
            [prompt_mask_PW.repeat_interleave(responses, 0)],
        )
        mask_BS, position_B1 = masks[0], position_PW[:, -1:].repeat_interleave(responses, 0)
        alive_B = torch.ones(len(mask_BS), dtype=torch.bool, device=model.device)
        fed_R = torch.arange(len(mask_BS), device=model.device)  # the rows that the cache holds
        logprobs, top_tokens, top_logprobs = [], [], []
        while True:
            if not all_logprobs_BV.isfinite().all():
                raise FloatingPointError("the sampling policy's distribution is not finite")
            token_B1 = torch.multinomial(all_logprobs_BV.exp(), 1, generator=generator)
            logprobs.append(torch.where(alive_B, all_logprobs_BV.gather(-1, token_B1).squeeze(-1), 0.0))
            if top_k:
                top_BK, top_logprobs_BK = _most_likely(all_logprobs_BV, token_B1, top_k)
                top_tokens.append(top_BK)
                top_logprobs.append(top_logprobs_BK)
            tokens.append(torch.where(alive_B[:, None], token_B1, 0))
            masks.append(alive_B[:, None].long())
            alive_B = alive_B & (token_B1.squeeze(-1) != end)
            if len(logprobs) == max_new_tokens or not alive_B.any():
                break
            # Rows that have ended ride along on padding until they leave, or the last one ends.
            mask_BS = torch.cat([mask_BS, masks[-1]], dim=1)
            position_B1 = position_B1 + 1
            if int(alive_B[fed_R].sum()) <= LEAST_ALIVE * len(fed_R):
                staying_R = alive_B[fed_R].nonzero().squeeze(-1)
                cache.reorder_cache(staying_R)  # type: ignore[arg-type]
                fed_R = fed_R[staying_R]
            if len(fed_R) == len(alive_B):
                all_logprobs_BV = feed(tokens[-1], alive_B[:, None], mask_BS, position_B1)
                continue
            fed_RV = feed(tokens[-1][fed_R], alive_B[fed_R, None], mask_BS[fed_R], position_B1[fed_R])
            all_logprobs_BV = all_logprobs_BV.index_copy(0, fed_R, fed_RV)
            if chosen:
                chosen[-1] = _widened(chosen[-1], fed_R, len(alive_B), NO_ROUTE)
                router_logits[-1] = _widened(router_logits[-1], fed_R, len(alive_B), 0.0)
    sequences = Sequences(torch.cat(tokens, 1), torch.cat(masks, 1), len(logprobs))
    routes_LBFK = torch.cat(chosen, dim=2) if chosen else None
    check_routes(routes_LBFK, sequences)
    return Rollout(
        sequences,
        torch.stack(logprobs, 1),
        routes_LBFK,
        torch.zeros(len(mask_BS), device=model.device),
        torch.stack(top_tokens, 1) if top_k else None,
        torch.stack(top_logprobs, 1) if top_k else None,
        log_softmax(torch.stack(router_logits, 2)) if router_logits else None,
    )


def _widened(values_LRX: Tensor, rows_R: Tensor, rows: int, missing: float) -> Tensor:
    """``values_LRX`` of some rows as those of all, ``missing`` elsewhere."""
    wide_LBX = values_LRX.new_full((values_LRX.shape[0], rows, *values_LRX.shape[2:]), missing)
    return wide_LBX.index_copy(1, rows_R, values_LRX)


def _most_likely(all_logprobs_BV: Tensor, token_B1: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The ``top_tokens`` and ``top_logprobs`` of one position, (B, K + 1) each."""
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
