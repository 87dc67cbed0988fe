"""A transformers causal language model from the numbers in ``conf/model.yaml``.

This module contains no model code: the YAML names a config class of transformers (``_target_``) and its fields, and
transformers builds the model.
"""

import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from steadymoe.models import contract, megablocks
from steadymoe.models.routing import routers
from steadymoe.models.selection import experts_of

# The tokenizer gives these fields, so that one model YAML serves every task.
_FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
# The fields in which families have their top-k; a new family may add a name.
_TOP_K = ("num_experts_per_tok", "moe_topk", "experts_per_token")
# The suite's own fields: the routers' arithmetic (``precision`` is for the rest), a factor on their initial weights.
_ROUTER_DTYPE, _ROUTER_SCALE = "router_dtype", "router_scale"

# Field of a transformers config without effect in a run → what has the effect instead.
_WITHOUT_EFFECT = {
    "router_aux_loss_coef": "routing.aux_loss is the coefficient",
    "aux_loss_alpha": "routing.aux_loss is the coefficient",
    "router_z_loss_coef": "routing.z_loss is the coefficient",
    "dtype": "weights are fp32, and precision sets the dtype of forwards",
    "torch_dtype": "weights are fp32, and precision sets the dtype of forwards",
    "_attn_implementation": "attention is sdpa where a family has it",
    "attn_implementation": "attention is sdpa where a family has it",
    "_experts_implementation": "experts=… chooses it",
    "output_router_logits": "routers are always recorded",
    "use_cache": "sampling has a cache, training has none",
}

# A larger number of layers, experts or units is a typing error, and transformers makes lists of that length.
_LARGEST = 100_000

# By their names in transformers' registry; the default first. Also in bench/schema.py, which imports no transformers.
EXPERTS = ("grouped_mm", "eager", megablocks.NAME)


@dataclass(frozen=True)
class Shape:
    """What is known of a model before it is built."""

    moe_layers: int
    """The number of layers with a router; 0 for a dense model."""
    layers: int
    width: int
    """H, the width of the hidden state between two layers."""
    positions: int | None
    """The longest sequence, prompt and response together, in tokens; None for no limit."""


def config_class(target: str) -> type[PreTrainedConfig]:
    """Return the transformers config class that ``_target_`` names. Raises ValueError for any other class or name."""
    package, _, name = target.rpartition(".")
    cls = getattr(transformers, name, None) if package == "transformers" else None
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedConfig)):
        raise ValueError(
            f"model.config._target_ must name a transformers config class (like transformers.Qwen3MoeConfig), "
            f"got {target!r}"
        )
    return cls


def check(config: Mapping[str, Any]) -> Shape:
    """Return the shape of the model of this config.

    Raises ValueError, in one line, for values that transformers would accept silently or fail on later, and
    ``contract.OutsideContractError`` (a ValueError) for a family outside the contract (models/contract.py).
    """
    cls = config_class(str(config.get("_target_")))
    numbers = _numbers(config)
    known = _fields(cls)
    for key, value in numbers.items():
        if key in _FROM_TOKENIZER:
            raise ValueError(f"model.config.{key} is given by the task's tokenizer; leave it out")
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"{cls.__name__} has no field model.config.{key}{hint}")
        if key in _WITHOUT_EFFECT:
            raise ValueError(f"model.config.{key} would have no effect here: {_WITHOUT_EFFECT[key]}")
        if ("dropout" in key or "jitter" in key) and value:
            raise ValueError(
                f"model.config.{key} would have no effect: models run without noise, so that π_old is exact"
            )
        counts = key.startswith(("num_", "n_")) or key.endswith(("_size", "_dim"))
        least = 0 if "shared_expert" in key else 1
        if counts and type(value) is int and not least <= value <= _LARGEST:
            raise ValueError(f"model.config.{key} must be between {least} and {_LARGEST}; got {value}")
    if config.get(_ROUTER_DTYPE) not in (None, "float32", "bfloat16"):
        raise ValueError(f"model.config.{_ROUTER_DTYPE} must be float32 or bfloat16; got {config[_ROUTER_DTYPE]!r}")
    scale = config.get(_ROUTER_SCALE)
    if scale is not None and not (type(scale) in (int, float) and scale > 0):
        raise ValueError(f"model.config.{_ROUTER_SCALE} must be a number above 0; got {scale!r}")
    try:
        built = cls(**numbers)
    except Exception as error:  # transformers validates types with exception classes of its own
        raise ValueError(f"{cls.__name__}: {' '.join(str(error).split())}") from error

    heads = getattr(built, "num_attention_heads", None)
    if heads and not getattr(built, "head_dim", None) and built.hidden_size % heads:
        raise ValueError(f"num_attention_heads ({heads}) must divide hidden_size ({built.hidden_size})")
    try:
        moe_layers = contract.moe_layers(built)
    except contract.OutsideContractError:
        raise
    except Exception as error:
        given, reason = ", ".join(f"{key}={value}" for key, value in numbers.items()), " ".join(str(error).split())
        raise ValueError(f"{cls.__name__} cannot be built from {given}: {type(error).__name__} {reason}") from error
    if moe_layers and _top_k(built) is None:
        raise ValueError(f"{cls.__name__} has its top-k in a field that models/build.py does not know")
    for key in (_ROUTER_DTYPE, _ROUTER_SCALE):
        if config.get(key) is not None and not moe_layers:
            raise ValueError(f"model.config.{key} is for routers, but this model is dense; leave it out")
    positions = getattr(built, "max_position_embeddings", None)
    return Shape(moe_layers, built.num_hidden_layers, built.hidden_size, positions)


def _top_k(config: PreTrainedConfig) -> int | None:
    return next((getattr(config, name) for name in _TOP_K if hasattr(config, name)), None)


def _numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for the family's own config class."""
    return {key: value for key, value in config.items() if key not in ("_target_", _ROUTER_DTYPE, _ROUTER_SCALE)}


def _fields(cls: type[PreTrainedConfig]) -> set[str]:
    """Return the config's declared fields, and fields that only its model reads (like ``head_dim`` of Qwen3-MoE)."""
    if cls not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"transformers has no causal language model for {cls.__name__}")
    source = inspect.getsource(sys.modules[AutoModelForCausalLM._model_mapping[cls].__module__])
    read = re.findall(r"\bconfig\.(\w+)|\bgetattr\((?:self\.)?config, \"(\w+)\"", source)
    return {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map) | {a or b for a, b in read}


def build(
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    device: str | None = None,
    experts: str = EXPERTS[0],
) -> PreTrainedModel:
    """Return a freshly initialised fp32 model on ``device`` (None: torch's default device).

    Equal seeds give equal weights. ``experts`` is one of ``EXPERTS``; ImportError if ``megablocks`` is not installed.
    """
    cls = config_class(config["_target_"])
    numbers = _numbers(config) | {"vocab_size": len(tokenizer)}
    numbers |= {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("pad", "bos", "eos")}
    # transformers initialises from torch's global generator: it has our seed inside the block, its old state after it.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(cls(**numbers), dtype=torch.float32, **implementations(cls, experts))
    if config.get(_ROUTER_SCALE) is not None:
        with torch.no_grad():
            for router in routers(model):
                router.get_parameter("weight").mul_(config[_ROUTER_SCALE])
    if config.get(_ROUTER_DTYPE) is not None:
        for router in routers(model):
            own = {"is_half": config[_ROUTER_DTYPE] == "bfloat16"}
            router.__class__ = type(type(router).__name__, (_InItsDtype, type(router)), own)
    # The model stays in evaluation mode, so that no dropout or router jitter makes sampler and trainer differ.
    return model.eval().to(device) if device else model.eval()


def size(model: PreTrainedModel) -> dict[str, int]:
    """Return counts: parameters, active_parameters (used by one token), moe_layers, experts (per layer), top_k.

    Every token uses routers, shared experts and embeddings. The last three counts are 0 for a dense model.
    """
    layers = routers(model)
    experts, top_k = (experts_of(layers[0]), _top_k(model.config) or 0) if layers else (0, 0)
    parameters = model.num_parameters()
    routed = sum(weight.numel() for name, weight in model.named_parameters() if is_expert(name))
    counts = {"moe_layers": len(layers), "experts": experts, "top_k": top_k}
    idle = routed * (experts - top_k) // max(experts, 1)
    return {"parameters": parameters, "active_parameters": parameters - idle, **counts}


def is_expert(name: str) -> bool:
    """Return whether the weight of this name belongs to routed experts."""
    return ".experts." in name


def implementations(cls: type[PreTrainedConfig], experts: str) -> dict[str, str]:
    """Return transformers' arguments for a family's layers: ``sdpa`` attention if it has one, and ``experts``."""
    if experts == megablocks.NAME:
        megablocks.register()
    family: Any = AutoModelForCausalLM._model_mapping[cls]
    chosen = {"attn_implementation": "sdpa" if family._supports_sdpa else "eager"}
    return chosen | ({"experts_implementation": experts} if family._can_set_experts_implementation() else {})


class _InItsDtype(nn.Module):
    """A mix-in for the class of a router: it computes in bf16 (``is_half``) or fp32 under any ``precision``."""

    is_half: bool

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(hidden.device.type, dtype=torch.bfloat16, enabled=self.is_half):
            return super().forward(hidden if self.is_half else hidden.float(), *args, **kwargs)
