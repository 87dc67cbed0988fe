"""A few sequences that are looked at again and again: how far routing moved, and what it does to the ratio.

Shapes: B sequences, T response positions, F positions fed, N response tokens, L MoE layers, K experts a token.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.bench import drift
from steadymoe.bench.policy import Forward, Sequences, forward
from steadymoe.bench.rollout import check_routes
from steadymoe.models.routing import routers


class Probe:
    """Fixed sequences under a model that changes; measures nothing of a dense model."""

    def __init__(self, model: PreTrainedModel, sequences: Sequences, precision: str) -> None:
        self._sequences, self._precision = sequences, precision
        self._first = self._last = self._forward(model)

    def since_start(self, model: PreTrainedModel) -> drift.Change | None:
        """Routing now against that at construction."""
        return self._change(self._first, self._forward(model))

    def after_update(self, model: PreTrainedModel) -> tuple[drift.Change, dict[str, Tensor]] | None:
        """Routing now against that at the last call, and the ``attribution`` of the ratio since construction."""
        now, before = self._forward(model), self._last
        moved = self._change(before, now)
        pinned = None if self._first is None else self._forward(model, self._first.routes_LBFK)
        if moved is None or now is None or pinned is None or self._first is None:
            return None
        self._last = now
        mask_BT = self._sequences.response_mask_BT.bool()
        first_N = self._first.logprobs_BT[mask_BT]
        free_N, pinned_N = now.logprobs_BT[mask_BT] - first_N, pinned.logprobs_BT[mask_BT] - first_N
        return moved, attribution(free_N, pinned_N, self._changed(self._first, now))

    def _change(self, before: Forward | None, now: Forward | None) -> drift.Change | None:
        if before is None or now is None or before.routes_LBFK is None or now.routes_LBFK is None:
            return None
        return drift.change(before.routes_LBFK, now.routes_LBFK, self._sequences.response_mask_BT)

    def _changed(self, before: Forward, now: Forward) -> Tensor:
        """Which response tokens have another route in any layer, (N,) bool."""
        assert before.routes_LBFK is not None  # of a model with routers
        assert now.routes_LBFK is not None
        return drift.any_layer(before.routes_LBFK, now.routes_LBFK, self._sequences.response_mask_BT)

    @torch.no_grad()
    def _forward(self, model: PreTrainedModel, forced_LBFK: Tensor | None = None) -> Forward | None:
        if not routers(model):
            return None
        found = forward(model, self._sequences, self._precision, forced_LBFK=forced_LBFK)
        check_routes(found.routes_LBFK, self._sequences)
        return found


def attribution(free_N: Tensor, pinned_N: Tensor, changed_N: Tensor) -> dict[str, Tensor]:
    """What routing contributes to the log-ratio of tokens since the old policy.

    ``free_N`` are log-ratios with the router's own choice, ``pinned_N`` with the old routes forced, prompt
    included; ``changed_N`` marks tokens whose route differs in any layer. ``routing_share`` is
    1 − E[pinned²]/E[free²], negative where pinning makes it larger; absent where nothing moved. The second
    moment of the difference and its covariance with the pinned part say how the share comes about:
    E[free²] = E[pinned²] + 2 E[pinned·difference] + E[difference²].
    """
    difference_N = free_N - pinned_N
    columns = {
        "log_ratio_moment_free": free_N.square().mean(),
        "log_ratio_moment_pinned": pinned_N.square().mean(),
        "log_ratio_moment_routing": difference_N.square().mean(),
        "log_ratio_covariance_routing": (pinned_N * difference_N).mean(),
    }
    if columns["log_ratio_moment_free"] > 0:
        columns["routing_share"] = 1 - columns["log_ratio_moment_pinned"] / columns["log_ratio_moment_free"]
    for name, chosen_N in (("changed", changed_N), ("unchanged", ~changed_N)):
        if chosen_N.any():
            columns[f"log_ratio_moment_{name}"] = free_N[chosen_N].square().mean()
    return columns
