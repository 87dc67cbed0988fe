"""What the audited mini-batches look like to the losses: clips, ratios, routes, and where a loss puts its gradient.

The *gradient mass* of a token is the absolute slope of the loss with respect to the token's log-probability.

Shapes: B sequences of the rollout, M of a mini-batch, T response positions, N response tokens.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadymoe.bench.audit.gradients import Arm, Frozen, Slopes
from steadymoe.bench.measurement import routing_drift, token_metrics
from steadymoe.bench.statistics import estimates
from steadymoe.bench.statistics.estimates import POSITIVE, Estimate
from steadymoe.bench.training.forward import Forward
from steadymoe.bench.training.microbatches import MicroBatch
from steadymoe.bench.training.probes import attribution

# Quantities of the data, which no loss changes, have this in place of a loss's name.
ALL = "all"
_OF_DATA = ("token_ratio_mean", "token_ratio_max", "token_ratio_variance", "sequence_ratio_variance", "ess")
_OF_LOSS = ("clip_fraction", "clip_fraction_low", "clip_fraction_high", "correction_weight", "correction_rejected")
_MOMENTS = ("log_ratio_moment_free", "log_ratio_moment_pinned")
_NOT_SHARES = (*_OF_DATA[:-1], *_MOMENTS, "correction_weight", "pinned_share")
_DECILES = 10


class Tokens:
    """Gathers numbers of every mini-batch; ``estimates`` gives their means with intervals over mini-batches."""

    def __init__(self, frozen: Frozen, first: Arm, is_free: bool) -> None:
        """``first``: an arm for the forward with replayed routes; ``is_free``: whether routers choose themselves."""
        self._frozen, self._first, self._is_free = frozen, first, is_free
        self._tops: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._bottoms: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._decile_BT = deciles(frozen.old[first.label].logprobs_BT, frozen.rollout.sequences.response_mask_BT)

    @torch.no_grad()
    def __call__(self, number: int, part: MicroBatch, now: Forward, found: Mapping[str, Slopes]) -> None:
        """Take the numbers of one mini-batch."""
        mask_MT = self._frozen.rollout.sequences.response_mask_BT[part.rows_M]
        changed_N = None
        if self._first.label in found:  # one arm is enough for what no loss changes
            data = found[self._first.label]
            numbers = token_metrics.to_floats(token_metrics.of_update(data.batch, data.output)[0])
            self._mean(ALL, {name: numbers[name] for name in _OF_DATA}, 1)
        old_LBFK = self._frozen.old[self._first.label].routes_LBFK
        if now.routes_LBFK is not None and old_LBFK is not None:
            changed_N = routing_drift.any_layer(old_LBFK[:, part.rows_M], now.routes_LBFK, mask_MT)
            if self._first.label in found:
                self._routes(part, now, mask_MT, old_LBFK, changed_N)
        for label, each in found.items():
            numbers = token_metrics.to_floats(token_metrics.of_update(each.batch, each.output)[0])
            self._mean(label, {name: numbers[name] for name in _OF_LOSS if name in numbers}, int(mask_MT.sum()))
            mass_N = each.of_logprobs_MT[mask_MT.bool()].abs().double()
            self._mass(label, mass_N, changed_N, self._decile_BT[part.rows_M][mask_MT.bool()])

    def estimates(self) -> dict[tuple[str, str], Estimate]:
        """(loss, quantity) → the mean over mini-batches with its interval."""
        found = {}
        for key, tops in self._tops.items():
            bounds = POSITIVE if key[1] in _NOT_SHARES else (0.0, 1.0)
            found[key] = estimates.ratio_of_sums(tops, self._bottoms[key], bounds=bounds)
        pinned = found.pop((ALL, "pinned_share"), None)
        if pinned is not None:
            found[ALL, "routing_share"] = Estimate(1 - pinned.mean, 1 - pinned.high, 1 - pinned.low, pinned.n)
        return found

    def _mean(self, label: str, means: Mapping[str, float], weight: float) -> None:
        for name, mean in means.items():
            self._add(label, name, mean * weight, weight)

    def _add(self, label: str, name: str, top: float, bottom: float) -> None:
        self._tops[label, name].append(top)
        self._bottoms[label, name].append(bottom)

    def _mass(self, label: str, mass_N: Tensor, changed_N: Tensor | None, decile_N: Tensor) -> None:
        """Add a loss's gradient mass on tokens whose route changed, and by decile of the old probability."""
        whole = float(mass_N.sum())
        if changed_N is not None:
            self._add(label, "mass_on_changed_routes", float(mass_N[changed_N].sum()), whole)
        for decile in range(_DECILES):
            of_decile = float(mass_N[decile_N == decile].sum())
            self._add(label, f"mass_in_decile_{decile + 1}", of_decile, whole)

    def _routes(self, part: MicroBatch, now: Forward, mask_MT: Tensor, old_LBFK: Tensor, changed_N: Tensor) -> None:
        """Add how far routes moved and, with free routers, the moments of the log-ratio with and without replay."""
        assert now.routes_LBFK is not None  # of a model with routers
        moved = routing_drift.change(old_LBFK[:, part.rows_M], now.routes_LBFK, mask_MT)
        means = {"expert_change": moved.expert, "set_change": moved.set, "token_change": moved.any_layer}
        self._mean(ALL, token_metrics.to_floats(means), int(mask_MT.sum()))
        if not self._is_free:
            return
        first, rollout = self._first, self._frozen.rollout
        pinned = first.learner.forwards(first.trainer.model, rollout, part, old_LBFK)
        before_N = self._frozen.old[first.label].logprobs_BT[part.rows_M][mask_MT.bool()]
        free_N, pinned_N = (each.logprobs_BT[mask_MT.bool()] - before_N for each in (now, pinned))
        moments: dict[str, Any] = token_metrics.to_floats(attribution(free_N, pinned_N, changed_N))
        tokens = len(free_N)
        free, pinned_moment = (moments[name] * tokens for name in _MOMENTS)
        self._add(ALL, _MOMENTS[0], free, tokens)
        self._add(ALL, _MOMENTS[1], pinned_moment, tokens)
        self._add(ALL, "pinned_share", pinned_moment, free)


def deciles(logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The tenth of all response tokens, from 0 (least likely), that each token's probability lies in, (B, T)."""
    values_N = logprobs_BT[mask_BT.bool()]
    order_N = values_N.argsort(stable=True)
    rank_N = torch.empty_like(order_N)
    rank_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    decile_BT = torch.zeros_like(mask_BT, dtype=torch.long)
    decile_BT[mask_BT.bool()] = rank_N * _DECILES // max(len(order_N), 1)
    return decile_BT
