"""TRL's GRPOTrainer with the suite's losses, routing replay and columns, on one process or several (DDP, FSDP2).

TRL samples, rewards, forms advantages and steps the optimizer. A rollout is one step of the record, and an optimizer
step is one update. The old policy is computed after TRL has shuffled and split the rollout, in the micro-batches that
are trained on, so that the ratio is exactly 1 before the first update.

Shapes: B responses of a micro-batch, S = W + T positions of prompt and response, N = B·S positions fed, T response
positions, P prompts, G responses to each, L MoE layers, E experts, K experts a token.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from steadymoe.algorithms import Batch, PolicyLoss
from steadymoe.algorithms.corrections import Correction, Uncorrected
from steadymoe.algorithms.objective import Objective
from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.support.clock import Clock
from steadymoe.bench.trainers import journal, moments, objectives, trl_record, trl_refusals
from steadymoe.bench.trainers.moments import Moments
from steadymoe.bench.trainers.run_folder import ForeignRun
from steadymoe.bench.trainers.scoring import Scored, routes_of, sampled_mask, sequences_of
from steadymoe.bench.training.probes import UpdateProbe
from steadymoe.models.routing import RouteRecorder, routers
from steadymoe.models.selection import experts_of

_KEY = "steadymoe"


class SteadyGRPOTrainer(GRPOTrainer):
    """``GRPOTrainer`` that minimises a loss of the suite and measures it.

    Its arguments are TRL's; ``args`` must be given. TRL's own settings of a loss (``loss_type``, ``epsilon``, …) must
    stay at their defaults. ``beta`` of ``args`` is the coefficient of the KL term, and TRL keeps the reference model.
    Advantages are TRL's (``scale_rewards``). All columns also go to TRL's own logs, as ``steadymoe/<column>``.

    Further arguments:
        loss: the name of an algorithm or preset, a ``PolicyLoss`` or an ``Objective``.
        correction: the name of a correction of the sampler's mismatch, or a ``Correction``.
        routing: ``off``, ``r2`` (the old policy's experts run in every update) or ``freeze`` (routers do not learn).
        record: the results folder below which the run is recorded; None records nothing.
        experiment, task: names in the record.
        probe: how many responses of a process are measured once more after every update, with routers free and with
            old routes forced, for ``expert_change_per_update`` and ``routing_share``. The main process's are recorded.
        axes: what tells this run from others of the experiment, such as ``{"learning_rate": 1e-6}``.

    Raises ConfigError, in one line and before the model is loaded, for what cannot be trained or measured.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *more: Any,
        loss: str | PolicyLoss | Objective = "grpo",
        correction: str | Correction = "none",
        routing: str = "off",
        record: str | Path | None = None,
        experiment: str = "trl",
        task: str = "own",
        axes: Mapping[str, Any] | None = None,
        probe: int = 0,
        **named: Any,
    ) -> None:
        trl = trl_refusals.check_trl()
        if args is None:
            raise ConfigError("args must be given: a trl.GRPOConfig")
        self.objective = objectives.chosen(loss, correction, args.beta)
        processes = args.distributed_state.num_processes
        holds = {"old_logprobs_BT", "groups_B", "entropy_BT"} | ({"reference_logprobs_BT"} if args.beta else set())
        samples_elsewhere = args.use_vllm or named.get("rollout_func") is not None
        holds |= {"rollout_logprobs_BT"} if samples_elsewhere else set()
        config = trl_refusals.config_of(model, args)
        layers = trl_refusals.layers_of(config)
        holds |= {"router_log_ratio_LBTK"} if layers else set()
        objectives.check(self.objective, holds, is_split=processes * args.gradient_accumulation_steps > 1)
        corrects = not isinstance(self.objective.correction, Uncorrected)
        trl_refusals.check_settings(args, corrects or self.objective.traits.corrects_for_sampler)
        trl_refusals.check_routing(routing, layers)
        trl_refusals.check_sharding(config, args)
        if probe < 0:
            raise ConfigError(f"probe is a number of responses, at least 0; got {probe}")
        self._replays, self._probed = routing == "r2", probe
        self._run: ForeignRun | None = None
        if record is not None:
            self._run = trl_record.foreign_run(
                args,
                self.objective,
                model,
                f"trl {trl}",
                samples_elsewhere,
                routing=routing,
                results=Path(record),
                algorithm=objectives.name_of(loss),
                experiment=experiment,
                task=task,
                axes=axes or {},
                correction=correction if isinstance(correction, str) else type(correction).__name__,
            )
            self._run.refuse_taken()

        super().__init__(model, reward_funcs, args, *more, **named)
        self.core: PreTrainedModel = getattr(self.model, "get_base_model", lambda: self.model)()
        found = routers(self.core)
        self._experts = next((experts_of(router) for router in found), 0)
        for router in found if routing == "freeze" else ():
            router.requires_grad_(False)
        if self.aux_loss_enabled and self.accelerator.is_main_process:
            print(
                f"steadymoe: a router auxiliary loss is on, coefficient {self.router_aux_loss_coef} "
                "(router_aux_loss_coef=0.0 in GRPOConfig switches it off)"
            )
        self._loss_state = self.objective.loss.initial_state()
        self._until_backward, self._skips_old = ExitStack(), False
        self._sizes: list[list[int]] = []
        self._steps = trl_record.Steps(self)
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
        with clock("rollout_seconds"):
            inputs = super()._prepare_inputs(generation_batch)
        with clock("old_policy_seconds"):
            whole = self._begin_rollout(self._buffered_inputs)
        self._steps.begin(whole, self._scores.view(-1, self.num_generations), clock.seconds)
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

    def _get_per_token_logps_and_entropies(self, model: Any, input_ids: Tensor, *more: Any, **named: Any) -> Any:
        if self._skips_old:
            # TRL would compute the old policy here, before it splits the rollout; ``_begin_rollout`` does so after.
            self._skips_old = False
            return torch.zeros_like(input_ids[:, -more[1] :], dtype=torch.float32), None, None
        return super()._get_per_token_logps_and_entropies(model, input_ids, *more, **named)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._scores = (rewards * self.reward_weights.to(rewards.device)).nansum(-1)
        if not self.model.training:
            self._steps.evaluated(gather_object(prompts), self._scores.tolist())
        return rewards

    @torch.no_grad()
    def _begin_rollout(self, parts: list[dict[str, Any]]) -> Moments:
        """The old policy of every micro-batch, the sizes of the mini-batches, and the moments of the rollout."""
        found, sizes = [], []
        for inputs in parts:
            old = inputs[_KEY] = self._score(self.model, inputs)
            mask_BT = sampled_mask(inputs)
            sampler_BT, reference_BT = inputs.get("sampling_per_token_logps"), inputs.get("ref_per_token_logps")
            of_part = moments.of_rollout(mask_BT, old.logprobs_BT, sampler_BT, reference_BT, old.routes, self._experts)
            fed = (inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()) * self.num_iterations
            found.append(of_part | Moments({"fed": fed}))
            sizes.append(torch.stack([mask_BT.any(-1).sum(), mask_BT.sum()]))
        sizes_U2 = torch.stack(sizes).unflatten(0, (-1, self.args.gradient_accumulation_steps)).sum(1)
        self._sizes = self.accelerator.reduce(sizes_U2, "sum").tolist()
        if self._probed and self._experts:  # in every process, for all must take part in a sharded model's forward
            watched = sequences_of(parts[0], self._probed)
            self._steps.probe = UpdateProbe(self.core, watched, "bf16" if self.args.bf16 else "fp32")
        return trl_record.gathered(found)

    # --- one micro-batch ----------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        with ExitStack() as self._until_backward:
            return super().training_step(model, inputs, num_items_in_batch)

    def _score(self, model: Any, inputs: Mapping[str, Any], forced_LNK: Tensor | None = None) -> Scored:
        """Log-probabilities, entropy and routes of a micro-batch, with ``forced_LNK`` in place of the routers' choice.

        Only here are routers watched: not in generation, evaluation, or a reference model's forward. Forced routes
        stay until the backward pass is over, for gradient checkpointing runs layers again.
        """
        tokens_BS = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask_BS = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        recorder = RouteRecorder(self.core)
        with ExitStack() as here:
            (here if forced_LNK is None else self._until_backward).enter_context(recorder)
            recorder.force(forced_LNK)
            logprobs_BT, entropy_BT, aux_loss = self._get_per_token_logps_and_entropies(
                model,
                tokens_BS,
                mask_BS,
                width,
                compute_entropy=True,
                compute_aux_loss=self.aux_loss_enabled and torch.is_grad_enabled(),
            )
            routed = recorder.take(tokens_BS.numel())
        routes = None if routed is None else routes_of(routed, tokens_BS.shape, width)
        kept_LNK = routed.executed_LNK if routed is not None and self._replays else None
        return Scored(logprobs_BT, entropy_BT, aux_loss, routes, kept_LNK)

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        """The micro-batch's part of the loss, times the number of processes, by which DDP divides."""
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
        found = moments.of_update(batch, output) | Moments({"loss": loss.detach().double()})
        if old.routes is not None and now.routes is not None:
            found |= moments.of_routing(old.routes, now.routes, batch.mask_BT, self._experts, self._replays)
        self._steps.of_update.append(found)
        return loss * self.accelerator.num_processes

    def _batch(self, inputs: Mapping[str, Any], old: Scored, now: Scored) -> Batch:
        """What the loss is given. Where the sampler's log-probability is missing, π_old stands in: no correction."""
        sampler_BT, log_ratio_LBTK = inputs.get("sampling_per_token_logps"), None
        if sampler_BT is not None:
            sampler_BT = torch.where(sampler_BT.isfinite(), sampler_BT, old.logprobs_BT)
        if self.objective.traits.routes and old.routes is not None and now.routes is not None:
            chosen_LBTK = old.routes.live_LBFK[:, :, -old.logprobs_BT.shape[1] :].long()
            log_ratio_LBTK = (now.routes.logprobs_LBTE - old.routes.logprobs_LBTE).gather(-1, chosen_LBTK)
        together = self.args.gradient_accumulation_steps
        responses, tokens = self._sizes[self._step % self.args.steps_per_generation // together]
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
            "grad_norm": float(super()._get_grad_norm(model, grad_norm=grad_norm)),
            "learning_rate": float(self._get_learning_rate()),
        }
        return self._steps.before_update["grad_norm"]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """As transformers, and then the experts, which transformers 5.23 leaves as they are.

        A checkpoint holds every expert by itself, the model holds them in one tensor, and ``Trainer`` does not convert.
        """
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._experts and self.core is self.model:
            saved = type(self.core).from_pretrained(resume_from_checkpoint, dtype=self.core.dtype)
            self.core.load_state_dict(saved.state_dict())

    def train(self, *more: Any, **named: Any) -> Any:
        """``Trainer.train``, recorded by the main process."""
        if self._run is None or not self.accelerator.is_main_process:
            return super().train(*more, **named)
        self._run.refuse_taken()
        self._steps.journal = journal.Journal(self._run)
        with self._steps.journal.open():
            return super().train(*more, **named)
