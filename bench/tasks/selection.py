"""Selection sort, written out: the second task whose length does not change the number of decisions.

A prompt is a list of symbols. Each pass swaps the smallest symbol of the part not yet sorted to its front, and the
response writes the whole list after every pass: ``3120`` with two passes is answered by ``01230123``. A pass is one
decision; the rest of its line is copied from the line before, which always stands ``length`` positions back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steadymoe.bench.tasks import draw_prompts
from steadymoe.bench.tasks.characters import CharacterTask, refuse_bad_symbols


@dataclass(kw_only=True)
class Selection(CharacterTask):
    """The task ``selection``; its numbers are explained in ``conf/task/selection.yaml``."""

    symbols: str
    length: int
    passes: int

    def __post_init__(self) -> None:
        refuse_bad_symbols(self.symbols)
        if not 1 <= self.passes < self.length:
            raise ValueError(f"1 <= task.passes < task.length must hold, got {self.passes} and {self.length}")
        self.prepare(self.symbols)

    @property
    def max_new_tokens(self) -> int:
        """Room for the right answer, its end token, and ``spare_tokens``."""
        return self.length * self.passes + 1 + self.spare_tokens

    def sample(self, count: int, generator: np.random.Generator, held_out: bool = False) -> list[str]:
        """Return ``count`` prompts of ``length`` uniform symbols, with repetition."""

        def draw() -> str:
            return "".join(self.symbols[index] for index in generator.integers(len(self.symbols), size=self.length))

        return draw_prompts(draw, count, held_out)

    def demonstrations(self, prompts: Sequence[str], noise: float, generator: np.random.Generator) -> list[str]:
        """Return the lists after each pass.

        Each pass takes a wrong symbol with probability ``noise``: one from a uniform place that does not hold the
        smallest. Later passes continue from there. A list whose unsorted part holds one symbol alone has no wrong one.
        """
        answers = []
        for prompt in prompts:
            line, answer = list(prompt), ""
            for front in range(self.passes):
                place = self._smallest(line, front)
                wrong = [other for other in range(front, self.length) if line[other] != line[place]]
                if wrong and generator.random() < noise:
                    place = wrong[int(generator.integers(len(wrong)))]
                line[front], line[place] = line[place], line[front]
                answer += "".join(line)
            answers.append(answer)
        return answers

    def score(self, prompt: str, response: str, finished: bool) -> float:
        """Return 1 if the response ended, has one line for each pass, and its last line is right; else 0."""
        line = list(prompt)
        for front in range(self.passes):
            place = self._smallest(line, front)
            line[front], line[place] = line[place], line[front]
        well_formed = finished and len(response) == self.length * self.passes
        return float(well_formed and response.endswith("".join(line)))

    def _smallest(self, line: Sequence[str], front: int) -> int:
        return min(range(front, self.length), key=lambda place: self.symbols.index(line[place]))
