"""How a router selects its experts: seen from outside, and decided from outside.

Shapes (docs/metrics.md): N tokens of a forward, K experts a token, E experts, H hidden.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# The route of a position that was never fed to the model: padding, and positions after the end token.
NO_ROUTE = -1


class Choice(NamedTuple):
    """What decides the experts of one router's call besides the router's own logits; by default nothing."""

    forced_NK: Tensor | None = None
    """Experts that run in place of the router's own choice; ``NO_ROUTE`` leaves the choice to the router."""
    gates_NK: Tensor | None = None
    """Gate weights of the forced experts, constants in place of the router's own; None for the router's own."""
    score_share: float | None = None
    """A forced expert runs only where its score is at least this share of the weakest that the router chooses."""
    head_HE: Tensor | None = None
    """The router chooses by logits + input · head (PR², 2606.00395, eq. 4-6)."""
    predicted_N: Tensor | None = None
    """Tokens whose choice the head moves; None for all."""
    keeps_gates: bool = False
    """Whether ``Seen`` gets the gate weights."""


class Seen(NamedTuple):
    """What one call of a router saw and chose."""

    executed_NK: Tensor
    live_NK: Tensor
    """The same tensor as ``executed_NK`` unless experts were forced."""
    logits_NE: Tensor
    inputs_NH: Tensor
    gates_NK: Tensor | None
    """The gate weights of the executed experts, without gradient; None unless ``Choice.keeps_gates``."""


def choose(
    router: nn.Module, forward: Callable[..., Any], choice: Choice, hidden: Tensor, *args: Any, **kwargs: Any
) -> tuple[Any, Seen]:
    """Run the router's ``forward`` with the experts of ``choice``; return its output and what the router saw.

    The ``live`` choice comes from the router's unchanged logits, and so do gate weights unless ``choice`` has gates.
    Raises RuntimeError unless the router selects its experts by one ``torch.topk``.
    """
    inputs_NH = hidden.detach().reshape(-1, hidden.shape[-1])
    forced_NK = choice.forced_NK
    if choice.head_HE is not None:
        moved_NE = (inputs_NH @ choice.head_HE).detach()
        with torch.no_grad(), _Selection(experts_of(router)) as predicted:
            with_logits(router, forward, lambda logits: logits + moved_NE.view_as(logits), hidden, *args, **kwargs)
        forced_NK = predicted.live[0]
        if choice.predicted_N is not None:
            forced_NK = forced_NK.masked_fill(~choice.predicted_N[:, None], NO_ROUTE)
    # A router returns (logits, gate weights, indices): see transformers' XTopKRouter classes.
    if forced_NK is not None and choice.score_share is not None:
        with torch.no_grad():
            logits_NE, _, own_NK = forward(hidden, *args, **kwargs)
        forced_NK = filtered(forced_NK, own_NK, logits_NE.float().softmax(-1), choice.score_share)
    if forced_NK is None:
        logits_NE, gates_NK, indices_NK = forward(hidden, *args, **kwargs)
        live_NK = indices_NK
    else:
        with _Selection(experts_of(router), forced_NK) as selection:
            logits_NE, gates_NK, indices_NK = forward(hidden, *args, **kwargs)
        if len(selection.live) != 1:
            raise RuntimeError(
                f"a router ({type(router).__name__}) selected its experts {len(selection.live)} times in one call; "
                "replay needs exactly one torch.topk"
            )
        live_NK = selection.live[0]
        if choice.gates_NK is not None:
            gates_NK = torch.where(forced_NK == NO_ROUTE, gates_NK, choice.gates_NK.to(gates_NK.dtype))
    kept_NK = gates_NK.detach() if choice.keeps_gates else None
    return (logits_NE, gates_NK, indices_NK), Seen(indices_NK, live_NK, logits_NE, inputs_NH, kept_NK)


def filtered(forced_NK: Tensor, own_NK: Tensor, scores_NE: Tensor, share: float) -> Tensor:
    """Return the forced experts whose score is at least ``share`` × that of the router's weakest, (N, K).

    In place of each other one stands the first of the router's ``own_NK``, in their order, that does not run yet
    (prime-rl #2703). ``NO_ROUTE`` stays.
    """
    weakest_N1 = scores_NE.gather(-1, own_NK).amin(-1, keepdim=True)
    keeps_NK = scores_NE.gather(-1, forced_NK.clamp(min=0)) >= share * weakest_N1
    runs_NK = ((own_NK[:, :, None] == forced_NK[:, None]) & keeps_NK[:, None]).any(-1)
    spare_NK = own_NK.gather(-1, runs_NK.int().argsort(dim=-1, stable=True))
    place_NK = ((~keeps_NK).cumsum(-1) - 1).clamp(min=0)
    return torch.where(keeps_NK | (forced_NK == NO_ROUTE), forced_NK, spare_NK.gather(-1, place_NK))


def scores_of_all_experts(func: Callable[..., Any], args: Any, kwargs: Any, experts: int) -> Tensor | None:
    """Return the scores, (N, E), if a call is the ``torch.topk`` by which a router chooses its experts; else None.

    DeepSeek's routers also take a top-k over groups of experts. The top-k over all experts has two-dimensional scores.
    """
    if func not in (torch.topk, torch.Tensor.topk):
        return None
    scores: Tensor = args[0] if args else kwargs["input"]
    return scores if scores.dim() == 2 and scores.shape[-1] == experts else None


class _Selection(TorchFunctionMode):
    """Records the choice of a router's one ``torch.topk`` over all experts, and puts ``forced_NK`` in its place."""

    def __init__(self, experts: int, forced_NK: Tensor | None = None) -> None:
        super().__init__()
        self._experts, self._forced_NK = experts, forced_NK
        self.live: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        scores = scores_of_all_experts(func, args, kwargs, self._experts)
        if scores is None:
            return result
        self.live.append(result.indices.detach())
        if self._forced_NK is None:
            return result
        if self._forced_NK.shape != result.indices.shape:
            raise ValueError(
                f"routes of {tuple(self._forced_NK.shape)} tokens and experts for a router that chose "
                f"{tuple(result.indices.shape)}"
            )
        indices_NK = torch.where(self._forced_NK == NO_ROUTE, result.indices, self._forced_NK)
        return torch.return_types.topk((scores.gather(-1, indices_NK), indices_NK))


def with_logits(
    router: nn.Module, forward: Callable[..., Any], change: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Run a router's ``forward`` with ``change`` applied to its logits (N, E), before the rest of the router.

    Raises RuntimeError unless the router computed its logits by exactly one linear map to E features.
    """
    with _Logits(experts_of(router), change) as logits:
        output = forward(*args, **kwargs)
    if logits.changed != 1:
        raise RuntimeError(f"a router computed its logits {logits.changed} times in one call; expected one linear map")
    return output


class _Logits(TorchFunctionMode):
    """Changes the result of the one linear map to E features inside a router, and counts the changes."""

    def __init__(self, experts: int, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._experts, self._change, self.changed = experts, change, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is nn.functional.linear and result.shape[-1] == self._experts:
            self.changed += 1
            return self._change(result)
        return result


def experts_of(router: nn.Module) -> int:
    """E, the number of experts that a router chooses from."""
    return int(router.get_parameter("weight").shape[0])
