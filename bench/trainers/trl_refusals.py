"""What ``steadymoe.bench.trainers.trl`` refuses before any work: another TRL, and settings that would say nothing."""

import inspect
import os
from dataclasses import fields
from importlib.metadata import version
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from steadymoe.bench.config.validate import ConfigError
from steadymoe.models.contract import OutsideContractError, moe_layers

TESTED = "1.16"
# The methods that the adapter calls or replaces, with their parameters. TRL calls them private, and they drift.
_SIGNATURES = {
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("self", "model", "inputs"),
    "_get_grad_norm": ("self", "model", "grad_norm"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
}
# This one also takes what images need.
_SCORING = ("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy")
# Settings of TRL's own loss, which the suite's loss replaces.
_OF_THE_LOSS = (
    *("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "off_policy_mask_threshold"),
    *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
    *("vespo_lambda_neg", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "use_bias_correction_kl"),
)
ROUTINGS = ("off", "r2", "freeze")


def check_trl() -> str:
    """The version of TRL. Raises ConfigError if it is not the one that the adapter was made for."""
    found = version("trl")
    if not found.startswith(f"{TESTED}."):
        raise ConfigError(f"the adapter is made for TRL {TESTED}; this is TRL {found}: pip install 'steadymoe[trl]'")
    wanted = _SIGNATURES | {"_get_per_token_logps_and_entropies": (*_SCORING, "compute_aux_loss")}
    for name, parameters in wanted.items():
        method = getattr(GRPOTrainer, name, None)
        there = () if method is None else tuple(inspect.signature(inspect.unwrap(method)).parameters)
        if (there[: len(parameters)] if parameters[-1] == "compute_aux_loss" else there) != parameters:
            raise ConfigError(
                f"TRL's GRPOTrainer.{name} takes {', '.join(there) or 'nothing'}, not {', '.join(parameters)}: the "
                "adapter does not know it"
            )
    return found


def check_settings(args: GRPOConfig, corrects: bool) -> None:
    """Raise ConfigError for settings that contradict the suite's loss, which ``corrects`` for the sampler or not."""
    usual = {field.name: field.default for field in fields(GRPOConfig)}
    for name in _OF_THE_LOSS:
        if getattr(args, name) != usual[name]:
            raise ConfigError(
                f"{name}={getattr(args, name)!r} belongs to TRL's own loss, which steadymoe's replaces; leave it out, "
                "and pass loss=steadymoe.algorithms.load(name, field=…)"
            )
    if args.use_vllm and args.vllm_importance_sampling_correction:
        what = "two corrections at once" if corrects else "TRL's own correction, which steadymoe's loss would drop"
        raise ConfigError(f"{what}: set vllm_importance_sampling_correction=False, and choose by correction=…")
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise ConfigError(
            f"steps_per_generation={args.steps_per_generation} must be a multiple of "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: an update takes one rollout's data"
        )


def check_routing(routing: str, layers: int) -> None:
    """Raise ConfigError for an unknown routing, and for one that a dense model cannot have."""
    if routing in ("r3", "pr2"):
        raise ConfigError(f"routing={routing}: TRL does not hand over the sampler's routes; use {', '.join(ROUTINGS)}")
    if routing not in ROUTINGS:
        raise ConfigError(f"unknown routing {routing!r}; choose from {', '.join(ROUTINGS)}")
    if routing != "off" and layers == 0:
        raise ConfigError(f"routing={routing}: the model is dense, it has no router")


def check_sharding(config: PreTrainedConfig, args: GRPOConfig) -> None:
    """Raise ConfigError for sharding under which a model would learn wrongly or not be sharded, without a word.

    transformers shards a model that is loaded with a ``distributed_config``; accelerate shards a loaded model, on
    accelerators alone: on CPU processes it trains a whole copy in each (accelerate 1.15, ``AcceleratorState``).
    """
    given: Any = (args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}).get("distributed_config")
    given = given or getattr(config, "distributed_config", None) or {}
    sizes = {name: value or 1 for name, value in (given if isinstance(given, dict) else vars(given)).items()}
    for name in ("tp_size", "pp_size"):
        if sizes.get(name, 1) > 1:
            raise ConfigError(
                f"distributed_config: with {name}={sizes[name]} processes share responses, and the columns would "
                "count them twice; shard by fsdp_size, dp_replicate_size and ep_size"
            )
    shards, text = sizes.get("fsdp_size", 1), config.get_text_config()
    if getattr(text, "tie_word_embeddings", False) and text.vocab_size % shards:
        raise ConfigError(
            f"distributed_config: with tied embeddings of {text.vocab_size} tokens in {shards} unequal shards the "
            "output layer would keep its first weights (transformers 5.23, torch 2.13); take another fsdp_size"
        )
    is_asked = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" or bool(args.fsdp)
    if is_asked and args.device.type == "cpu":
        raise ConfigError(
            "accelerate does not shard (FSDP) on CPU processes, and would train a whole copy in each without a word: "
            "give model_init_kwargs={'distributed_config': {'fsdp_size': <processes>}} in its place"
        )


def config_of(model: str | PreTrainedModel, args: GRPOConfig) -> PreTrainedConfig:
    """The model's config, before the model is loaded."""
    if not isinstance(model, str):
        return model.config
    given = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    found: PreTrainedConfig = AutoConfig.from_pretrained(
        model, trust_remote_code=args.trust_remote_code, revision=given.get("revision")
    )
    return found


def layers_of(config: PreTrainedConfig) -> int:
    """The number of MoE layers, from the model's config alone. Raises ConfigError for an MoE outside the contract."""
    try:
        return moe_layers(config)
    except OutsideContractError as error:
        raise ConfigError(str(error)) from error
