"""How far routing moved: the same tokens' experts under two policies, engines or moments, and the load.

Shapes: L MoE layers, B sequences, T response positions, F positions fed, K experts a token, E experts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Change:
    """Differences between two recordings of the routes of the same response tokens."""

    expert_L: Tensor
    """1 − mean |S_old ∩ S_new| / K over response tokens, of each layer."""
    set_L: Tensor
    """Share of response tokens whose set of experts differs, of each layer."""
    any_layer: Tensor
    """Share of response tokens whose set differs in at least one layer."""

    @property
    def expert(self) -> Tensor:
        """Expert-change rate over all layers and response tokens."""
        return self.expert_L.mean()

    @property
    def set(self) -> Tensor:
        """Set-change rate over all layers and response tokens."""
        return self.set_L.mean()


def change(old_LBFK: Tensor, new_LBFK: Tensor, mask_BT: Tensor) -> Change:
    """Compare two recordings on the response tokens that ``mask_BT`` marks.

    The route of a response token is that of the position that predicts it, the one before it: there alone
    both the sampler and the training forward have one for every response token. Raises ValueError where
    the recordings are not of the same layers, positions and experts per token.
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
    )


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
    """How evenly each layer's experts are used."""

    entropy_L: Tensor
    """−Σ_e f_e log f_e / log E: 1 when all experts are used alike."""
    max_violation_L: Tensor
    """max_e f_e · E − 1: 0 when all experts are used alike."""


def load(routes_LBFK: Tensor, mask_BT: Tensor, experts: int) -> Load:
    """The load of ``experts`` experts by the response tokens that ``mask_BT`` marks."""
    chosen_LX = of_response_tokens(routes_LBFK, mask_BT).flatten(1).long()
    counts_LE = torch.zeros(chosen_LX.shape[0], experts, device=chosen_LX.device)
    counts_LE.scatter_add_(1, chosen_LX, torch.ones_like(chosen_LX, dtype=counts_LE.dtype))
    share_LE = counts_LE / chosen_LX.shape[1]
    # A single expert is always evenly loaded.
    entropy_L = torch.special.entr(share_LE).sum(-1) / math.log(experts) if experts > 1 else share_LE[:, 0]
    return Load(entropy_L, share_LE.amax(-1) * experts - 1)
