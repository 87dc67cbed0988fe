"""Policy-optimisation algorithms: tensors in, (loss, metrics) out.

A loss is a frozen dataclass in a file of its own, a ``PolicyLoss`` called with a ``Batch``. Its numbers, each
with its source, stand in ``conf/algorithm/<name>.yaml``; the dataclass repeats them as defaults.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput, Surrogate
from steadymoe.algorithms.loss import ClippedLoss, HostedLoss, PolicyLoss, RatioLoss, TokenLoss, Traits

__all__ = [
    "Batch",
    "ClippedLoss",
    "HostedLoss",
    "LossOutput",
    "PolicyLoss",
    "RatioLoss",
    "Surrogate",
    "TokenLoss",
    "Traits",
    "build",
    "load",
    "meant",
    "names",
    "ops",
]

_CONF = Path(__file__).parent.parent / "conf" / "algorithm"

# What other trainers call the same thing, in the order in which our names are tried.
_ELSEWHERE = {
    **dict.fromkeys(("epsilon", "clip_ratio", "clip_ratio_low", "ratio_clip_min"), ("clip_low", "log_clip_low")),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "ratio_clip_max"), ("clip_high", "log_clip_high", "ratio_cap")),
    **dict.fromkeys(("clip_ratio_c", "delta", "ratio_clip_c"), ("dual_clip",)),
    **dict.fromkeys(("importance_sampling_level",), ("ratio",)),
    **dict.fromkeys(("loss_agg_mode", "loss_type"), ("aggregation",)),
    "clip_low": ("log_clip_low",),
    "clip_high": ("log_clip_high", "ratio_cap"),
    "log_clip_low": ("clip_low",),
    "log_clip_high": ("clip_high",),
}


def names(presets: bool = False) -> list[str]:
    """The algorithms that ship with the suite, sorted; with ``presets`` also what trainers make of them.

    A preset is called ``<algorithm>@<trainer>-<version>``.
    """
    found = sorted(path.name.removesuffix(".yaml") for path in _CONF.glob("*.yaml"))
    return [name for name in found if presets or "@" not in name]


def load(name: str, **overrides: Any) -> PolicyLoss:
    """The loss of one algorithm or preset by its name, with the numbers of its YAML and ``overrides`` over them.

    Raises ValueError for an unknown name, and what ``build`` raises for an unknown or impossible number.
    """
    if name not in names(presets=True):
        raise ValueError(f"unknown algorithm {name!r}; choose from {', '.join(names(presets=True))}")
    return build(yaml.safe_load((_CONF / f"{name}.yaml").read_text())["loss"] | overrides)


def build(config: Mapping[str, Any]) -> Any:
    """The object that ``_target_`` names, a dataclass, from the other keys; mappings in it are built first.

    Raises TypeError for a key that is no field of the class, naming the field that was probably meant, and
    ValueError for a class that cannot be found or a number that it refuses.
    """
    target = str(config.get("_target_"))
    module, _, name = target.rpartition(".")
    try:
        cls: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"_target_ names no class: {target} ({error})") from error
    if not hasattr(cls, "__dataclass_fields__"):
        raise ValueError(f"_target_ must name a dataclass; {target} is none")
    values = {key: build(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    del values["_target_"]
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    for key in values.keys() - set(known):
        raise TypeError(f"{name} has no {key!r}; {meant(key, known)}")
    return cls(**values)


def meant(key: str, known: list[str]) -> str:
    """An answer to a field name that does not exist: the one most like it, or of the same meaning, and all others."""
    near = [name for name in _ELSEWHERE.get(key, ()) if name in known] or difflib.get_close_matches(key, known)
    choice = f"did you mean {near[0]}? " if near else ""
    return f"{choice}Its fields are {', '.join(known) if known else 'none'}"
