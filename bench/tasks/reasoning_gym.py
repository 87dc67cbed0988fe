"""The datasets of the package reasoning-gym, by name, each with its own verifier. One token per character.

A prompt is the question and a newline. The task passes over a question if its prompt or answer is longer than the
budget, if it has no answer to demonstrate, or if a character is neither printable ASCII nor a newline. A dataset is
refused if more than half of its questions are passed over. The verifier gives the reward, and it may be partial.
"""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from steadymoe.algorithms import meant
from steadymoe.bench.tasks import draw_prompts, refuse_empty_streams
from steadymoe.bench.tasks.characters import character_tokenizer, corrupted

_CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))

# The seed of the dataset's questions; a run's own seed decides which of these questions the run draws.
_SEED = 0

# The number of questions that are checked before a dataset is accepted.
_LOOKED_AT = 16


@dataclass
class ReasoningGym:
    """The task ``reasoning_gym``; its numbers are explained in ``conf/task/reasoning_gym.yaml``."""

    dataset: str
    options: Mapping[str, Any]
    questions: int
    max_prompt_tokens: int
    max_new_tokens: int
    allow_eval: bool
    version: int = 1
    tokenizer: PreTrainedTokenizerBase = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("questions", "max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"task.{name} must be at least 1; got {getattr(self, name)}")
        if self.version != 1:
            raise ValueError(f"task reasoning_gym is at version 1; got task.version={self.version}")
        self.tokenizer = character_tokenizer(_CHARACTERS)
        self._data = _create(self.dataset, dict(self.options), self.questions)
        if not self.allow_eval and re.search(r"\b(eval|exec|parse_expr)\(", inspect.getsource(self._data.score_answer)):
            raise ValueError(
                f"the verifier of {self.dataset} runs what the policy wrote as Python code, or may; "
                "task.allow_eval=true permits it"
            )
        self._entry = lru_cache(maxsize=1024)(self._data.__getitem__)
        # The index of the question behind each sampled prompt; at most ``questions`` entries.
        self._index: dict[str, int] = {}
        self._look()
        refuse_empty_streams(self)

    def sample(self, count: int, generator: np.random.Generator, held_out: bool = False) -> list[str]:
        """``count`` prompts, uniform over the fitting questions among the dataset's first ``questions``."""
        drawn: dict[str, int] = {}

        def draw() -> str | None:
            index = int(generator.integers(self.questions))
            entry = self._entry(index)
            if self._reason_against(entry) is not None:
                return None
            prompt = _prompt(entry)
            drawn[prompt] = index
            return prompt

        prompts = draw_prompts(draw, count, held_out)
        # Two questions may have the same words. The question sampled last counts, so that a resumed run scores as
        # an uninterrupted run does.
        self._index |= {prompt: drawn[prompt] for prompt in prompts}
        return prompts

    def demonstrations(self, prompts: Sequence[str], noise: float, generator: np.random.Generator) -> list[str]:
        """The dataset's own answers. A wrong step replaces a digit by another digit, a letter by one of its case."""
        kinds = [digits, ascii_lowercase, ascii_uppercase]
        return [corrupted(self._sampled(prompt)["answer"], noise, kinds, generator) for prompt in prompts]

    def score(self, prompt: str, response: str, finished: bool) -> float:
        """The verifier's score of a finished response; 0 if the response is unfinished or the verifier fails on it.

        Raises ValueError for a prompt that this task has not sampled: the verifier needs the prompt's whole entry.
        """
        entry = self._sampled(prompt)
        if not finished:
            return 0.0
        try:
            score = float(self._data.score_answer(response, entry))
        except Exception:  # some verifiers stumble over malformed responses, each in its own way
            return 0.0
        return min(max(score, 0.0), 1.0)

    def _sampled(self, prompt: str) -> dict[str, Any]:
        if prompt not in self._index:
            raise ValueError(f"{prompt!r} is no prompt that this task has sampled")
        return self._entry(self._index[prompt])

    def _reason_against(self, entry: Mapping[str, Any]) -> str | None:
        """Why the task passes over a question, or None."""
        prompt, answer = _prompt(entry), entry["answer"]
        if not isinstance(answer, str) or not answer:
            return "no answer to demonstrate"
        if set(prompt + answer) - set(_CHARACTERS):
            return "characters outside printable ASCII"
        if len(prompt) > self.max_prompt_tokens:
            return "more than task.max_prompt_tokens"
        if len(answer) + 1 > self.max_new_tokens:
            return "more than task.max_new_tokens"
        return None

    def _look(self) -> None:
        """Raise ValueError if most of the questions do not fit, or if a second look gives other questions."""
        looked_at = range(min(_LOOKED_AT, self.questions))
        entries = [self._entry(index) for index in looked_at]
        for entry, again in zip(entries, map(self._data.__getitem__, looked_at), strict=True):
            if (entry["question"], entry["answer"]) != (again["question"], again["answer"]):
                raise ValueError(f"{self.dataset} draws its questions from a global generator, so no run could repeat")
        reasons = [reason for reason in map(self._reason_against, entries) if reason is not None]
        if 2 * len(reasons) > len(entries):
            prompt = max(len(_prompt(entry)) for entry in entries)
            answer = max(len(str(entry["answer"])) for entry in entries) + 1
            raise ValueError(
                f"{len(reasons)} of the first {len(entries)} questions of {self.dataset} do not fit "
                f"({', '.join(sorted(set(reasons)))}); all lengths fit with task.max_prompt_tokens={prompt} and "
                f"task.max_new_tokens={answer}"
            )


def _prompt(entry: Mapping[str, Any]) -> str:
    return f"{entry['question']}\n"


def _create(name: str, options: dict[str, Any], questions: int) -> Any:
    """The dataset; raises ValueError if the package is missing, or has no such dataset or option."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(
            "task=reasoning_gym needs the package reasoning-gym: pip install 'steadymoe[reasoning]'"
        ) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        raise ValueError(f"reasoning-gym has no dataset {name!r}; {', '.join(near) or ', '.join(sorted(DATASETS))}")
    known = [each.name for each in dataclasses.fields(DATASETS[name][1]) if each.name not in ("seed", "size")]
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option task.options.{option}; {meant(option, known)}")
    try:
        return create_dataset(name, seed=_SEED, size=questions, **options)
    except Exception as error:  # each dataset checks its options in its own way, mostly with assert
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise ValueError(
            f"reasoning-gym cannot make {name} of {questions} questions from {given or 'no options'}: "
            f"{type(error).__name__} {error}"
        ) from error
