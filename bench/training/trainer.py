"""Training, one step at a time: sample, reward, advantage, old policy, updates, measure, evaluate.

Shapes: P prompts, G responses to each, B = P·G sequences of a rollout, M of them in one mini-batch, T response
positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.algorithms import build, ops
from steadymoe.bench.schema import OverlongConfig, RunConfig
from steadymoe.bench.support.clock import Clock
from steadymoe.bench.support.seeding import numpy_generator, seeded_globals, torch_generator
from steadymoe.bench.tasks import Task, sample
from steadymoe.bench.training import samples
from steadymoe.bench.training.columns import names
from steadymoe.bench.training.forward import Extras
from steadymoe.bench.training.learner import RECALLS, Learner
from steadymoe.bench.training.microbatches import MicroBatch
from steadymoe.bench.training.old_policy import OldPolicy, as_sampled, check_sampler
from steadymoe.bench.training.probes import Probe, UpdateProbe, replay_columns
from steadymoe.bench.training.sampling import Decoding, Rollout, join, roll_out
from steadymoe.bench.training.step_rows import Measured, Row, StepRows, mismatch_columns, rollout_columns
from steadymoe.models.engine import Sampler

ROLLOUT_SECONDS, OLD_POLICY_SECONDS, PROBE_SECONDS = names("rollout_seconds", "old_policy_seconds", "probe_seconds")
UPDATE_SECONDS, EVALUATION_SECONDS, SCORE = names("update_seconds", "evaluation_seconds", "score")
SCORE_GREEDY, SCORE_PASS, SCORE_PERMUTED = names("score_greedy", "score_pass", "score_permuted")

# A reused sampler is verified on one part in so many of the rollout, in whole mini-batches.
_VERIFIED = 16


@dataclass(frozen=True)
class StepResult:
    """The rows that one step adds to each table, and the update at which a number was not finite.

    ``diverged_at_update`` is None if all numbers were finite. It is 0 if the rollout could not be sampled, because the
    policy's distribution was not finite. Otherwise it is the update whose loss or gradient was not finite (such an
    update is measured and not applied), or the last update before an evaluation that could not be sampled.
    """

    rows: dict[str, list[Row]]
    diverged_at_update: int | None = None
    samples: tuple[Row, ...] = ()
    """A few prompts and responses of the rollout (``samples.take``); empty at a step without samples."""


class Trainer:
    """Trains a model from its cold start, one step at a time."""

    def __init__(self, model: PreTrainedModel, task: Task, config: RunConfig) -> None:
        self.model, self.task, self.config = model, task, config
        self.learner = Learner(model, config)
        self._measures = config.measure == "all"
        self.sampler = Sampler(build(config.engine), model)
        self.advantage = build(config.used_advantage)
        with seeded_globals(config.seed, "start"):
            drawn = numpy_generator(config.seed, "evaluation")
            self._held_out = sample(task, config.evaluation.prompts, drawn, held_out=True)
            self._since_start: Probe | None = None
            if self.learner.forwards.records_routes:
                fixed = self._rollout("probe", 0, config.probe.responses, 1)
                self._since_start = Probe(model, fixed.sequences, config.precision, pinned_LBFK=fixed.pinned_LBFK)
                self.learner.forwards.check_routers(fixed.sequences)

    def step(self, step: int) -> StepResult:
        """Sample one rollout with the current weights and train on it."""
        with seeded_globals(self.config.seed, "step", step):
            return self._step(step)

    def _step(self, step: int) -> StepResult:
        clock, rows = Clock(self.model.device), StepRows(step)
        try:
            with clock(ROLLOUT_SECONDS):
                rollout, scores_PG, tokens_sampled = self.sample(step)
        except FloatingPointError:
            return StepResult({"steps": [{"step": step} | clock.seconds]}, diverged_at_update=0)

        minibatches = self.minibatches(step)
        with clock(OLD_POLICY_SECONDS):
            old, compared = self.old_policy(rollout, minibatches, step)
        rewards_B = self.rewards(rollout, old)
        if self.config.rollout.shuffle_rewards:
            rewards_B = self._shuffled(rewards_B, step)
        advantages_BT = self.advantages(rewards_B, rollout.sequences.response_mask_BT)

        with clock(PROBE_SECONDS):
            probe, measured_rollout = self.probe(step, rollout, old, compared)
        mask_BT, rewards_KG = rollout.sequences.response_mask_BT, rewards_B.view(-1, scores_PG.shape[1])
        counts = int(mask_BT.any(-1).sum()), int(mask_BT.sum()), tokens_sampled
        rows.add_rollout(scores_PG, rewards_KG, *counts, measured_rollout)
        rows.add_rewards(rewards_B, rollout, old)

        diverged_at_update = None
        for update, minibatch in enumerate(minibatches, start=1):
            per_rollout = self.config.updates_per_rollout
            self.learner.schedule((step - 1) * per_rollout + update, self.config.rollouts * per_rollout)
            with clock(UPDATE_SECONDS):
                measured = self.learner.update(rollout, old, advantages_BT, minibatch, first=update == 1)
            if probe is not None:
                with clock(PROBE_SECONDS):
                    measured |= Measured(*probe.after_update(self.model), {})
            rows.add_update(self.learner.learning_rate, measured)
            if not measured.is_finite:
                diverged_at_update = update
                break

        if step % self.config.in_rollouts(self.config.evaluation.every) == 0 or step == self.config.rollouts:
            try:
                with clock(EVALUATION_SECONDS):
                    rows.add_evaluations(self.evaluate(step))
            except FloatingPointError:
                diverged_at_update = rows.updates
        shown = samples.is_shown(step, self.config.rollouts)
        texts = samples.take(rollout, self.task, step, self.config.rollout.responses) if shown else []
        tables = rows.tables(clock.seconds, int(rollout.sequences.mask_BS.sum()))
        return StepResult(tables, diverged_at_update, tuple(texts))

    def evaluate(self, step: int) -> list[Row]:
        """One sampled response to each held-out prompt, at temperature 1, always by the same prompts and random draws.

        Before the first and after the last step also the greedy response, and the best of ``evaluation.pass_k`` for the
        first prompts; the greedy response everywhere with ``measure=all``. Raises FloatingPointError if the policy's
        distribution is not finite.
        """
        with seeded_globals(self.config.seed, "evaluation"):
            return self._evaluate(step)

    def _evaluate(self, step: int) -> list[Row]:
        numbers, ends = self.config.evaluation, step in (0, self.config.rollouts)
        permutes = numbers.permuted_routes and self.learner.experts > 0
        decoding = Decoding(precision=self.config.precision, routes=permutes, pinned=self.learner.pinned)
        made = self._respond("evaluation", self._held_out, 1, decoding)
        rows: list[Row] = [
            {"step": step, "prompt": prompt, SCORE: score}
            for prompt, score in zip(self._held_out, made.scores_B.tolist(), strict=True)
        ]
        found = {}
        if ends or self._measures:
            greedy = replace(decoding, greedy=True, routes=False)
            found[SCORE_GREEDY] = self._respond("evaluation", self._held_out, 1, greedy).scores_B
        if ends and numbers.pass_k:
            found[SCORE_PASS] = self._best_scores(numbers.pass_k, replace(decoding, routes=False))
        if permutes:
            assert made.routes_LBFK is not None  # of a model with routers
            moved = replace(decoding, bank_LNK=made.routes_LBFK[:, made.sequences.route_mask_BF])
            found[SCORE_PERMUTED] = self._respond("evaluation_permuted", self._held_out, 1, moved).scores_B
        for name, scores in found.items():
            for row, score in zip(rows, scores.tolist(), strict=False):  # pass@k is of the first prompts alone
                row[name] = score
        return rows

    def _best_scores(self, responses: int, decoding: Decoding) -> Tensor:
        """The highest score of ``responses`` to each of the first prompts; as many rows at once as a rollout has."""
        rollout, texts = self.config.rollout, self._held_out[: self.config.evaluation.pass_prompts]
        at_once = max(1, self.config.prompts * rollout.responses // responses)
        best = [
            self._respond("evaluation_pass", texts[first : first + at_once], responses, decoding, first)
            .scores_B.view(-1, responses)
            .amax(-1)
            for first in range(0, len(texts), at_once)
        ]
        return torch.cat(best)

    def _respond(
        self, stage: str, texts: Sequence[str], responses: int, decoding: Decoding, number: int = 0
    ) -> Rollout:
        generator = torch_generator(self.config.seed, stage, number, self.model.device.type)
        return roll_out(self.model, self.task, texts, responses, generator, decoding)

    def _rollout(
        self, stage: str, step: int, prompts: int, responses: int, sampler: PreTrainedModel | None = None
    ) -> Rollout:
        """Sample with ``sampler`` under the engine; for None, held-out prompts with the trained model."""
        seed, temperature = self.config.seed, self.config.rollout.temperature
        texts = sample(self.task, prompts, numpy_generator(seed, f"{stage}_prompts", step), sampler is None)
        generator = torch_generator(seed, f"{stage}_responses", step, self.model.device.type)
        if sampler is None:
            pinned = self.learner.pinned
            decoding = Decoding(precision=self.config.precision, temperature=temperature, pinned=pinned)
            return roll_out(self.model, self.task, texts, responses, generator, decoding)
        decoding = Decoding(
            precision=self.config.precision,
            engine=self.sampler.engine,
            temperature=temperature,
            top_k=self.learner.objective.traits.top_k,
            routes=self.learner.forwards.records_routes,
            gates=self.config.routing.replay == "r3_gates",
            pinned=self.learner.pinned,
        )
        return roll_out(sampler, self.task, texts, responses, generator, decoding)

    def sample(self, step: int) -> tuple[Rollout, Tensor, int]:
        """Return the groups to train on; the scores (prompts, responses) and the token count of all sampled groups.

        The groups to train on come first. With ``algorithm.sampling.max_rollouts`` above 1, groups of equal scores are
        dropped and replaced from further rollouts, up to this number of rollouts (dynamic sampling, DAPO, 2503.14476,
        eq. 11). If too few groups with different scores are found, dropped groups fill the remaining places.
        """
        prompts, responses = self.config.prompts, self.config.rollout.responses
        rounds = self.config.algorithm.sampling.max_rollouts
        noise = torch_generator(self.config.seed, "engine", step, self.model.device.type)
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
        order_P = (~signal_P).int().argsort(stable=True)  # groups with signal first, in their order
        rows_PG = order_P[:, None] * responses + torch.arange(responses, device=order_P.device)
        return join(parts).rows(rows_PG[:prompts].flatten()), scores_PG[order_P], tokens

    def minibatches(self, step: int) -> list[list[MicroBatch]]:
        """Return the micro-batches of each mini-batch: whole groups, in a seeded order."""
        prompts, responses = self.config.prompts, self.config.rollout.responses
        generator = torch_generator(self.config.seed, "minibatches", step)
        order_P = torch.randperm(prompts, generator=generator)
        rows_PG = order_P[:, None] * responses + torch.arange(responses)
        chunks = rows_PG.chunk(self.config.updates_per_rollout)
        return [self.learner.forwards.split(chunk.flatten().to(self.model.device)) for chunk in chunks]

    def old_policy(
        self, rollout: Rollout, minibatches: list[list[MicroBatch]], step: int
    ) -> tuple[OldPolicy, tuple[Rollout, OldPolicy] | None]:
        """Return the old policy to train against; and rows of the rollout with the trainer's own forward, or None.

        These are all rows, or those on which a reused sampler is verified.
        """
        every = self.config.savings.reuse_sampler_logprobs
        if every is None:
            old = self.learner.old_policy(rollout, minibatches)
            return old, (rollout, old)
        old = as_sampled(rollout, self.learner.reference_logprobs(rollout, minibatches))
        if step % every != 1 % every:
            return old, None
        verified = minibatches[: math.ceil(len(minibatches) / _VERIFIED)]
        rows = torch.cat([part.rows_M for minibatch in verified for part in minibatch]).sort().values
        compared = rollout.rows(rows), self.learner.old_policy(rollout, verified)
        check_sampler(*compared, self.config.rollout.responses, self.config.rollout.temperature)
        return old, compared

    def rewards(self, rollout: Rollout, old: OldPolicy) -> Tensor:
        """Return the task's scores less the penalty for length and, with the KL term in the reward, the KL, (B,)."""
        kl, taken_BT = self.learner.objective.kl, None
        if kl.place == "reward" and old.reference_logprobs_BT is not None:
            taken_BT = kl.coefficient * ops.kl_estimate(old.logprobs_BT, old.reference_logprobs_BT, kl.estimator)
        overlong, mask_BT = self.config.algorithm.overlong, rollout.sequences.response_mask_BT
        return shaped_rewards(rollout.scores_B, mask_BT, self.task.max_new_tokens, overlong, taken_BT)

    def _shuffled(self, rewards_B: Tensor, step: int) -> Tensor:
        """Give each response the reward of another, whatever its prompt; by draws of the step."""
        generator = torch_generator(self.config.seed, "shuffled_rewards", step)
        return rewards_B[torch.randperm(len(rewards_B), generator=generator).to(rewards_B.device)]

    def advantages(self, rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the advantage of every token, (B, T); 0 on padding."""
        rewards_PG = rewards_B.view(-1, self.config.rollout.responses)
        return self.advantage(rewards_PG, mask_BT.sum(-1).view(rewards_PG.shape)).flatten()[:, None] * mask_BT

    def probe(
        self, step: int, rollout: Rollout, old: OldPolicy, compared: tuple[Rollout, OldPolicy] | None
    ) -> tuple[UpdateProbe | None, Measured]:
        """Return the probe that measures after each update of this step, or None, and the rollout's measurements."""
        if not self._measures:
            return None, Measured(mismatch_columns(compared), {}, {})
        every, since_start, probe = self.config.in_rollouts(self.config.probe.every), None, None
        replay: dict[str, Tensor] = {}
        if step % every == 1 % every:
            assert self._since_start is not None  # made for all that is measured
            since_start = self._since_start.since_start(self.model)
            watched = rollout.rows(self.sampled_rows(step))
            precision, temperature = self.config.precision, self.config.rollout.temperature
            extras = Extras(kept_BTV=watched.kept_BTV, temperature=temperature)
            probe = UpdateProbe(self.model, watched.sequences, precision, extras, watched.pinned_LBFK)
            if self.config.routing.replay in RECALLS and compared is not None and probe.before_BT is not None:
                replayed_BT = compared[1].logprobs_BT[self.sampled_rows(step)]
                replay = replay_columns(self.model, watched, replayed_BT, probe.before_BT, precision, extras)
        measured = rollout_columns(rollout, old, compared, since_start, self.learner.experts)
        return probe, measured | Measured(replay, {}, {})

    def sampled_rows(self, step: int) -> Tensor:
        """Return the rows of the rollout whose routes the probe measures from update to update."""
        rows = self.config.prompts * self.config.rollout.responses
        count = min(rows, max(4, round(rows * self.config.probe.fraction)))
        order = torch.randperm(rows, generator=torch_generator(self.config.seed, "probe_sample", step))
        return order[:count].to(self.model.device)


def overlong_penalty(lengths_B: Tensor, budget: int, penalty: float, buffer: float) -> Tensor:
    """Return the penalty for length, (B,): 0 up to (1 − buffer) · budget tokens, then linear, ``penalty`` at budget.

    Soft overlong punishment (DAPO, 2503.14476, eq. 13). ``budget`` is the largest length of a response in tokens;
    ``buffer`` is a share of it.
    """
    free = (1 - buffer) * budget
    return penalty * ((lengths_B - free) / (budget - free)).clamp(0, 1)


def shaped_rewards(
    scores_B: Tensor, mask_BT: Tensor, budget: int, punishment: OverlongConfig, kl_BT: Tensor | None
) -> Tensor:
    """Return the rewards that advantages are formed from, (B,): scores less the penalties.

    ``punishment`` holds the numbers of ``overlong_penalty``. ``kl_BT`` is a KL term times its coefficient, subtracted
    token by token, or None.
    """
    rewards_B = scores_B
    if punishment.penalty > 0:
        rewards_B = rewards_B - overlong_penalty(mask_BT.sum(-1), budget, punishment.penalty, punishment.buffer)
    return rewards_B if kl_BT is None else rewards_B - (kl_BT * mask_BT).sum(-1)
