"""Decoder layers compiled by ``torch.compile``: routes are recorded, forced and predicted as in layers that are not.

One graph serves all layers of a model, and all lengths and numbers of rows above one (but for ``compiling._SIZES``). A
router's choice enters the graph as tensors, and what the router saw leaves it as tensors (``selection.Tapped``).

Shapes (docs/glossary.md): P rows of X positions, Q positions fed, H hidden.
"""

import functools
import os
import pickle
import shutil
import stat
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from steadymoe.models import build
from steadymoe.models.routing import routers
from steadymoe.models.selection import Choice, Seen, Tap, Tapped

# The families that tests/models/test_compiled.py compares with their uncompiled selves.
FAMILIES = (
    *("Qwen3MoeConfig", "Qwen3Config", "Qwen2MoeConfig", "OlmoeConfig", "MixtralConfig", "GraniteMoeConfig"),
    "Glm4MoeConfig",
)
# torch's own limit is 8 graphs of a function in a process; a worker of a sweep may meet more models than that.
_MAX_GRAPHS = 256
_ONE_QUERY = "one_query"
# What a loader raises on half a file.
_OF_DAMAGE = (ImportError, OSError, EOFError, SyntaxError, pickle.UnpicklingError)


def reason_against(family: type[PreTrainedConfig], experts: str, device: str, precision: str = "fp32") -> str | None:
    """Return why layers of this family cannot be compiled on this machine, in one line; None if they can."""
    if family.__name__ not in FAMILIES:
        return f"{family.__name__} is none of the families that were compared with it on and off: {', '.join(FAMILIES)}"
    if experts != build.EXPERTS[0]:
        return f"experts={experts} runs Python inside a layer; use experts={build.EXPERTS[0]}"
    if device != "cpu":
        return f"it was never run on device={device}; use device=cpu"
    if precision != "fp32":
        return f"it was not compared with precision={precision} on and off; use precision=fp32"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"it needs a C++ compiler, and there is no {compiler} (the variable CXX names another)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "it needs the headers of Python (the package python3-dev, or a Python that carries them)"
    try:
        return _fault_of(cache_folder())
    except RuntimeError:
        return "there is no home folder to keep compiled code in (XDG_CACHE_HOME names another folder)"


def cache_folder() -> Path:
    """Return where compiled code is kept from process to process: in the user's own cache, and never in a folder of
    results.

    Code is loaded from here and run. The folder with the highest number counts (``set_aside``).
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"  # a relative one is to be ignored
    own = cache / "steadymoe" / "compiled"
    return own / str(max((int(each.name) for each in own.glob("[0-9]*") if each.name.isdigit()), default=1))


def set_aside() -> None:
    """Compile again from now on, in a new folder: what the cache holds cannot be used.

    A process that is killed while it writes code leaves half a file, and torch fails on it for ever. Other processes
    may still use the old folder, so it stays.
    """
    old = cache_folder()
    _begin(old.with_name(str(int(old.name) + 1)))
    torch._dynamo.reset()


def _begin(folder: Path) -> None:
    for place in _ours(folder):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    why = _fault_of(folder)
    if why is not None:  # it was another when the run was planned
        raise RuntimeError(f"compile=true: {why}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _ours(folder: Path) -> tuple[Path, ...]:
    """Return the folders that this module makes: ``steadymoe``, ``compiled`` and its number."""
    return folder.parent.parent, folder.parent, folder


def _fault_of(folder: Path) -> str | None:
    """Return why code must not be loaded from ``folder``, or None."""
    for place in _ours(folder):
        if not os.path.lexists(place):
            continue
        about = place.lstat()
        if not stat.S_ISDIR(about.st_mode):
            return f"{place}, where compiled code is kept, is no folder"
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others can write to {place}, and code is loaded from it (XDG_CACHE_HOME moves it)"
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return None if os.access(existing, os.W_OK) else f"{folder}, where compiled code is kept, cannot be written"


def is_damage(error: BaseException) -> bool:
    """Return whether half a file in the cache may be why compiling failed.

    torch wraps what the loader of the file raised, once or several times, so any failure of its compiler may be damage.
    """
    wraps: Any = torch._dynamo.exc.BackendCompilerFailed
    return isinstance(error, (wraps, *_OF_DAMAGE)) or isinstance(error.__cause__, _OF_DAMAGE)


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer of ``model``, at the first forward that needs it; nothing undoes this."""
    _begin(cache_folder())
    limits: Any = torch._dynamo.config
    limits.recompile_limit = limits.accumulated_recompile_limit = _MAX_GRAPHS
    # torch would load a probe from the cache, and write code without vectors, whose sums round otherwise, if that probe
    # is half a file or takes long. What the processor has is enough.
    torch._inductor.config.cpp.vec_isa_ok = True
    _multiply_experts_by_torch()
    router: Any
    for router in routers(model):
        cls: Any = type(router)
        router.__class__ = _tapped(cls)
        router.tap = Tap()
    layer: Any
    for layer in _decoder_layers(model):
        layer.forward = _CompiledLayer(layer)


def is_compiled(model: PreTrainedModel) -> bool:
    """Return whether ``compile_layers`` has compiled the layers of ``model``."""
    return any(isinstance(vars(module).get("forward"), _CompiledLayer) for module in model.modules())


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers; transformers declares their class as the source of the output ``hidden_states``."""
    recorded: Any = model.base_model._can_record_outputs
    cls = getattr(recorded["hidden_states"], "target_class", recorded["hidden_states"])
    return [module for module in model.modules() if isinstance(module, cls)]


@functools.cache
def _tapped(cls: Any) -> type[nn.Module]:
    """One class for the routers of all models of a process, so that one graph serves them."""
    return type(cls.__name__, (Tapped, cls), {})


@functools.cache
def _multiply_experts_by_torch() -> None:
    """Inside a graph transformers multiplies fp32 experts by a loop in Python; torch's own product takes its place."""
    product = nn.functional.grouped_mm

    def backward(input: Tensor, weight: Tensor, offs: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        grad_input = product(grad_output, weight.mT, offs=offs)
        if weight.stride(-1) == 1:
            return grad_input, product(input.t(), grad_output, offs=offs)
        return grad_input, product(grad_output.t(), input, offs=offs).mT  # with the strides of the weight

    torch.library.register_kernel(
        "transformers::grouped_mm_fallback", "cpu", lambda x, w, offs: product(x, w, offs=offs)
    )
    torch.library.register_kernel("transformers::grouped_mm_fallback_backward", "cpu", backward)


class _CompiledLayer:
    """Stands in for the ``forward`` of a decoder layer."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer: Any = layer
        self._taps = [module.tap for module in layer.modules() if isinstance(module, Tapped)]

    def __call__(self, hidden_PQH: Tensor, *args: Any, **kwargs: Any) -> Any:
        choices = [Choice() if tap.recorder is None else tap.recorder[0].choice(tap.recorder[1]) for tap in self._taps]
        output, seen = self._run(choices, hidden_PQH, args, kwargs)
        for tap, each in zip(self._taps, seen, strict=True):
            if tap.recorder is not None:
                tap.recorder[0].saw(tap.recorder[1], each)
        return output

    def _run(self, choices: list[Choice], hidden_PQH: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Output and routes of the layer, by the graph that fits; without one where a graph would not pay."""
        cache = kwargs.get("past_key_values")
        if len(hidden_PQH) == 1:  # torch would make graphs of their own for a single row
            return _run_layer(self._layer, self._taps, choices, hidden_PQH, args, kwargs)[:2]
        run = _graph(_run_layer)
        if cache is None:
            if "two_parts" not in kwargs:  # which has its own terms
                kwargs["attention_mask"] = _terms(kwargs["attention_mask"], hidden_PQH, hidden_PQH.shape[1])
            return run(self._layer, self._taps, choices, hidden_PQH, args, kwargs)[:2]
        mine: Any = cache.layers[self._layer.self_attn.layer_idx]
        if hidden_PQH.shape[1] > 1 or type(mine) is not DynamicLayer or not mine.is_initialized:  # the prompts
            return _run_layer(self._layer, self._taps, choices, hidden_PQH, args, kwargs)[:2]
        kept: Any = mine.keys, mine.values
        kwargs["attention_mask"] = _terms(kwargs["attention_mask"], hidden_PQH, kept[0].shape[-2] + 1)
        del kwargs["past_key_values"]
        config = self._layer.self_attn.config
        usual, config._attn_implementation = config._attn_implementation, _ONE_QUERY
        try:
            output, seen, grown = run(self._layer, self._taps, choices, hidden_PQH, args, kwargs, kept)
        finally:
            config._attn_implementation = usual
        mine.keys, mine.values = grown
        return output, seen


def _terms(mask: Tensor | None, hidden_PQH: Tensor, keys: int) -> Tensor:
    """Return the terms added to attention scores, (P, 1, Q, keys): one kind of mask, so one graph serves all."""
    rows, queries = hidden_PQH.shape[:2]
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=hidden_PQH.device).tril(keys - queries)
    if mask.dtype == torch.bool:
        terms = torch.zeros(mask.shape, device=mask.device)
        mask = terms.masked_fill_(~mask, torch.finfo(torch.float32).min)
    return mask.expand(rows, 1, queries, keys).contiguous()


@functools.cache
def _graph(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


class _Growing:
    """Keys and values of one layer, which grow by the new tokens' as in ``DynamicLayer``."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)
        return self.keys, self.values


def _run_layer(
    layer: nn.Module,
    taps: Sequence[Tap],
    choices: Sequence[Choice],
    hidden_PQH: Tensor,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Any, list[Seen], tuple[Tensor, Tensor] | None]:
    """Run a decoder layer with the experts of ``choices``; return its output and what its routers saw.

    ``kept`` are keys and values of the tokens before; with them the last item is both with the new tokens.
    """
    cache = None if kept is None else _Growing(*kept)
    if cache is not None:
        kwargs = kwargs | {"past_key_values": cache}
    for tap, choice in zip(taps, choices, strict=True):
        tap.choice, tap.seen = choice, []
    output = type(layer).forward(layer, hidden_PQH, *args, **kwargs)
    seen = [tap.seen[0] for tap in taps]
    for tap in taps:  # nothing of this forward stays in memory
        tap.choice, tap.seen = Choice(), []
    return output, seen, None if cache is None else (cache.keys, cache.values)


def _attend_with_one_query(
    module: nn.Module,
    query_PNQD: Tensor,
    key_PMSD: Tensor,
    value_PMSD: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token: sums that a graph computes in one loop, where torch's kernel starts once a head.

    N query heads share M heads of keys and values of width D; S tokens are seen. Returns (P, 1, N, D) and no weights.
    """
    rows, heads, _, width = query_PNQD.shape
    shared = key_PMSD.shape[1]
    query = query_PNQD.view(rows, shared, heads // shared, 1, width)
    scores = (query * key_PMSD[:, :, None]).sum(-1) * scaling + attention_mask[:, :, :1]
    weights = scores.softmax(-1)[..., None]
    output = (weights * value_PMSD[:, :, None]).sum(-2)
    return output.reshape(rows, 1, heads, width).to(query_PNQD.dtype), None


ALL_ATTENTION_FUNCTIONS.register(_ONE_QUERY, _attend_with_one_query)
