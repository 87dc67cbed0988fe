"""The columns of one step: measurements of the rollout and of every gradient update, as rows of the tables.

Shapes: B sequences of a rollout, M of them in one mini-batch, T response positions, F positions fed, L MoE layers, K
experts a token, E experts, C counts of changed experts (0 to K).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.bench.training import routing_drift, token_metrics
from steadymoe.bench.training.columns import EVALUATED, names
from steadymoe.bench.training.forward import Forward
from steadymoe.bench.training.old_policy import OldPolicy
from steadymoe.bench.training.sampling import Rollout
from steadymoe.models.selection import NO_ROUTE

ROLLOUT_ROUTER_KL, ROUTER_CONFIDENCE, TOKENS_SAMPLED = names("rollout_router_kl", "router_confidence", "tokens_sampled")
LOSS, REPLAY_SHARE, SHAPED_REWARD, LEARNING_RATE = names("loss", "replay_share", "shaped_reward", "learning_rate")
GRAD_NORM, ROUTER_KL, REPLAY_KEPT, REFERENCE_KL = names("grad_norm", "router_kl", "replay_kept", "reference_kl")
LOAD_MAX_VIOLATION, ROLLOUT_CHANGED_SLOTS_HISTOGRAM = names("load_max_violation", "rollout_changed_slots_histogram")
EXPERT_CHANGE_SINCE_START, REPLAY_EXPERT_DISAGREEMENT = names("expert_change_since_start", "replay_expert_disagreement")
ROUTER_MARGIN_OVER_SPREAD, ROLLOUT_TOP1_DISAGREEMENT = names("router_margin_over_spread", "rollout_top1_disagreement")
ROLLOUT_ANY_LAYER_DISAGREEMENT, EXPERT_CHANGE_RATE = names("rollout_any_layer_disagreement", "expert_change_rate")
ROLLOUT_EXPERT_DISAGREEMENT, ROLLOUT_SET_DISAGREEMENT = names("rollout_expert_disagreement", "rollout_set_disagreement")
EXPERT_SET_CHANGE_RATE, CHANGED_SLOTS_HISTOGRAM = names("expert_set_change_rate", "changed_slots_histogram")
TOP1_CHANGE_RATE, RESPONSE_LENGTH, RESPONSE_TOKENS = names("top1_change_rate", "response_length", "response_tokens")
ROUTER_MARGIN, ROLLOUT_SECONDS, UPDATE_SECONDS = names("router_margin", "rollout_seconds", "update_seconds")
TOKEN_ANY_LAYER_CHANGE_RATE, UPDATE_TOKENS_PER_SECOND = names("token_any_layer_change_rate", "update_tokens_per_second")
REPLAY_SET_DISAGREEMENT, ROLLOUT_TOKENS_PER_SECOND = names("replay_set_disagreement", "rollout_tokens_per_second")
ROLLOUT_SHIFT = names(*(f"rollout_{name}" for name in routing_drift.SHIFT))

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """The measurements of a rollout or of one gradient update."""

    overall: dict[str, Tensor]
    """Scalars by column."""
    layers: dict[str, Tensor]
    """(L,) by column."""
    histograms: dict[str, Tensor]
    """Counts by column."""

    def __or__(self, other: "Measured") -> "Measured":
        return Measured(self.overall | other.overall, self.layers | other.layers, self.histograms | other.histograms)

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm of an update are finite; if not, the update was not applied."""
        return bool(self.overall[LOSS].isfinite() and self.overall[GRAD_NORM].isfinite())


@torch.no_grad()
def mismatch_columns(compared: tuple[Rollout, OldPolicy] | None) -> dict[str, Tensor]:
    """Return how the sampler's log-probabilities differ from the trainer's on the rows ``compared``."""
    if compared is None:
        return {}
    sampled, recomputed = compared
    return token_metrics.of_mismatch(sampled.logprobs_BT, recomputed.logprobs_BT, sampled.sequences.response_mask_BT)


@torch.no_grad()
def rollout_columns(
    rollout: Rollout,
    old: OldPolicy,
    compared: tuple[Rollout, OldPolicy] | None,
    since_start: routing_drift.Change | None,
    experts: int,
) -> Measured:
    """Return a rollout's measurements: sampler against trainer, the experts' load, drift since the cold start.

    Sampler and trainer are compared on the rows whose forward the trainer computed, ``compared``. ``experts`` is E, 0
    for a dense model.
    """
    mask_BT, overall = rollout.sequences.response_mask_BT, mismatch_columns(compared)
    if rollout.routes_LBFK is None:
        return Measured(overall, {}, {})
    load = routing_drift.load(rollout.routes_LBFK, mask_BT, experts)
    layers = load.columns
    overall |= over_layers(layers) | {LOAD_MAX_VIOLATION: load.max_violation_L.max()}
    if since_start is not None:
        assert old.router_logprobs_LBTE is not None  # recorded together with routes
        top_k = rollout.routes_LBFK.shape[-1]
        margin_L = routing_drift.margin_over_spread(old.router_logprobs_LBTE, top_k, mask_BT)
        overall |= {EXPERT_CHANGE_SINCE_START: since_start.expert, ROUTER_MARGIN_OVER_SPREAD: margin_L.mean()}
        layers[EXPERT_CHANGE_SINCE_START] = since_start.expert_L
    if compared is None:
        return Measured(overall, layers, {})
    sampled, recomputed = compared
    compared_BT = sampled.sequences.response_mask_BT
    assert sampled.routes_LBFK is not None
    assert sampled.router_logprobs_LBTE is not None  # recorded together with routes
    assert recomputed.routes_LBFK is not None
    assert recomputed.router_logprobs_LBTE is not None
    disagreement = routing_drift.change(sampled.routes_LBFK, recomputed.routes_LBFK, compared_BT)
    logprobs = sampled.router_logprobs_LBTE, recomputed.router_logprobs_LBTE
    top1_L = routing_drift.top1_change(sampled.routes_LBFK, recomputed.routes_LBFK, *logprobs, compared_BT)
    shift = routing_drift.shift(*logprobs, sampled.routes_LBFK, compared_BT)
    overall |= dict(zip(ROLLOUT_SHIFT, shift.columns.values(), strict=True))
    overall[ROLLOUT_ANY_LAYER_DISAGREEMENT] = disagreement.any_layer
    moved = {
        ROLLOUT_EXPERT_DISAGREEMENT: disagreement.expert_L,
        ROLLOUT_SET_DISAGREEMENT: disagreement.set_L,
        ROLLOUT_TOP1_DISAGREEMENT: top1_L,
        ROLLOUT_ROUTER_KL: shift.kl_L,
    }
    histograms = {ROLLOUT_CHANGED_SLOTS_HISTOGRAM: disagreement.slots_C}
    return Measured(overall | over_layers(moved), layers | moved, histograms)


@torch.no_grad()
def routing_columns(
    old: OldPolicy,
    now: Forward,
    mask_MT: Tensor,
    experts: int,
    forced_LMFK: Tensor | None,
    filters: bool = False,
) -> Measured:
    """Return how the routers' own choice changed from the old policy to one update, on the rows of a mini-batch.

    ``now`` is the update's forward, ``forced_LMFK`` are the routes that it replays, None without replay. With
    ``filters`` the routers may run others (``selection.filtered``).
    """
    assert old.routes_LBFK is not None  # of a model with routers
    assert old.router_logprobs_LBTE is not None
    assert now.routes_LBFK is not None
    assert now.executed_LBFK is not None
    old_LBFK, old_LBTE, now_LBTE = old.routes_LBFK, old.router_logprobs_LBTE, now.router_logprobs_LBTE
    moved = routing_drift.change(old_LBFK, now.routes_LBFK, mask_MT)
    top1_L = routing_drift.top1_change(old_LBFK, now.routes_LBFK, old_LBTE, now_LBTE, mask_MT)
    shift = routing_drift.shift(old_LBTE, now_LBTE, old_LBFK, mask_MT)
    decision = routing_drift.decision(now_LBTE, now.routes_LBFK, mask_MT)
    load = routing_drift.load(now.routes_LBFK, mask_MT, experts)
    layers = {
        EXPERT_CHANGE_RATE: moved.expert_L,
        EXPERT_SET_CHANGE_RATE: moved.set_L,
        TOP1_CHANGE_RATE: top1_L,
        ROUTER_KL: shift.kl_L,
        ROUTER_MARGIN: decision.margin_L,
        ROUTER_CONFIDENCE: decision.confidence_L,
    }
    overall = over_layers(layers) | shift.columns | {TOKEN_ANY_LAYER_CHANGE_RATE: moved.any_layer}
    if forced_LMFK is not None:
        replay = routing_drift.change(now.executed_LBFK, now.routes_LBFK, mask_MT)
        overall |= {REPLAY_EXPERT_DISAGREEMENT: replay.expert, REPLAY_SET_DISAGREEMENT: replay.set}
        has_run_LMF = (now.executed_LBFK != NO_ROUTE).all(-1)
        has_kept_LMFK = now.executed_LBFK == forced_LMFK
        if filters:  # the routers may replace any of them
            overall[REPLAY_KEPT] = has_kept_LMFK[has_run_LMF].double().mean()
        else:
            overall[REPLAY_SHARE] = has_kept_LMFK.all(-1)[has_run_LMF].double().mean()
    return Measured(overall, layers | load.columns, {CHANGED_SLOTS_HISTOGRAM: moved.slots_C})


def over_layers(layers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean over layers of each column."""
    return {name: values_L.mean() for name, values_L in layers.items()}


class StepRows:
    """The rows of one step, collected during the step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._step_row: Row = {"step": step}
        self._updates: list[Row] = []
        self._layers: list[Row] = []
        self._evaluations: list[Row] = []
        self._histograms: dict[str, list[Tensor]] = {}

    @property
    def updates(self) -> int:
        """How many gradient updates have been added."""
        return len(self._updates)

    def add_rollout(
        self, scores_PG: Tensor, rewards_KG: Tensor, responses: int, tokens: int, tokens_sampled: int, shown: Measured
    ) -> None:
        """Scores of all that was sampled, the groups to train on first; of these the rewards and the measurements.

        ``responses`` are those with tokens, and ``tokens`` all theirs, of the groups to train on.
        """
        self._step_row |= token_metrics.of_rewards(scores_PG, rewards_KG) | token_metrics.to_floats(shown.overall)
        self._step_row |= {RESPONSE_LENGTH: tokens / max(1, responses), RESPONSE_TOKENS: tokens}
        self._step_row[TOKENS_SAMPLED] = tokens_sampled
        self._add(0, shown)

    def add_rewards(self, rewards_B: Tensor, rollout: Rollout, old: OldPolicy) -> None:
        """The rewards behind the advantages, and the KL to the cold start if a KL term needs it."""
        self._step_row[SHAPED_REWARD] = rewards_B.mean().item()
        if old.reference_logprobs_BT is not None:
            kl_BT = ops.kl_estimate(old.logprobs_BT, old.reference_logprobs_BT, "k3")
            mask_BT = rollout.sequences.response_mask_BT
            self._step_row[REFERENCE_KL] = token_metrics.mean(kl_BT, mask_BT).double().item()

    def add_update(self, learning_rate: float, measured: Measured) -> None:
        """One gradient update."""
        self._updates.append({"step": self.step, "update": self.updates + 1, LEARNING_RATE: learning_rate})
        self._updates[-1] |= token_metrics.to_floats(measured.overall)
        self._add(self.updates, measured)

    def add_evaluations(self, evaluations: list[Row]) -> None:
        """The held-out prompts and their scores."""
        self._evaluations = evaluations
        if evaluations:
            for column, score in EVALUATED.items():
                scores = [row[score] for row in evaluations if score in row]
                if scores:
                    self._step_row[column] = sum(scores) / len(scores)

    def tables(self, seconds: dict[str, float], tokens_fed: int = 0) -> dict[str, list[Row]]:
        """Return the rows of every table; ``seconds`` by stage, ``tokens_fed`` are those of updates."""
        row = self._step_row | token_metrics.of_step(self._updates)
        row |= {name: torch.stack(counts).sum(0).tolist() for name, counts in self._histograms.items()}
        row |= seconds
        if TOKENS_SAMPLED in row:
            row[ROLLOUT_TOKENS_PER_SECOND] = row[TOKENS_SAMPLED] / seconds[ROLLOUT_SECONDS]
            row[UPDATE_TOKENS_PER_SECOND] = tokens_fed / seconds[UPDATE_SECONDS]
        return {
            "steps": [row],
            "updates": self._updates,
            "layers": self._layers,
            "evaluations": self._evaluations,
        }

    def _add(self, update: int, measured: Measured) -> None:
        """Add the rows of the layers, and the histograms; a step sums its histograms."""
        columns = {name: values_L.tolist() for name, values_L in measured.layers.items()}
        for layer in range(len(next(iter(columns.values()), []))):
            keys = {"step": self.step, "update": update, "layer": layer}
            self._layers.append(keys | {name: values[layer] for name, values in columns.items()})
        for name, counts in measured.histograms.items():
            self._histograms.setdefault(name, []).append(counts)
