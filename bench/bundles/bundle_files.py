"""Bundles as folders: written whole or not at all, and checked by their headers before a tensor is loaded."""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from steadymoe.bench.bundles.bundle import About, BadBundle, Bundle, check_sizes

FORMAT, VERSION = "steadymoe bundle", 1
MANIFEST, TENSORS = "bundle.json", "tensors.safetensors"
# The most bytes of the tensors, of their header, and of the manifest.
MOST_BYTES, MOST_HEADER, MOST_MANIFEST = 2**31, 2**17, 2**16
# Types by their names in safetensors' header.
_DTYPES = {torch.int32: "I32", torch.uint8: "U8", torch.float32: "F32", torch.int16: "I16"}
_FIELDS = {each.name: each for each in fields(Bundle) if "dtype" in each.metadata}
NEEDED = tuple(name for name in _FIELDS if name in ("tokens_BS", "mask_BS", "groups_B", "rewards_B"))


def write(bundle: Bundle, folder: Path) -> None:
    """Write a bundle as a new folder; the same bundle gives the same bytes. Raises BadBundle if ``folder`` exists."""
    refuse_existing(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        tensors = {name: values.contiguous().clone() for name, values in bundle.tensors()}
        save_file(tensors, temporary / TENSORS)
        if (size := (temporary / TENSORS).stat().st_size) > MOST_BYTES:
            raise BadBundle(
                f"a bundle has at most {MOST_BYTES} bytes; this one would have {size}: write fewer rollouts"
            )
        facts = {
            "format": FORMAT,
            "version": VERSION,
            "about": asdict(bundle.about),
            "response_width": bundle.response_width,
            "sizes": bundle.sizes | {"G": bundle.responses},
            "fields": sorted(tensors),
            "sha256": _sha256(temporary / TENSORS),
        }
        (temporary / MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(place: Path) -> None:
    """Raise BadBundle if there is something at ``place`` already, or no folder above it that could hold it."""
    if place.exists() or place.is_symlink():
        raise BadBundle(f"{place} exists already; nothing is overwritten")
    if not place.parent.is_dir():
        raise BadBundle(f"there is no folder {place.parent} to write into")


def read(folder: Path) -> Bundle:
    """The bundle in a folder. Raises BadBundle, in one line with the name of the folder, for any fault in it."""
    try:
        facts = _facts(folder / MANIFEST)
        _check_header(folder / TENSORS, facts)
        if _sha256(folder / TENSORS) != facts["sha256"]:
            raise BadBundle(f"{TENSORS} is not the file that {MANIFEST} was written for: its sha256 differs")
        about = _about(facts["about"])
        tensors = tensors_of(folder / TENSORS)
        bundle = Bundle(about=about, response_width=facts["response_width"], **tensors)
        if facts["sizes"] != bundle.sizes | {"G": bundle.responses}:
            raise BadBundle(f"the sizes in {MANIFEST} are not the tensors' sizes")
        return bundle
    except BadBundle as error:
        raise BadBundle(f"{folder}: {error}") from error


def check_model(bundle: Bundle, model: nn.Module) -> None:
    """Raise BadBundle unless the weights of ``model`` are the ones that sampled the bundle."""
    expected, found = bundle.about.model_sha256, model_sha256(model)
    if expected is None:
        raise BadBundle("the bundle does not say which weights sampled it: model_sha256 is null")
    if found != expected:
        raise BadBundle(f"the bundle is of a model with model_sha256 {expected[:16]}…; this model has {found[:16]}…")


def model_sha256(model: nn.Module) -> str:
    """The SHA-256 of a model's weights: name, type, shape and bytes of each, in the order of the names."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        values = weight.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises BadBundle for a file that is none, or too large."""
    header_of(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (SafetensorError, OSError, ValueError) as error:
        raise BadBundle(f"{path.name} is no whole safetensors file: {_one_line(error)}") from error


def header_of(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor of a safetensors file, without loading one. Raises BadBundle."""
    if not path.is_file():
        raise BadBundle(f"there is no file {path.name}")
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise BadBundle(f"{path.name} has {size} bytes; at most {MOST_BYTES} are read")
    with path.open("rb") as file:
        begins = file.read(8)
    if len(begins) < 8 or (length := struct.unpack("<Q", begins)[0]) > MOST_HEADER:
        raise BadBundle(f"{path.name} is no safetensors file, or its header has more than {MOST_HEADER} bytes")
    if length > size:
        raise BadBundle(f"{path.name} is no whole safetensors file: its header is longer than the file")
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in sorted(file.keys())}
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise BadBundle(f"{path.name} is no whole safetensors file: {_one_line(error)}") from error


def _facts(path: Path) -> dict[str, Any]:
    """The manifest. Raises BadBundle for one of another format or version, or without a needed entry."""
    if not path.is_file():
        raise BadBundle(f"there is no file {path.name}")
    with path.open("rb") as file:
        content = file.read(MOST_MANIFEST + 1)
    if len(content) > MOST_MANIFEST:
        raise BadBundle(f"{path.name} has more than {MOST_MANIFEST} bytes")
    try:
        facts = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadBundle(f"{path.name} is no JSON: {_one_line(error)}") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise BadBundle(f"{path.name} does not say that this is a bundle: format must be {FORMAT!r}")
    if facts.get("version") != VERSION or type(facts["version"]) is not int:
        raise BadBundle(f"version {repr(facts.get('version'))[:40]} of bundles is not known; this code reads {VERSION}")
    kinds = {"about": dict, "response_width": int, "sizes": dict, "fields": list, "sha256": str}
    for name, kind in kinds.items():
        if type(facts.get(name)) is not kind:
            raise BadBundle(f"{path.name} has no proper {name}")
    return facts


def _about(facts: Mapping[str, Any]) -> About:
    known = [each.name for each in fields(About)]
    if strange := sorted(set(facts) - set(known)):
        raise BadBundle(f"{MANIFEST}: about has an unknown entry {strange[0][:40]!r}; it takes {', '.join(known)}")
    if missing := [name for name in ("made_by", "model") if name not in facts]:
        raise BadBundle(f"{MANIFEST}: about has no {missing[0]}")
    return About(**facts)


def _check_header(path: Path, facts: Mapping[str, Any]) -> None:
    """Raise BadBundle unless names, types and shapes of the tensors are as they must be, and as the manifest says."""
    header = header_of(path)
    if strange := sorted(set(header) - set(_FIELDS)):
        raise BadBundle(f"{path.name} has an unknown field {strange[0][:40]!r}; fields are {', '.join(_FIELDS)}")
    if missing := [name for name in NEEDED if name not in header]:
        raise BadBundle(f"{path.name} has no {missing[0]}; every bundle has {', '.join(NEEDED)}")
    if sorted(header) != facts["fields"]:
        raise BadBundle(f"{path.name} and {MANIFEST} do not name the same fields")
    for name, (dtype, _) in header.items():
        if dtype != (expected := _DTYPES[_FIELDS[name].metadata["dtype"]]):
            raise BadBundle(f"{name} must be stored as {expected}; got {dtype}")
    check_sizes({name: shape for name, (_, shape) in header.items()}, facts["response_width"])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
