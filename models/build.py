"""A transformers causal language model from the numbers in ``conf/model/*.yaml``.

No model code is written here: the YAML names a transformers config class (``_target_``) and its fields,
and transformers builds the model that belongs to it.
"""

import dataclasses
import difflib
import functools
import inspect
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from steadymoe.models import contract, megablocks
from steadymoe.models.routing import experts_of, routers

# Given by the tokenizer, so that one model YAML serves every task.
_FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
_TOP_K = ("num_experts_per_tok", "moe_topk", "experts_per_token")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# A field of ours beside the family's own: the arithmetic of the routers, whatever that of the rest (``precision``).
_ROUTER_DTYPE = "router_dtype"

# Fields of transformers' configs that a run does not go by, and what it goes by.
_WITHOUT_EFFECT = {
    "router_aux_loss_coef": "routing.aux_loss is the coefficient",
    "aux_loss_alpha": "routing.aux_loss is the coefficient",
    "router_z_loss_coef": "routing.z_loss is the coefficient",
    "dtype": "weights are fp32, and precision says what forwards are",
    "torch_dtype": "weights are fp32, and precision says what forwards are",
    "_attn_implementation": "attention is sdpa where a family has it",
    "attn_implementation": "attention is sdpa where a family has it",
    "_experts_implementation": "experts=… chooses it",
    "output_router_logits": "routers are always recorded",
    "use_cache": "sampling has a cache, training has none",
}

# How experts are computed: names of transformers' registry of experts implementations, the usual one first.
EXPERTS = ("grouped_mm", "eager", megablocks.NAME)


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
    """Raise ValueError, in one line, for what transformers would accept in silence or break on later.

    A family outside the contract of routers and experts is refused here too; see ``models/contract.py``.
    """
    cls = config_class(str(config.get("_target_")))
    numbers = _numbers(config)
    known = _fields(cls)
    for key in numbers:
        if key in _FROM_TOKENIZER:
            raise ValueError(f"model.config.{key} is given by the task's tokenizer; leave it out")
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"{cls.__name__} has no field model.config.{key}{hint}")
        if key in _WITHOUT_EFFECT:
            raise ValueError(f"model.config.{key} would have no effect here: {_WITHOUT_EFFECT[key]}")
        if ("dropout" in key or "jitter" in key) and numbers[key]:
            raise ValueError(
                f"model.config.{key} would have no effect: models run without noise, so that π_old is exact"
            )
    for key, value in numbers.items():
        counts = key.startswith(("num_", "n_")) or key.endswith(("_size", "_dim"))
        least = 0 if "shared_expert" in key else 1
        if counts and isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ValueError(f"model.config.{key} must be at least {least}; got {value}")
    if config.get(_ROUTER_DTYPE) not in (None, *_ROUTED):
        raise ValueError(f"model.config.{_ROUTER_DTYPE} must be {' or '.join(_ROUTED)}; got {config[_ROUTER_DTYPE]!r}")
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
        routed = has_experts(config)
    except contract.OutsideContractError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in numbers.items())
        said = " ".join(str(error).split())
        raise ValueError(f"{cls.__name__} cannot be built from {given}: {type(error).__name__} {said}") from error
    if config.get(_ROUTER_DTYPE) is not None and not routed:
        raise ValueError(f"model.config.{_ROUTER_DTYPE} is of routers, and this model is dense; leave it out")


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the model of this config has a layer with a router; raises as ``contract.moe_layers``."""
    return _moe_layers(config["_target_"], json.dumps(_numbers(config), sort_keys=True)) > 0


def positions(config: Mapping[str, Any]) -> int | None:
    """For how many tokens the model of this config is made, prompt and response together; None if it does not say."""
    return getattr(config_class(config["_target_"])(**_numbers(config)), "max_position_embeddings", None)


def layers_and_width(config: Mapping[str, Any]) -> tuple[int, int]:
    """How many layers the model of this config has, and how many numbers stand between two of them for a token."""
    made = config_class(config["_target_"])(**_numbers(config))
    return made.num_hidden_layers, made.hidden_size


@functools.cache
def _moe_layers(target: str, numbers: str) -> int:
    return contract.moe_layers(config_class(target)(**json.loads(numbers)))


def _numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the family's own config class is given."""
    return {key: value for key, value in config.items() if key not in ("_target_", _ROUTER_DTYPE)}


def _fields(cls: type[PreTrainedConfig]) -> set[str]:
    """Names that the config declares, or that its model reads all the same (``head_dim`` of Qwen3-MoE, say)."""
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
    """A freshly initialised fp32 model on ``device`` (None: torch's current one); equal seeds give equal weights.

    ``experts`` is one of ``EXPERTS``; raises ImportError for ``megablocks`` where it is not installed.
    """
    cls = config_class(config["_target_"])
    numbers = _numbers(config)
    numbers |= {"vocab_size": len(tokenizer)}
    numbers |= {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("pad", "bos", "eos")}
    # transformers initialises from torch's global generator: lent a seed for the duration, then given back.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(cls(**numbers), dtype=torch.float32, **implementations(cls, experts))
    if config.get(_ROUTER_DTYPE) is not None:
        for router in routers(model):
            router.__class__ = type(type(router).__name__, (_ROUTED[config[_ROUTER_DTYPE]], type(router)), {})
    # In evaluation mode throughout, so that no dropout or router jitter sets sampler and trainer apart.
    return model.eval().to(device) if device else model.eval()


def size(model: PreTrainedModel) -> dict[str, int]:
    """Counts of a model: all parameters, those that one token uses, MoE layers, experts of each, experts a token.

    Routers, shared experts and embeddings are used by every token. The last two are 0 for a dense model.
    """
    parameters, (router, *_) = model.num_parameters(), [*routers(model), None]
    if router is None:
        return {"parameters": parameters, "active_parameters": parameters, "moe_layers": 0, "experts": 0, "top_k": 0}
    experts = experts_of(router)
    top_k = next(getattr(model.config, name) for name in _TOP_K if hasattr(model.config, name))
    routed = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    active = parameters - routed * (experts - top_k) // experts
    layers = len(routers(model))
    return {
        "parameters": parameters,
        "active_parameters": active,
        "moe_layers": layers,
        "experts": experts,
        "top_k": top_k,
    }


def implementations(cls: type[PreTrainedConfig], experts: str) -> dict[str, str]:
    """How a family's layers are computed: attention by ``sdpa`` where it has that; ``experts`` as in ``build``."""
    if experts == megablocks.NAME:
        megablocks.register()
    family: Any = AutoModelForCausalLM._model_mapping[cls]
    chosen = {"attn_implementation": "sdpa" if family._supports_sdpa else "eager"}
    return chosen | ({"experts_implementation": experts} if family._can_set_experts_implementation() else {})


class _InFloat32(nn.Module):
    """Mixed into the class of a router: its arithmetic is fp32 under any ``precision``."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.float(), *args, **kwargs)


class _InBfloat16(nn.Module):
    """Mixed into the class of a router: its arithmetic is bf16 under any ``precision``."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
            return super().forward(hidden, *args, **kwargs)


_ROUTED = {"float32": _InFloat32, "bfloat16": _InBfloat16}
