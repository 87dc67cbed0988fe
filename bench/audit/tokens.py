"""Per-token numbers of the audited mini-batches: clips, ratios, routes, and where a loss puts its gradient.

The *gradient mass* of a token is the absolute slope of the loss with respect to the token's log-probability.

Shapes: L MoE layers, B sequences of the rollout, F positions fed, K experts a token, M rows of a mini-batch,
T response positions, N response tokens.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from steadymoe.bench.audit.gradients import Slopes
from steadymoe.bench.audit.losses import Loss
from steadymoe.bench.audit.rollouts import Frozen
from steadymoe.bench.statistics import estimates
from steadymoe.bench.statistics.estimates import POSITIVE, Estimate
from steadymoe.bench.training import routing_drift, token_metrics
from steadymoe.bench.training.forward import Forward
from steadymoe.bench.training.microbatches import MicroBatch

# The label of quantities that no loss changes.
ALL = "all"
_OF_DATA = ("token_ratio_mean", "token_ratio_max", "token_ratio_variance", "sequence_ratio_variance", "ess")
_OF_LOSS = ("clip_fraction", "clip_fraction_low", "clip_fraction_high", "correction_weight", "correction_rejected")
_MOMENTS = ("log_ratio_moment_free", "log_ratio_moment_pinned")
_NOT_SHARES = {*_OF_DATA, *_MOMENTS, "correction_weight", "pinned_share"} - {"ess"}
_DECILES = 10


class Tokens:
    """Collects numbers of every mini-batch; ``estimates`` returns their means with intervals over mini-batches."""

    def __init__(self, frozen: Frozen, first: Loss, is_free: bool) -> None:
        """``first``: a loss for the forward with replayed routes; ``is_free``: whether routes are free."""
        self._frozen, self._first, self._is_free = frozen, first, is_free
        self._parts: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self._old = frozen.old[first.label]
        self._decile_BT = deciles(self._old.logprobs_BT, frozen.rollout.sequences.response_mask_BT)

    @torch.no_grad()
    def __call__(self, part: MicroBatch, now: Forward, slopes: Mapping[str, Slopes]) -> None:
        """Add the numbers of one mini-batch."""
        mask_MT = self._frozen.rollout.sequences.response_mask_BT[part.rows_M]
        mask_bool_MT, tokens = mask_MT.bool(), int(mask_MT.sum())
        numbers = {
            label: token_metrics.to_floats(token_metrics.of_update(each.batch, each.output)[0])
            for label, each in slopes.items()
        }
        is_first = self._first.label in slopes  # one loss is enough for what no loss changes
        if is_first:
            for name in _OF_DATA:
                self._add(ALL, name, numbers[self._first.label][name], 1)
        changed_N = None
        if now.routes_LBFK is not None and self._old.routes_LBFK is not None:
            old_LMFK = self._old.routes_LBFK[:, part.rows_M]
            changed_N = routing_drift.any_layer(old_LMFK, now.routes_LBFK, mask_MT)
            if is_first:
                moved = routing_drift.change(old_LMFK, now.routes_LBFK, mask_MT)
                means = {"expert_change": moved.expert, "set_change": moved.set, "token_change": moved.any_layer}
                for name, mean in token_metrics.to_floats(means).items():
                    self._add(ALL, name, mean * tokens, tokens)
            if is_first and self._is_free:
                self._add_moments(part, now, mask_bool_MT)
        decile_N = self._decile_BT[part.rows_M][mask_bool_MT]
        for label, each in slopes.items():
            for name in (name for name in _OF_LOSS if name in numbers[label]):
                self._add(label, name, numbers[label][name] * tokens, tokens)
            mass_N = each.by_logprobs_MT[mask_bool_MT].abs().double()
            mass = float(mass_N.sum())
            if changed_N is not None:
                self._add(label, "mass_on_changed_routes", float(mass_N[changed_N].sum()), mass)
            for decile in range(_DECILES):
                self._add(label, f"mass_in_decile_{decile + 1}", float(mass_N[decile_N == decile].sum()), mass)

    def estimates(self) -> dict[tuple[str, str], Estimate]:
        """Return (loss, quantity) → the mean over mini-batches with its interval."""
        means = {}
        for key, parts in self._parts.items():
            bounds = POSITIVE if key[1] in _NOT_SHARES else (0.0, 1.0)
            tops, bottoms = zip(*parts, strict=True)
            means[key] = estimates.ratio_of_sums(tops, bottoms, bounds)
        pinned = means.pop((ALL, "pinned_share"), None)
        if pinned is not None:
            means[ALL, "routing_share"] = Estimate(1 - pinned.mean, 1 - pinned.high, 1 - pinned.low, pinned.n)
        return means

    def _add(self, label: str, name: str, top: float, bottom: float) -> None:
        self._parts[label, name].append((top, bottom))

    def _add_moments(self, part: MicroBatch, now: Forward, mask_MT: Tensor) -> None:
        """Add the second moments of the log-ratio with free and with replayed routes."""
        model, rollout = self._first.trainer.model, self._frozen.rollout
        pinned = self._first.learner.forwards(model, rollout, part, self._old.routes_LBFK)
        before_N, tokens = self._old.logprobs_BT[part.rows_M][mask_MT], int(mask_MT.sum())
        free_sum, pinned_sum = (
            float((forward.logprobs_BT[mask_MT] - before_N).square().mean()) * tokens for forward in (now, pinned)
        )
        for name, moment in zip(_MOMENTS, (free_sum, pinned_sum), strict=True):
            self._add(ALL, name, moment, tokens)
        self._add(ALL, "pinned_share", pinned_sum, free_sum)


def deciles(logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the tenth of all response tokens, 0 for the least likely, that each token lies in, (B, T)."""
    values_N = logprobs_BT[mask_BT.bool()]
    order_N = values_N.argsort(stable=True)
    rank_N = torch.empty_like(order_N)
    rank_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    decile_BT = torch.zeros_like(mask_BT, dtype=torch.long)
    decile_BT[mask_BT.bool()] = rank_N * _DECILES // max(len(order_N), 1)
    return decile_BT
