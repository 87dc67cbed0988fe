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
    encoded = task.tokenizer(repeated, padding=True, padding_side="left", return_tensors="pt").to(model.device)
    sequences, logprobs_BT, routes_LBFK = sample(
        model,
        encoded["input_ids"],
        encoded["attention_mask"],
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
        scores.append(task.score(prompt, text, finished))
    return Rollout(sequences, logprobs_BT, routes_LBFK, torch.tensor(scores, device=model.device))


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts_BW: Tensor,
    prompt_mask_BW: Tensor,
    *,
    end: int,
    max_new_tokens: int,
    generator: torch.Generator,
    precision: str = "fp32",
) -> tuple[Sequences, Tensor, Tensor | None]:
    """Sample until every row has drawn ``end`` or ``max_new_tokens`` tokens.

    Returns the sequences, log μ (B, T), and the routes (L, B, F, K; None for a dense model). Padding
    tokens have id 0. Raises RuntimeError if the routes do not fall on the tokens they belong to, and
    FloatingPointError if the policy's distribution is not finite.
    """
    rows = prompts_BW.shape[0]
    alive_B = torch.ones(rows, dtype=torch.bool, device=model.device)
    tokens, masks, logprobs, routes = [prompts_BW], [prompt_mask_BW], [], []
    cache = DynamicCache(config=model.config)
    fed_BF, fed_mask_BF, mask_BS = prompts_BW, prompt_mask_BW, prompt_mask_BW
    position_BF = positions(prompt_mask_BW)
    with RouteRecorder(model) as recorder, autocast(model.device.type, precision):
        for _ in range(max_new_tokens):
            logits_BV = model(
                input_ids=fed_BF,
                attention_mask=mask_BS,
                position_ids=position_BF,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            routed = recorder.take(fed_BF.numel())
            if routed is not None:
                indices_LBFK = routed[0].view(recorder.layers, *fed_BF.shape, -1)
                routes.append(indices_LBFK.masked_fill(~fed_mask_BF.bool()[None, ..., None], NO_ROUTE))
            all_logprobs_BV = logits_BV.float().log_softmax(-1)
            if not all_logprobs_BV.isfinite().all():
                raise FloatingPointError("the sampling policy's distribution is not finite")
            token_B1 = torch.multinomial(all_logprobs_BV.exp(), 1, generator=generator)
            logprob_B = all_logprobs_BV.gather(-1, token_B1).squeeze(-1)
            logprobs.append(torch.where(alive_B, logprob_B, 0.0))
            tokens.append(torch.where(alive_B[:, None], token_B1, 0))
            masks.append(alive_B[:, None].long())
            alive_B = alive_B & (token_B1.squeeze(-1) != end)
            if not alive_B.any():
                break
            # Rows that have ended ride along on padding until the last one ends.
            fed_BF, fed_mask_BF = tokens[-1], alive_B[:, None]
            mask_BS = torch.cat([mask_BS, masks[-1]], dim=1)
            position_BF = position_BF[:, -1:] + 1
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
