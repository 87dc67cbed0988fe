"""When updates, steps and evaluations of TRL's trainer end, and what ``run.json`` says of a run of it."""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOConfig

from steadymoe.algorithms.objective import Objective
from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.measurement import token_metrics
from steadymoe.bench.support.clock import Clock
from steadymoe.bench.trainers import journal, moments
from steadymoe.bench.trainers.moments import Moments
from steadymoe.bench.trainers.run_folder import ForeignRun
from steadymoe.bench.training.columns_of_step import Measured, Row
from steadymoe.bench.training.probes import UpdateProbe
from steadymoe.models import build

if TYPE_CHECKING:
    from steadymoe.bench.trainers.trl import SteadyGRPOTrainer


class Steps(TrainerCallback):
    """Makes rows of what a trainer measures. Each process has the pooled rows; one has a journal to write them to."""

    def __init__(self, trainer: "SteadyGRPOTrainer") -> None:
        self._trainer = trainer
        self.journal: journal.Journal | None = None
        self.of_update: list[Moments] = []
        """The micro-batches of the current update, of this process."""
        self.before_update: dict[str, float] = {}
        """Gradient norm and learning rate of the current update."""
        self.probe: UpdateProbe | None = None
        """Some responses of this process in the current rollout; the main process records what its own measure."""
        self._rows = journal.ForeignStep(0)
        self._seconds: dict[str, float] = {}
        self._fed = self._missing = 0
        self._evaluated: list[tuple[Sequence[Any], list[float]]] = []
        self._begun = 0.0

    @property
    def _updates_per_step(self) -> int:
        args = self._trainer.args
        return int(args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)

    def begin(self, whole: Moments, scores_PG: Tensor, seconds: dict[str, float]) -> None:
        """A rollout was sampled, and the old policy computed."""
        tokens, responses = int(whole.sums["tokens"]), int(whole.sums["responses"])
        self._fed = int(whole.sums["fed"])
        self._missing += int(whole.sums.get("missing", 0))
        # These stages are part of TRL's update, and the probe is not: ``on_step_end``.
        self._seconds = {**seconds, "update_seconds": -sum(seconds.values()), "probe_seconds": 0.0}
        row = {"response_length": tokens / max(1, responses), "response_tokens": tokens, "tokens_sampled": tokens}
        self._rows = journal.ForeignStep(self._trainer.state.global_step // self._updates_per_step + 1)
        self._rows.add_sampled(row, scores_PG, moments.columns_of_rollout(whole))

    def evaluated(self, prompts: Sequence[Any], scores: list[float]) -> None:
        """Responses to held-out prompts, of all processes."""
        self._evaluated.append((prompts, scores))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        after, rest = divmod(state.global_step, self._updates_per_step)
        if rest:
            raise ConfigError(
                f"the checkpoint was written after update {state.global_step}, in the middle of a rollout's "
                f"{self._updates_per_step} updates; set save_steps to a multiple of {self._updates_per_step}"
            )
        if self.journal is not None:
            aux_loss = self._trainer.router_aux_loss_coef if self._trainer.aux_loss_enabled else 0.0
            sizes = build.size(self._trainer.core)
            self.journal.begin(after, state.max_steps // self._updates_per_step, router_aux_loss=aux_loss, **sizes)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        measured = moments.columns_of_update(gathered(self.of_update))
        self.of_update.clear()
        if self.probe is not None:
            clock = Clock(self._trainer.accelerator.device)
            with clock("probe_seconds"):
                measured |= Measured(*self.probe.after_update(self._trainer.core), {})
            self._seconds["probe_seconds"] += clock.seconds["probe_seconds"]
            self._begun += clock.seconds["probe_seconds"]
        overall = token_metrics.to_floats(measured.overall) | {"grad_norm": self.before_update["grad_norm"]}
        for name, value in overall.items():
            self._trainer._metrics["train"][f"steadymoe/{name}"].append(value)
        norm = measured.overall["loss"].new_tensor(self.before_update["grad_norm"])
        self._rows.add_update(self.before_update["learning_rate"], measured | Measured({"grad_norm": norm}, {}, {}))
        self._seconds["update_seconds"] += time.perf_counter() - self._begun
        if self._rows.updates == self._updates_per_step and not control.should_evaluate:
            self._write()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = -(-state.global_step // self._updates_per_step)
        found: list[Row] = []
        for prompts, scores in self._evaluated:
            found += journal.evaluations(step, prompts, scores)
        self._evaluated.clear()
        if step == 0 and self.journal is not None:
            self.journal.step({"evaluations": found})
        if step > 0:
            self._rows.add_evaluations(found)
        if self._rows.updates == self._updates_per_step:
            self._write()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.journal is not None:
            self.journal.end(is_whole=state.global_step >= state.max_steps)

    def _write(self) -> None:
        """Write the step, which is whole."""
        if self.journal is not None:
            self.journal.step(self._rows.tables(self._seconds, self._fed), sampler_logprobs_missing=self._missing)
        self._rows = journal.ForeignStep(0)


def gathered(parts: Sequence[Moments]) -> Moments:
    """The moments of the parts of all processes, on the CPU; every process gets them."""
    return moments.pooled(gather_object([moments.pooled(parts).cpu()]))


def foreign_run(
    args: GRPOConfig,
    objective: Objective,
    model: str | PreTrainedModel,
    origin: str,
    samples_elsewhere: bool,
    **named: Any,
) -> ForeignRun:
    """The run of a trainer with these settings; ``named`` are further fields of ``ForeignRun``."""
    name = model if isinstance(model, str) else model.config._name_or_path or model.config.model_type
    return ForeignRun(
        origin=origin,
        model=str(name).rstrip("/").rpartition("/")[2],
        engine="vllm" if args.use_vllm else "rollout_func" if samples_elsewhere else "transformers",
        seed=args.seed,
        config=_config(args, objective, named["routing"], named["experiment"]),
        command=shlex.join(["python", *sys.argv]),
        **named,
    )


def _config(args: GRPOConfig, objective: Objective, routing: str, experiment: str) -> dict[str, Any]:
    """What a run is made with, for ``run.json``; the number of steps is known when training begins."""
    return {
        "experiment_name": experiment,
        "seed": args.seed,
        "device": args.device.type,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "steps": 0,
        "total_updates": args.max_steps if args.max_steps > 0 else None,
        "epochs": args.num_train_epochs,
        "updates_per_rollout": args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps,
        "microbatch": args.per_device_train_batch_size,
        "rollout": {
            "prompts": args.generation_batch_size // args.num_generations,
            "responses": args.num_generations,
            "max_new_tokens": args.max_completion_length,
        },
        "optimizer": {
            "name": str(getattr(args.optim, "value", args.optim)),
            **{name: getattr(args, name) for name in ("learning_rate", "weight_decay", "max_grad_norm")},
        },
        "algorithm": {
            "loss": _described(objective.loss),
            "kl": asdict(objective.kl),
            "entropy_bonus": objective.entropy_bonus,
        },
        "correction": _described(objective.correction),
        "routing": {"replay": "r2" if routing == "r2" else "none", "freeze": routing == "freeze"},
        "engine": {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p},
        "trainer": {
            "processes": args.distributed_state.num_processes,
            "accumulation": args.gradient_accumulation_steps,
            "num_iterations": args.num_iterations,
            "scale_rewards": args.scale_rewards,
            "gradient_checkpointing": args.gradient_checkpointing,
            "router_aux_loss_coef": args.router_aux_loss_coef,
        },
    }


def _described(value: Any) -> dict[str, Any]:
    """A dataclass as the mapping that ``steadymoe.algorithms.build`` reads."""
    inner = {
        name: _described(each) if hasattr(each, "__dataclass_fields__") else each for name, each in vars(value).items()
    }
    return {"_target_": f"{type(value).__module__}.{type(value).__qualname__}"} | inner
