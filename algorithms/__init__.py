"""Policy-optimisation algorithms: tensors in, (loss, metrics) out.

A loss is a frozen dataclass in a file of its own, called with a ``Batch``. Its numbers, each with its
source, stand in ``conf/algorithm/<name>.yaml``; the dataclass repeats them as defaults.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from steadymoe.algorithms.batch import Batch, LossOutput

__all__ = ["Batch", "LossOutput", "load", "names"]

_CONF = Path(__file__).parent.parent / "conf" / "algorithm"


def names() -> list[str]:
    """The algorithms that ship with the suite, sorted."""
    return sorted(path.stem for path in _CONF.glob("*.yaml"))


def load(name: str, **overrides: Any) -> Callable[[Batch], LossOutput]:
    """The loss of one algorithm by its name, with the numbers of its YAML and ``overrides`` over them.

    Raises ValueError for an unknown name, and what the dataclass raises (TypeError, ValueError) for an
    unknown or impossible number.
    """
    if name not in names():
        raise ValueError(f"unknown algorithm {name!r}; choose from {', '.join(names())}")
    config = yaml.safe_load((_CONF / f"{name}.yaml").read_text())["loss"] | overrides
    module, _, cls = config.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), cls)(**config)
