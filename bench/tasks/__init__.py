"""Tasks: where prompts, demonstrations and rewards come from. One file per task, one YAML in ``conf/task``."""

import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

# One prompt in this many is held out, by a checksum of its text.
_HELD_OUT = 8


class Task(Protocol):
    """What the pipeline asks of a task. Texts in, texts and numbers out; no tensors."""

    version: int
    """Raised when a change makes scores incomparable with earlier ones; part of every config hash."""

    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    """The end token included; a response that has not ended by then is unfinished."""

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
