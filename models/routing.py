"""Which experts a forward chose, read from the router modules of any transformers MoE model.

Shapes: L MoE layers, N tokens of a forward (batch × positions, flattened), K experts a token, E experts.
"""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# In place of a route where a position was never fed to the model: padding, and what follows the end token.
NO_ROUTE = -1


def routers(model: PreTrainedModel) -> list[nn.Module]:
    """The router modules in the order of their layers; empty for a dense model.

    transformers declares them itself, as the source of a model's ``router_logits`` output.
    """
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits")
    if recorder is None:
        return []
    cls = recorder.target_class
    return [module for module in model.modules() if isinstance(module, cls)]


class RouteRecorder:
    """Records what every router does while the ``with`` block is open.

    One model forward, then ``take()``: routers that ran not at all or twice are an error, not silence.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._routers = routers(model)
        self._calls: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._routers]
        self._hooks: list[Any] = []

    @property
    def layers(self) -> int:
        """L, the number of MoE layers; 0 for a dense model."""
        return len(self._routers)

    def __enter__(self) -> "RouteRecorder":
        for calls, router in zip(self._calls, self._routers, strict=True):
            # A router returns (logits, gate weights, indices): see transformers' XTopKRouter classes.
            self._hooks.append(
                router.register_forward_hook(
                    lambda module, args, output, calls=calls: calls.append((output[0], output[2]))
                )
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for calls in self._calls:
            calls.clear()

    def take(self, tokens: int) -> tuple[Tensor, list[Tensor]] | None:
        """The indices (L, N, K; int16) and the logits (L times (N, E)) of the one forward since the last call.

        ``tokens`` is N, the number of positions that the forward was given. None for a dense model.
        Raises RuntimeError if a router did not run exactly once on exactly N tokens.
        """
        if not self._routers:
            return None
        for layer, calls in enumerate(self._calls):
            if len(calls) != 1:
                raise RuntimeError(f"router of MoE layer {layer} ran {len(calls)} times in one forward")
            if calls[0][1].shape[0] != tokens:
                raise RuntimeError(
                    f"router of MoE layer {layer} saw {calls[0][1].shape[0]} tokens; the forward had {tokens}"
                )
        logits_LNE = [calls[0][0] for calls in self._calls]
        indices_LNK = torch.stack([calls[0][1] for calls in self._calls]).to(torch.int16)
        for calls in self._calls:
            calls.clear()
        return indices_LNK, logits_LNE


@torch.no_grad()
def chosen_logprobs(logits_LNE: list[Tensor], indices_LNK: Tensor) -> Tensor:
    """log of each router's softmax for given experts, (L, N, K); for ``NO_ROUTE`` the number means nothing."""
    experts_LNK = indices_LNK.long().clamp(min=0)
    return torch.stack(
        [
            logits.float().log_softmax(-1).gather(-1, chosen)
            for logits, chosen in zip(logits_LNE, experts_LNK, strict=True)
        ]
    )


def load_balancing_loss(logits_LNE: list[Tensor], indices_LNK: Tensor, mask_N: Tensor) -> Tensor:
    """E · Σ_e f_e P_e over the tokens of all layers together, a scalar (Switch Transformer, 2101.03961, eq. 4).

    f_e is the number of choices of expert e per token (they sum to K), P_e its mean router probability;
    a perfectly even load gives K. The convention is that of transformers' ``load_balancing_loss_func``.
    """
    # Only the tokens that count: what a router says of padding may be anything, its routes NO_ROUTE.
    keep_N = mask_N.bool()
    probs_LNE = torch.stack([logits_NE[keep_N] for logits_NE in logits_LNE]).float().softmax(-1)
    experts = probs_LNE.shape[-1]
    chosen_LNE = nn.functional.one_hot(indices_LNK[:, keep_N].long(), experts).sum(-2)
    share_E = chosen_LNE.to(probs_LNE.dtype).mean((0, 1))
    return experts * (share_E * probs_LNE.mean((0, 1))).sum()
