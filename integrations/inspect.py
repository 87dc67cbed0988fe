"""``steadymoe-integrations inspect``: how far an optimizer's step moves a checkpoint's routers, relative to their size.

The relative step of a matrix W, (m, n) as stored, is RMS(ΔW)/RMS(W). At the learning rate η, without weight decay:

    AdamW                    RMS(ΔW) ≈ η
    Muon (original)          RMS(ΔW) = η √max(1, m/n)/√max(m, n)
    Muon (match_rms_adamw)   RMS(ΔW) = 0.2 η

Muon's update is orthogonal, so its RMS is 1/√max(m, n), times the factor that ``adjust_lr_fn`` of torch.optim.Muon
names. It is taken for each of stacked experts. What this leaves out:

1. Biases, norms, convolutions, Mamba's A_log, and weights outside of layers with a router.
2. AdamW's steps are shorter where gradients change sign. Newton–Schulz is orthogonal only approximately.
3. SGD: its step is proportional to a gradient, and a checkpoint holds none.
"""

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from steadymoe.bench.support import files
from steadymoe.bench.support.errors import Parser, UserError
from steadymoe.bench.support.text import visible

_DESCRIPTION = """Print how far an optimizer's step moves a checkpoint's routers, relative to their size.

  steadymoe-integrations inspect ~/models/my-moe --rate 1e-5

Needs no GPU, builds no model, writes nothing. What the number means: integrations/README.md#inspect"""
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# The most bytes of an index (one of 140,000 tensors has 16 MB) and of a file of weights; values that are read at once.
_MAX_INDEX, _MAX_WEIGHTS, _PIECE = 2**26, 2**42, 2**22
_LAYER = re.compile(r"((?:.*?\.)?(?:layers?|blocks?|h)\.)([0-9]{1,6})\.(.+)")
# Types of weights that are read, and of buffers that are none; any other is a quantised weight.
_FLOATS, _BUFFERS = ("F64", "F32", "F16", "BF16"), ("I64", "BOOL")
ROLES = ("router", "attention", "experts", "others")
RULES = ("AdamW", "Muon (original)", "Muon (match_rms_adamw)")


def main(words: list[str]) -> int:
    """Run ``steadymoe-integrations inspect`` and return the exit code. Raises as ``inspect`` does."""
    parser = Parser(
        prog="steadymoe-integrations inspect", description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=f"folder with {_WEIGHTS} or {_INDEX}")
    parser.add_argument("--rate", type=learning_rate, default=1e-6, help="learning rate (default: 1e-6, usual in RL)")
    parser.add_argument("--json", action="store_true", help="print JSON, with every rule in every layer")
    arguments = parser.parse_args(words)
    found = inspect(arguments.checkpoint, arguments.rate)
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(_lines(found)))
    return 0


def inspect(checkpoint: Path, rate: float) -> dict[str, Any]:
    """Return RMS and relative steps of each layer with a router, and the median of its router's over its others'.

    Raises UserError for what is not an MoE checkpoint, and OSError for a file that cannot be read.
    """
    layers: list[dict[str, Any]] = []
    for name, roles in _layers(_tensors(checkpoint)).items():
        sums = {role: np.sum([_sums(tensor) for tensor in tensors], axis=0) for role, tensors in roles.items()}
        sums["others"] = np.sum([each for role, each in sums.items() if role != "router"], axis=0)
        shown = {role: sums[role] for role in ROLES if role in sums}
        if bad := [role for role, (_, squares, _) in shown.items() if not 0 < squares < math.inf]:
            raise UserError(f"the weights of {name} ({bad[0]}) are all zero or not finite: they have no relative step")
        rms = {role: math.sqrt(squares / count) for role, (count, squares, _) in shown.items()}
        of_step = {role: (1, math.sqrt(orthogonal / count), 0.2) for role, (count, _, orthogonal) in shown.items()}
        unit = {rule: {role: of_step[role][at] / rms[role] for role in shown} for at, rule in enumerate(RULES)}
        steps = {rule: {role: rate * step for role, step in each.items()} for rule, each in unit.items()}
        ratios = {rule: each["router"] / each["others"] for rule, each in unit.items()}
        layers.append({"layer": name, "rms": rms, "relative_step": steps, "router_over_others": ratios})
    medians = {rule: median(layer["router_over_others"][rule] for layer in layers) for rule in RULES}
    return {"checkpoint": str(checkpoint), "rate": rate, "layers": layers, "router_over_others": medians}


def role_of(path: str, shape: tuple[int, ...], router_rows: frozenset[int] = frozenset()) -> str | None:
    """Return what a tensor of a layer is: ``router``, ``attention``, ``experts``, ``rest``, or None if not counted.

    ``path`` is its name in the layer, as the modules of transformers 5.23 or the checkpoints that it converts have it.
    Experts are matrices, (m, n), or stacked, (E, m, n). GraniteMoE does not call them experts in its checkpoints: then
    the stack has as many matrices as the layer's routers have rows, ``router_rows``.
    """
    parts, in_attention = path.split("."), re.search("attn|attention", path) is not None
    if parts[-1].endswith(("bias", "A_log")) or len(shape) not in (2, 3) or 0 in shape:
        return None
    stacked = len(shape) == 3
    if any(part.startswith("router") for part in parts):
        return None if stacked else "router"
    if "experts" in parts:
        return "experts"
    if stacked:
        return "experts" if shape[0] in router_rows and not in_attention and "shared" not in path else None
    if in_attention:
        return "attention"
    return "router" if {"gate", "gate_weight"} & set(parts) else "rest"  # not shared_expert_gate, nor gate_proj


def learning_rate(text: str) -> float:
    """Return a learning rate. Raises argparse's error for one outside (0, 1], and ValueError for no number."""
    if not 0 < (rate := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return rate


def _tensors(checkpoint: Path) -> dict[str, Any]:
    """Return name → lazily read slices of every tensor. Raises as ``inspect`` does."""
    from safetensors import SafetensorError, safe_open

    named = _files(checkpoint)
    tensors: dict[str, Any] = {}
    for path in sorted({checkpoint / file for file in named.values()} or {checkpoint / _WEIGHTS}):
        files.opened(_no_link(path), _MAX_WEIGHTS).close()
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{path} is not a valid safetensors file: {str(error)[:200]}") from error
        tensors |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it does not iterate)
    if missing := sorted(named.keys() - tensors.keys()):
        raise UserError(f"{checkpoint / named[missing[0]]} lacks {missing[0]}, which {_INDEX} expects there")
    return tensors


def _files(checkpoint: Path) -> dict[str, str]:
    """Return tensor → file by the index; empty if there is one file, as transformers looks. Raises UserError."""
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} is not a folder; name the one that holds {_WEIGHTS} or {_INDEX}")
    names = sorted(path.name for path in checkpoint.iterdir())
    if _WEIGHTS in names:
        return {}
    if _INDEX not in names:
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        why = f"; {pickles[0]} is a pickle, and pickles are not read: use save_pretrained" if pickles else ""
        raise UserError(f"{checkpoint} has neither {_WEIGHTS} nor {_INDEX}{why}")
    try:
        named = files.read_json(_no_link(checkpoint / _INDEX), _MAX_INDEX)["weight_map"]
        shards = sorted(set(named.values()))
        wrong = [file for file in shards if not re.fullmatch(r"[^/\\\0]+\.safetensors", file)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{checkpoint / _INDEX} is not an index of weights: {error!r}") from error
    if wrong or not shards:
        raise UserError(f"{checkpoint / _INDEX} must name safetensors files in its folder, got {wrong[:1] or 'none'}")
    if absent := sorted(set(shards) - set(names)):
        raise UserError(f"{checkpoint} lacks {absent[0]}, one of {len(shards)} files that {_INDEX} names")
    return named


def _no_link(path: Path) -> Path:
    if path.is_symlink():  # as all files in Hugging Face's cache are
        raise UserError(f"{path} is a link, and links are not followed: copy the folder with cp -rL first")
    return path


def _layers(tensors: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Return layer → role → tensors of the layers with experts, in order. Raises UserError if there are none."""
    by_layer, found = defaultdict[tuple[str, int], dict[str, str]](dict), {}
    for name, tensor in tensors.items():
        if (at := _LAYER.fullmatch(name)) and tensor.get_dtype() not in _BUFFERS:
            by_layer[at[1], int(at[2])][name] = at[3]
    for (stem, number), paths in sorted(by_layer.items()):
        if _predicts_further(stem, paths.values()):
            continue
        shapes = {name: tuple(tensors[name].get_shape()) for name in paths}
        rows = frozenset(shapes[name][0] for name, path in paths.items() if role_of(path, shapes[name]) == "router")
        roles = defaultdict[str, list[Any]](list)
        for name, path in paths.items():
            if role := role_of(path, shapes[name], rows):
                roles[role].append(tensors[name])
        if "experts" not in roles:
            continue
        if "router" not in roles:
            raise UserError(
                f"{stem}{number} has experts, but no router by a known name: integrations/README.md#inspect"
            )
        if coded := {tensor.get_dtype() for each in roles.values() for tensor in each} - {*_FLOATS}:
            raise UserError(f"{stem}{number} is quantised ({min(coded)}); save the model in bf16 and inspect that")
        found[f"{stem}{number}"] = dict(roles)
    if not found:
        raise UserError("no layer has a router and experts: the model is dense, or its weight names are unknown")
    return found


def _predicts_further(stem: str, paths: Iterable[str]) -> bool:
    """Return whether a layer is of multi-token prediction, which no update of the policy touches.

    DeepSeek's stand behind the main layers, with a projection and a head of their own; Qwen's are ``mtp.layers``.
    """
    heads = {path.split(".")[0] for path in paths} & {"eh_proj", "shared_head"}
    return bool(heads) or any(part.startswith("mtp") for part in stem.split("."))


def _sums(tensor: Any) -> np.ndarray:
    """Return count and sum of squares of a tensor's weights, and the latter of Muon's original update at rate 1."""
    import torch

    *stacked, m, n = shape = tensor.get_shape()
    rows = max(1, _PIECE * shape[0] // math.prod(shape))
    pieces = (tensor[begin : begin + rows] for begin in range(0, shape[0], rows))
    squares = sum(torch.linalg.vector_norm(piece, dtype=torch.float64).item() ** 2 for piece in pieces)
    # Each (m, n) has min(m, n) singular values of √max(1, m/n).
    return np.array([math.prod(shape), squares, math.prod(stacked) * min(m, n) * max(1, m / n)])


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the command prints: the layers under AdamW, the medians of all rules, one sentence."""
    from tabulate import tabulate

    layers, ends = found["layers"], ("router", "others")
    heads = [*(f"RMS of\n{role}" for role in ROLES), *(f"AdamW step\nof {role}" for role in ends), "router ÷\nothers"]
    rows = []
    for layer in layers:
        steps, ratio = layer["relative_step"]["AdamW"], layer["router_over_others"]["AdamW"]
        rows.append([visible(layer["layer"]), *map(layer["rms"].get, ROLES), *map(steps.get, ends), ratio])
    yield tabulate(rows, ["layer", *heads], floatfmt=".3g", missingval="–")
    rows, ratios = [], [row[-1] for row in rows]
    for rule, ratio in found["router_over_others"].items():
        steps = [[each["relative_step"][rule].get(role) for each in layers] for role in ROLES]
        known = [[step for step in each if step is not None] for each in steps]
        rows.append([rule, *(median(each) if each else None for each in known), ratio])
    heads = [f"relative step at {found['rate']:g}, median", *ROLES, "router ÷ others"]
    yield "\n" + tabulate(rows, heads, floatfmt=".3g", missingval="–")
    yield (
        "SGD has no row: its step is proportional to the gradient, which a checkpoint does not hold.\n\n"
        f"Your routers step {median(ratios):.3g} times as far as the other weights, relative to their size "
        f"(AdamW; median of {len(layers)} layers, from {min(ratios):.3g} to {max(ratios):.3g})."
    )
