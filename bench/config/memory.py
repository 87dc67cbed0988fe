"""Whether a machine can hold what a run asks for: a bound from below, so that what it refuses cannot be made.

Counted are responses that use their whole budget of tokens, and of them only what is certainly there at once, at four
bytes a number:

- A token of a rollout is an id and a mask of eight bytes each, and a log-probability.
- A response that is sampled has log-probabilities of its next token over the vocabulary.
- A response that is trained on has, for each of its tokens, the states between layers, which the backward needs: layers
  times hidden size numbers. Of a demonstration the prompt's are counted.
"""

import os
from pathlib import Path

import torch

from steadymoe.bench.config.schema import RunConfig
from steadymoe.bench.support.seeding import numpy_generator
from steadymoe.bench.tasks import Task
from steadymoe.models import build

_TOKEN, _NUMBER = 8 + 8 + 4, 4
# The limit of a container, of control groups 2 and 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def capacity(device: str) -> int:
    """Bytes of memory of ``device``, ``cpu`` or ``cuda``: all of it, used or free."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for path in _LIMITS if path.exists() and (limit := path.read_text().strip()).isdigit()]
    return min([physical, *map(int, limits)])


def needs(config: RunConfig, task: Task) -> dict[str, int]:
    """The least bytes that each part of a run takes, by the numbers of ``config`` that it comes from."""
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
