"""Whether a run fits into the memory of its device, by a lower bound: a run that is refused here could not be made.

The bound assumes that responses use their whole budget of tokens. It counts only tensors that must be in memory at the
same time, at four bytes a number:

- For each token of a rollout an id and a mask, of eight bytes each, and a log-probability.
- For each response while it is sampled, the log-probabilities of the next token over the vocabulary.
- For each token of a response in an update, the states between layers (layers times hidden size numbers): the backward
  needs them. For a demonstration, the tokens of the prompt are counted instead.
"""

import os
from pathlib import Path

import torch

from steadymoe.bench.config.schema import RunConfig
from steadymoe.bench.support.seeding import numpy_generator
from steadymoe.bench.tasks import Task
from steadymoe.models import build

_TOKEN, _NUMBER = 8 + 8 + 4, 4
# The files with a container's memory limit, in version 2 and version 1 of control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def capacity(device: str) -> int:
    """Bytes of memory of ``device``, ``cpu`` or ``cuda``: all of it, used or free."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for path in _LIMITS if path.exists() and (limit := path.read_text().strip()).isdigit()]
    return min([physical, *map(int, limits)])


def needs(config: RunConfig, task: Task) -> dict[str, int]:
    """A lower bound in bytes for each part of a run, keyed by the fields of ``config`` that set its size."""
    (prompt,) = task.tokenizer(task.sample(1, numpy_generator(0, "memory")))["input_ids"]
    length, words = len(prompt) + task.max_new_tokens, len(task.tokenizer)
    sampled = length * _TOKEN + words * _NUMBER
    rollout, evaluation, probe, cold_start = config.rollout, config.evaluation, config.probe, config.cold_start
    responses = rollout.prompts * rollout.responses
    needed = {
        f"rollout.prompts={rollout.prompts} with rollout.responses={rollout.responses}": responses * sampled,
        f"evaluation.prompts={evaluation.prompts}": evaluation.prompts * sampled,
        f"probe.responses={probe.responses}": probe.responses * length * _TOKEN,
    }
    if "path" in config.model:
        return needed
    layers, hidden = build.layers_and_width(config.model["config"])
    states = layers * hidden * _NUMBER
    at_once = config.microbatch or responses // config.updates_per_rollout
    return needed | {
        f"an update of {at_once} responses": at_once * task.max_new_tokens * states,
        f"cold_start.batch_size={cold_start.batch_size}": cold_start.batch_size * len(prompt) * states,
        f"cold_start.check_prompts={cold_start.check_prompts}": cold_start.check_prompts * sampled,
    }


def check(config: RunConfig, task: Task) -> None:
    """Raise ValueError, in one line, if a part of the run cannot fit into the memory of its device."""
    there = capacity(config.device)
    for what, needed in needs(config, task).items():
        if needed > there:
            raise ValueError(
                f"{what} takes at least {needed / 2**30:,.0f} GiB of memory (docs/sweeps.md); "
                f"{config.device} has {there / 2**30:,.0f} GiB here"
            )
