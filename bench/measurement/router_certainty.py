"""How sure routers are of their choice, beyond the margin and the confidence of ``routing_drift.decision``.

Shapes: L MoE layers, B sequences, T response positions, E experts, N response tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The spread of a router's scores is taken over so many of the largest, where there are so many experts.
_SPREAD_OVER = 16


@dataclass(frozen=True)
class Certainty:
    """How sure the routers of each layer are, each number a mean over response tokens."""

    margin_over_spread_L: Tensor
    """(s_K − s_{K+1}) / (s_1 − s_min(16, E)) of a router's logits in falling order."""
    margin_over_spread_of_probabilities_L: Tensor
    """The same quotient of the softmax of the logits over all experts."""
    top1_probability_L: Tensor
    """The largest probability of the softmax over all experts; 1/E for a router without an opinion."""
    entropy_L: Tensor
    """The entropy of the softmax over all experts, divided by log E; 1 for a router without an opinion."""


def certainty(logprobs_LBTE: Tensor, experts_per_token: int, mask_BT: Tensor) -> Certainty:
    """How sure routers are, from their log-probabilities of all experts; a log-probability orders as its logit does.

    The quotients are nan if every expert is chosen, and 0 where all scores are equal. A bias for balance, by which
    DeepSeek-V3 and GLM-4-MoE choose, is in no logit and does not count.
    """
    sorted_LNE = logprobs_LBTE[:, mask_BT.bool()].sort(-1, descending=True).values
    probabilities_LNE = sorted_LNE.exp()
    entropy_LN = torch.special.entr(probabilities_LNE).sum(-1) / math.log(max(2, sorted_LNE.shape[-1]))
    return Certainty(
        _margin_over_spread(sorted_LNE, experts_per_token).mean(-1),
        _margin_over_spread(probabilities_LNE, experts_per_token).mean(-1),
        probabilities_LNE[..., 0].mean(-1),
        entropy_LN.mean(-1),
    )


def _margin_over_spread(sorted_LNE: Tensor, experts_per_token: int) -> Tensor:
    """The quotient of each layer and response token, (L, N); ``sorted_LNE`` falls along the experts."""
    experts = sorted_LNE.shape[-1]
    if experts_per_token >= experts:
        return torch.full_like(sorted_LNE[..., 0], torch.nan)
    last = max(min(_SPREAD_OVER, experts), experts_per_token + 1)
    spread_LN = sorted_LNE[..., 0] - sorted_LNE[..., last - 1]
    margin_LN = sorted_LNE[..., experts_per_token - 1] - sorted_LNE[..., experts_per_token]
    return torch.where(spread_LN > 0, margin_LN / spread_LN.clamp(min=torch.finfo(spread_LN.dtype).tiny), 0.0)
