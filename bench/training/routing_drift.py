"""How far routing moved between two forwards of the same tokens, how sure routers are, and the load of experts.

The two forwards may differ in the policy, the engine or the moment of training. Shapes: L MoE layers, B sequences, T
response positions, F positions fed, K experts a token, E experts, N response tokens, C = K + 1 counts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from steadymoe.bench.training.columns import names

SHIFT = names("router_kl", "router_shift_mean", "router_shift_min", "router_shift_p10", "router_shift_floored")
LOAD = names("load_entropy", "load_max_violation", "dead_experts")


@dataclass(frozen=True)
class Change:
    """Differences between two recordings of the routes of the same response tokens."""

    expert_L: Tensor
    """1 − |S_old ∩ S_new| / K for each layer, the mean over response tokens."""
    set_L: Tensor
    """The share of response tokens whose set of experts differs, for each layer."""
    any_layer: Tensor
    """The share of response tokens whose set differs in at least one layer."""
    slots_C: Tensor
    """How many pairs (layer, response token) have 0, 1, … K experts that differ."""

    @property
    def expert(self) -> Tensor:
        """The expert-change rate over all layers and response tokens, from 0 to 1."""
        return self.expert_L.mean()

    @property
    def set(self) -> Tensor:
        """The set-change rate over all layers and response tokens, from 0 to 1."""
        return self.set_L.mean()


def change(old_LBFK: Tensor, new_LBFK: Tensor, mask_BT: Tensor) -> Change:
    """Compare two recordings on the response tokens that ``mask_BT`` marks.

    The route of a response token is the route of the position before it, which predicts it: only there have both the
    sampler and the training forward a route for every response token. Raises ValueError for recordings that differ in
    layers, positions or experts per token, and for a response token without a route.
    """
    if old_LBFK.shape != new_LBFK.shape:
        raise ValueError(f"routes of different shapes: {tuple(old_LBFK.shape)} and {tuple(new_LBFK.shape)}")
    old_LNK, new_LNK = of_response_tokens(old_LBFK, mask_BT), of_response_tokens(new_LBFK, mask_BT)
    shared_LN = (old_LNK[..., :, None] == new_LNK[..., None, :]).sum((-1, -2))
    experts = old_LNK.shape[-1]
    differs_LN = shared_LN < experts
    return Change(
        expert_L=1 - shared_LN.float().mean(-1) / experts,
        set_L=differs_LN.float().mean(-1),
        any_layer=differs_LN.any(0).float().mean(),
        slots_C=torch.bincount((experts - shared_LN).flatten(), minlength=experts + 1),
    )


def any_layer(old_LBFK: Tensor, new_LBFK: Tensor, mask_BT: Tensor) -> Tensor:
    """Whether a response token has another set of experts in at least one layer, (N,) bool."""
    old_LNK, new_LNK = of_response_tokens(old_LBFK, mask_BT), of_response_tokens(new_LBFK, mask_BT)
    return (old_LNK.sort(-1).values != new_LNK.sort(-1).values).any(-1).any(0)


def top1_change(old_LBFK: Tensor, new_LBFK: Tensor, old_LBTE: Tensor, new_LBTE: Tensor, mask_BT: Tensor) -> Tensor:
    """The share of response tokens whose strongest expert differs between two recordings, for each layer, (L,).

    The strongest of the chosen experts has the largest router logit, and so the largest gate weight. DeepSeek-V3 and
    GLM-4-MoE choose experts by this score plus a bias for balance; the bias is in no gate weight and does not count
    here. ``old_LBTE`` and ``new_LBTE`` are the routers' log-probabilities of all experts. Routes need not be sorted, as
    in these two families; among equal logits the first in the order of the routes counts.
    """
    old_LN = _strongest(old_LBFK, old_LBTE, mask_BT)
    return (old_LN != _strongest(new_LBFK, new_LBTE, mask_BT)).float().mean(-1)


def _strongest(routes_LBFK: Tensor, logprobs_LBTE: Tensor, mask_BT: Tensor) -> Tensor:
    """The chosen expert with the largest log-probability, for each layer and response token, (L, N)."""
    chosen_LNK = of_response_tokens(routes_LBFK, mask_BT).long()
    first_LN1 = logprobs_LBTE[:, mask_BT.bool()].gather(-1, chosen_LNK).argmax(-1, keepdim=True)
    return chosen_LNK.gather(-1, first_LN1).squeeze(-1)


@dataclass(frozen=True)
class Shift:
    """How far the routers' distributions moved between two forwards of the same response tokens."""

    kl_L: Tensor
    """Σ_e p_old log p_old/p_new in nats for each layer, the mean over response tokens."""
    gamma_N: Tensor
    """RSPO's γ for each response token: e^−(mean over layers and old experts of |log p_new/p_old|)."""

    @property
    def columns(self) -> dict[str, Tensor]:
        """Scalars by column: the KL over all layers; over tokens γ's mean, minimum, tenth percentile, share floored."""
        floored, tenth = (self.gamma_N < SHIFT_FLOOR).float().mean(), self.gamma_N.quantile(0.1)
        numbers = self.kl_L.mean(), self.gamma_N.mean(), self.gamma_N.min(), tenth, floored
        return dict(zip(SHIFT, numbers, strict=True))


# RSPO's floor in a re-implementation (algorithms/rspo.py). A column holds the share of tokens below it.
SHIFT_FLOOR = 0.8


def shift(old_LBTE: Tensor, new_LBTE: Tensor, old_routes_LBFK: Tensor, mask_BT: Tensor) -> Shift:
    """Compare the routers' log-probabilities of all experts; γ is over the experts in ``old_routes_LBFK``."""
    keep_BT = mask_BT.bool()
    old_LNE, new_LNE = old_LBTE[:, keep_BT], new_LBTE[:, keep_BT]
    chosen_LNK = of_response_tokens(old_routes_LBFK, mask_BT).long()
    moved_LNK = (new_LNE - old_LNE).gather(-1, chosen_LNK).abs()
    return Shift((old_LNE.exp() * (old_LNE - new_LNE)).sum(-1).mean(-1), (-moved_LNK.mean((0, 2))).exp())


@dataclass(frozen=True)
class Decision:
    """How sure the routers of each layer are of their choice."""

    margin_L: Tensor
    """The smallest chosen logit less the largest that was not chosen, the mean over response tokens."""
    confidence_L: Tensor
    """The summed probability of the chosen experts, the mean over response tokens."""


def decision(logprobs_LBTE: Tensor, routes_LBFK: Tensor, mask_BT: Tensor) -> Decision:
    """How sure routers are, from their log-probabilities of all experts and their own choice.

    The margin may be negative if a router does not choose the largest logits, for example because of a bias for
    balance. It is nan if every expert is chosen.
    """
    logprobs_LNE = logprobs_LBTE[:, mask_BT.bool()]
    chosen_LNK = of_response_tokens(routes_LBFK, mask_BT).long()
    inside_LNK = logprobs_LNE.gather(-1, chosen_LNK)
    outside_LN = logprobs_LNE.scatter(-1, chosen_LNK, -torch.inf).amax(-1)
    if chosen_LNK.shape[-1] == logprobs_LNE.shape[-1]:
        outside_LN = torch.full_like(outside_LN, torch.nan)  # every expert is chosen: there is no margin
    return Decision((inside_LNK.amin(-1) - outside_LN).mean(-1), inside_LNK.exp().sum(-1).mean(-1))


# A router's scores spread from the largest to the sixteenth, or to the last of fewer experts, as in published numbers.
_SPREAD_OVER = 16


def margin_over_spread(logprobs_LBTE: Tensor, experts_per_token: int, mask_BT: Tensor) -> Tensor:
    """Return (s_K − s_{K+1}) / (s_1 − s_min(16, E)) of each router's sorted logits, a mean over response tokens, (L,).

    Log-probabilities differ as logits do. nan if every expert is chosen, and 0 where all scores are equal. The
    balancing bias by which DeepSeek-V3 and GLM-4-MoE choose is in no logit and does not count.
    """
    sorted_LNE = logprobs_LBTE[:, mask_BT.bool()].sort(-1, descending=True).values
    experts = sorted_LNE.shape[-1]
    if experts_per_token >= experts:
        return torch.full_like(sorted_LNE[:, 0, 0], torch.nan)
    last = max(min(_SPREAD_OVER, experts), experts_per_token + 1)
    spread_LN = sorted_LNE[..., 0] - sorted_LNE[..., last - 1]
    margin_LN = sorted_LNE[..., experts_per_token - 1] - sorted_LNE[..., experts_per_token]
    return torch.where(spread_LN > 0, margin_LN / spread_LN.clamp(min=torch.finfo(spread_LN.dtype).tiny), 0.0).mean(-1)


def of_response_tokens(routes_LBFK: Tensor, mask_BT: Tensor) -> Tensor:
    """The routes that produced the response tokens, (L, N, K) for the N tokens of ``mask_BT``.

    Raises ValueError if one of these tokens has no route.
    """
    routes_LNK = routes_LBFK[:, :, -mask_BT.shape[1] :][:, mask_BT.bool()]
    if (routes_LNK < 0).any():
        raise ValueError("a response token has no recorded route")
    return routes_LNK


@dataclass(frozen=True)
class Load:
    """How evenly the experts of each layer are used."""

    entropy_L: Tensor
    """−Σ_e f_e log f_e / log E for the shares f_e of the experts: 1 for equal shares."""
    max_violation_L: Tensor
    """max_e f_e · E − 1: 0 for equal shares."""
    dead_L: Tensor
    """The share of experts that no token chose."""

    @property
    def columns(self) -> dict[str, Tensor]:
        """The tensors, (L,), by column."""
        return dict(zip(LOAD, (self.entropy_L, self.max_violation_L, self.dead_L), strict=True))


def load(routes_LBFK: Tensor, mask_BT: Tensor, experts: int) -> Load:
    """The load of ``experts`` experts by the response tokens of ``mask_BT``. Raises ValueError like ``change``."""
    return load_of(choices(routes_LBFK, mask_BT, experts))


def choices(routes_LBFK: Tensor, mask_BT: Tensor, experts: int) -> Tensor:
    """How often response tokens chose each of ``experts`` experts, (L, E). Raises ValueError like ``change``."""
    chosen_LX = of_response_tokens(routes_LBFK, mask_BT).flatten(1).long()
    counts_LE = torch.zeros(chosen_LX.shape[0], experts, device=chosen_LX.device)
    return counts_LE.scatter_add_(1, chosen_LX, torch.ones_like(chosen_LX, dtype=counts_LE.dtype))


def load_of(counts_LE: Tensor) -> Load:
    """The load behind ``choices``, which may be summed over parts of a mini-batch."""
    experts = counts_LE.shape[1]
    share_LE = counts_LE / counts_LE.sum(-1, keepdim=True)
    # A single expert is always evenly loaded.
    entropy_L = torch.special.entr(share_LE).sum(-1) / math.log(experts) if experts > 1 else share_LE[:, 0]
    return Load(entropy_L, share_LE.amax(-1) * experts - 1, (counts_LE == 0).float().mean(-1))
