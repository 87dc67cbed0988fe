"""Checkpoints hold what a run needs to go on: weights, optimizer moments, the state of loss and sampler, the step.

They hold no state of randomness: every draw has a generator made from (seed, stage, step).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer
from transformers import PreTrainedModel

from steadymoe.bench.support import atomic_files
from steadymoe.bench.training.learner import Learner
from steadymoe.models.engine import Sampler


def save(path: Path, learner: Learner, sampler: Sampler, step: int) -> None:
    """Write the state after ``step`` steps, atomically."""
    tensors = of_training(learner.model, learner.optimizer)
    tensors |= {f"loss/{name}": value.clone() for name, value in learner.state.items()}
    if learner.predictor is not None:
        tensors |= {f"predictor/{name}": value.clone() for name, value in learner.predictor.state_dict().items()}
    tensors |= {f"sampler/{name}": value.clone() for name, value in sampler.state().items()}
    atomic_files.write(path, lambda temporary: save_file(tensors, temporary, metadata={"step": str(step)}))


def of_training(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Copies of the weights and of the optimizer's moments, by names that ``restore_training`` reads."""
    # clone(): tied weights share memory, which safetensors refuses.
    tensors = {f"model/{name}": value.clone() for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": value.clone() for name, value in state.items()}
    return tensors


def restore_training(model: PreTrainedModel, optimizer: Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the tensors of ``of_training`` into ``model`` and ``optimizer``."""
    weights: dict[str, torch.Tensor] = {}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "model":
            weights[name] = value
        else:
            index, _, moment = name.partition("/")
            state.setdefault(int(index), {})[moment] = value
    model.load_state_dict(weights)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def step_of(path: Path) -> int | None:
    """The step of a checkpoint, read from its header; None if there is no checkpoint or it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return int(file.metadata()["step"])
    except (OSError, SafetensorError, TypeError, KeyError, ValueError):
        return None


def load(path: Path, learner: Learner, sampler: Sampler) -> int:
    """Load the file that ``save`` wrote into ``learner`` and ``sampler``; returns its step."""
    kept: dict[str, torch.Tensor] = {}
    of_loss, of_sampler, of_predictor = {}, {}, {}
    with safe_open(path, framework="pt") as file:
        step = int(file.metadata()["step"])
        for key in file.keys():  # noqa: SIM118 (not a dict)
            kind, _, name = key.partition("/")
            if kind == "loss":
                of_loss[name] = file.get_tensor(key)
            elif kind == "sampler":
                of_sampler[name] = file.get_tensor(key)
            elif kind == "predictor":
                of_predictor[name] = file.get_tensor(key)
            else:
                kept[key] = file.get_tensor(key)
    restore_training(learner.model, learner.optimizer, kept)
    learner.remember(of_loss)
    if learner.predictor is not None:
        learner.predictor.load_state_dict(of_predictor)
    sampler.load(of_sampler)
    return step
