"""The settings of the TRL adapter: the objective, refusals before any work, and the config in ``run.json``."""

import inspect
import os
from collections.abc import Collection
from dataclasses import asdict, fields, is_dataclass
from importlib.metadata import version
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from steadymoe import conf
from steadymoe.algorithms import PolicyLoss, build, load, names
from steadymoe.algorithms.objective import KL, Objective
from steadymoe.bench.support.errors import UserError
from steadymoe.integrations.verl.requirements import missing
from steadymoe.models.contract import OutsideContractError, moe_layers

TESTED = "1.16"
# Methods that the adapter overrides and that TRL calls private: they change.
_OVERRIDDEN = (
    *("training_step", "_prepare_inputs", "_generate_and_score_completions", "_calculate_rewards", "_compute_loss"),
    *("_get_per_token_logps_and_entropies", "_get_grad_norm", "_load_from_checkpoint"),
)
# Settings of TRL's own loss, which the suite's loss replaces.
_TRL_LOSS = (
    *("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "off_policy_mask_threshold"),
    *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
    *("vespo_lambda_neg", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "use_bias_correction_kl"),
)
ROUTINGS = ("off", "r2", "freeze")
# Settings of TRL that ``run.json`` holds, besides those that the suite has too.
_RECORDED = (
    *("bf16", "fp16", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_iterations", "scale_rewards", "gradient_checkpointing", "router_aux_loss_coef"),
)


def objective_of(loss: str | PolicyLoss, correction: str, beta: float) -> Objective:
    """Return the objective from the names of a loss (or the loss itself) and of a correction, with TRL's KL term.

    ``beta`` is the coefficient of the KL term, k3 in the loss. Raises UserError for an unknown name, and for two
    corrections.
    """
    try:
        corrects = build(conf.read("correction", correction))
    except ValueError as error:
        raise UserError(str(error)) from error
    try:
        loss = load(loss) if isinstance(loss, str) else loss
        return Objective(loss=loss, correction=corrects, kl=KL(coefficient=beta))
    except (TypeError, ValueError) as error:
        raise UserError(f"loss: {error}") from error


def loss_name(loss: str | PolicyLoss) -> str:
    """Return the name of a run's algorithm: the name that was given, else the module of the loss's class."""
    if isinstance(loss, str):
        return loss
    module = type(loss).__module__.rpartition(".")[2]
    return module if module in names() else type(loss).__name__


def check_objective(objective: Objective, provided: Collection[str], is_split: bool) -> None:
    """Raise UserError unless the trainer, which fills the fields ``provided`` of a batch, can compute the objective.

    ``is_split`` says whether a mini-batch is split over micro-batches or processes.
    """
    reason = missing(objective, provided, is_split)
    if reason is None:
        return
    if is_split and objective.loss.traits.whole_minibatch:
        reason += ": use one process and gradient_accumulation_steps=1"
    raise UserError(f"{type(objective.loss).__name__} {reason}")


def check_trl(adapter: type[GRPOTrainer]) -> str:
    """Return the version of TRL. Raises UserError if it is not the one that ``adapter`` was made for.

    The methods that the adapter overrides must have the parameters that it names.
    """
    installed = version("trl")
    if not installed.startswith(f"{TESTED}."):
        raise UserError(
            f"the adapter is made for TRL {TESTED}; this is TRL {installed}: pip install './integrations[trl]'"
        )
    for name in _OVERRIDDEN:
        parameters = inspect.signature(getattr(adapter, name)).parameters.values()
        ours = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        method = getattr(GRPOTrainer, name, None)
        theirs = [] if method is None else list(inspect.signature(inspect.unwrap(method)).parameters)
        if theirs[: len(ours)] != ours:
            takes = ", ".join(theirs) or "nothing"
            raise UserError(
                f"TRL's GRPOTrainer.{name} takes {takes}, not {', '.join(ours)}: the adapter does not know it"
            )
    return installed


def check_settings(args: GRPOConfig, corrects: bool) -> None:
    """Raise UserError for settings that contradict the suite's loss, which ``corrects`` for the sampler or not."""
    defaults = {field.name: field.default for field in fields(GRPOConfig)}
    for name in _TRL_LOSS:
        if getattr(args, name) != defaults[name]:
            raise UserError(
                f"{name}={getattr(args, name)!r} belongs to TRL's own loss, which steadymoe's replaces; leave it out, "
                "and pass loss=steadymoe.algorithms.load(name, field=…)"
            )
    if args.use_vllm and args.vllm_importance_sampling_correction:
        what = "correct twice" if corrects else "be ignored by steadymoe's loss"
        raise UserError(
            f"vllm_importance_sampling_correction=True would {what}: set it to False, and choose by correction=…"
        )
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise UserError(
            f"steps_per_generation={args.steps_per_generation} must be a multiple of "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: an update uses one rollout's data"
        )


def check_routing(routing: str, layers: int) -> None:
    """Raise UserError for an unknown routing, and for one that a model of no MoE ``layers`` cannot have."""
    if routing in ("r3", "r3_gates", "r3_filtered", "pr2"):
        raise UserError(f"routing={routing}: TRL does not provide the sampler's routes; use {', '.join(ROUTINGS)}")
    if routing not in ROUTINGS:
        raise UserError(f"unknown routing {routing!r}; choose from {', '.join(ROUTINGS)}")
    if routing != "off" and layers == 0:
        raise UserError(f"routing={routing}: the model is dense and has no routers")


def check_sharding(config: PreTrainedConfig, args: GRPOConfig) -> None:
    """Raise UserError for sharding under which a model would silently learn wrongly or not be sharded.

    transformers shards a model that is loaded with a ``distributed_config``; accelerate shards a loaded model, on
    accelerators alone: on CPU processes it trains a full copy in each (accelerate 1.15, ``AcceleratorState``).
    """
    kwargs = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    sharding: Any = kwargs.get("distributed_config") or getattr(config, "distributed_config", None) or {}
    sizes = {name: size or 1 for name, size in (sharding if isinstance(sharding, dict) else vars(sharding)).items()}
    for name in ("tp_size", "pp_size"):
        if sizes.get(name, 1) > 1:
            raise UserError(
                f"distributed_config: with {name}={sizes[name]} processes share responses, and the columns would "
                "count them twice; shard by fsdp_size, dp_replicate_size and ep_size"
            )
    shards, text = sizes.get("fsdp_size", 1), config.get_text_config()
    if getattr(text, "tie_word_embeddings", False) and text.vocab_size % shards:
        raise UserError(
            f"distributed_config: with tied embeddings of {text.vocab_size} tokens in {shards} unequal shards the "
            "output layer would keep its initial weights (transformers 5.23, torch 2.13); use another fsdp_size"
        )
    uses_accelerate = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" or bool(args.fsdp)
    if uses_accelerate and args.device.type == "cpu":
        raise UserError(
            "accelerate does not shard (FSDP) on CPU processes, and would silently train a full copy in each: use "
            "model_init_kwargs={'distributed_config': {'fsdp_size': <processes>}} instead"
        )


def model_config(model: str | PreTrainedModel, args: GRPOConfig) -> tuple[PreTrainedConfig, int]:
    """Return the config of a model that need not be loaded yet, and its number of MoE layers.

    Raises UserError for an MoE outside the contract (docs/moe.md).
    """
    if isinstance(model, str):
        kwargs = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
        trusted = {"trust_remote_code": args.trust_remote_code, "revision": kwargs.get("revision")}
        config: PreTrainedConfig = AutoConfig.from_pretrained(model, **trusted)
    else:
        config = model.config
    try:
        return config, moe_layers(config)
    except OutsideContractError as error:
        raise UserError(str(error)) from error


def updates_per_rollout(args: GRPOConfig) -> int:
    """Return the number of optimizer steps on one rollout."""
    return int(args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)


def run_config(args: GRPOConfig, objective: Objective, routing: str, experiment: str) -> dict[str, Any]:
    """Return the config of a run for ``run.json``; the number of updates is known when training begins."""
    rollout = args.generation_batch_size // args.num_generations
    return {
        "experiment_name": experiment,
        "seed": args.seed,
        "device": args.device.type,
        "updates": 1,
        "updates_per_rollout": updates_per_rollout(args),
        "minibatch_prompts": max(1, rollout * args.gradient_accumulation_steps // args.steps_per_generation),
        "rollout": {"responses": args.num_generations, "max_new_tokens": args.max_completion_length},
        "optimizer": {name: getattr(args, name) for name in ("learning_rate", "weight_decay", "max_grad_norm")},
        "algorithm": {"loss": _with_target(objective.loss), "kl": asdict(objective.kl)},
        "correction": _with_target(objective.correction),
        "routing": routing,
        "engine": {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        "trainer": {name: getattr(args, name) for name in _RECORDED}
        | {"optim": str(getattr(args.optim, "value", args.optim)), "processes": args.distributed_state.num_processes},
    }


def _with_target(value: Any) -> Any:
    """Return a dataclass as the mapping that ``steadymoe.algorithms.build`` reads; other values stay."""
    if not is_dataclass(value):
        return value
    target = f"{type(value).__module__}.{type(value).__qualname__}"
    return {"_target_": target} | {name: _with_target(field) for name, field in vars(value).items()}
