"""What learns: weights, optimizer and the loss's own state; the old policy and the gradient updates.

Shapes: P prompts, G responses to each, B = P·G sequences of a rollout, M of them in one mini-batch, T response
positions, F positions fed, L MoE layers, K experts a token.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.algorithms import Batch, LossOutput
from steadymoe.algorithms.objective import from_config
from steadymoe.bench import drift, metrics
from steadymoe.bench.forwards import Block, Forwards, Part
from steadymoe.bench.old_policy import OldPolicy
from steadymoe.bench.policy import Forward, Sequences
from steadymoe.bench.rollout import Rollout
from steadymoe.models.predictor import RoutePredictor
from steadymoe.models.routing import experts_of, load_balancing_loss, routers, z_loss


@dataclass(frozen=True)
class Measured:
    """One gradient update: columns overall, columns per layer, and histograms of ratios by their column."""

    overall: dict[str, Tensor]
    layers: dict[str, Tensor]
    histograms: dict[str, Tensor]
    slots_C: Tensor | None
    """Counts of (layer, response token) by changed experts; None for a dense model."""


class Learner:
    """A model at its cold start and what trains it; ``config`` is a composed ``conf/config.yaml``."""

    def __init__(self, model: PreTrainedModel, config: Mapping[str, Any]) -> None:
        self.model, self.config = model, config
        self._replay, self._measures = config["routing"]["replay"], config["measure"] == "all"
        if config["routing"]["freeze"]:
            for router in routers(model):
                router.requires_grad_(False)
        self.objective = from_config(config["algorithm"], config["correction"])
        self.state: Mapping[str, Tensor] = {}
        self.remember(self.objective.loss.initial_state())
        numbers = config["optimizer"]
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=numbers["learning_rate"],
            betas=(numbers["beta1"], numbers["beta2"]),
            eps=numbers["epsilon"],
            weight_decay=numbers["weight_decay"],
            fused=True,
        )
        self.predictor: RoutePredictor | None = None
        if self._replay == "pr2":
            self.predictor = RoutePredictor(model)
            rate = config["routing"]["predictor_learning_rate"]
            self.optimizer.add_param_group(
                {"params": list(self.predictor.parameters()), "lr": rate, "weight_decay": 0.0}
            )
        self.experts = next((experts_of(router) for router in routers(model)), 0)
        self._reference = copy.deepcopy(model) if self.objective.kl.coefficient > 0 else None
        self.forwards = Forwards(model, config, self.objective)
        self._first: tuple[Block, Forward] | None = None  # of the old policy, with its gradient

    def remember(self, state: Mapping[str, Tensor]) -> None:
        """Keep what the loss wants back, on the model's device."""
        self.state = {name: value.detach().to(self.model.device) for name, value in state.items()}

    @torch.no_grad()
    def old_policy(self, made: Rollout, minibatches: list[list[Part]]) -> OldPolicy:
        """π_old of the whole rollout, computed in the parts that will be trained on.

        The same split means the same arithmetic, so the ratio is exactly 1 before the first update. Under R3 the
        sampler's experts run here as in the updates, under PR² those that are predicted. Where
        ``forwards.reuses_first`` the first forward is kept with its gradient, for the first update.
        """
        split = _blocks(minibatches)
        order_B = torch.cat([block.rows_M for block in split]).argsort()
        forced_LBFK = made.routes_LBFK if self._replay == "r3" else None
        heads_LHE = None if self.predictor is None else list(self.predictor.heads_LHE)
        reuses = self.forwards.reuses_first(minibatches[0])
        forwards: list[Forward] = []
        for block in split:
            with torch.set_grad_enabled(reuses and not forwards):
                forwards.append(self.forwards(self.model, made, block, forced_LBFK, heads_LHE))
        self._first = (split[0], forwards[0]) if reuses else None
        routed = forwards[0].routes_LBFK is not None

        def joined(parts: list[Tensor | None], dim: int = 0) -> Tensor | None:
            found = [part for part in parts if part is not None]
            return torch.cat(found, dim).index_select(dim, order_B) if found else None

        return OldPolicy(
            logprobs_BT=torch.cat([each.logprobs_BT.detach() for each in forwards])[order_B],
            routes_LBFK=joined([each.routes_LBFK for each in forwards], 1),
            executed_LBFK=joined([each.executed_LBFK for each in forwards], 1),
            router_logprobs_LBTE=joined([each.router_logprobs_LBTE for each in forwards], 1) if routed else None,
            router_inputs_LBTH=joined([each.router_inputs_LBTH for each in forwards], 1) if self.predictor else None,
            top_logprobs_BTK=joined([each.top_logprobs_BTK for each in forwards]),
            reference_logprobs_BT=self.reference_logprobs(made, minibatches),
        )

    @torch.no_grad()
    def reference_logprobs(self, made: Rollout, minibatches: list[list[Part]]) -> Tensor | None:
        """Under the weights of the cold start, in the rollout's order; None unless a KL term asks for them."""
        if self._reference is None:
            return None
        split = _blocks(minibatches)
        found = [self.forwards(self._reference, made, block).logprobs_BT for block in split]
        return torch.cat(found)[torch.cat([block.rows_M for block in split]).argsort()]

    def update(
        self, made: Rollout, old: OldPolicy, advantages_BT: Tensor, parts: list[Part], first: bool = False
    ) -> Measured:
        """One gradient step on the parts of a mini-batch; ``first`` for the first on its rollout.

        The step is not taken, and the loss's state not renewed, when the loss or the gradient is not finite. PR²'s
        predictors learn in the same step, but not in the first, when the routers are still the old ones.
        """
        rows_M = torch.cat([part.rows_M for part in parts])
        mask_MT = made.sequences.response_mask_BT[rows_M]
        whole = int(mask_MT.any(-1).sum()), int(mask_MT.sum())
        kept, self._first = self._first, None  # of no use once a weight has changed
        losses, batches, outputs, forwards, predictions = [], [], [], [], []
        for part in parts:
            rows, found = part.rows_M, []
            for block in part.blocks:
                if kept is not None and block is kept[0]:
                    found.append(kept[1])
                    continue
                with torch.set_grad_enabled(block.loud):
                    found.append(self.forwards(self.model, made, block, self.replayed(made, old)))
            now = Forward.join(found)
            batch = self.batch(made, old, advantages_BT, rows, now, whole)
            output = self.objective(batch)
            loss = output.loss + self._router_losses(now, made.sequences.rows(rows))
            if loss.requires_grad:
                loss.backward()
            losses.append(loss.detach())
            batches.append(batch)
            outputs.append(output)
            if now.routes_LBFK is not None:
                forwards.append(now)
            if self.predictor is not None and not first:
                assert old.router_inputs_LBTH is not None  # kept for PR²
                assert old.router_logprobs_LBTE is not None
                prediction = self.predictor(
                    old.router_inputs_LBTH[:, rows],
                    old.router_logprobs_LBTE[:, rows],
                    now.router_logprobs_LBTE,
                    batch.mask_BT,
                )
                share = batch.mask_BT.sum() / whole[1]
                (share * prediction).backward()
                predictions.append(share * prediction.detach())
        loss = torch.stack(losses).sum()
        if not any(len(part.loud_M) for part in parts):
            # AdamW goes on by its momentum where a gradient is 0, and would stand still where there is none.
            for weight in self.model.parameters():
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config["optimizer"]["max_grad_norm"])
        if loss.isfinite() and grad_norm.isfinite() and all(each.isfinite() for each in predictions):
            self.optimizer.step()
            self.remember(outputs[-1].state)
        self.optimizer.zero_grad()
        batch = Batch.join(batches)
        columns = {"loss": loss, "grad_norm": grad_norm}
        columns["entropy"] = metrics.mean(batch.get("entropy_BT"), batch.mask_BT)
        if not self._measures:
            return Measured(columns, {}, {}, None)
        if predictions:
            columns["route_prediction_kl"] = torch.stack(predictions).sum() / len(forwards[0].routed[0][0].logits_LNE)
        return self._measure(columns, old, rows_M, batch, _join(outputs), forwards)

    def replayed(self, made: Rollout, old: OldPolicy) -> Tensor | None:
        """The experts that run in the updates on a rollout, (L, B, F, K); None for the routers' own choice."""
        return {"none": None, "r2": old.routes_LBFK, "r3": made.routes_LBFK, "pr2": old.executed_LBFK}[self._replay]

    def batch(
        self,
        made: Rollout,
        old: OldPolicy,
        advantages_BT: Tensor,
        rows: Tensor,
        now: Forward,
        whole: tuple[int, int],
    ) -> Batch:
        """What the loss is given of a micro-batch; ``whole`` is the mini-batch's responses and tokens."""

        def of(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        log_ratio_LBTK = None
        if self.objective.traits.routes and old.routes_LBFK is not None and old.router_logprobs_LBTE is not None:
            chosen_LBTK = old.routes_LBFK[:, rows, -now.logprobs_BT.shape[1] :].long().clamp(min=0)
            moved_LBTE = now.router_logprobs_LBTE - old.router_logprobs_LBTE[:, rows]
            log_ratio_LBTK = moved_LBTE.gather(-1, chosen_LBTK)
        return Batch(
            logprobs_BT=now.logprobs_BT,
            mask_BT=made.sequences.response_mask_BT[rows],
            advantages_BT=advantages_BT[rows],
            old_logprobs_BT=old.logprobs_BT[rows],
            rollout_logprobs_BT=made.logprobs_BT[rows],
            groups_B=rows // self.config["rollout"]["responses"],
            reference_logprobs_BT=of(old.reference_logprobs_BT),
            entropy_BT=now.entropy_BT,
            router_log_ratio_LBTK=log_ratio_LBTK,
            top_logprobs_BTK=now.top_logprobs_BTK,
            old_top_logprobs_BTK=of(old.top_logprobs_BTK),
            rollout_top_logprobs_BTK=of(made.top_logprobs_BTK),
            responses=whole[0],
            tokens=whole[1],
            state=self.state,
        )

    def _router_losses(self, now: Forward, sequences: Sequences) -> Tensor | float:
        """The routers' auxiliary losses with their coefficients; 0 without."""
        numbers, loss = self.config["routing"], 0.0
        if now.executed_LBFK is None:
            return loss
        mask_N = sequences.route_mask_BF.flatten()
        if numbers["aux_loss"] > 0:
            executed_LNK = now.executed_LBFK.flatten(1, 2)
            loss = loss + numbers["aux_loss"] * load_balancing_loss(now.router_logits_LNE, executed_LNK, mask_N)
        if numbers["z_loss"] > 0:
            loss = loss + numbers["z_loss"] * z_loss(now.router_logits_LNE, mask_N)
        return loss

    @torch.no_grad()
    def _measure(
        self,
        columns: dict[str, Tensor],
        old: OldPolicy,
        rows_M: Tensor,
        batch: Batch,
        output: LossOutput,
        forwards: list[Forward],
    ) -> Measured:
        """``columns`` and all others of an update; routes are the routers' own choice against the old policy's."""
        overall, histograms = metrics.of_update(batch, output)
        overall |= columns
        if not forwards or old.routes_LBFK is None or old.router_logprobs_LBTE is None:
            return Measured(overall, {}, histograms, None)
        # Forwards of a model with routers have routes.
        now_LBFK = torch.cat([each.routes_LBFK for each in forwards], 1)  # type: ignore[misc]
        executed_LBFK = torch.cat([each.executed_LBFK for each in forwards], 1)  # type: ignore[misc]
        now_LBTE = torch.cat([each.router_logprobs_LBTE for each in forwards], 1)
        old_LBFK, old_LBTE = old.routes_LBFK[:, rows_M], old.router_logprobs_LBTE[:, rows_M]
        moved = drift.change(old_LBFK, now_LBFK, batch.mask_BT)
        top1_L = drift.top1_change(old_LBFK, now_LBFK, old_LBTE, now_LBTE, batch.mask_BT)
        shift = drift.shift(old_LBTE, now_LBTE, old_LBFK, batch.mask_BT)
        decision = drift.decision(now_LBTE, now_LBFK, batch.mask_BT)
        load = drift.load(now_LBFK, batch.mask_BT, self.experts)
        overall |= {
            "expert_change_rate": moved.expert,
            "expert_set_change_rate": moved.set,
            "token_any_layer_change_rate": moved.any_layer,
            "top1_change_rate": top1_L.mean(),
            **shift.columns,
            "router_margin": decision.margin_L.mean(),
            "router_confidence": decision.confidence_L.mean(),
        }
        if self._replay != "none":
            replayed = drift.change(executed_LBFK, now_LBFK, batch.mask_BT)
            overall |= {"replay_expert_disagreement": replayed.expert, "replay_set_disagreement": replayed.set}
        layers = {
            "expert_change_rate": moved.expert_L,
            "expert_set_change_rate": moved.set_L,
            "top1_change_rate": top1_L,
            "router_kl": shift.kl_L,
            "router_margin": decision.margin_L,
            "router_confidence": decision.confidence_L,
            "load_entropy": load.entropy_L,
            "load_max_violation": load.max_violation_L,
            "dead_experts": load.dead_L,
        }
        return Measured(overall, layers, histograms, moved.slots_C)


def _blocks(minibatches: list[list[Part]]) -> list[Block]:
    """The forwards of a rollout."""
    return [block for parts in minibatches for part in parts for block in part.blocks]


def _join(outputs: list[LossOutput]) -> LossOutput:
    """The outputs of the parts of a mini-batch as one: losses add up, tokens are joined, numbers averaged."""
    metrics_: dict[str, Tensor] = {}
    for name, first in outputs[0].metrics.items():
        values = [output.metrics[name].detach() for output in outputs]
        metrics_[name] = torch.cat(values) if first.ndim else torch.stack(values).mean()
    return LossOutput(torch.stack([output.loss.detach() for output in outputs]).sum(), metrics_)
