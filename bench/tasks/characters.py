"""Texts as characters: a tokenizer of one token a character, and answers with wrong ones among them."""

from collections.abc import Sequence

import numpy as np
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one token a character, with ``<pad>`` (id 0) and ``<eos>`` (id 1), padding on the left."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *characters])}
    # There is no unknown token: a character outside the vocabulary is an error.
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # a dot would leave newlines together
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def corrupted(answer: str, noise: float, kinds: Sequence[str], generator: np.random.Generator) -> str:
    """``answer`` with each character, with probability ``noise``, replaced by another of its kind, uniformly.

    ``kinds`` are sets of characters that stand for each other, like ``["0123456789", "+-*"]``; a character of
    none of them, or alone in its kind, stays.
    """
    characters = list(answer)
    for index, character in enumerate(characters):
        if generator.random() < noise:
            others = next((kind for kind in kinds if character in kind), "").replace(character, "")
            if others:
                characters[index] = others[int(generator.integers(len(others)))]
    return "".join(characters)
