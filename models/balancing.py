"""Bias balancing: load balancing without an auxiliary loss (2408.15664; DeepSeek-V3, 2412.19437, section 2.1.2).

    experts chosen by s_e + b_e,   gates from s_e alone,   after each update b_e += speed · sign(mean load − load_e)

The bias b is a buffer of each router: no optimizer moves it, and checkpoints and copies of the model have it. Where the
family's routers have one (DeepSeek-V3, GLM-4-MoE), that is it. Other routers get one, added to the scores that
``torch.topk`` chooses by: probabilities in most families, logits in GraniteMoE and GPT-OSS.

Shapes (docs/metrics.md): L MoE layers, B sequences, F positions fed, K experts a token, N tokens of a forward, E
experts.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from steadymoe.models.routing import routers
from steadymoe.models.selection import NO_ROUTE, experts_of, scores_of_all_experts

# The name of the buffer in transformers' families.
BIAS = "e_score_correction_bias"


def install(model: PreTrainedModel) -> None:
    """Add a bias of 0 to every router without a bias of its own."""
    router: Any
    for router in routers(model):
        if not hasattr(router, BIAS):
            router.register_buffer(BIAS, torch.zeros(experts_of(router), device=router.weight.device))
            router.__class__ = type(type(router).__name__, (_Biased, type(router)), {})


def biases(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the routers' biases by their names in the model; empty without balancing."""
    return {name: value for name, value in model.named_buffers() if name.endswith(f".{BIAS}")}


@torch.no_grad()
def balance(model: PreTrainedModel, routes_LBFK: Tensor, speed: float) -> None:
    """Move the bias of every router by ``speed``, towards an even load of its experts.

    The load counts the routers' own choices, ``routes_LBFK``, of all tokens of a mini-batch. Counts are whole numbers,
    so the order of the tokens and the split into micro-batches change no bit.
    """
    router: Any
    for router, routes_BFK in zip(routers(model), routes_LBFK, strict=True):
        experts = experts_of(router)
        load_E = routes_BFK[routes_BFK != NO_ROUTE].long().bincount(minlength=experts)
        bias_E = getattr(router, BIAS)
        bias_E += speed * (load_E.sum() - experts * load_E).sign().to(bias_E.dtype)


class _Biased(nn.Module):
    """A mix-in for the class of a router: it chooses by its scores plus its bias."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _BiasedSelection(experts_of(self), getattr(self, BIAS)):
            return super().forward(hidden, *args, **kwargs)


class _BiasedSelection(TorchFunctionMode):
    """Adds a bias to the scores that a router's one ``torch.topk`` chooses by, and to none that it returns.

    A mode around this one (``selection.choose``) sees the biased choice, and can replace it.
    """

    def __init__(self, experts: int, bias_E: Tensor) -> None:
        super().__init__()
        self._experts, self._bias_E = experts, bias_E

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        scores_NE = scores_of_all_experts(func, args, kwargs, self._experts)
        if scores_NE is None:
            return func(*args, **kwargs)
        biased_NE = scores_NE + self._bias_E
        result = func(biased_NE, *args[1:], **{key: value for key, value in kwargs.items() if key != "input"})
        return torch.return_types.topk((scores_NE.gather(-1, result.indices), result.indices))
