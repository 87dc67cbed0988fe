"""All that a run needs to go on where it was: weights, optimizer moments, step. Randomness needs nothing."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from steadymoe.bench import atomic


def save(path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the state after ``step`` steps, atomically."""
    # clone(): tied weights share memory, which safetensors refuses.
    tensors = {f"model/{name}": value.clone() for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": value.clone() for name, value in state.items()}
    atomic.write(path, lambda temporary: save_file(tensors, temporary, metadata={"step": str(step)}))


def step_of(path: Path) -> int | None:
    """The step of a checkpoint without loading it; None where there is none."""
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        return int(file.metadata()["step"])


def load(path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> int:
    """Restore what ``save`` wrote into ``model`` and ``optimizer``; returns the step."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    weights = {}
    with safe_open(path, framework="pt") as file:
        step = int(file.metadata()["step"])
        for key in file.keys():  # noqa: SIM118 (not a dict)
            kind, _, name = key.partition("/")
            if kind == "model":
                weights[name] = file.get_tensor(key)
            else:
                index, _, moment = name.partition("/")
                state.setdefault(int(index), {})[moment] = file.get_tensor(key)
    model.load_state_dict(weights)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    return step
