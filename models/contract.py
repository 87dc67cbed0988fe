"""The contract between the suite and a Mixture-of-Experts family of transformers.

A family inside the contract can be recorded, replayed and trained:

1. Its base model declares one class of routers, ``_can_record_outputs["router_logits"]``.
2. A router has a ``weight`` of E rows and returns (logits, gate weights, indices): (N, E), (N, K) and (N, K).
3. A router chooses by exactly one ``torch.topk`` over the (N, E) scores of all experts, so that a choice can be forced.
   It returns the choice in the order of ``torch.topk`` (``bench/training/microbatches.py`` checks the order when a run
   starts).
4. The experts run through transformers' registry of experts implementations.

Shapes (docs/metrics.md): N tokens of a forward, K experts a token, E experts, H hidden.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_SHAPES_ONLY = "shapes_only"
ALL_EXPERTS_FUNCTIONS.register(_SHAPES_ONLY, lambda experts, hidden_NH, indices_NK, weights_NK: hidden_NH)


class OutsideContractError(ValueError):
    """A family breaks the contract; the message is one line and names the reason."""

    def __init__(self, config: type[PreTrainedConfig], reason: str) -> None:
        super().__init__(f"{config.__name__} is not a supported family (docs/moe.md): {reason}")


def moe_layers(config: PreTrainedConfig) -> int:
    """Return the number of layers with a router; 0 for a dense model.

    Raises OutsideContractError for a mixture of experts outside the contract, and the error of transformers if it
    cannot build a model from the config. The check is one forward on the meta device (shapes without numbers): 0.04 s
    for 4 layers, 0.6 s for the 61 layers of DeepSeek-V3.
    """
    cls = type(config)
    with torch.device("meta"), torch.no_grad():
        # Eager attention is the only one that never looks at the values of its inputs.
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager", experts_implementation=_SHAPES_ONLY
        )
        routers = _routers(cls, model)
        if not routers:
            return 0
        if not model._can_set_experts_implementation():
            raise OutsideContractError(cls, "its experts are not run through transformers' registry of implementations")
        calls: list[nn.Module] = []
        with _Selections() as selections:

            def check(router: nn.Module, _: Any, output: Any) -> None:
                calls.append(router)
                if reason := _reason_against(router, output, selections.shapes):
                    raise OutsideContractError(cls, reason)

            for router in routers:
                router.register_forward_pre_hook(lambda *_: selections.shapes.clear())
                router.register_forward_hook(check)
            # Sampling uses this cache, and with a cache transformers does not look for packed sequences.
            cache = DynamicCache(config=model.config)
            model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    if len(calls) != len(routers):
        raise OutsideContractError(cls, f"its {len(routers)} routers ran {len(calls)} times in one forward")
    return len(routers)


def _routers(cls: type[PreTrainedConfig], model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of the declared router class; empty for a dense model."""
    declared = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    if isinstance(declared, list):
        raise OutsideContractError(cls, f"it has {len(declared)} classes of routers")
    routers = [module for module in model.modules() if declared and isinstance(module, declared.target_class)]
    if not routers and any(name.endswith("experts") for name, _ in model.named_modules()):
        raise OutsideContractError(cls, "its base model declares no class of routers")
    return routers


def _reason_against(router: nn.Module, output: Any, selections: list[torch.Size]) -> str | None:
    """Return how one call of a router breaks the contract, or None."""
    name = type(router).__name__
    values = output if isinstance(output, tuple) else (output,)
    if [each.dim() if isinstance(each, Tensor) else None for each in values] != [2, 2, 2]:
        return f"{name} returns {len(values)} values, not its logits, the gate weights and the experts' indices"
    logits_NE, weights_NK, indices_NK = values
    if weights_NK.shape != indices_NK.shape or indices_NK.is_floating_point():
        return f"{name} does not return its logits, then the gate weights, then the experts' indices"
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape[0] != logits_NE.shape[1]:
        return f"{name} has no weight with a row for each expert"
    over_all = selections.count(logits_NE.shape)
    if over_all != 1:
        return f"{name} chooses by {over_all} calls of torch.topk over all experts, not by one that could be forced"
    return None


class _Selections(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, torch.Tensor.topk):
            self.shapes.append((args[0] if args else kwargs["input"]).shape)
        return func(*args, **(kwargs or {}))
