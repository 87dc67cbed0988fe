"""Checkpoints hold what a run needs to go on: weights, optimizer moments, the state of loss and sampler, the step.

They hold no state of randomness: every draw has a generator made from (seed, stage, step).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer
from transformers import PreTrainedModel

from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.seeding import torch_generator
from steadymoe.bench.training.learner import Learner
from steadymoe.bench.training.optimizer import moments, restore
from steadymoe.models.engine import Sampler


def save(path: Path, learner: Learner, sampler: Sampler, step: int) -> None:
    """Write the state after ``step`` steps, atomically."""
    tensors = of_training(learner.model, learner.optimizer)
    tensors |= {f"loss/{name}": value.clone() for name, value in learner.state.items()}
    if learner.predictor is not None:
        tensors |= {f"predictor/{name}": value.clone() for name, value in learner.predictor.state_dict().items()}
    tensors |= {f"sampler/{name}": value.clone() for name, value in sampler.state().items()}
    atomic_files.write(path, lambda temporary: save_file(tensors, temporary, metadata={"after_step": str(step)}))


def of_training(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Copies of the weights and of the optimizer's moments, by names that ``restore_training`` reads."""
    # clone(): tied weights share memory, which safetensors refuses.
    tensors = {f"model/{name}": value.clone() for name, value in model.state_dict().items()}
    return tensors | {f"optimizer/{name}": value for name, value in moments(optimizer).items()}


def restore_weights(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the weights among the tensors of ``of_training`` into ``model``."""
    model.load_state_dict(_of("model", tensors))


def restore_moments(learner: Learner, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the moments of the model's weights among the tensors of a checkpoint; a predictor's are left out."""
    of_model = {name for name, _ in learner.model.named_parameters()}
    kept = {key: value for key, value in _of("optimizer", tensors).items() if key.partition("/")[2] in of_model}
    restore(learner.optimizer, kept)


@torch.no_grad()
def disturb(model: PreTrainedModel, strength: float, seed: int) -> None:
    """Add Gaussian noise with the standard deviation ``strength`` to every weight; 0 changes nothing."""
    if strength == 0:
        return
    generator = torch_generator(seed, "weight_noise")
    for weight in model.parameters():
        weight.add_(strength * torch.randn(weight.shape, generator=generator).to(weight.device))


def restore_training(model: PreTrainedModel, optimizer: Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the tensors of ``of_training`` into ``model`` and ``optimizer``.

    Raises KeyError, and changes nothing, if a moment is not named by a parameter of the optimizer.
    """
    restore(optimizer, _of("optimizer", tensors))
    restore_weights(model, tensors)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by their keys."""
    return load_file(path)


def _of(kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors whose keys begin with ``kind``, by the rest of their keys."""
    return {key.removeprefix(f"{kind}/"): value for key, value in tensors.items() if key.startswith(f"{kind}/")}


def step_of(path: Path) -> int | None:
    """The step of a checkpoint, read from its header; None if there is no checkpoint or it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return int(file.metadata()["after_step"])
    except (OSError, SafetensorError, TypeError, KeyError, ValueError):
        return None


def load(path: Path, learner: Learner, sampler: Sampler) -> int:
    """Load the file that ``save`` wrote into ``learner`` and ``sampler``; returns its step."""
    with safe_open(path, framework="pt") as file:
        step = int(file.metadata()["after_step"])
    tensors = tensors_of(path)
    restore_training(learner.model, learner.optimizer, tensors)
    learner.remember(_of("loss", tensors))
    if learner.predictor is not None:
        learner.predictor.load_state_dict(_of("predictor", tensors))
    sampler.load(_of("sampler", tensors))
    return step
