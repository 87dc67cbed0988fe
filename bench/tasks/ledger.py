"""Ledgers: responses of any length with the same few decisions.

A prompt lists cells of three characters, an operation, a digit and an empty slot, and ends in a start value. A response
repeats every cell and writes the running value, modulo 10, into its slot: ``+3_.8_-4_5`` is answered by ``+38.88-44``.
Cells with ``+`` and ``-`` are *forks*, where the value changes; a cell with ``.`` is a *filler*, where it stays.
Fillers make responses longer and leave the number of forks, hence the difficulty, alone.

Every prompt of a task has the same width, so that a cell and its copy, and a slot and the value before it, always stand
equally far apart: a small model learns to copy in about a hundred updates.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from steadymoe.bench.tasks import draw_prompts
from steadymoe.bench.tasks.characters import CharacterTask

_SIGNS = {"+": 1, "-": -1, ".": 0}
_EMPTY = "___"


@dataclass(kw_only=True)
class Ledger(CharacterTask):
    """The task ``ledger``; its numbers are explained in ``conf/task/ledger.yaml``."""

    min_forks: int
    max_forks: int
    fillers: int

    def __post_init__(self) -> None:
        self.refuse_unordered(1, "min_forks", "max_forks")
        self.refuse_negative("fillers")
        self.prepare("0123456789+-._")

    @property
    def max_new_tokens(self) -> int:
        """Room for the longest right answer, its end token, and ``spare_tokens``."""
        return 3 * (self.max_forks + self.fillers) + 1 + self.spare_tokens

    def sample(self, count: int, generator: np.random.Generator, held_out: bool = False) -> list[str]:
        """Return ``count`` prompts; the number of forks is uniform, and so are their places, signs and digits."""

        def draw() -> str:
            forks = int(generator.integers(self.min_forks, self.max_forks + 1))
            cells = forks + self.fillers
            signs = np.full(cells, ".")
            signs[generator.choice(cells, size=forks, replace=False)] = generator.choice(["+", "-"], size=forks)
            digits = generator.integers(10, size=cells)
            body = "".join(f"{sign}{digit}_" for sign, digit in zip(signs, digits, strict=True))
            return body + _EMPTY * (self.max_forks - forks) + str(generator.integers(10))

        return draw_prompts(draw, count, held_out)

    def demonstrations(self, prompts: Sequence[str], noise: float, generator: np.random.Generator) -> list[str]:
        """Return the filled-in ledgers.

        Each fork is wrong with probability ``noise``: its value is then uniform over the wrong digits, and later cells
        continue from it. Fillers are always right.
        """
        answers = []
        for prompt in prompts:
            value, answer = int(prompt[-1]), ""
            for sign, digit in _cells(prompt):
                value = (value + _SIGNS[sign] * int(digit)) % 10
                if sign != "." and generator.random() < noise:
                    value = (value + int(generator.integers(1, 10))) % 10
                answer += f"{sign}{digit}{value}"
            answers.append(answer)
        return answers

    def score(self, prompt: str, response: str, finished: bool) -> float:
        """Return 1 if the response ended, has three characters for each cell, and ends in the right value; else 0."""
        cells = list(_cells(prompt))
        value = (int(prompt[-1]) + sum(_SIGNS[sign] * int(digit) for sign, digit in cells)) % 10
        return float(finished and len(response) == 3 * len(cells) and response[-1] == str(value))


def _cells(prompt: str) -> Iterator[tuple[str, str]]:
    return ((sign, digit) for sign, digit in re.findall(r"([-+.])(\d)_", prompt))
