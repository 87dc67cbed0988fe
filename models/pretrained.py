"""A local checkpoint of transformers in place of a model built from numbers: weights, tokenizer, chat template, limits.

Nothing is downloaded, and no code or pickle of a checkpoint is executed: only transformers' own classes and safetensors
are used. Every function raises ValueError for a bad checkpoint, in one line that begins with ``model.path``.
"""

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from steadymoe.models import build, contract

# Hides transformers' function from chat templates: the prompts of a run must not depend on the day. Templates are read
# with trim_blocks, which takes the newline, so that the template itself begins on a line of its own.
_TODAY = "{% macro strftime_now(format) %}2024-07-26{% endmacro %}\n"

# Files with these endings are the content of a checkpoint; its read-me and its optimizer's state change no number.
_CONTENT = (".safetensors", ".json", ".jinja", ".model", ".txt")


@dataclass(frozen=True)
class Limits:
    """The longest texts of a checkpoint, in tokens; None means that the checkpoint names no limit."""

    length: int | None
    """Prompt and response together."""
    new_tokens: int | None
    """The response alone."""


def moe_layers(path: str) -> int:
    """Return the number of layers with a router, 0 for a dense model. Raises ValueError if the model cannot run."""
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"model.path: {path} is not a folder with a config.json")
    return _moe_layers(path, digest(path))


@functools.cache
def _moe_layers(path: str, content: str) -> int:
    for shard in sorted(_shards(Path(path))):
        if not (Path(path) / shard).is_file():
            raise ValueError(f"model.path: {path} has no {shard}; only safetensors weights are read")
        try:
            with safe_open(Path(path) / shard, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model.path: {shard} in {path} is not a safetensors file: {_line(error)}") from error
    config = _config(path)
    if getattr(config, "quantization_config", None):
        raise ValueError(f"model.path: the weights in {path} are quantised and cannot be trained")
    try:
        return contract.moe_layers(config)
    except Exception as error:
        raise ValueError(f"model.path: {path}: {_line(error)}") from error


def _shards(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return {"model.safetensors"}
    try:
        return {str(shard) for shard in json.loads(index.read_text())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model.path: {index} is not an index of weights: {_line(error)}") from error


def load(path: str, device: str, experts: str = build.EXPERTS[0]) -> PreTrainedModel:
    """Return the model in fp32 on ``device``, like a model of ``build.build``.

    A vocabulary that is padded beyond the tokenizer's tokens loses the rest, so that no id without a token is drawn.
    Raises ValueError if weights are missing.
    """
    config = _config(path)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            **build.implementations(type(config), experts),
        )
    finally:
        if shown:
            logging.enable_progress_bar()
    model, report = loaded
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise ValueError(f"model.path: {path} has no weights for {len(wrong)} parts of its model, first {wrong[0]}")
    if (tokens := len(load_tokenizer(path))) < config.get_text_config().vocab_size:
        model.resize_token_embeddings(tokens)
    return model.eval().to(device)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the checkpoint's tokenizer.

    A call puts each text into the tokenizer's chat template, if it has one; a date in the template is always the same.
    Its ``end_ids`` are all ids that end a response, by the tokenizer, the config or the generation config. It decodes
    without tidying spaces. A tokenizer without a padding token pads with its end token. Raises ValueError if the
    tokenizer cannot be used.
    """
    if not (Path(path) / "tokenizer_config.json").is_file():  # transformers would invent an empty tokenizer
        raise ValueError(f"model.path: {path} has no tokenizer (no tokenizer_config.json)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, padding_side="left"
        )
    except Exception as error:  # the libraries that read its files raise errors of many kinds
        raise ValueError(f"model.path: the tokenizer in {path} cannot be loaded: {_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model.path: the tokenizer in {path} has no end token, so no response could end")
    config = _config(path).get_text_config()
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"model.path: the tokenizer in {path} has {len(tokenizer)} tokens, but its model has {config.vocab_size}"
        )
    if (last := max(tokenizer.get_vocab().values())) != len(tokenizer) - 1:
        raise ValueError(f"model.path: the tokenizer in {path} has {len(tokenizer)} tokens, but ids up to {last}")
    tokenizer.end_ids = tuple(sorted({tokenizer.eos_token_id, *_ends(path)}))
    tokenizer.clean_up_tokenization_spaces = False
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is not None:
        tokenizer.chat_template = _TODAY + tokenizer.get_chat_template()
        tokenizer.__class__ = type("Chat", (_Chat, type(tokenizer)), {})
    return tokenizer


def _ends(path: str) -> set[int]:
    """Return the ids of end tokens that the config and the generation config declare; a class's default is none."""
    _generation(path)  # raises an error if it is not valid
    found: set[int] = set()
    for file in (Path(path) / "config.json", Path(path) / "generation_config.json"):
        written = json.loads(file.read_text()) if file.is_file() else {}
        for each in (written, written.get("text_config") or {}):
            declared = each.get("eos_token_id")
            found |= {declared} if isinstance(declared, int) else set(declared or ())
    return found


def limits(path: str) -> Limits:
    """Return the smallest limits among the checkpoint's model, tokenizer and generation config."""
    generation = _generation(path)
    new_tokens = getattr(generation, "max_new_tokens", None)
    positions = getattr(_config(path).get_text_config(), "max_position_embeddings", None)
    lengths = positions, load_tokenizer(path).model_max_length, getattr(generation, "max_length", None)
    length = min((length for length in lengths if length is not None), default=None)
    return Limits(length, None if new_tokens is None else int(new_tokens))


def _generation(path: str) -> GenerationConfig | None:
    try:
        if (Path(path) / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"model.path: generation_config.json in {path} cannot be read: {_line(error)}") from error
    return None


def digest(path: str) -> str:
    """Return a SHA-256 of the checkpoint's content (64 hex digits); its place on disk does not matter."""
    files = sorted(file for file in Path(path).iterdir() if file.suffix in _CONTENT and file.is_file())
    parts = [f"{file.name} {_file_digest(file, file.stat().st_mtime_ns, file.stat().st_size)}" for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def _file_digest(file: Path, changed: int, size: int) -> str:
    """SHA-256 of a file. The cache reads a file again only if ``changed`` or ``size`` differ: weights are gigabytes."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _config(path: str) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # an unknown family, code of the checkpoint's own, a config that is not JSON
        raise ValueError(f"model.path: the config in {path} cannot be loaded: {_line(error)}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"model.path: transformers has no causal language model for the {type(config).__name__} in {path}"
        )
    return config


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


class _Chat(PreTrainedTokenizerBase):
    """A mix-in for the class of a tokenizer with a chat template."""

    def __call__(self, text: list[str], **kwargs: Any) -> Any:
        """Encode each text as a user's message, up to the beginning of the assistant's answer."""
        chats = [[{"role": "user", "content": each}] for each in text]
        written = self.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        return super().__call__(written, add_special_tokens=False, **kwargs)  # the template has written them
