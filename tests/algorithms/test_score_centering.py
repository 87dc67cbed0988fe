"""Score centering on whole distributions: its gradient in the logits, against sums over the vocabulary."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from steadymoe.algorithms import Batch, load

WEIGHTS: dict[str, Callable[[float], float]] = {
    "score_centering": lambda r: 1.0,
    "score_centering_tis": lambda r: min(r, 2.0),
    "score_centering_mis": lambda r: r if 0.5 <= r <= 5.0 else 0.0,
}
VOCABULARY = 7


def policies() -> tuple[Tensor, Tensor]:
    """log π_θ and log μ of one position, (V,) each; their ratios lie on both sides of the bounds, from 0.25 to 5.5."""
    policy = [0.30, 0.06, 0.06, 0.20, 0.24, 0.03, 0.11]
    sampler = [0.25, 0.24, 0.19, 0.16, 0.10, 0.04, 0.02]
    return torch.tensor(policy, dtype=torch.float64).log(), torch.tensor(sampler, dtype=torch.float64).log()


def in_logits(name: str, token: int, policy_V: Tensor, sampler_V: Tensor, top_k: int) -> Tensor:
    """The gradient of −loss in the logits of π_θ, (V,), where ``token`` was sampled with advantage 1."""
    logits_V = policy_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(-1)
    head = sampler_V.topk(min(top_k, len(sampler_V))).indices
    listed = torch.cat([head, torch.tensor([token])])
    rollout_K = sampler_V[listed].clone()
    if token in head:
        rollout_K[-1] = -math.inf
    one = torch.ones(1, 1).double()
    fields: dict[str, Any] = {"top_logprobs_BTK": logprobs_V[listed], "rollout_top_logprobs_BTK": rollout_K}
    batch = Batch(
        logprobs_BT=logprobs_V[token].expand(1, 1),
        rollout_logprobs_BT=sampler_V[token].expand(1, 1),
        mask_BT=one,
        advantages_BT=one,
        **{name: values_K[None, None] for name, values_K in fields.items()},
    )
    (gradient_V,) = torch.autograd.grad(-load(name, top_k=top_k)(batch).loss, logits_V)
    return gradient_V


def exact(name: str, token: int, policy_V: Tensor, sampler_V: Tensor) -> Tensor:
    """w(p/q) ∇log p(token) − Σ_v q_v w(p_v/q_v) ∇log p_v with ∂log p_v/∂z_u = 1[u = v] − p_u, as scalars."""
    p, q = policy_V.exp().tolist(), sampler_V.exp().tolist()
    w = [WEIGHTS[name](x / y) for x, y in zip(p, q, strict=True)]
    terms = [
        w[token] * ((u == token) - p[u]) - sum(q[v] * w[v] * ((u == v) - p[u]) for v in range(len(p)))
        for u in range(len(p))
    ]
    return torch.tensor(terms, dtype=torch.float64)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("top_k", [VOCABULARY, VOCABULARY + 20])
def test_head_over_the_whole_vocabulary_is_exact(name: str, top_k: int) -> None:
    policy_V, sampler_V = policies()
    for token in range(VOCABULARY):
        found_V = in_logits(name, token, policy_V, sampler_V, top_k)
        assert_close(found_V, exact(name, token, policy_V, sampler_V))
    rounded_V = in_logits(name, 2, policy_V, sampler_V + 2e-8, top_k)  # has no tail either
    assert_close(rounded_V, exact(name, 2, policy_V, sampler_V), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", WEIGHTS)
def test_proportional_tail_is_exact(name: str) -> None:
    """Of the tokens outside the head μ and π_θ differ by one factor, so that their total says all of them."""
    policy_V, sampler_V = policies()
    order = sampler_V.argsort(descending=True)
    for factor in (0.3, 1.0, 2.5):
        moved_V = policy_V.clone()
        moved_V[order[3:]] = sampler_V[order[3:]] + math.log(factor)
        moved_V = moved_V.log_softmax(-1)
        for token in order[:3].tolist():
            assert_close(in_logits(name, token, moved_V, sampler_V, 3), exact(name, token, moved_V, sampler_V))
