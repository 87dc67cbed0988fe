"""What the tasks of the suite share: one token per character, checked numbers, wrong characters in answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


@dataclass(kw_only=True)
class CharacterTask:
    """A task with one token per character; a subclass has its numbers, ``sample``, ``demonstrations`` and ``score``."""

    spare_tokens: int
    version: int = 1
    tokenizer: PreTrainedTokenizerBase = field(init=False, repr=False)

    def prepare(self, characters: str) -> None:
        """Make the tokenizer. Raises ValueError for a bad shared number, and if a stream of prompts is empty."""
        self.refuse_negative("spare_tokens")
        if self.version != 1:
            raise ValueError(f"task {type(self).__name__.lower()} is at version 1; got task.version={self.version}")
        self.tokenizer = character_tokenizer(characters)
        task: Any = self
        for held_out in (False, True):
            task.sample(1, np.random.default_rng(0), held_out)

    def refuse_negative(self, name: str) -> None:
        """Raise ValueError if a number is below 0."""
        if getattr(self, name) < 0:
            raise ValueError(f"task.{name} must not be negative; got {getattr(self, name)}")

    def refuse_unordered(self, least: int, low: str, high: str) -> None:
        """Raise ValueError unless ``least`` <= the number ``low`` <= the number ``high``."""
        if not least <= getattr(self, low) <= getattr(self, high):
            raise ValueError(
                f"{least} <= task.{low} <= task.{high} must hold, got {getattr(self, low)} and {getattr(self, high)}"
            )


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, ``<pad>`` (id 0) and ``<eos>`` (id 1); it pads on the left."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *characters])}
    # There is no unknown token: a character outside the vocabulary is an error.
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # a dot does not match newlines
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def refuse_bad_symbols(symbols: str) -> None:
    """Raise ValueError unless ``symbols`` are two or more different ASCII letters or digits."""
    letters_and_digits = symbols.isascii() and symbols.isalnum()
    if not letters_and_digits or len(set(symbols)) < max(2, len(symbols)):
        raise ValueError(f"task.symbols must be two or more different letters or digits; got {symbols!r}")


def corrupted(answer: str, noise: float, kinds: Sequence[str], generator: np.random.Generator) -> str:
    """``answer`` with wrong characters: with probability ``noise`` another character of the same kind replaces each.

    ``kinds`` are sets of characters that may replace each other, like ``["0123456789", "+-*"]``; the replacement is
    uniform over the other characters of the set. A character outside all sets, or alone in its set, stays.
    """
    characters = list(answer)
    for index, character in enumerate(characters):
        if generator.random() < noise:
            others = next((kind for kind in kinds if character in kind), "").replace(character, "")
            if others:
                characters[index] = others[int(generator.integers(len(others)))]
    return "".join(characters)
