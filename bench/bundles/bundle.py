"""A bundle: frozen rollouts with what policies said of them, one safetensors file that any trainer can write.

docs/bundle.md describes the file. The same rules hold for a bundle that is made and for one that is read.

Shapes: B responses in groups of G, S positions of prompt and response together, T response positions, L MoE layers, K
experts a token.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.training.forward import Sequences

# The entry of safetensors' metadata that holds what is no tensor, as JSON.
ENTRY = "steadymoe_bundle"
# The largest sizes of a bundle, compared with the header before a tensor is loaded.
MOST = {"B": 2**16, "S": 2**17, "T": 2**17, "L": 2**9, "K": 2**6}
# The most bytes of a file and of its header.
MOST_BYTES, MOST_HEADER = 2**31, 2**17
DTYPES = {torch.int32: "I32", torch.uint8: "U8", torch.float32: "F32"}
_WHOLE = {"tokens_BS": torch.int32, "mask_BS": torch.uint8, "groups_B": torch.int32, "minibatches_B": torch.int32}
_PLACES = {"B": "row", "S": "position", "T": "response position", "L": "layer", "K": "place"}


class BadBundle(UserError, ValueError):
    """Something is not a bundle, or lacks what is asked of it; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Frozen rollouts. Numbers are converted to the type of their field, and padding becomes 0.

    Raises BadBundle, with the name of the field, for a wrong shape or type, a mask that is not 0 and 1 or has holes, a
    log-probability above 0 or not finite, a reward or an advantage that is not finite, and groups that are not whole.
    """

    response_width: int
    """T: the last T of the S positions hold responses."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Where the rollouts come from, in words: made_by, model, or anything else."""
    tokens_BS: Tensor
    """Token ids; prompts end at position S − T, responses begin there; 0 on padding."""
    mask_BS: Tensor
    """1 on tokens of prompt and response, 0 on padding: left of prompts, right of responses."""
    groups_B: Tensor
    """A number that the G responses to one prompt share; they stand in neighbouring rows."""
    rewards_B: Tensor
    """The reward of each response."""
    minibatches_B: Tensor | None = None
    """The mini-batch of each response, 0, 1, …; a group lies in one. None for a single mini-batch."""
    advantages_BT: Tensor | None = None
    """The advantage of each token; None if rewards and groups give the advantages."""
    rollout_logprobs_BT: Tensor | None = None
    """log μ of the response tokens, as the sampling engine computed it."""
    old_logprobs_BT: Tensor | None = None
    """log π_old of the same tokens: the trainer's forward at the weights that sampled."""
    logprobs_BT: Tensor | None = None
    """log π_θ of the same tokens: the trainer's forward at the current weights."""
    router_log_ratio_LBTK: Tensor | None = None
    """log p_θ(e) − log p_old(e) of the routers' softmax for the K experts that π_old chose (RSPO)."""

    def __post_init__(self) -> None:
        _check_facts(self.response_width, self.about)
        for name, values in self.tensors.items():
            if not isinstance(values, Tensor):
                raise BadBundle(f"{name} must be a tensor; got {type(values).__name__}")
        _sizes({name: tuple(values.shape) for name, values in self.tensors.items()}, self.response_width)
        for name, values in self.tensors.items():
            object.__setattr__(self, name, _converted(name, values))
        self._check_masks()
        _demand(self.rewards_B.isfinite(), "rewards_B must be finite", "B")
        self._check_groups()
        for name, values in self.tensors.items():
            if "T" in name.rpartition("_")[2]:
                self._check_floats(name, values)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the bundle holds, by name."""
        return {name: values for name in FIELDS if (values := getattr(self, name)) is not None}

    @property
    def sizes(self) -> dict[str, int]:
        """B, S, T, and L and K where there are log-ratios of routers."""
        return _sizes({name: tuple(values.shape) for name, values in self.tensors.items()}, self.response_width)

    @property
    def mask_BT(self) -> Tensor:
        """1 on response tokens."""
        return self.mask_BS[:, -self.response_width :]

    @property
    def sequences(self) -> Sequences:
        """The tokens as a training forward takes them."""
        return Sequences(self.tokens_BS.long(), self.mask_BS.long(), self.response_width)

    @property
    def responses(self) -> int:
        """G, the number of responses to each prompt."""
        return len(self.groups_B) // len(self.groups_B.unique())

    def rows_of_minibatches(self) -> list[Tensor]:
        """The rows of each mini-batch, (M,) each."""
        if self.minibatches_B is None:
            return [torch.arange(len(self.groups_B))]
        return [(self.minibatches_B == each).nonzero().flatten() for each in self.minibatches_B.unique()]

    def get(self, name: str, why: str) -> Tensor:
        """A field by its name. Raises BadBundle, with the reason ``why`` it is needed, if the bundle lacks it."""
        values: Tensor | None = getattr(self, name)
        if values is None:
            raise BadBundle(f"the bundle has no {name}, {why}")
        return values

    def _check_masks(self) -> None:
        _demand(self.mask_BS <= 1, "mask_BS must hold 0 and 1 alone", "BS")
        prompts, mask_BT = self.mask_BS[:, : -self.response_width].bool(), self.mask_BT.bool()
        _demand(_ends_in_ones(prompts), "mask_BS must be one run of 1 at the right end of each prompt", "B")
        _demand(_ends_in_ones(mask_BT.flip(-1)), "mask_BS must be one run of 1 at the left end of each response", "B")
        object.__setattr__(self, "tokens_BS", self.tokens_BS * self.mask_BS)
        _demand(self.tokens_BS >= 0, "tokens_BS must hold token ids, at least 0", "BS")

    def _check_floats(self, name: str, values: Tensor) -> None:
        """Put 0 on padding. Raises BadBundle for a number that cannot stand on a token."""
        letters = name.rpartition("_")[2]
        mask = self.mask_BT.bool().view(*self.mask_BT.shape, *[1] * (letters[-1] == "K"))
        values = torch.where(mask, values, 0.0)
        _demand(values.isfinite(), f"{name} must be finite on response tokens", letters)
        if name.endswith("logprobs_BT"):
            _demand(values <= 0, f"{name} must hold logarithms of probabilities, at most 0", letters)
        object.__setattr__(self, name, values)

    def _check_groups(self) -> None:
        groups, counts = self.groups_B.unique_consecutive(return_counts=True)
        if len(groups.unique()) < len(groups) or (counts != counts[0]).any():
            raise BadBundle("groups_B must be whole groups of one size, each in neighbouring rows")
        first_B = torch.arange(len(self.groups_B)) // counts[0] * counts[0]
        prompts = ((self.tokens_BS.long() + 1) * self.mask_BS)[:, : -self.response_width]  # 0 on padding alone
        _demand((prompts == prompts[first_B]).all(-1), "groups_B must share a prompt", "B")
        if self.minibatches_B is not None:
            numbers = self.minibatches_B.unique()
            if not torch.equal(numbers, torch.arange(len(numbers), dtype=numbers.dtype)):
                raise BadBundle("minibatches_B must number the mini-batches 0, 1, … without a gap")
            _demand(self.minibatches_B == self.minibatches_B[first_B], "minibatches_B must hold whole groups", "B")


FIELDS = {each.name: _WHOLE.get(each.name, torch.float32) for each in fields(Bundle)[2:]}
NEEDED = ("tokens_BS", "mask_BS", "groups_B", "rewards_B")


def write(bundle: Bundle, path: Path) -> None:
    """Write a bundle as a new file, whole or not at all; the same bundle gives the same bytes. Raises BadBundle."""
    refuse_existing(path)
    if (size := sum(values.nbytes for values in bundle.tensors.values())) > MOST_BYTES:
        raise BadBundle(f"a bundle has at most {MOST_BYTES} bytes; this one would have {size}: write fewer rollouts")
    facts = {"response_width": bundle.response_width, "about": dict(bundle.about)}
    try:
        atomic_files.write(path, partial(save_file, bundle.tensors, metadata={ENTRY: json.dumps(facts)}))
    except (SafetensorError, OSError) as error:  # a full disk
        raise BadBundle(f"{path} cannot be written: {_one_line(error)}") from error


def refuse_existing(place: Path) -> None:
    """Raise BadBundle if there is something at ``place`` already, or no folder above it that could hold it."""
    if place.exists() or place.is_symlink():
        raise BadBundle(f"{place} exists already; nothing is overwritten")
    if not place.parent.is_dir():
        raise BadBundle(f"there is no folder {place.parent} to write into")


def read(path: Path) -> Bundle:
    """The bundle in a file. Raises BadBundle, in one line with the name of the file, for any fault in it."""
    try:
        return Bundle(**_check_header(path) | tensors_of(path))
    except BadBundle as error:
        raise BadBundle(f"{path}: {error}") from error


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises BadBundle for a file that is none, or too large."""
    opened = _opened(path)
    return {name: opened.get_tensor(name) for name in sorted(opened.keys())}


def _opened(path: Path) -> Any:
    """A safetensors file whose header is known to be whole; no tensor is loaded. Raises BadBundle."""
    if not path.is_file():
        raise BadBundle(f"there is no file {path.name}")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise BadBundle(f"{path.name} has {size} bytes; at most {MOST_BYTES} are read")
    with path.open("rb") as file:
        begins = file.read(8)
    if len(begins) < 8 or struct.unpack("<Q", begins)[0] > MOST_HEADER:
        raise BadBundle(f"{path.name} is not a safetensors file, or its header has more than {MOST_HEADER} bytes")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise BadBundle(f"{path.name} is not a whole safetensors file: {_one_line(error)}") from error


def _check_header(path: Path) -> dict[str, Any]:
    """What the header says that is no tensor. Raises BadBundle unless it is a bundle's, before a tensor is loaded."""
    opened = _opened(path)
    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, it is no dict
    try:
        facts = json.loads((opened.metadata() or {}).get(ENTRY, "null"))
    except (ValueError, RecursionError) as error:
        raise BadBundle(f"the metadata {ENTRY} is not JSON: {_one_line(error)}") from error
    if not isinstance(facts, dict) or set(facts) != {"response_width", "about"}:
        raise BadBundle(f"the metadata must have an entry {ENTRY} with response_width and about")
    _check_facts(**facts)
    if strange := sorted(set(slices) - set(FIELDS)):
        raise BadBundle(f"unknown field {strange[0][:40]!r}; fields are {', '.join(FIELDS)}")
    if missing := [name for name in NEEDED if name not in slices]:
        raise BadBundle(f"there is no {missing[0]}; every bundle has {', '.join(NEEDED)}")
    for name, each in slices.items():
        if each.get_dtype() != (expected := DTYPES[FIELDS[name]]):
            raise BadBundle(f"{name} must be stored as {expected}; got {each.get_dtype()}")
    _sizes({name: tuple(each.get_shape()) for name, each in slices.items()}, facts["response_width"])
    return facts


def _check_facts(response_width: Any, about: Any) -> None:
    if type(response_width) is not int:
        raise BadBundle(f"response_width must be a whole number; got {response_width!r:.60}")
    if not isinstance(about, Mapping) or not all(isinstance(text, str) for pair in about.items() for text in pair):
        raise BadBundle(f"about must map names to texts; got {about!r:.60}")


def _sizes(shapes: Mapping[str, tuple[int, ...]], response_width: int) -> dict[str, int]:
    """The size of each shape letter. Raises BadBundle unless shapes, by name, fit together and into ``MOST``."""
    tokens = shapes["tokens_BS"]
    if len(tokens) != 2 or not 1 <= response_width < tokens[1]:
        raise BadBundle(f"tokens_BS must be (B, S) with S > response_width = {response_width}; got {tokens}")
    sizes = {"T": response_width}
    for name in FIELDS:
        letters, shape = name.rpartition("_")[2], shapes.get(name)
        if shape is None:
            continue
        found = {letter: sizes.setdefault(letter, size) for letter, size in zip(letters, shape, strict=False)}
        if shape != tuple(found.values()) or len(shape) != len(letters):
            told = ", ".join(f"{letter} = {size}" for letter, size in found.items())
            raise BadBundle(f"{name} must have the shape ({', '.join(letters)}) with {told}; got {shape}")
    for letter, size in sizes.items():
        if not 1 <= size <= MOST[letter]:
            raise BadBundle(f"the size {letter} must be between 1 and {MOST[letter]}; got {size}")
    return sizes


def _converted(name: str, values: Tensor) -> Tensor:
    """``values`` as the type of the field, on the CPU. Raises BadBundle for other numbers, or ones that do not fit."""
    values, dtype = values.detach().cpu(), FIELDS[name]
    if dtype.is_floating_point != values.is_floating_point() or values.is_complex():
        kind = "floating-point numbers" if dtype.is_floating_point else "whole numbers"
        raise BadBundle(f"{name} must hold {kind}; got {values.dtype}")
    made = values.to(dtype)
    if not dtype.is_floating_point and not torch.equal(made.long(), values.long()):
        raise BadBundle(f"{name} must hold whole numbers that fit into {str(dtype).removeprefix('torch.')}")
    return made.contiguous()


def _ends_in_ones(mask_BX: Tensor) -> Tensor:
    """Whether each row is zeros and then at least one 1, (B,) bool."""
    return mask_BX[:, -1] & (mask_BX[:, 1:] >= mask_BX[:, :-1]).all(-1)


def _demand(fine: Tensor, what: str, letters: str) -> None:
    """Raise BadBundle with the first place where ``fine``, of the shape ``letters``, is false."""
    if not fine.all():
        at = (~fine).nonzero()[0].tolist()
        place = ", ".join(f"{_PLACES[letter]} {index}" for letter, index in zip(letters, at, strict=True))
        raise BadBundle(f"{what}; wrong in {place}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
