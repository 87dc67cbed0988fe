"""Rollout: G responses to each of P prompts, sampled by the policy with a key-value cache.

Shapes: B = P·G sequences, T sampled positions, W width of the padded prompts, S = W + T positions in all,
F = S − 1 positions fed, L MoE layers, K experts a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from steadymoe.bench.policy import Sequences, autocast, positions
from steadymoe.bench.tasks import Task
from steadymoe.models.routing import NO_ROUTE, RouteRecorder


@dataclass(frozen=True)
class Rollout:
    """Responses as the sampling policy made them. Rows of one prompt stand together."""

    sequences: Sequences
    logprobs_BT: Tensor
    """log μ of each sampled token, 0 on padding."""
    routes_LBFK: Tensor | None
    """Experts chosen while sampling, ``NO_ROUTE`` on padding and for the last sampled token of a row."""
    scores_B: Tensor


@torch.no_grad()
def rollout(
    model: PreTrainedModel,
    task: Task,
    prompts: Sequence[str],
    responses: int,
    generator: torch.Generator,
    precision: str = "fp32",
) -> Rollout:
    """Sample ``responses`` answers to each prompt at temperature 1 and score them."""
    repeated = [prompt for prompt in prompts for _ in range(responses)]
    encoded = task.tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt").to(model.device)
    sequences, logprobs_BT, routes_LBFK = sample(
        model,
        encoded["input_ids"],
        encoded["attention_mask"],
        responses=responses,
        end=task.tokenizer.eos_token_id,
        max_new_tokens=task.max_new_tokens,
        generator=generator,
        precision=precision,
    )
    responses_BT = sequences.tokens_BS[:, -sequences.response_width :]
    lengths_B = sequences.response_mask_BT.sum(-1)
    scores = []
    for prompt, row_T, length in zip(repeated, responses_BT.tolist(), lengths_B.tolist(), strict=True):
        finished = row_T[length - 1] == task.tokenizer.eos_token_id
        text = task.tokenizer.decode(row_T[: length - finished])
        scores.append(task.score(prompt, str(text), finished))
    return Rollout(sequences, logprobs_BT, routes_LBFK, torch.tensor(scores, device=model.device))


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
) -> tuple[Sequences, Tensor, Tensor | None]:
    """Sample ``responses`` rows per prompt until each has drawn ``end`` or ``max_new_tokens`` tokens.

    A prompt is fed once and its cache repeated for its rows. Returns the sequences, log μ (B, T), and the
    routes (L, B, F, K; None for a dense model). Padding tokens have id 0. Raises RuntimeError if the routes
    do not fall on the tokens they belong to, and FloatingPointError if the policy's distribution is not finite.
    """
    cache = DynamicCache(config=model.config)
    routes: list[Tensor] = []

    def feed(tokens: Tensor, real: Tensor, mask_so_far: Tensor, position: Tensor) -> Tensor:
        """Next-token log-probabilities after ``tokens`` (rows, V); keeps the routes of the ``real`` ones."""
        logits = model(
            input_ids=tokens,
            attention_mask=mask_so_far,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        routed = recorder.take(tokens.numel())
        if routed is not None:
            indices = routed[0].view(recorder.layers, *tokens.shape, -1)
            routes.append(indices.masked_fill(~real.bool()[None, ..., None], NO_ROUTE))
        return logits.float().log_softmax(-1)

    with RouteRecorder(model) as recorder, autocast(model.device.type, precision):
        position_PW = positions(prompt_mask_PW)
        all_logprobs_PV = feed(prompts_PW, prompt_mask_PW, prompt_mask_PW, position_PW)
        cache.batch_repeat_interleave(responses)
        all_logprobs_BV = all_logprobs_PV.repeat_interleave(responses, 0)
        routes = [prompt_routes.repeat_interleave(responses, 1) for prompt_routes in routes]
        tokens, masks = (
            [prompts_PW.repeat_interleave(responses, 0)],
            [prompt_mask_PW.repeat_interleave(responses, 0)],
        )
        mask_BS, position_B1 = masks[0], position_PW[:, -1:].repeat_interleave(responses, 0)
        alive_B = torch.ones(len(mask_BS), dtype=torch.bool, device=model.device)
        logprobs = []
        while True:
            if not all_logprobs_BV.isfinite().all():
                raise FloatingPointError("the sampling policy's distribution is not finite")
            token_B1 = torch.multinomial(all_logprobs_BV.exp(), 1, generator=generator)
            logprobs.append(torch.where(alive_B, all_logprobs_BV.gather(-1, token_B1).squeeze(-1), 0.0))
            tokens.append(torch.where(alive_B[:, None], token_B1, 0))
            masks.append(alive_B[:, None].long())
            alive_B = alive_B & (token_B1.squeeze(-1) != end)
            if len(logprobs) == max_new_tokens or not alive_B.any():
                break
            # Rows that have ended ride along on padding until the last one ends.
            mask_BS = torch.cat([mask_BS, masks[-1]], dim=1)
            position_B1 = position_B1 + 1
            all_logprobs_BV = feed(tokens[-1], alive_B[:, None], mask_BS, position_B1)
    sequences = Sequences(torch.cat(tokens, 1), torch.cat(masks, 1), len(logprobs))
    routes_LBFK = torch.cat(routes, dim=2) if routes else None
    check_routes(routes_LBFK, sequences)
    return sequences, torch.stack(logprobs, 1), routes_LBFK


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
