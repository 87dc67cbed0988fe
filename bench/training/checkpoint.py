"""Checkpoints hold what a run needs to resume: weights, optimizer moments, the state of loss and sampler, the step.

They hold no state of randomness: every draw has a generator made from (seed, stage, step). Moments are saved by the
names of their parameters, so a checkpoint does not depend on the order and the grouping of the parameters. A file has
the checksum of its tensors, and one whose tensors are others is never used.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file, save_model
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from steadymoe.bench.support import files
from steadymoe.bench.training.learner import Learner
from steadymoe.models import balancing
from steadymoe.models.engine import Sampler


def save(path: Path, learner: Learner, sampler: Sampler, step: int) -> None:
    """Write the state after ``step`` steps, atomically."""
    tensors = training_state(learner.model, learner.optimizer)
    tensors |= {f"loss/{name}": value.clone() for name, value in learner.state.items()}
    if learner.predictor is not None:
        tensors |= {f"predictor/{name}": value.clone() for name, value in learner.predictor.state_dict().items()}
    if learner.lag is not None:
        tensors |= {f"lag/{name}": value.clone() for name, value in learner.lag.state().items()}
    if learner.norms is not None:
        tensors["norms"] = learner.norms.clone()
    tensors |= {f"sampler/{name}": value.clone() for name, value in sampler.state().items()}
    write_tensors(path, tensors, {"after_step": str(step)})


def save_weights(path: Path, model: PreTrainedModel) -> None:
    """Write the weights alone, atomically, as ``cold_start.path`` reads them."""
    files.write(path, lambda temporary: save_model(model, str(temporary)))


_ABOUT = "about"


class DamagedTensors(ValueError):
    """A file does not hold the tensors that were saved; the message is one line."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors, texts about them, and the checksum of the tensors, atomically."""
    # One text, because safetensors writes several in any order, and equal checkpoints have equal bytes.
    about = {_ABOUT: json.dumps({**metadata, "sha256": _checksum(tensors)})}
    files.write(path, lambda temporary: save_file(dict(tensors), temporary, metadata=about))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what ``write_tensors`` wrote. Raises DamagedTensors for other tensors, and OSError."""
    files.opened(path, sys.maxsize).close()  # no link, no pipe
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(json.loads(file.metadata()[_ABOUT]))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedTensors(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if metadata.get("sha256") != _checksum(tensors):
        raise DamagedTensors(f"{path} is damaged: its tensors are not those that were saved")
    return tensors, metadata


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def training_state(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return copies of the weights and of the optimizer's moments, by names that ``restore_training`` reads."""
    # clone(): tied weights share memory, which safetensors refuses.
    tensors = {f"model/{name}": value.clone() for name, value in model.state_dict().items()}
    return tensors | {
        f"optimizer/{moment}/{name}": value.clone()
        for name, weight in _named(optimizer).items()
        for moment, value in optimizer.state.get(weight, {}).items()
    }


def restore_training(model: PreTrainedModel, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of ``training_state`` into ``model``, with the biases of bias balancing, and ``optimizer``.

    Raises KeyError, and changes nothing, if a moment is not named by a parameter of the optimizer.
    """
    named = _named(optimizer)
    state: dict[Tensor, dict[str, Tensor]] = {}
    for key, value in _section("optimizer", tensors).items():
        moment, _, name = key.partition("/")
        state.setdefault(named[name], {})[moment] = value.to(named[name].device)
    optimizer.state.clear()
    optimizer.state.update(state)
    weights = _section("model", tensors)
    if any(name.endswith(f".{balancing.BIAS}") for name in weights):
        balancing.install(model)
    model.load_state_dict(weights)


def _section(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(f"{kind}/"): value for key, value in tensors.items() if key.startswith(f"{kind}/")}


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint; None if there is no checkpoint or it is damaged."""
    try:
        return int(read_tensors(path)[1]["after_step"])
    except (OSError, KeyError, ValueError):
        return None


def load(path: Path, learner: Learner, sampler: Sampler) -> int:
    """Load the file that ``save`` wrote into ``learner`` and ``sampler``; returns its step."""
    tensors, metadata = read_tensors(path)
    restore_training(learner.model, learner.optimizer, tensors)
    learner.remember(_section("loss", tensors))
    if learner.predictor is not None:
        learner.predictor.load_state_dict(_section("predictor", tensors))
    if learner.lag is not None:
        learner.lag.load(_section("lag", tensors))
    if "norms" in tensors and learner.config.optimizer.autoclip is not None:
        learner.norms = tensors["norms"].to(learner.model.device)
    sampler.load(_section("sampler", tensors))
    return int(metadata["after_step"])


def _named(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        name: weight
        for group in optimizer.param_groups
        for name, weight in zip(group["param_names"], group["params"], strict=True)
    }
