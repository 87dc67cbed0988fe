"""AdamW over the weights of a model: its groups of parameters, and its moments by the names of the parameters.

The names make a checkpoint independent of the order and the grouping of the parameters.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from steadymoe.models.routing import routers


def build(model: PreTrainedModel, learning_rate: float, router_factor: float = 1.0, **numbers: Any) -> AdamW:
    """AdamW whose routers learn at ``router_factor`` × ``learning_rate``; ``numbers`` are AdamW's own arguments."""
    of_routers = {id(weight) for router in routers(model) for weight in router.parameters()}
    named = list(model.named_parameters())
    groups: list[dict[str, Any]]
    if router_factor == 1.0 or not of_routers:
        groups = [{"params": named}]
    else:
        groups = [
            {"params": [each for each in named if id(each[1]) not in of_routers]},
            {"params": [each for each in named if id(each[1]) in of_routers], "lr": router_factor * learning_rate},
        ]
    return AdamW(groups, lr=learning_rate, fused=True, **numbers)


def moments(optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of the optimizer's state, as ``<moment>/<name of the parameter>``; empty before the first step."""
    return {
        f"{moment}/{name}": value.clone()
        for name, weight in _named(optimizer).items()
        for moment, value in optimizer.state.get(weight, {}).items()
    }


def restore(optimizer: Optimizer, kept: Mapping[str, Tensor]) -> None:
    """Put back what ``moments`` copied. Raises KeyError for a parameter that the optimizer does not have."""
    index = {name: place for place, name in enumerate(_named(optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in kept.items():
        moment, _, name = key.partition("/")
        state.setdefault(index[name], {})[moment] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def _named(optimizer: Optimizer) -> dict[str, Tensor]:
    """The parameters by their names, in the order of the optimizer's state."""
    return {
        name: weight
        for group in optimizer.param_groups
        for name, weight in zip(group["param_names"], group["params"], strict=True)
    }
