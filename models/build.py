"""A transformers causal language model from the numbers in ``conf/model/*.yaml``.

No model code is written here: the YAML names a transformers config class (``_target_``) and its fields,
and transformers builds the model that belongs to it.
"""

import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Given by the tokenizer, so that one model YAML serves every task.
_FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
_TOP_K = ("num_experts_per_tok", "moe_topk", "experts_per_token")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def config_class(target: str) -> type[PreTrainedConfig]:
    """The transformers config class that ``_target_`` names; ValueError if it is not one."""
    package, _, name = target.rpartition(".")
    cls = getattr(transformers, name, None) if package == "transformers" else None
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedConfig)):
        raise ValueError(
            f"model.config._target_ is {target!r}, which is no transformers config class "
            "(like transformers.Qwen3MoeConfig)"
        )
    return cls


def check(config: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, for what transformers would accept in silence or break on later."""
    cls = config_class(str(config.get("_target_")))
    numbers = {key: value for key, value in config.items() if key != "_target_"}
    known = _fields(cls)
    for key in numbers:
        if key in _FROM_TOKENIZER:
            raise ValueError(f"model.config.{key} is given by the task's tokenizer; leave it out")
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"{cls.__name__} has no field model.config.{key}{hint}")
        if ("dropout" in key or "jitter" in key) and numbers[key]:
            raise ValueError(
                f"model.config.{key} would have no effect: models run without noise, so that π_old is exact"
            )
    for key, value in numbers.items():
        counts = key.startswith(("num_", "n_")) or key.endswith(("_size", "_dim"))
        if counts and isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f"model.config.{key} must be at least 1; got {value}")
    try:
        made = cls(**numbers)
    except Exception as error:  # transformers validates types with exception classes of its own
        raise ValueError(f"{cls.__name__}: {' '.join(str(error).split())}") from error

    def first(names: tuple[str, ...]) -> int | None:
        """A number by whichever name this family has for it, its default included."""
        return next((value for name in names if isinstance(value := getattr(made, name, None), int)), None)

    top_k, experts = first(_TOP_K), first(_EXPERTS)
    if top_k is not None and experts is not None and top_k > experts:
        raise ValueError(
            f"top-k above the number of experts: num_experts_per_tok is {top_k} of {experts} (model.config)"
        )
    heads, key_value_heads = first(("num_attention_heads",)), first(("num_key_value_heads",))
    if heads and key_value_heads and heads % key_value_heads:
        raise ValueError(f"num_key_value_heads ({key_value_heads}) must divide num_attention_heads ({heads})")
    if heads and not getattr(made, "head_dim", None) and made.hidden_size % heads:
        raise ValueError(f"num_attention_heads ({heads}) must divide hidden_size ({made.hidden_size})")
    try:
        with torch.device("meta"):  # everything but the memory
            AutoModelForCausalLM.from_config(made)
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in numbers.items())
        raise ValueError(f"{cls.__name__} cannot be built from {given}: {type(error).__name__} {error}") from error


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the model of this config is a mixture of experts."""
    made = config_class(config["_target_"])(**{key: value for key, value in config.items() if key != "_target_"})
    return any(isinstance(getattr(made, name, None), int) for name in _EXPERTS)


def _fields(cls: type[PreTrainedConfig]) -> set[str]:
    """Names that the config declares, or that its model reads all the same (``head_dim`` of Qwen3-MoE, say)."""
    if cls not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"transformers has no causal language model for {cls.__name__}")
    source = inspect.getsource(sys.modules[AutoModelForCausalLM._model_mapping[cls].__module__])
    read = re.findall(r"\bconfig\.(\w+)|\bgetattr\((?:self\.)?config, \"(\w+)\"", source)
    return {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map) | {a or b for a, b in read}


def build(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int, device: str | None = None
) -> PreTrainedModel:
    """A freshly initialised fp32 model on ``device`` (None: torch's current one); equal seeds give equal weights.

    Experts run through transformers' ``grouped_mm`` implementation, attention through ``sdpa``.
    """
    cls = config_class(config["_target_"])
    numbers = {key: value for key, value in config.items() if key != "_target_"}
    numbers |= {"vocab_size": len(tokenizer)}
    numbers |= {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("pad", "bos", "eos")}
    kwargs: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": torch.float32}
    if has_experts(config):
        kwargs["experts_implementation"] = "grouped_mm"
    # transformers initialises from torch's global generator: lent a seed for the duration, then given back.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(cls(**numbers), **kwargs)
    # In evaluation mode throughout, so that no dropout or router jitter sets sampler and trainer apart.
    return model.eval().to(device) if device else model.eval()
