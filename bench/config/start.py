"""Whether a run can begin where its config says: at a checkpoint, at given weights, or where another run was."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from steadymoe.bench.config import branch, token_limits
from steadymoe.bench.config.schema import RunConfig
from steadymoe.bench.tasks import Task
from steadymoe.models import build


def check(config: RunConfig, task: Task) -> None:
    """Raise ValueError, in one line, if the place where the run begins is missing or is another model's."""
    if config.start_from is not None:
        if "path" in config.model or config.cold_start.path is not None:
            raise ValueError("start_from begins at a run's checkpoint; leave model=pretrained and cold_start.path out")
        start = branch.read(config.start_from)
        branch.check(start)
        _weights("start_from", start.checkpoint, config.model["config"], task, prefix="model/")
    elif "path" in config.model:
        if config.cold_start.path is not None:
            raise ValueError("with model=pretrained training starts from model.path; leave cold_start.path out")
        token_limits.check(config.model["path"], config.task)
    elif config.cold_start.path is not None:
        _weights("cold_start.path", Path(config.cold_start.path), config.model["config"], task)


def _weights(key: str, path: Path, model_config: Mapping[str, Any], task: Task, prefix: str = "") -> None:
    """Raise ValueError unless a safetensors file holds the weights of this model. Only the header is read.

    ``key`` is the field that names the file; the names of the weights begin with ``prefix`` there.
    """
    with torch.device("meta"):
        model = build.build(model_config, task.tokenizer, 0)
    try:
        with safe_open(path, framework="pt") as file:
            held = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{key}: {path} is no safetensors file ({error})") from error
    found: dict[int, bool] = {}
    names = {}
    for name, weight in model.named_parameters(remove_duplicate=False):  # a tied weight is held under one name
        found[id(weight)] = found.get(id(weight), False) or held.get(f"{prefix}{name}") == weight.shape
        names[id(weight)] = name
    wrong = [names[key] for key, is_found in found.items() if not is_found]
    if wrong:
        raise ValueError(f"{key}: {path} is not of this model; the first weight that differs is {wrong[0]}")
