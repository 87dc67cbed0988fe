"""One step of reinforcement: rollout → old policy → advantages → updates → evaluation → rows.

Shapes: P prompts, G responses to each, B = P·G sequences of a rollout, M of them in one mini-batch, T response
positions, F positions fed, L MoE layers, K experts a token.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.algorithms import build, ops
from steadymoe.bench import drift, metrics, reward, samples
from steadymoe.bench.forwards import Part
from steadymoe.bench.learner import Learner
from steadymoe.bench.old_policy import OldPolicy, as_sampled, check_sampler
from steadymoe.bench.probe import Probe, UpdateProbe
from steadymoe.bench.rollout import Rollout, join, rollout
from steadymoe.bench.seeding import numpy_generator, torch_generator
from steadymoe.bench.tasks import Task
from steadymoe.models.engine import Sampler

Row = dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    """What one step adds to each table, and where it met a number that is not finite.

    ``diverged_at_update`` is None, or the update whose loss or gradient was not finite (it was measured,
    not applied; or it left a policy that evaluation could not sample from), or 0 if the policy could not be
    sampled from in the first place.
    """

    rows: dict[str, list[Row]]
    diverged_at_update: int | None = None
    said: tuple[Row, ...] = ()
    """A few of the rollout's prompts and responses, of the steps that ``samples`` keeps."""


class Trainer:
    """A model at its cold start, and what trains it; ``config`` is a composed ``conf/config.yaml``."""

    def __init__(self, model: PreTrainedModel, task: Task, config: Mapping[str, Any]) -> None:
        self.model, self.task, self.config = model, task, config
        self.learner = Learner(model, config)
        self._measures, self._drops = config["measure"] == "all", config["savings"]["drop_finished"]
        self.sampler = Sampler(build(config["engine"]), model)
        self.advantage = build(config["advantage"] or config["algorithm"]["advantage"])
        self._held_out = task.sample(
            config["evaluation"]["prompts"], numpy_generator(config["seed"], "evaluation"), held_out=True
        )
        said = self._rollout("probe", 0, config["probe"]["responses"], 1)
        self._cold_start = Probe(model, said.sequences, config["precision"])
        self.learner.forwards.check_sharing(said.sequences)
        self.learner.forwards.check_routers(said.sequences)

    def step(self, step: int) -> StepResult:
        """Sample one rollout with the current weights and train on it."""
        clock = Clock(self.model.device)
        # Rollout
        try:
            with clock("rollout_seconds"):
                made, scores_PG, tokens_sampled = self.sample(step)
        except FloatingPointError:
            return StepResult({"steps": [{"step": step} | clock.seconds]}, diverged_at_update=0)
        mask_BT = made.sequences.response_mask_BT

        # Advantages, which need the old policy for a KL term alone; then the old policy, in the parts of the updates
        rewards_B = self._rewards(made, None)
        advantages_BT = self._advantages(rewards_B, mask_BT)
        silent_B = (advantages_BT == 0).all(-1) if self.learner.forwards.skips_silent else None
        minibatches = self.minibatches(step, silent_B)
        with clock("old_policy_seconds"):
            old, recomputed = self._old_policy(made, minibatches, step)
        if old.reference_logprobs_BT is not None:
            rewards_B = self._rewards(made, old)
            advantages_BT = self._advantages(rewards_B, mask_BT)

        # What the rollout shows before it is trained on
        with clock("probe_seconds"):
            since_start, sampled = None, None
            if self._measures and step % self.config["probe"]["every"] == 1 % self.config["probe"]["every"]:
                since_start = self._cold_start.since_start(self.model)
                watched = made.sequences.rows(self.sampled_rows(step))
                sampled = UpdateProbe(self.model, watched, self.config["precision"])
        shown, layers, between = self._measure_rollout(made, old, since_start, recomputed)
        layer_rows = _layer_rows(step, 0, layers)

        # Updates
        update_rows: list[Row] = []
        histograms: dict[str, list[torch.Tensor]] = {}
        diverged_at_update, slots = None, []
        for update, parts in enumerate(minibatches, start=1):
            with clock("update_seconds"):
                measured = self.learner.update(made, old, advantages_BT, parts, first=update == 1)
                overall, layers = dict(measured.overall), dict(measured.layers)
                for name, counts in measured.histograms.items():
                    histograms.setdefault(name, []).append(counts)
                slots += [] if measured.slots_C is None else [measured.slots_C]
            with clock("probe_seconds"):
                probed = None if sampled is None else sampled.after_update(self.model)
            if probed is not None:
                moved, attribution = probed
                overall |= {"expert_change_per_update": moved.expert} | attribution
                layers["expert_change_per_update"] = moved.expert_L
            rate = self.learner.optimizer.param_groups[0]["lr"]
            keys = {"step": step, "update": update, "learning_rate": rate}
            update_rows.append(keys | metrics.to_floats(overall))
            layer_rows += _layer_rows(step, update, layers)
            if not overall["loss"].isfinite() or not overall["grad_norm"].isfinite():
                diverged_at_update = update
                break

        # Evaluation
        evaluations: list[Row] = []
        if step % self.config["evaluation"]["every"] == 0 or step == self.config["steps"]:
            try:
                with clock("evaluation_seconds"):
                    evaluations = self.evaluate(step)
            except FloatingPointError:
                diverged_at_update = len(update_rows)

        # Rows
        shown["shaped_reward"] = rewards_B.mean()
        row: Row = {"step": step} | metrics.of_rewards(scores_PG) | metrics.to_floats(shown)
        row |= metrics.of_step(update_rows)
        row |= {name: torch.stack(counts).sum(0).tolist() for name, counts in histograms.items()}
        if slots:
            row["changed_slots_histogram"] = torch.stack(slots).sum(0).tolist()
        if between is not None:
            row["rollout_changed_slots_histogram"] = between.slots_C.tolist()
        row |= {"response_length": mask_BT.sum().item() / len(mask_BT), "response_tokens": int(mask_BT.sum())}
        if evaluations:
            row["eval_accuracy"] = sum(each["score"] for each in evaluations) / len(evaluations)
        row |= clock.seconds
        row["tokens_sampled"] = tokens_sampled
        row["rollout_tokens_per_second"] = tokens_sampled / clock.seconds["rollout_seconds"]
        row["update_tokens_per_second"] = int(made.sequences.mask_BS.sum()) / clock.seconds["update_seconds"]
        tables = {"steps": [row], "updates": update_rows, "layers": layer_rows, "evaluations": evaluations}
        said: list[Row] = []
        if samples.is_shown(step, self.config["steps"]):
            said = samples.take(made, self.task, step, self.config["rollout"]["responses"])
        return StepResult(tables, diverged_at_update, tuple(said))

    def evaluate(self, step: int) -> list[Row]:
        """One sampled response to each held-out prompt: always the same prompts and the same draws.

        Raises FloatingPointError if the policy's distribution is not finite.
        """
        generator = torch_generator(self.config["seed"], "evaluation", 0, self.model.device.type)
        precision = self.config["precision"]
        more: Any = {"drop_finished": self._drops, "routes": False}
        made = rollout(self.model, self.task, self._held_out, 1, generator, precision, **more)
        scored = zip(self._held_out, made.scores_B.tolist(), strict=True)
        return [{"step": step, "prompt": prompt, "score": score} for prompt, score in scored]

    def _rollout(
        self, stage: str, step: int, prompts: int, responses: int, sampler: PreTrainedModel | None = None
    ) -> Rollout:
        """Responses by ``sampler`` under the engine, or, for None, held-out ones by the trained model itself."""
        seed = self.config["seed"]
        texts = self.task.sample(prompts, numpy_generator(seed, f"{stage}_prompts", step), sampler is None)
        generator = torch_generator(seed, f"{stage}_responses", step, self.model.device.type)
        precision, top_k = self.config["precision"], self.learner.objective.traits.top_k
        if sampler is None:
            return rollout(self.model, self.task, texts, responses, generator, precision, drop_finished=self._drops)
        heat, routes = self.sampler.engine.temperature, self.learner.forwards.records_routes
        return rollout(sampler, self.task, texts, responses, generator, precision, top_k, heat, self._drops, routes)

    def sample(self, step: int) -> tuple[Rollout, Tensor, int]:
        """The groups to train on, and of all that was sampled for them the scores (prompts, responses) and tokens.

        With ``algorithm.sampling.max_rollouts`` above 1 groups whose scores are all equal are dropped and
        replaced from further rollouts, up to that many (dynamic sampling, DAPO, 2503.14476, eq. 11); if that is
        not enough, groups without signal fill the places that are left.
        """
        prompts, responses = self.config["rollout"]["prompts"], self.config["rollout"]["responses"]
        rounds = self.config["algorithm"]["sampling"]["max_rollouts"]
        noise = torch_generator(self.config["seed"], "engine", step, self.model.device.type)
        sampler = self.sampler.model(noise)
        parts: list[Rollout] = []
        while True:
            stage = f"rollout_refill_{len(parts)}" if parts else "rollout"
            parts.append(self._rollout(stage, step, prompts, responses, sampler))
            scores_PG = torch.cat([part.scores_B for part in parts]).view(-1, responses)
            signal_P = (scores_PG != scores_PG[:, :1]).any(-1)
            if len(parts) == rounds or signal_P.sum() >= prompts:
                break
        tokens = sum(int(part.sequences.response_mask_BT.sum()) for part in parts)
        if rounds == 1:
            return parts[0], scores_PG, tokens
        kept_P = (~signal_P).int().argsort(stable=True)[:prompts]  # those with signal first, in their order
        rows_B = (kept_P[:, None] * responses + torch.arange(responses, device=kept_P.device)).flatten()
        return join(parts).rows(rows_B), scores_PG, tokens

    def _old_policy(
        self, made: Rollout, minibatches: list[list[Part]], step: int
    ) -> tuple[OldPolicy, OldPolicy | None]:
        """The old policy to train against, and the trainer's own forward of it where it was computed."""
        every = self.config["savings"]["sampler_as_old"]
        if every is None:
            old = self.learner.old_policy(made, minibatches)
            return old, old
        if step % every != 1 % every:
            return as_sampled(made, self.learner.reference_logprobs(made, minibatches)), None
        recomputed = self.learner.old_policy(made, minibatches)
        check_sampler(made, recomputed)
        return as_sampled(made, recomputed.reference_logprobs_BT), recomputed

    def _advantages(self, rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
        """Of every token, (B, T); 0 on padding."""
        rewards_PG = rewards_B.view(-1, self.config["rollout"]["responses"])
        return self.advantage(rewards_PG, mask_BT.sum(-1).view(rewards_PG.shape)).flatten()[:, None] * mask_BT

    def _rewards(self, made: Rollout, old: OldPolicy | None) -> Tensor:
        """What advantages are computed from, (B,); ``old`` is needed where a KL term is taken from rewards."""
        kl, taken_BT = self.learner.objective.kl, None
        if kl.place == "reward" and old is not None and old.reference_logprobs_BT is not None:
            taken_BT = kl.coefficient * ops.kl_estimate(old.logprobs_BT, old.reference_logprobs_BT, kl.estimator)
        overlong, mask_BT = self.config["algorithm"]["overlong"], made.sequences.response_mask_BT
        return reward.shaped(made.scores_B, mask_BT, self.task.max_new_tokens, overlong, taken_BT)

    def minibatches(self, step: int, silent_B: Tensor | None = None) -> list[list[Part]]:
        """The parts of each mini-batch: whole groups, in a seeded order; ``silent_B`` marks rows of advantage 0."""
        prompts, responses = self.config["rollout"]["prompts"], self.config["rollout"]["responses"]
        generator = torch_generator(self.config["seed"], "minibatches", step)
        order_P = torch.randperm(prompts, generator=generator)
        rows_PG = order_P[:, None] * responses + torch.arange(responses)
        chunks = rows_PG.chunk(self.config["updates_per_rollout"])
        return [self.learner.forwards.parts(chunk.flatten().to(self.model.device), silent_B) for chunk in chunks]

    def sampled_rows(self, step: int) -> Tensor:
        """The rows of the rollout whose routes are watched from update to update."""
        rows = self.config["rollout"]["prompts"] * self.config["rollout"]["responses"]
        count = min(rows, max(4, round(rows * self.config["probe"]["fraction"])))
        order = torch.randperm(rows, generator=torch_generator(self.config["seed"], "probe_sample", step))
        return order[:count].to(self.model.device)

    def _measure_rollout(
        self, made: Rollout, old: OldPolicy, since_start: drift.Change | None, recomputed: OldPolicy | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], drift.Change | None]:
        """What a rollout shows before it is trained on: sampler against trainer, and drift since the cold start.

        Columns overall, columns per layer, and the change of routes between the two engines. Sampler and trainer are
        compared where the trainer's forward was ``recomputed``.
        """
        mask_BT = made.sequences.response_mask_BT
        overall: dict[str, Tensor] = {}
        if recomputed is not None and self._measures:
            overall |= metrics.of_mismatch(made.logprobs_BT, recomputed.logprobs_BT, mask_BT)
        if old.reference_logprobs_BT is not None:
            kl_BT = ops.kl_estimate(old.logprobs_BT, old.reference_logprobs_BT, "k3")
            overall["reference_kl"] = metrics.mean(kl_BT, mask_BT)
        if made.routes_LBFK is None or not self._measures:
            return overall, {}, None
        load = drift.load(made.routes_LBFK, mask_BT, self.learner.experts)
        overall |= {
            "load_entropy": load.entropy_L.mean(),
            "load_max_violation": load.max_violation_L.max(),
            "dead_experts": load.dead_L.mean(),
        }
        layers = {
            "load_entropy": load.entropy_L,
            "load_max_violation": load.max_violation_L,
            "dead_experts": load.dead_L,
        }
        if since_start is not None:
            overall["expert_change_since_start"] = since_start.expert
            layers["expert_change_since_start"] = since_start.expert_L
        if recomputed is None:
            return overall, layers, None
        assert made.router_logprobs_LBTE is not None  # beside routes
        assert recomputed.routes_LBFK is not None
        assert recomputed.router_logprobs_LBTE is not None
        disagreement = drift.change(made.routes_LBFK, recomputed.routes_LBFK, mask_BT)
        logprobs = made.router_logprobs_LBTE, recomputed.router_logprobs_LBTE
        top1_L = drift.top1_change(made.routes_LBFK, recomputed.routes_LBFK, *logprobs, mask_BT)
        shift = drift.shift(*logprobs, made.routes_LBFK, mask_BT)
        overall |= {
            "rollout_expert_disagreement": disagreement.expert,
            "rollout_set_disagreement": disagreement.set,
            "rollout_any_layer_disagreement": disagreement.any_layer,
            "rollout_top1_disagreement": top1_L.mean(),
            **{f"rollout_{name}": value for name, value in shift.columns.items()},
        }
        layers |= {
            "rollout_expert_disagreement": disagreement.expert_L,
            "rollout_set_disagreement": disagreement.set_L,
            "rollout_top1_disagreement": top1_L,
            "rollout_router_kl": shift.kl_L,
        }
        return overall, layers, disagreement


class Clock:
    """Adds up the seconds of named stages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def _layer_rows(step: int, update: int, layers: dict[str, Tensor]) -> list[Row]:
    """One row per MoE layer from per-layer columns (L,)."""
    columns = {name: values_L.tolist() for name, values_L in layers.items()}
    count = len(next(iter(columns.values()), []))
    return [
        {"step": step, "update": update, "layer": layer} | {name: values[layer] for name, values in columns.items()}
        for layer in range(count)
    ]
