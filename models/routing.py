"""Routes of a forward (the experts that routers chose), recorded and replayed at the routers of any MoE model.

Shapes (docs/metrics.md): L MoE layers, N tokens of a forward (batch × positions, flattened), K experts a token,
E experts, H hidden.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from steadymoe.models.selection import Choice, Seen, choose, experts_of


def routers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the L router modules in the order of their layers; empty for a dense model.

    transformers itself declares the class of routers, as the source of a model's output ``router_logits``.
    """
    recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    return [module for module in model.modules() if recorder and isinstance(module, recorder.target_class)]


@dataclass(frozen=True)
class Routed:
    """The routes, logits and inputs of the routers in one forward."""

    executed_LNK: Tensor
    """The experts that ran, int16: the router's own choice, or the forced choice."""
    live_LNK: Tensor
    """The router's own choice, int16, also under force; the same tensor as ``executed_LNK`` without force."""
    logits_LNE: list[Tensor]
    """The logits of each layer's router, (N, E), with gradient."""
    inputs_LNH: list[Tensor]
    """The input of each layer's router, (N, H), without gradient."""
    gates_LNK: Tensor | None = None
    """The gate weights of the executed experts, without gradient; None unless the recorder keeps them."""


class RouteRecorder:
    """Records the routers of a model while the ``with`` block is open, and forces their choice on request.

    Call ``take()`` after each forward of the model; it raises an error if a router did not run exactly once. Routes
    alone force only the selection: a router computes its gate weights from its live logits, so it learns under replay
    as without. Forced gates are constants and give a router no gradient. Both are kept by layer, so a layer that runs
    again after ``take()`` is forced again (gradient checkpointing runs it in the backward pass, with the block still
    open). With ``watch=False`` the recorder does nothing, as for a dense model; with ``gates`` it records gate weights.
    """

    def __init__(self, model: PreTrainedModel, watch: bool = True, gates: bool = False) -> None:
        self._keeps_gates = gates
        self._routers = routers(model) if watch else []
        self._calls: list[list[Seen]] = [[] for _ in self._routers]
        self._forced: list[Tensor] | None = None
        self._gates_LNK: Tensor | None = None
        self._score_share: float | None = None
        self._heads: Sequence[Tensor] | None = None
        self._predicted_N: Tensor | None = None
        self._before: list[Any] = []

    @property
    def layers(self) -> int:
        """L, the number of MoE layers; 0 for a dense model."""
        return len(self._routers)

    def force(
        self, routes_LNK: Tensor | None, gates_LNK: Tensor | None = None, score_share: float | None = None
    ) -> None:
        """Force these routes from now on, with these gate weights if given (else the router's own).

        ``NO_ROUTE`` leaves choice and gates to the router; None leaves every choice to it. ``score_share``: ``Choice``.
        Raises ValueError for another number of layers, or for an expert that the model does not have.
        """
        self._gates_LNK, self._score_share = gates_LNK, score_share
        if routes_LNK is None:
            self._forced = None
            return
        if len(routes_LNK) != self.layers:
            raise ValueError(f"routes of {len(routes_LNK)} layers for a model with {self.layers} MoE layers")
        experts = [experts_of(router) for router in self._routers]
        if any(layer_NK.max() >= count for layer_NK, count in zip(routes_LNK, experts, strict=True)):
            raise ValueError(f"a route names expert {int(routes_LNK.max())}; the model has {min(experts)}")
        self._forced = list(routes_LNK.long())

    def predict(self, heads_LHE: Sequence[Tensor] | None, mask_N: Tensor | None = None) -> None:
        """From now on the routers choose by logits + input · head (``Choice.head_HE``); None ends this.

        Tokens with a false ``mask_N`` keep the router's own choice. Raises ValueError for another number of layers.
        """
        if heads_LHE is not None and len(heads_LHE) != self.layers:
            raise ValueError(f"predictors of {len(heads_LHE)} layers for a model with {self.layers} MoE layers")
        self._heads, self._predicted_N = heads_LHE, mask_N

    def __enter__(self) -> "RouteRecorder":
        for layer, router in enumerate(self._routers):
            self._before.append(router.__dict__.get("forward"))
            # This replaces the method; a hook cannot reach the selection inside it.
            router.forward = partial(self._run, layer, router.forward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for router, before, calls in zip(self._routers, self._before, self._calls, strict=True):
            calls.clear()
            del router.forward  # the method of the class is visible again; an earlier replacement is restored below
            if before is not None:
                router.forward = before
        self._before.clear()
        self._forced = self._gates_LNK = self._heads = None

    def _run(self, layer: int, forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, seen = choose(self._routers[layer], forward, self.choice(layer), hidden, *args, **kwargs)
        self.saw(layer, seen)
        return output

    def choice(self, layer: int) -> Choice:
        """Return what decides the experts of an MoE layer now."""
        return Choice(
            forced_NK=None if self._forced is None else self._forced[layer],
            gates_NK=None if self._gates_LNK is None else self._gates_LNK[layer],
            score_share=self._score_share,
            head_HE=None if self._heads is None else self._heads[layer],
            predicted_N=self._predicted_N,
            keeps_gates=self._keeps_gates,
        )

    def saw(self, layer: int, seen: Seen) -> None:
        """Keep what the router of an MoE layer saw, until ``take``."""
        self._calls[layer].append(seen)

    def take(self, tokens: int) -> Routed | None:
        """Return the routes of the one forward since the last call; None for a dense model.

        ``tokens`` is N, the number of positions fed to the forward. Raises RuntimeError if a router did not run exactly
        once on exactly N tokens.
        """
        if not self._routers:
            return None
        for layer, calls in enumerate(self._calls):
            if len(calls) != 1:
                raise RuntimeError(f"router of MoE layer {layer} ran {len(calls)} times in one forward")
            if len(calls[0].live_NK) != tokens:
                raise RuntimeError(
                    f"router of MoE layer {layer} saw {len(calls[0].live_NK)} tokens; the forward had {tokens}"
                )
        seen = [calls.pop() for calls in self._calls]
        executed_LNK = _stacked(each.executed_NK for each in seen)
        free = all(each.executed_NK is each.live_NK for each in seen)
        live_LNK = executed_LNK if free else _stacked(each.live_NK for each in seen)
        gates = [each.gates_NK for each in seen if each.gates_NK is not None]
        logits_LNE, inputs_LNH = [each.logits_NE for each in seen], [each.inputs_NH for each in seen]
        return Routed(executed_LNK, live_LNK, logits_LNE, inputs_LNH, torch.stack(gates) if gates else None)


def _stacked(indices: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(indices)).to(torch.int16)


def log_softmax(logits_XE: Tensor) -> Tensor:
    """Return the log-softmax of the routers over all experts (the last dimension), in fp32; same shape.

    Computed over the first dimension it takes 0.06 ms on one core, and over so short a last one 0.30 ms (2560 × 8).
    """
    return logits_XE.float().movedim(-1, 0).contiguous().log_softmax(0).movedim(0, -1).contiguous()


def z_loss(logits_LNE: list[Tensor], mask_N: Tensor) -> Tensor:
    """Mean over layers and counted tokens of (log Σ_e e^logit)², a scalar (ST-MoE, 2202.08906, eq. 5)."""
    keep_N = mask_N.bool()
    return torch.stack([logits_NE[keep_N].float().logsumexp(-1).square().mean() for logits_NE in logits_LNE]).mean()


def load_balancing_loss(
    logits_LNE: list[Tensor], indices_LNK: Tensor, mask_N: Tensor, per_layer: bool = False
) -> Tensor:
    """E · Σ_e f_e P_e, a scalar: over the tokens of all layers together, or the mean of the layers' own.

    f_e is the number of choices of expert e per token (all f_e sum to K), P_e the mean router probability of expert e.
    A perfectly even load gives K. ``per_layer`` is Switch Transformer's loss (2101.03961, eq. 4), averaged over layers.
    Pooled, as in transformers' ``load_balancing_loss_func``, layers that collapse on different experts look even.
    """
    # Only counted tokens: the logits of padding may be anything, and its routes are NO_ROUTE.
    keep_N = mask_N.bool()
    probs_LNE = torch.stack([logits_NE[keep_N] for logits_NE in logits_LNE]).float().softmax(-1)
    experts = probs_LNE.shape[-1]
    chosen_LNE = nn.functional.one_hot(indices_LNK[:, keep_N].long(), experts).sum(-2)
    over = (1,) if per_layer else (0, 1)
    return experts * (chosen_LNE.to(probs_LNE.dtype).mean(over) * probs_LNE.mean(over)).sum(-1).mean()
