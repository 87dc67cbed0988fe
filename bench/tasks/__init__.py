"""Tasks: the sources of prompts, demonstrations and rewards. One file per task, one YAML in ``conf/task``.

Generators and texts come in; prompts, answers and rewards go out, never tensors. A task imports ``support`` and
``algorithms`` at most.
"""

import math
import reprlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

# One prompt in this many is held out. A checksum of the prompt's text decides.
_HELD_OUT = 8

# A larger score is infinite in float32.
_LARGEST_SCORE = float(np.finfo(np.float32).max)

# Prompts of each stream, at least, that are drawn to see whether the two overlap.
_STREAM = 256
# Demonstrations whose score is checked.
_DEMONSTRATED = 64

# After this many draws in a row without a usable prompt there is no such prompt.
_MAX_DRAWS = 1000


class Task(Protocol):
    """The interface between the pipeline and a task: texts in, texts and numbers out; no tensors."""

    version: int
    """Raised when a change makes scores incomparable with earlier ones; part of every config hash."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def max_new_tokens(self) -> int:
        """The longest response in tokens, end token included; a response of this length without its end is cut off."""
        ...

    def sample(self, count: int, generator: np.random.Generator, held_out: bool = False) -> list[str]:
        """``count`` prompts from the training stream or from the held-out stream; no prompt is in both streams."""
        ...

    def demonstrations(self, prompts: Sequence[str], noise: float, generator: np.random.Generator) -> list[str]:
        """One worked answer for each prompt; each step is wrong with probability ``noise``."""
        ...

    def score(self, prompt: str, response: str, finished: bool) -> float:
        """The reward in [0, 1]; 0 for a malformed or unfinished response. ``finished``: the end token was sampled."""
        ...


def sample(task: Task, count: int, generator: np.random.Generator, held_out: bool = False) -> list[str]:
    """Return ``count`` prompts of a stream. Raises ValueError, in one line, if the task returns another number."""
    stream = "held-out" if held_out else "training"
    try:
        prompts = task.sample(count, generator, held_out)
    except ValueError as error:
        raise ValueError(f"{type(task).__name__}.sample cannot return {count} {stream} prompts: {error}") from error
    if len(prompts) != count:
        raise ValueError(f"{type(task).__name__}.sample returned {len(prompts)} {stream} prompts instead of {count}")
    return prompts


def check_streams(task: Task, training: int, held_out: int, demonstrates: bool) -> None:
    """Draw prompts of both streams, and answers, before anything is trained.

    ``training`` and ``held_out`` are the most that a run asks for at once.
    Raises ValueError, in one line, for a stream that has not as many prompts, for a prompt in both streams, unless the
    task declares ``shares_prompts = True``, and if the task's own score rejects all of its demonstrations.
    """
    name = type(task).__name__
    trained, kept = [], set()
    for draw in range(math.ceil(_STREAM / min(training, held_out))):
        # The same draws for both: a task that ignores held_out returns the same prompts.
        trained += sample(task, training, np.random.default_rng(draw))
        kept |= set(sample(task, held_out, np.random.default_rng(draw), held_out=True))
    shared = [prompt for prompt in trained if prompt in kept]
    if shared and not getattr(task, "shares_prompts", False):
        raise ValueError(
            f"{name}.sample returns the prompt {reprlib.repr(shared[0])} both for training and held out; keep the two "
            "apart (bench.tasks.is_held_out), or declare shares_prompts = True"
        )
    if not demonstrates:
        return
    prompts = trained[:_DEMONSTRATED]
    answers = task.demonstrations(prompts, 0.0, np.random.default_rng(0))
    if len(answers) != len(prompts):
        raise ValueError(f"{name}.demonstrations returned {len(answers)} answers to {len(prompts)} prompts")
    if all(score(task, prompt, answer, True) <= 0 for prompt, answer in zip(prompts, answers, strict=True)):
        raise ValueError(
            f"{name}.score gives 0 to all demonstrations without noise, such as {reprlib.repr(answers[0])} for the "
            f"prompt {reprlib.repr(prompts[0])}"
        )


def score(task: Task, prompt: str, response: str, finished: bool) -> float:
    """Score a response as a float. Raises ValueError, in one line, for what is not a finite number."""
    value: Any = task.score(prompt, response, finished)
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST_SCORE:  # NaN too
        raise ValueError(
            f"{type(task).__name__}.score must return a finite number, got {reprlib.repr(value)} for the prompt "
            f"{reprlib.repr(prompt)} and the response {reprlib.repr(response)}"
        )
    return number


def end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of the tokens that end a response; a checkpoint may name several."""
    ids: tuple[int, ...] = getattr(tokenizer, "end_ids", (tokenizer.eos_token_id,))
    return ids


def decoded(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], response: Sequence[int]) -> tuple[str, bool]:
    """Return the text of a response's tokens, without its end token, and whether it has one.

    Decoded behind the prompt's last token: a tokenizer may strip the first space of what it decodes.
    """
    finished, before = response[-1] in end_ids(tokenizer), list(prompt[-1:])
    text = str(tokenizer.decode([*before, *response[: len(response) - finished]]))
    return text[len(str(tokenizer.decode(before))) :], finished


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out set. The text of the prompt alone decides, never the seed."""
    return zlib.crc32(prompt.encode()) % _HELD_OUT == 0


def draw_prompts(draw: Callable[[], str | None], count: int, held_out: bool) -> list[str]:
    """``count`` prompts of one stream, drawn with ``draw()``; ``draw`` returns None for a prompt that a task rejects.

    Raises ValueError if a thousand draws in a row give no prompt of the stream.
    """
    prompts: list[str] = []
    misses = 0
    while len(prompts) < count:
        prompt = draw()
        if prompt is not None and is_held_out(prompt) == held_out:
            prompts.append(prompt)
            misses = 0
        elif (misses := misses + 1) == _MAX_DRAWS:
            stream = "held-out" if held_out else "training"
            raise ValueError(f"the task's settings allow no {stream} prompts: none in {_MAX_DRAWS} draws")
    return prompts
