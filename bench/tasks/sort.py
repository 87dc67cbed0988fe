"""Sorting: ``5291=`` is answered by its symbols in order, ``1259``. Prompts of any length, and an easy check."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steadymoe.bench.tasks import draw_prompts
from steadymoe.bench.tasks.characters import CharacterTask, corrupted, refuse_bad_symbols


@dataclass(kw_only=True)
class Sort(CharacterTask):
    """The task ``sort``; its numbers are explained in ``conf/task/sort.yaml``."""

    symbols: str
    min_length: int
    max_length: int

    def __post_init__(self) -> None:
        refuse_bad_symbols(self.symbols)
        self.refuse_unordered(2, "min_length", "max_length")
        self.prepare(self.symbols + "=")

    @property
    def max_new_tokens(self) -> int:
        """Room for the longest right answer, its end token, and ``spare_tokens``."""
        return self.max_length + 1 + self.spare_tokens

    def sample(self, count: int, generator: np.random.Generator, held_out: bool = False) -> list[str]:
        """``count`` prompts; the length is uniform, and each symbol is uniform, with repetition."""

        def draw() -> str:
            length = int(generator.integers(self.min_length, self.max_length + 1))
            return "".join(self.symbols[index] for index in generator.integers(len(self.symbols), size=length)) + "="

        return draw_prompts(draw, count, held_out)

    def demonstrations(self, prompts: Sequence[str], noise: float, generator: np.random.Generator) -> list[str]:
        """The sorted symbols. A wrong step is uniform over the other symbols; later steps are not affected by it."""
        return [corrupted(self._sorted(prompt), noise, [self.symbols], generator) for prompt in prompts]

    def score(self, prompt: str, response: str, finished: bool) -> float:
        """1 if the response ended and is exactly the sorted prompt; else 0."""
        return float(finished and response == self._sorted(prompt))

    def _sorted(self, prompt: str) -> str:
        return "".join(sorted(prompt[:-1], key=self.symbols.index))
