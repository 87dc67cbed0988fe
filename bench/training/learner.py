"""The learner: weights, optimizer and the loss's own state; the old policy and the gradient updates.

Shapes: P prompts, G responses to each, B = P·G sequences of a rollout, M of them in one mini-batch, T response
positions, F positions fed, L MoE layers, K experts a token, H hidden.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.algorithms import Batch, LossOutput
from steadymoe.algorithms.parts import joined, rows
from steadymoe.bench.schema import RunConfig
from steadymoe.bench.training import optimizers, token_metrics
from steadymoe.bench.training.columns import names
from steadymoe.bench.training.forward import Forward, router_losses
from steadymoe.bench.training.microbatches import Forwards, MicroBatch
from steadymoe.bench.training.old_policy import OldPolicy
from steadymoe.bench.training.sampling import Rollout
from steadymoe.bench.training.step_rows import Measured, routing_columns
from steadymoe.models import balancing
from steadymoe.models.predictor import RoutePredictor
from steadymoe.models.routing import routers
from steadymoe.models.selection import NO_ROUTE, experts_of
from steadymoe.models.snapshots import Lag

LOSS, GRAD_NORM, NORM_CUT, ROUTING_LAGGED, ENTROPY = names("loss", "grad_norm", "norm_cut", "routing_lagged", "entropy")
(ROUTE_PREDICTION_KL,) = names("route_prediction_kl")

# Replays of the sampler's own routes.
RECALLS = ("r3", "r3_gates", "r3_filtered")


class Learner:
    """A model at its cold start and what trains it."""

    def __init__(self, model: PreTrainedModel, config: RunConfig) -> None:
        self.model, self.config = model, config
        self._replay, self._measures = config.routing.replay, config.measure == "all"
        if config.routing.bias_speed > 0:
            balancing.install(model)
        if config.routing.freeze:
            for router in routers(model):
                router.requires_grad_(False)
        self.objective = config.objective()
        self.state: Mapping[str, Tensor] = {}
        self.remember(self.objective.loss.initial_state())
        self.optimizer = optimizers.build(model, config.optimizer)
        self.predictor: RoutePredictor | None = None
        if self._replay == "pr2":
            self.predictor = RoutePredictor(model)
            rate = config.routing.predictor_learning_rate
            named = [(f"predictor.{name}", weight) for name, weight in self.predictor.named_parameters()]
            self.optimizer.add_param_group({"params": named, "lr": rate, "weight_decay": 0.0})
        routing = config.routing
        self.lag = None if routing.lag is None else Lag(model, routing.lag, routing.lag_trigger)
        self.norms: Tensor | None = None  # of all gradients so far, under optimizer.autoclip
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.experts = next((experts_of(router) for router in routers(model)), 0)
        penalized = self.objective.kl.coefficient > 0
        start = copy.deepcopy(model).requires_grad_(False) if penalized or self._replay == "pinned" else None
        self._reference = start if penalized else None
        self.pinned = start if self._replay == "pinned" else None
        """The weights that choose experts under pinned routing, those of the start; else None."""
        self.forwards = Forwards(model, config, self.objective)

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate for the model's weights."""
        return self.optimizer.param_groups[0]["lr"]

    def schedule(self, update: int, of: int) -> None:
        """Set the learning rates of the ``update``-th of all updates, from 1 (``optimizer.decay``)."""
        decayed = self.config.optimizer.decay * of
        if decayed > 0:
            factor = min(1.0, (of - update + 1) / decayed)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = factor * rate

    def remember(self, state: Mapping[str, Tensor]) -> None:
        """Keep the state that the loss asked for, on the model's device."""
        self.state = {name: value.detach().to(self.model.device) for name, value in state.items()}

    @torch.no_grad()
    def old_policy(self, rollout: Rollout, minibatches: Sequence[list[MicroBatch]]) -> OldPolicy:
        """π_old of the whole rollout, computed in the micro-batches that will be trained on.

        The same split means the same arithmetic, so the ratio is exactly 1 before the first update. Under R3 the
        sampler's experts run here as in the updates (with its gates, if recalled), as under pinned routing; under PR²
        the predicted experts, and under lagged routing those of the first update, for all rows.
        """
        parts = [part for minibatch in minibatches for part in minibatch]
        forced_LBFK = self._sampled_routes(rollout)
        if forced_LBFK is None:
            forced_LBFK = self.lagged_routes(rollout, parts)
        heads_LHE = None if self.predictor is None else list(self.predictor.heads_LHE)
        now = joined([self.forwards(self.model, rollout, part, forced_LBFK, heads_LHE) for part in parts])
        old = OldPolicy(
            logprobs_BT=now.logprobs_BT,
            routes_LBFK=now.routes_LBFK,
            executed_LBFK=now.executed_LBFK,
            router_logprobs_LBTE=None if now.routes_LBFK is None else now.router_logprobs_LBTE,
            router_inputs_LBTH=now.router_inputs_LBTH if self.predictor else None,
            top_logprobs_BTK=now.top_logprobs_BTK,
            reference_logprobs_BT=None,
        )
        reference_BT = self.reference_logprobs(rollout, minibatches)
        return replace(rows(old, _in_order_of_the_rollout(parts)), reference_logprobs_BT=reference_BT)

    @torch.no_grad()
    def reference_logprobs(self, rollout: Rollout, minibatches: Sequence[list[MicroBatch]]) -> Tensor | None:
        """Return log-probabilities under the cold start, (B, T), in the rollout's order; None without a KL term."""
        if self._reference is None:
            return None
        parts = [part for minibatch in minibatches for part in minibatch]
        logprobs = [self.forwards(self._reference, rollout, part).logprobs_BT for part in parts]
        return torch.cat(logprobs)[_in_order_of_the_rollout(parts)]

    def update(
        self,
        rollout: Rollout,
        old: OldPolicy,
        advantages_BT: Tensor,
        minibatch: Sequence[MicroBatch],
        first: bool = False,
    ) -> Measured:
        """One gradient step on the micro-batches of a mini-batch; ``first`` for the first on its rollout.

        The step is not taken, the loss's state not renewed and no bias moved, when the loss or the gradient is not
        finite. PR²'s predictors learn in the same step, but not in the first, when the routers are still the old ones.
        """
        rows_M = torch.cat([part.rows_M for part in minibatch])
        mask_MT = rollout.sequences.response_mask_BT[rows_M]
        responses_and_tokens = int(mask_MT.any(-1).sum()), int(mask_MT.sum())
        losses, batches, outputs, forwards, predictions = [], [], [], [], []
        routing, forced_LBFK = self.config.routing, self.replayed(rollout, old, minibatch)
        for part in minibatch:
            now = self.forwards(self.model, rollout, part, forced_LBFK)
            batch = self.batch(rollout, old, advantages_BT, part.rows_M, now, responses_and_tokens)
            output = self.objective(batch)
            sequences = rollout.sequences.rows(part.rows_M)
            per_layer = routing.aux_loss_per_layer
            loss = output.loss + router_losses(now, sequences, routing.aux_loss, routing.z_loss, per_layer)
            if loss.requires_grad:  # a user's loss may have no gradient: the run says so at its end
                try:
                    loss.backward()
                except RuntimeError as error:  # an operation in place, say: the frames of the loss are gone
                    name, place = type(self.objective.loss).__name__, self.objective.loss.place
                    raise RuntimeError(f"the gradient of {name} failed ({place}): {error}") from error
            if self.predictor is not None and not first:
                share = batch.mask_BT.sum() / responses_and_tokens[1]
                predictions.append(self._learn_to_predict(share, old, part.rows_M, now, batch.mask_BT))
            losses.append(loss.detach())
            batches.append(batch)
            outputs.append(output)
            forwards.append(now)
        loss = torch.stack(losses).sum()
        grad_norm, largest = self._clip()
        is_lagged = self.lag is not None and self.lag.is_on
        if loss.isfinite() and grad_norm.isfinite() and all(each.isfinite() for each in predictions):
            if self.lag is not None:
                self.lag.before_step(float(grad_norm))
            self.optimizer.step()
            self.remember(outputs[-1].state)
            if routing.bias_speed > 0:  # of the whole mini-batch, however it was split
                routes = [now.routes_LBFK for now in forwards if now.routes_LBFK is not None]
                balancing.balance(self.model, torch.cat(routes, 1), routing.bias_speed)
        self.optimizer.zero_grad()
        columns = {LOSS: loss, GRAD_NORM: grad_norm, NORM_CUT: (grad_norm > largest).to(loss.dtype)}
        if self.lag is not None:
            columns[ROUTING_LAGGED] = loss.new_tensor(float(is_lagged))
        if predictions and self._measures:
            assert old.routes_LBFK is not None  # of a model with routers
            columns[ROUTE_PREDICTION_KL] = torch.stack(predictions).sum() / len(old.routes_LBFK)
        forced_LMFK = None if forced_LBFK is None else forced_LBFK[:, rows_M]
        old_M = rows(old, rows_M)
        return self._measured(columns, old_M, joined(batches), joined(outputs), joined(forwards), forced_LMFK)

    def _clip(self) -> tuple[Tensor, float]:
        """Clip the gradient; return its norm before, and the norm that it was allowed."""
        optimizer, weights = self.config.optimizer, list(self.model.parameters())
        largest = optimizer.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(weights, largest)
        # A mini-batch without a signal says nothing of the norms.
        if optimizer.autoclip is not None and norm.isfinite() and norm > 0:
            self.norms = norm[None] if self.norms is None else torch.cat([self.norms, norm[None]])
            largest = min(largest, float(self.norms.quantile(optimizer.autoclip)))
            torch.nn.utils.clip_grad_norm_(weights, largest)
        return norm, largest

    @torch.no_grad()
    def _measured(
        self,
        columns: dict[str, Tensor],
        old: OldPolicy,
        batch: Batch,
        output: LossOutput,
        now: Forward,
        forced_LMFK: Tensor | None,
    ) -> Measured:
        entropy = token_metrics.mean(batch.get("entropy_BT"), batch.mask_BT)
        measured = Measured(columns | {ENTROPY: entropy}, {}, {})
        if not self._measures:
            return measured
        overall, histograms = token_metrics.of_update(batch, output)
        overall |= token_metrics.of_numbers(output.numbers)
        measured |= Measured(overall, {}, histograms)
        if now.routes_LBFK is None:
            return measured
        filters = self.config.routing.score_share is not None
        return measured | routing_columns(old, now, batch.mask_BT, self.experts, forced_LMFK, filters)

    def _learn_to_predict(self, share: Tensor, old: OldPolicy, rows: Tensor, now: Forward, mask_BT: Tensor) -> Tensor:
        """Run the backward of PR²'s heads on a ``share`` of the mini-batch's tokens and return its part of the KL."""
        assert self.predictor is not None
        assert old.router_inputs_LBTH is not None  # kept for PR²
        assert old.router_logprobs_LBTE is not None
        inputs_LBTH, logprobs_LBTE = old.router_inputs_LBTH[:, rows], old.router_logprobs_LBTE[:, rows]
        prediction = share * self.predictor(inputs_LBTH, logprobs_LBTE, now.router_logprobs_LBTE, mask_BT)
        prediction.backward()
        return prediction.detach()

    def replayed(self, rollout: Rollout, old: OldPolicy, minibatch: Sequence[MicroBatch]) -> Tensor | None:
        """Return the experts that run in the next update, (L, B, F, K); None for the routers' own choice.

        Rows outside the mini-batch count for nothing.
        """
        if self._replay == "lagged":
            return self.lagged_routes(rollout, minibatch)
        return {"r2": old.routes_LBFK, "pr2": old.executed_LBFK}.get(self._replay, self._sampled_routes(rollout))

    def _sampled_routes(self, rollout: Rollout) -> Tensor | None:
        """Return the experts that ran in sampling if they run in training, (L, B, F, K); else None."""
        return rollout.routes_LBFK if self._replay in RECALLS else rollout.pinned_LBFK

    @torch.no_grad()
    def lagged_routes(self, rollout: Rollout, parts: Sequence[MicroBatch]) -> Tensor | None:
        """Return the experts that the lagged weights choose for the rows of ``parts``, (L, B, F, K).

        The choice is that of a whole forward with these weights, as the report has it: the routers' inputs are as old
        as the routers. Other rows are ``NO_ROUTE``. None without lagged routing, and while it is off.
        """
        if self.lag is None or not self.lag.is_on:
            return None
        with self.lag.old_weights():
            chosen = [self.forwards(self.model, rollout, part).routes_LBFK for part in parts]
        chosen_LMFK = torch.cat([routes_LMFK for routes_LMFK in chosen if routes_LMFK is not None], 1)
        layers, _, fed, top_k = chosen_LMFK.shape
        routes_LBFK = chosen_LMFK.new_full((layers, len(rollout.scores_B), fed, top_k), NO_ROUTE)
        routes_LBFK[:, torch.cat([part.rows_M for part in parts])] = chosen_LMFK
        return routes_LBFK

    def batch(
        self,
        rollout: Rollout,
        old: OldPolicy,
        advantages_BT: Tensor,
        rows: Tensor,
        now: Forward,
        responses_and_tokens: tuple[int, int],
    ) -> Batch:
        """Return the loss's input for a micro-batch; the two counts are those of the whole mini-batch."""

        def of(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        log_ratio_LBTK = None
        if self.objective.traits.routes and old.routes_LBFK is not None and old.router_logprobs_LBTE is not None:
            chosen_LBTK = old.routes_LBFK[:, rows, -now.logprobs_BT.shape[1] :].long().clamp(min=0)
            moved_LBTE = now.router_logprobs_LBTE - old.router_logprobs_LBTE[:, rows]
            log_ratio_LBTK = moved_LBTE.gather(-1, chosen_LBTK)
        return Batch(
            logprobs_BT=now.logprobs_BT,
            mask_BT=rollout.sequences.response_mask_BT[rows],
            advantages_BT=advantages_BT[rows],
            old_logprobs_BT=old.logprobs_BT[rows],
            rollout_logprobs_BT=rollout.logprobs_BT[rows],
            groups_B=rows // self.config.rollout.responses,
            reference_logprobs_BT=of(old.reference_logprobs_BT),
            entropy_BT=now.entropy_BT,
            router_log_ratio_LBTK=log_ratio_LBTK,
            top_logprobs_BTK=now.top_logprobs_BTK,
            old_top_logprobs_BTK=of(old.top_logprobs_BTK),
            rollout_top_logprobs_BTK=of(rollout.top_logprobs_BTK),
            responses=responses_and_tokens[0],
            tokens=responses_and_tokens[1],
            state=self.state,
        )


def _in_order_of_the_rollout(parts: Sequence[MicroBatch]) -> Tensor:
    """Of each row of the rollout its place among the rows of ``parts``, (B,)."""
    return torch.cat([part.rows_M for part in parts]).argsort()
