"""Probes: forwards of a few fixed sequences that measure how far routing moved, and its effect on the ratio.

Shapes: B sequences, T response positions, F positions fed, N response tokens, L MoE layers, K experts a token.
"""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.bench.training import routing_drift, token_metrics
from steadymoe.bench.training.columns import names
from steadymoe.bench.training.forward import PLAIN, Extras, Forward, Sequences, forward
from steadymoe.bench.training.sampling import Rollout, check_routes
from steadymoe.models.routing import routers
from steadymoe.models.selection import NO_ROUTE

REPLAY_KL = names("replay_kl", "replay_kl_free", "replay_kl_shifted")
EXPERT_CHANGE_PER_UPDATE, LOG_RATIO_MOMENT_UNCHANGED = names("expert_change_per_update", "log_ratio_moment_unchanged")
ROLLOUT_KL_K3, RELATIVE_STEP_OTHERS, ROUTING_SHARE = names("rollout_kl_k3", "relative_step_others", "routing_share")
LOG_RATIO_MOMENT_TOP, RELATIVE_STEP_ROUTERS = names("log_ratio_moment_top", "relative_step_routers")
LOG_RATIO_MOMENT_TOP_CHANGED, LOG_RATIO_MOMENT_PINNED = names("log_ratio_moment_top_changed", "log_ratio_moment_pinned")
LOG_RATIO_MOMENT_FREE, LOG_RATIO_COVARIANCE_ROUTING = names("log_ratio_moment_free", "log_ratio_covariance_routing")
LOG_RATIO_MOMENT_CHANGED, LOG_RATIO_MOMENT_ROUTING = names("log_ratio_moment_changed", "log_ratio_moment_routing")

# The tokens that moved most, of all: ``tail`` tells their part of the moment.
_TOP = 0.001


class Probe:
    """Fixed sequences under a model that changes. A dense model has nothing to measure."""

    def __init__(
        self,
        model: PreTrainedModel,
        sequences: Sequences,
        precision: str,
        extras: Extras = PLAIN,
        pinned_LBFK: Tensor | None = None,
    ) -> None:
        """``extras``: mask replay and temperature, as the ratio of the updates has them. ``pinned_LBFK``: what runs."""
        self._sequences, self._precision, self._extras = sequences, precision, extras
        self._pinned_LBFK = pinned_LBFK
        self._first = self._forward(model)

    def since_start(self, model: PreTrainedModel) -> routing_drift.Change | None:
        """Return the change of routing since construction; None for a dense model."""
        now = self._forward(model)
        if now is None or self._first is None:
            return None
        return routing_drift.change(_routes(self._first), _routes(now), self._sequences.response_mask_BT)

    @torch.no_grad()
    def _forward(self, model: PreTrainedModel, forced_LBFK: Tensor | None = None) -> Forward | None:
        if not routers(model):
            return None
        runs_LBFK = forced_LBFK if self._pinned_LBFK is None else self._pinned_LBFK
        now = forward(model, self._sequences, self._precision, self._extras, runs_LBFK)
        check_routes(now.routes_LBFK, self._sequences)
        return now


class UpdateProbe(Probe):
    """Measures after every update how far routing moved, and the effect of routing on the ratio since construction.

    Every sequence stands twice in a forward: once with free routing, once with its routes at construction forced. One
    forward of twice the rows costs less than two forwards.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sequences: Sequences,
        precision: str,
        extras: Extras = PLAIN,
        pinned_LBFK: Tensor | None = None,
    ) -> None:
        self._rows, device = len(sequences.tokens_BS), sequences.tokens_BS.device
        twice_B = torch.arange(self._rows, device=device).repeat(2)
        if extras.kept_BTV is not None:
            extras = replace(extras, kept_BTV=extras.kept_BTV[twice_B])
        pinned_LBFK = None if pinned_LBFK is None else pinned_LBFK[:, twice_B]
        super().__init__(model, sequences.rows(twice_B), precision, extras, pinned_LBFK)
        self._last = self._first
        self._before = [weight.detach().clone() for weight in _whole_weights(model)]

    @property
    def before_BT(self) -> Tensor | None:
        """The log-probabilities of the sequences at construction, with free routing; None for a dense model."""
        return None if self._first is None else self._first.logprobs_BT[: self._rows]

    def after_update(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return columns overall and by layer.

        Since the last call: change of routing, and the relative step of the routers and of the other weights. Since
        construction: ``attribution`` and ``tail``. A dense model has the relative step of its weights alone.
        """
        first, last, rows = self._first, self._last, self._rows
        if first is None or last is None:
            return self._relative_steps(model), {}
        forced_LBFK = _routes(first).clone()
        forced_LBFK[:, :rows] = NO_ROUTE
        now = self._forward(model, forced_LBFK)
        assert now is not None  # a model has routers or not
        self._last = now
        mask_BT = self._sequences.response_mask_BT[:rows]
        first_LBFK, last_LBFK, now_LBFK = (_routes(each)[:, :rows] for each in (first, last, now))
        moved = routing_drift.change(last_LBFK, now_LBFK, mask_BT)
        changed_N = routing_drift.any_layer(first_LBFK, now_LBFK, mask_BT)
        halves = (now.logprobs_BT - first.logprobs_BT).split(rows)
        free_N, pinned_N = (half_BT[mask_BT.bool()] for half_BT in halves)
        overall = {EXPERT_CHANGE_PER_UPDATE: moved.expert} | attribution(free_N, pinned_N, changed_N)
        overall |= tail(free_N, changed_N)
        overall |= self._relative_steps(model)
        return overall, {EXPERT_CHANGE_PER_UPDATE: moved.expert_L}

    @torch.no_grad()
    def _relative_steps(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the length of the step since the last call over that of the weights, of routers and of others."""
        of_routers = {id(weight) for router in routers(model) for weight in router.parameters()}
        squares: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
        for weight, before in zip(_whole_weights(model), self._before, strict=True):
            step, size = squares.setdefault(
                RELATIVE_STEP_ROUTERS if id(weight) in of_routers else RELATIVE_STEP_OTHERS, ([], [])
            )
            step.append((weight - before).square().sum())
            size.append(before.square().sum())
            before.copy_(weight)
        return {
            name: (torch.stack(step).sum() / torch.stack(size).sum()).sqrt() for name, (step, size) in squares.items()
        }


@torch.no_grad()
def replay_columns(
    model: PreTrainedModel,
    rollout: Rollout,
    replayed_BT: Tensor,
    free_BT: Tensor,
    precision: str,
    extras: Extras = PLAIN,
) -> dict[str, Tensor]:
    """Return columns that show whether replayed routes are those of the tokens that they are forced on.

    They compare sampler and trainer on the same responses: with the sampler's routes replayed, ``replayed_BT``, with
    the routers' own choice, ``free_BT``, and with the sampler's routes (and gates) moved by one token, in the direction
    that fits better. Free routes alone are no test: noisy routes can be further from the sampler's than shifted ones.
    """
    assert rollout.routes_LBFK is not None  # of a model with routers
    mask_BT, shifted = rollout.sequences.response_mask_BT, []

    def kl(logprobs_BT: Tensor) -> Tensor:
        return token_metrics.of_mismatch(rollout.logprobs_BT, logprobs_BT, mask_BT)[ROLLOUT_KL_K3]

    for by, emptied in ((1, 0), (-1, -1)):
        routes_LBFK = rollout.routes_LBFK.roll(by, 2)
        routes_LBFK[:, :, emptied] = NO_ROUTE
        gates_LBFK = None if rollout.gates_LBFK is None else rollout.gates_LBFK.roll(by, 2)
        moved = forward(model, rollout.sequences, precision, extras, routes_LBFK, gates_LBFK=gates_LBFK)
        shifted.append(kl(moved.logprobs_BT))
    return dict(zip(REPLAY_KL, (kl(replayed_BT), kl(free_BT), torch.stack(shifted).min()), strict=True))


def _routes(now: Forward) -> Tensor:
    assert now.routes_LBFK is not None
    return now.routes_LBFK


def _whole_weights(model: PreTrainedModel) -> list[Tensor]:
    """Return the weights; none of a sharded model, of whose weights a process has only its shards."""
    weights: list[Tensor] = list(model.parameters())
    return [] if any(hasattr(weight, "full_tensor") for weight in weights) else weights


def tail(log_ratio_N: Tensor, changed_N: Tensor) -> dict[str, Tensor]:
    """Return the share of Σ log_ratio² that lies in the 0.1 % of the tokens that moved most, at least one, as columns.

    ``changed_N`` (bool) marks tokens whose route changed. Both columns are absent if no log-ratio moved.
    """
    square_N = log_ratio_N.square()
    whole = square_N.sum()
    if not whole > 0:
        return {}
    top = square_N.topk(max(1, round(_TOP * len(square_N))))
    return {
        LOG_RATIO_MOMENT_TOP: top.values.sum() / whole,
        LOG_RATIO_MOMENT_TOP_CHANGED: (top.values * changed_N[top.indices]).sum() / whole,
    }


def attribution(free_N: Tensor, pinned_N: Tensor, changed_N: Tensor) -> dict[str, Tensor]:
    """Return the part of routing in the log-ratios of tokens since the old policy, as columns.

    ``free_N`` are log-ratios with the routers' own choice, ``pinned_N`` with the old routes forced, on the prompt too.
    ``changed_N`` marks tokens whose route differs in any layer. ``routing_share`` is negative if pinning makes the
    moment larger, absent if no log-ratio moved: E[free²] = E[pinned²] + 2 E[pinned·difference] + E[difference²].
    """
    difference_N = free_N - pinned_N
    columns = {
        LOG_RATIO_MOMENT_FREE: free_N.square().mean(),
        LOG_RATIO_MOMENT_PINNED: pinned_N.square().mean(),
        LOG_RATIO_MOMENT_ROUTING: difference_N.square().mean(),
        LOG_RATIO_COVARIANCE_ROUTING: (pinned_N * difference_N).mean(),
    }
    if columns[LOG_RATIO_MOMENT_FREE] > 0:
        columns[ROUTING_SHARE] = 1 - columns[LOG_RATIO_MOMENT_PINNED] / columns[LOG_RATIO_MOMENT_FREE]
    for name, chosen_N in ((LOG_RATIO_MOMENT_CHANGED, changed_N), (LOG_RATIO_MOMENT_UNCHANGED, ~changed_N)):
        if chosen_N.any():
            columns[name] = free_N[chosen_N].square().mean()
    return columns
