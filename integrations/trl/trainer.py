"""TRL's GRPOTrainer with the suite's losses, routing replay and columns, on one process or several (DDP, FSDP2).

TRL samples, rewards, computes advantages and steps the optimizer. A rollout is one step of the record, and an optimizer
step is one update. The old policy is computed after TRL has shuffled and split the rollout, in the micro-batches that
are trained on, so that the ratio is exactly 1 before the first update.

Shapes: B responses of a micro-batch, S = W + T positions of prompt and response, N = B·S positions fed, T response
positions, P prompts, G responses to each, L MoE layers, E experts, K experts a token.
"""

import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from steadymoe.algorithms import Batch, PolicyLoss
from steadymoe.bench.support.clock import Clock
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.training.columns import names
from steadymoe.bench.training.forward import Sequences
from steadymoe.bench.training.probes import UpdateProbe
from steadymoe.integrations.trl import moments, run_folder
from steadymoe.integrations.trl import settings as trl_settings
from steadymoe.integrations.trl.moments import Moments, Routes
from steadymoe.integrations.trl.record import Steps, gathered
from steadymoe.models.routing import RouteRecorder, routers
from steadymoe.models.selection import experts_of

ROLLOUT_SECONDS, OLD_POLICY_SECONDS, GRAD_NORM = names("rollout_seconds", "old_policy_seconds", "grad_norm")
(LEARNING_RATE,) = names("learning_rate")
_KEY = "steadymoe"


@dataclass(frozen=True)
class Scored:
    """One forward of a micro-batch under the training arithmetic."""

    logprobs_BT: Tensor
    entropy_BT: Tensor
    aux_loss: Tensor | None
    routes: Routes | None
    """None for a dense model."""
    executed_LNK: Tensor | None
    """The experts that ran at every position fed, for replay."""


def sequences_of(inputs: Mapping[str, Any]) -> Sequences:
    """Return the sequences of a micro-batch of TRL, as the suite's own forward takes them."""
    tokens_BS = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask_BS = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    return Sequences(tokens_BS, mask_BS, inputs["completion_ids"].shape[1])


def probed_sequences(inputs: Mapping[str, Any], rows: int) -> Sequences:
    """Return ``rows`` sequences of a micro-batch; those with response tokens come first."""
    is_empty_B = ~inputs["completion_mask"].bool().any(-1)
    return sequences_of(inputs).rows(is_empty_B.int().argsort(stable=True)[:rows])


def sampled_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Return 1 on the tokens that the policy sampled: response tokens that no tool wrote, (B, T)."""
    mask_BT: Tensor = inputs["completion_mask"]
    return mask_BT * inputs["tool_mask"] if "tool_mask" in inputs else mask_BT


class SteadyGRPOTrainer(GRPOTrainer):
    """``GRPOTrainer`` that minimises a loss of the suite and measures it.

    The arguments are TRL's; ``args`` is required. TRL's own settings of a loss (``loss_type``, ``epsilon``, …) must
    stay at their defaults. ``beta`` of ``args`` is the coefficient of the KL term, and TRL holds the reference model.
    Advantages are TRL's (``scale_rewards``). All columns also go to TRL's own logs, as ``steadymoe/<column>``.

    Further arguments:
        loss: the name of an algorithm or preset, or a ``PolicyLoss``.
        correction: the name of a correction of the sampler's mismatch.
        routing: ``off``, ``r2`` (the old policy's experts run in every update) or ``freeze`` (routers do not learn).
        record: the results folder below which the run is recorded; None records nothing.
        experiment, task: names in the record.
        probe: the number of responses per process to measure again after every update, with routers free and with old
            routes forced, for ``expert_change_per_update`` and ``routing_share``. Only the main process's are recorded.
        axes: what tells this run apart from others of the experiment, such as ``{"learning_rate": 1e-6}``.

    Raises UserError, in one line and before the model is loaded, for what cannot be trained or measured.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *more: Any,
        loss: str | PolicyLoss = "grpo",
        correction: str = "off",
        routing: str = "off",
        record: str | Path | None = None,
        experiment: str = "trl",
        task: str = "own",
        axes: Mapping[str, Any] | None = None,
        probe: int = 0,
        **named: Any,
    ) -> None:
        version = trl_settings.check_trl(SteadyGRPOTrainer)
        if args is None:
            raise UserError("args is required: a trl.GRPOConfig")
        self.objective = trl_settings.objective_of(loss, correction, args.beta)
        config, layers = trl_settings.model_config(model, args)
        has_sampler = args.use_vllm or named.get("rollout_func") is not None
        provided = {
            *("old_logprobs_BT", "groups_B", "entropy_BT"),
            *(["reference_logprobs_BT"] if args.beta else []),
            *(["rollout_logprobs_BT"] if has_sampler else []),
            *(["router_log_ratio_LBTK"] if layers else []),
        }
        parts = args.distributed_state.num_processes * args.gradient_accumulation_steps
        trl_settings.check_objective(self.objective, provided, is_split=parts > 1)
        corrects = correction != "off" or self.objective.traits.corrects_for_sampler
        trl_settings.check_settings(args, corrects)
        trl_settings.check_routing(routing, layers)
        trl_settings.check_sharding(config, args)
        if probe < 0:
            raise UserError(f"probe must be a number of responses, at least 0; got {probe}")
        self._replays, self._probed = routing == "r2", probe
        self._facts: dict[str, Any] = {}
        self._results = None if record is None else Path(record)
        if self._results is not None:
            name = model if isinstance(model, str) else config._name_or_path or config.model_type
            names = {
                "trainer": "trl",
                "experiment": experiment,
                "algorithm": trl_settings.loss_name(loss),
                "model": str(name).rstrip("/").rpartition("/")[2],
                "task": task,
                "correction": correction,
                "routing": routing,
                "engine": "vllm" if args.use_vllm else "rollout_func" if has_sampler else "transformers",
            }
            plain = trl_settings.run_config(args, self.objective, routing, experiment)
            command = shlex.join(["python", *sys.argv])
            self._facts = run_folder.facts(names, version, axes or {}, plain, command)
            run_folder.free_folder(self._results, self._facts)

        super().__init__(model, reward_funcs, args, *more, **named)
        self.core: PreTrainedModel = getattr(self.model, "get_base_model", lambda: self.model)()
        self._experts = next((experts_of(router) for router in routers(self.core)), 0)
        for router in routers(self.core) if routing == "freeze" else ():
            router.requires_grad_(False)
        aux_loss = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
        if self.aux_loss_enabled and self.accelerator.is_main_process:
            print(
                f"steadymoe: a router auxiliary loss is on, coefficient {aux_loss} "
                "(router_aux_loss_coef=0.0 in GRPOConfig turns it off)"
            )
        self._loss_state = self.objective.loss.initial_state()
        self._until_backward, self._skips_old = ExitStack(), False
        self._sizes: list[list[int]] = []
        """Responses with tokens and tokens of each mini-batch of the rollout, over all processes."""
        self._steps = Steps(self.core, trl_settings.updates_per_rollout(args), self._metrics, aux_loss)
        self.add_callback(self._steps)

    # --- one rollout --------------------------------------------------------------------------------------

    @property
    def _forwards_per_rollout(self) -> int:
        """Micro-batches that are trained on before TRL samples again."""
        return int(self.args.steps_per_generation * self.num_iterations)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training or (self._step % self._forwards_per_rollout and self._buffered_inputs is not None):
            return super()._prepare_inputs(generation_batch)
        clock = Clock(self.accelerator.device)
        with clock(ROLLOUT_SECONDS):
            inputs = super()._prepare_inputs(generation_batch)
        with clock(OLD_POLICY_SECONDS):
            whole = self._begin_rollout(self._buffered_inputs)
        scores_PG = self._scores.view(-1, self.num_generations)
        self._steps.begin(self.state.global_step, whole, scores_PG, clock.seconds)
        return inputs

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        is_stale = self.args.gradient_accumulation_steps % self._forwards_per_rollout != 0
        self._skips_old = self.model.training and is_stale
        output = super()._generate_and_score_completions(inputs)
        output.pop("old_per_token_logps", None)
        rows = len(output["completion_ids"])
        first = self.accelerator.process_index * rows
        output["groups"] = torch.arange(first, first + rows, device=self.accelerator.device) // self.num_generations
        return output

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *more: Any, **named: Any
    ) -> Any:
        if self._skips_old:
            # TRL would compute the old policy here, before it splits the rollout; ``_begin_rollout`` does so after.
            self._skips_old = False
            return torch.zeros_like(input_ids[:, -logits_to_keep:], dtype=torch.float32), None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *more, **named
        )

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._scores = (rewards * self.reward_weights.to(rewards.device)).nansum(-1)
        if not self.model.training:
            self._steps.add_evaluations(self.state.global_step, gather_object(prompts), self._scores.tolist())
        return rewards

    @torch.no_grad()
    def _begin_rollout(self, parts: list[dict[str, Any]]) -> Moments:
        """Compute the old policy of every micro-batch; return the moments of the rollout, over all processes."""
        rollout, sizes = [], []
        for inputs in parts:
            old = inputs[_KEY] = self._score(self.model, inputs)
            mask_BT = sampled_mask(inputs)
            sampler_BT, reference_BT = inputs.get("sampling_per_token_logps"), inputs.get("ref_per_token_logps")
            part = moments.rollout_moments(
                mask_BT, old.logprobs_BT, sampler_BT, reference_BT, old.routes, self._experts
            )
            fed = (inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()) * self.num_iterations
            rollout.append(part | {"fed": fed})
            sizes.append(torch.stack([mask_BT.any(-1).sum(), mask_BT.sum()]))
        sizes_U2 = torch.stack(sizes).unflatten(0, (-1, self.args.gradient_accumulation_steps)).sum(1)
        self._sizes = self.accelerator.reduce(sizes_U2, "sum").tolist()
        if self._probed and self._experts:  # in every process: all take part in a sharded model's forward
            sequences = probed_sequences(parts[0], self._probed)
            self._steps.probe = UpdateProbe(self.core, sequences, "bf16" if self.args.bf16 else "fp32")
        return gathered(rollout)

    # --- one micro-batch ----------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        with ExitStack() as self._until_backward:
            return super().training_step(model, inputs, num_items_in_batch)

    def _score(self, model: Any, inputs: Mapping[str, Any], forced_LNK: Tensor | None = None) -> Scored:
        """Compute log-probabilities, entropy and routes of a micro-batch; ``forced_LNK`` replaces the routers' choice.

        Routers are recorded only here: not in generation, evaluation, or a reference model's forward. Forced routes
        stay until the backward pass ends, because gradient checkpointing runs layers again.
        """
        sequences = sequences_of(inputs)
        tokens_BS, width = sequences.tokens_BS, sequences.response_width
        recorder = RouteRecorder(self.core)
        with ExitStack() as here:
            (here if forced_LNK is None else self._until_backward).enter_context(recorder)
            recorder.force(forced_LNK)
            logprobs_BT, entropy_BT, aux_loss = self._get_per_token_logps_and_entropies(
                model,
                tokens_BS,
                sequences.mask_BS,
                width,
                compute_entropy=True,
                compute_aux_loss=self.aux_loss_enabled and torch.is_grad_enabled(),
            )
            routed = recorder.take(tokens_BS.numel())
        if routed is None:
            return Scored(logprobs_BT, entropy_BT, aux_loss, None, None)
        routes = Routes.of(routed, tokens_BS.shape, width)
        return Scored(logprobs_BT, entropy_BT, aux_loss, routes, routed.executed_LNK if self._replays else None)

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        """Return the micro-batch's part of the loss, times the number of processes, by which DDP divides."""
        if not self.model.training:
            return super()._compute_loss(model, inputs)  # evaluation is TRL's own
        old: Scored = inputs[_KEY]
        now = self._score(model, inputs, old.executed_LNK)
        batch = self._batch(inputs, old, now)
        output = self.objective(batch)
        if output.state:
            self._loss_state = {name: value.detach() for name, value in output.state.items()}
        loss = output.loss
        if now.aux_loss is not None:  # as TRL: a mean over micro-batches and processes
            parts = self.current_gradient_accumulation_steps * self.accelerator.num_processes
            loss = loss + self.router_aux_loss_coef * now.aux_loss / parts
        part = moments.update_moments(batch, output) | {"loss": loss.detach().double()}
        if old.routes is not None and now.routes is not None:
            part |= moments.routing_moments(old.routes, now.routes, batch.mask_BT, self._experts, self._replays)
        self._steps.update.append(part)
        return loss * self.accelerator.num_processes

    def _batch(self, inputs: Mapping[str, Any], old: Scored, now: Scored) -> Batch:
        """Return the loss's batch. Where the sampler's log-probability is missing, π_old replaces it: no correction."""
        sampler_BT, log_ratio_LBTK = inputs.get("sampling_per_token_logps"), None
        if sampler_BT is not None:
            sampler_BT = torch.where(sampler_BT.isfinite(), sampler_BT, old.logprobs_BT)
        if self.objective.traits.routes and old.routes is not None and now.routes is not None:
            chosen_LBTK = old.routes.live_LBFK[:, :, -old.logprobs_BT.shape[1] :].long()
            log_ratio_LBTK = (now.routes.logprobs_LBTE - old.routes.logprobs_LBTE).gather(-1, chosen_LBTK)
        part = self._step % self.args.steps_per_generation
        responses, tokens = self._sizes[part // self.args.gradient_accumulation_steps]
        advantages, mask_BT = inputs["advantages"], sampled_mask(inputs)
        return Batch(
            logprobs_BT=now.logprobs_BT,
            mask_BT=mask_BT,
            advantages_BT=(advantages[:, None] if advantages.dim() == 1 else advantages).expand(mask_BT.shape),
            old_logprobs_BT=old.logprobs_BT,
            rollout_logprobs_BT=sampler_BT,
            groups_B=inputs["groups"],
            reference_logprobs_BT=inputs.get("ref_per_token_logps"),
            entropy_BT=now.entropy_BT,
            router_log_ratio_LBTK=log_ratio_LBTK,
            responses=responses,
            tokens=tokens,
            state=self._loss_state,
        )

    # --- the record ---------------------------------------------------------------------------------------

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        self._steps.before_update = {
            GRAD_NORM: float(super()._get_grad_norm(model, grad_norm=grad_norm)),
            LEARNING_RATE: float(self._get_learning_rate()),
        }
        return self._steps.before_update[GRAD_NORM]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint, and then its experts, which transformers 5.23 leaves as they are.

        A checkpoint holds every expert separately, the model holds them in one tensor, and ``Trainer`` does not
        convert.
        """
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._experts and self.core is self.model:
            saved = type(self.core).from_pretrained(resume_from_checkpoint, dtype=self.core.dtype)
            self.core.load_state_dict(saved.state_dict())

    def train(self, *more: Any, **named: Any) -> Any:
        """Train as ``Trainer.train``; the main process records."""
        if self._results is None or not self.accelerator.is_main_process:
            return super().train(*more, **named)
        folder = run_folder.free_folder(self._results, self._facts)
        self._steps.record = run_folder.LiveRecord(folder, dict(self._facts))
        with self._steps.record:
            return super().train(*more, **named)
