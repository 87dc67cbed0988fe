"""Chains of modular arithmetic: ``3+7*2-5=`` is answered by the running values, ``005``, and an end token.

Operators apply from left to right. Each result is taken modulo ``modulus`` and is one digit. A response must have one
digit for each step. Its last digit alone decides the reward, so a response may be right by luck.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from steadymoe.bench.tasks import draw_prompts
from steadymoe.bench.tasks.characters import CharacterTask

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(kw_only=True)
class Chain(CharacterTask):
    """The task ``chain``; its numbers are explained in ``conf/task/chain.yaml``."""

    min_operands: int
    max_operands: int
    modulus: int

    def __post_init__(self) -> None:
        self.refuse_unordered(2, "min_operands", "max_operands")
        if not 2 <= self.modulus <= 10:
            raise ValueError(f"task.modulus must be 2 to 10, since a value is one digit; got {self.modulus}")
        self.prepare("0123456789+-*=")

    @property
    def max_new_tokens(self) -> int:
        """Room for the longest right answer, its end token, and ``spare_tokens``."""
        return self.max_operands - 1 + 1 + self.spare_tokens

    def sample(self, count: int, generator: np.random.Generator, held_out: bool = False) -> list[str]:
        """``count`` independent prompts; the number of operands is uniform."""

        def draw() -> str:
            operands = int(generator.integers(self.min_operands, self.max_operands + 1))
            digits = generator.integers(self.modulus, size=operands)
            symbols = generator.choice(list(_OPERATORS), size=operands - 1)
            body = "".join(f"{symbol}{digit}" for symbol, digit in zip(symbols, digits[1:], strict=True))
            return f"{digits[0]}{body}="

        return draw_prompts(draw, count, held_out)

    def demonstrations(self, prompts: Sequence[str], noise: float, generator: np.random.Generator) -> list[str]:
        """The running values. A wrong step is uniform over the wrong digits, and later steps continue from it."""
        answers = []
        for prompt in prompts:
            value, values = int(prompt[0]), ""
            for step, digit in _steps(prompt):
                value = step(value, digit) % self.modulus
                if generator.random() < noise:
                    value = (value + int(generator.integers(1, self.modulus))) % self.modulus
                values += str(value)
            answers.append(values)
        return answers

    def score(self, prompt: str, response: str, finished: bool) -> float:
        """1 if the response ended, has one digit for each step, and its last digit is the right final value; else 0."""
        value, steps = int(prompt[0]), 0
        for step, digit in _steps(prompt):
            value, steps = step(value, digit) % self.modulus, steps + 1
        well_formed = finished and len(response) == steps and response.isascii() and response.isdigit()
        return float(well_formed and response[-1] == str(value))


def _steps(prompt: str) -> Iterator[tuple[Callable[[int, int], int], int]]:
    """The operations of a prompt in order: ``3+7*2=`` gives (add, 7) and (mul, 2)."""
    for symbol, digit in zip(prompt[1:-1:2], prompt[2::2], strict=True):
        yield _OPERATORS[symbol], int(digit)
