"""Whether a model has positions for a task's prompts and responses, and a checkpoint's tokenizer can write them."""

import functools
import json
from collections.abc import Mapping
from typing import Any

from hydra.utils import instantiate

from steadymoe.bench.support.seeding import numpy_generator
from steadymoe.bench.tasks import Task
from steadymoe.models import build, pretrained

# The number of prompts that are checked. Training may draw a longer prompt.
_PROMPTS = 64


def check_built(config: Mapping[str, Any], task: Task) -> None:
    """Raise ValueError, in one line, if a model built from these numbers has fewer positions than ``task`` needs.

    Rotary embeddings would go on beyond these positions; learned embeddings would not.
    """
    tokens, positions = task.tokenizer(_prompts(task))["input_ids"], build.positions(config)
    longest, new = max(map(len, tokens)), task.max_new_tokens
    if positions is not None and longest + new > positions:
        raise ValueError(
            f"prompts of {longest} tokens and responses of {new} need {longest + new} positions; "
            f"model.config.max_position_embeddings is {positions}"
        )


def check(path: str, task: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, if the checkpoint in ``path`` has too few positions or tokens for the task."""
    _check(path, pretrained.digest(path), json.dumps(task, sort_keys=True))


@functools.cache
def _check(path: str, content: str, task_config: str) -> None:
    """``check``, cached by the checkpoint's content and the task, since reading a tokenizer takes a second."""
    task, tokenizer = instantiate(json.loads(task_config)), pretrained.load_tokenizer(path)
    new = task.max_new_tokens
    try:
        tokens = tokenizer(_prompts(task))["input_ids"]
    except Exception as error:  # a chat template is a program, and a tokenizer may lack a character
        said = " ".join(str(error).split())
        raise ValueError(
            f"model.path: the tokenizer in {path} cannot write the prompts of this task: {said}"
        ) from error
    if any(tokenizer.unk_token_id in row for row in tokens):
        raise ValueError(f"model.path: the tokenizer in {path} has no token for some text of this task's prompts")
    longest, limits = max(map(len, tokens)), pretrained.limits(path)
    if limits.new_tokens is not None and new > limits.new_tokens:
        raise ValueError(
            f"task.max_new_tokens is {new}, and {path} allows responses of {limits.new_tokens} (generation_config.json)"
        )
    if limits.length is not None and longest + new > limits.length:
        raise ValueError(
            f"prompts of {longest} tokens and responses of {new} (task.max_new_tokens) need {longest + new} positions; "
            f"{path} has {limits.length}"
        )


def _prompts(task: Task) -> list[str]:
    return task.sample(_PROMPTS, numpy_generator(0, "limits"))
