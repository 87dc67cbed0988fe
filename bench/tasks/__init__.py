"""Tasks: where prompts, demonstrations and rewards come from. One file per task, one YAML in ``conf/task``."""

import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

# One prompt in this many is held out, by a checksum of its text.
_HELD_OUT = 8

# So many draws in a row without a prompt of the wanted stream are no accident.
_MOST_DRAWS = 1000


class Task(Protocol):
    """What the pipeline asks of a task. Texts in, texts and numbers out; no tensors."""

    version: int
    """Raised when a change makes scores incomparable with earlier ones; part of every config hash."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def max_new_tokens(self) -> int:
        """The end token included; a response that has not ended by then is unfinished."""
        ...

    def sample(self, count: int, generator: np.random.Generator, held_out: bool = False) -> list[str]:
        """Prompts from the training stream or from the held-out ones; the two never share a prompt."""
        ...

    def demonstrations(self, prompts: Sequence[str], noise: float, generator: np.random.Generator) -> list[str]:
        """A worked answer to each prompt, every step wrong with probability ``noise``."""
        ...

    def score(self, prompt: str, response: str, finished: bool) -> float:
        """The reward in [0, 1]; 0 for a malformed or unfinished response."""
        ...


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out set: a property of its text alone, whatever the seed."""
    return zlib.crc32(prompt.encode()) % _HELD_OUT == 0


def draw_prompts(draw: Callable[[], str | None], count: int, held_out: bool) -> list[str]:
    """``count`` prompts of one stream from ``draw``, which answers None where it drew what the task cannot use.

    Raises ValueError when a thousand draws in a row give none.
    """
    prompts: list[str] = []
    misses = 0
    while len(prompts) < count:
        prompt = draw()
        if prompt is not None and is_held_out(prompt) == held_out:
            prompts.append(prompt)
            misses = 0
        elif (misses := misses + 1) == _MOST_DRAWS:
            stream = "held-out" if held_out else "training"
            raise ValueError(f"the task's numbers leave no {stream} prompts: none in {_MOST_DRAWS} draws")
    return prompts


def refuse_empty_streams(task: Task) -> None:
    """Raise ValueError if a task has no prompt to train on, or none to hold out."""
    for held_out in (False, True):
        task.sample(1, np.random.default_rng(0), held_out)
