"""Countdown: ``3 5 7=9:`` is answered by any expression of the given numbers that makes the target, ``7+5-3``.

A response may use each given number at most once, as in the television game, so a prompt has many right answers
(TinyZero demands each number exactly once). Brackets are allowed. No demonstration has brackets: the policy must find
them by itself. A division must leave no remainder.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from steadymoe.bench.tasks import draw_prompts, refuse_empty_streams
from steadymoe.bench.tasks.characters import character_tokenizer, corrupted

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_DIGITS = "0123456789"


@dataclass
class Countdown:
    """The task ``countdown``; its numbers are explained in ``conf/task/countdown.yaml``."""

    min_numbers: int
    max_numbers: int
    largest_number: int
    largest_target: int
    operators: str
    spare_tokens: int
    version: int = 1
    tokenizer: PreTrainedTokenizerBase = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 2 <= self.min_numbers <= self.max_numbers <= 6:
            raise ValueError(
                "2 <= task.min_numbers <= task.max_numbers <= 6, since a demonstration is found by trying all orders; "
                f"got {self.min_numbers} and {self.max_numbers}"
            )
        if self.largest_number < 1 or self.largest_target < 1:
            raise ValueError(
                "task.largest_number and task.largest_target must be at least 1; "
                f"got {self.largest_number} and {self.largest_target}"
            )
        different = set(self.operators)
        if not different or different - set(_PRECEDENCE) or len(different) < len(self.operators):
            raise ValueError(
                f"task.operators must be some of {''.join(_PRECEDENCE)}, each once; got {self.operators!r}"
            )
        if self.spare_tokens < 0:
            raise ValueError(f"task.spare_tokens must not be negative; got {self.spare_tokens}")
        if self.version != 1:
            raise ValueError(f"task countdown is at version 1; got task.version={self.version}")
        self.tokenizer = character_tokenizer(_DIGITS + self.operators + "()" + " =:")
        refuse_empty_streams(self)

    @property
    def max_new_tokens(self) -> int:
        """Room for the longest demonstrated answer, its end token, and ``spare_tokens``."""
        return self.max_numbers * len(str(self.largest_number)) + self.max_numbers - 1 + 1 + self.spare_tokens

    def sample(self, count: int, generator: np.random.Generator, held_out: bool = False) -> list[str]:
        """``count`` prompts; all numbers together can make the target.

        The number of numbers is uniform before prompts with an unusable target are rejected. Numbers stand in rising
        order, so that no held-out problem has a twin in the training stream.
        """

        def draw() -> str | None:
            size = int(generator.integers(self.min_numbers, self.max_numbers + 1))
            numbers = generator.integers(1, self.largest_number + 1, size=size).tolist()
            target = value(_joined(numbers, generator.choice(list(self.operators), size=size - 1).tolist()))
            if target is None or not 1 <= target <= self.largest_target:
                return None
            return f"{' '.join(map(str, sorted(numbers)))}={target}:"

        return draw_prompts(draw, count, held_out)

    def demonstrations(self, prompts: Sequence[str], noise: float, generator: np.random.Generator) -> list[str]:
        """A random right answer that uses all numbers. A wrong step is another digit or another operator.

        Raises ValueError for a prompt without such an answer.
        """
        answers = []
        for prompt in prompts:
            answer = self._solution(*_problem(prompt), generator)
            answers.append(corrupted(answer, noise, [_DIGITS, self.operators], generator))
        return answers

    def score(self, prompt: str, response: str, finished: bool) -> float:
        """1 if the response ended, uses given numbers at most once each, and its value is the target; else 0."""
        numbers, target = _problem(prompt)
        well_formed = finished and set(response) <= set(_DIGITS + self.operators + "()")
        within = well_formed and Counter(re.findall("[0-9]+", response)) <= Counter(map(str, numbers))
        return float(within and value(response) == target)

    def _solution(self, numbers: list[int], target: int, generator: np.random.Generator) -> str:
        """A right answer of all numbers. The search tries all orders and operators, starting at a random one."""
        shuffled = generator.permutation(numbers).tolist()
        operators = generator.permutation(list(self.operators)).tolist()
        for order in itertools.permutations(shuffled):
            for chosen in itertools.product(operators, repeat=len(numbers) - 1):
                expression = _joined(order, chosen)
                if value(expression) == target:
                    return expression
        raise ValueError(f"no expression of all of {numbers} makes {target}")


def value(expression: str) -> int | None:
    """The value of an expression like ``7*(3+5)``; None if it is malformed, or divides by zero or with a remainder."""
    tokens = re.findall(r"[0-9]+|.", expression, re.DOTALL)[::-1]
    try:
        result = _parse(tokens, 1)
    except (ValueError, IndexError, ArithmeticError, RecursionError):
        return None
    return None if tokens else result


def _parse(tokens: list[str], weakest: int) -> int:
    """The value of an operand and the operators after it that bind at least as strongly as ``weakest``.

    ``tokens`` are in reverse order; the function removes the tokens that it reads from the end of the list.
    """
    token = tokens.pop()
    if token == "(":
        left = _parse(tokens, 1)
        if tokens.pop() != ")":
            raise ValueError
    else:
        left = int(token)
    while tokens and _PRECEDENCE.get(tokens[-1], 0) >= weakest:
        symbol = tokens.pop()
        right = _parse(tokens, _PRECEDENCE[symbol] + 1)
        if symbol == "+":
            left += right
        elif symbol == "-":
            left -= right
        elif symbol == "*":
            left *= right
        elif left % right:
            raise ArithmeticError
        else:
            left //= right
    return left


def _joined(numbers: Sequence[int], symbols: Sequence[str]) -> str:
    return str(numbers[0]) + "".join(f"{symbol}{each}" for symbol, each in zip(symbols, numbers[1:], strict=True))


def _problem(prompt: str) -> tuple[list[int], int]:
    """Numbers and target: ``3 5 7=26:`` gives ([3, 5, 7], 26)."""
    numbers, _, target = prompt[:-1].partition("=")
    return [int(number) for number in numbers.split(" ")], int(target)
