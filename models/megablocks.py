"""MegaBlocks 0.10.0 as one more implementation of experts in transformers' registry, on each family's own weights.

    sort by expert → gather → grouped product with gate_up → gate → grouped product with down → weighted scatter

MegaBlocks sorts, counts, gathers and scatters, forward and backward; torch's ``grouped_mm`` computes the grouped
products. MegaBlocks is imported at its first use. This module replaces its compiled part, ``megablocks_ops``, if that
was not built, and on the CPU; there the Triton kernels run in Triton's interpreter.

Differs from plain MegaBlocks: 1. the block size of a kernel is fixed, and not the fastest of five at that moment, so
that a run repeats to the bit; 2. the grouped products do without ``grouped_gemm``, because this package cannot be
installed without a GPU; 3. the family's own routers are used.

Shapes (docs/metrics.md): N tokens of a forward, K experts a token, R = N·K rows sorted by expert, E experts, H hidden.
"""

import functools
import importlib
import importlib.util
import os
import sys
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "megablocks"


def reason_against(device: str) -> str | None:
    """Return why MegaBlocks cannot run on ``device`` (cpu or cuda), and what to do, in one line; or None."""
    missing = [name for name in ("triton", "stk", "megablocks") if importlib.util.find_spec(name) is None]
    if missing:
        return f"it is not installed (no {', '.join(missing)}); `make megablocks` adds it to .venv"
    if device == "cpu" and not _interpreted():
        return "on a CPU it runs only in Triton's interpreter, slowly: set TRITON_INTERPRET=1 in the environment"
    try:
        _ops()
    except ImportError as error:
        return f"it cannot be imported ({' '.join(str(error).split())}); `make megablocks` adds the version that can"
    return None


def register() -> None:
    """Add ``megablocks`` to transformers' registry of experts implementations. Raises ImportError if it is missing."""
    _ops()
    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)


def _forward(experts: Any, hidden_NH: Tensor, indices_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Return the weighted sum of the experts' outputs for each token, (N, H); ``experts`` is transformers' module."""
    ops, top_k = _ops(), indices_NK.shape[1]
    bits = max((experts.num_experts - 1).bit_length(), 1)  # a radix sort needs only the bits of an expert's number
    expert_R, source_R = ops.sort(indices_NK.flatten().int(), bits)
    counts_E = ops.histogram(expert_R, experts.num_experts)
    ends_E = ops.inclusive_cumsum(counts_E, 0).view(-1)  # MegaBlocks makes a scalar of it for a single expert

    def product(name: str, rows: Tensor) -> Tensor:
        """Each of the R rows times the matrix of its own expert."""
        weight = getattr(experts, name).to(rows.dtype)
        out = grouped_mm(rows, weight if experts.is_transposed else weight.transpose(1, 2), offs=ends_E)
        return out + getattr(experts, f"{name}_bias").to(rows.dtype)[expert_R] if experts.has_bias else out

    rows = ops.gather(hidden_NH.to(_dtype(experts.down_proj)), source_R, expert_R, ends_E, top_k)
    if experts.has_gate:
        rows = experts._apply_gate(product("gate_up_proj", rows))
    else:
        rows = experts.act_fn(product("up_proj", rows))
    rows = product("down_proj", rows)
    if getattr(experts, "has_post_expert_norm", False):  # transformers 5.17 has no such attribute
        rows = experts.post_expert_norm(rows)
    return ops.scatter(rows, source_R, expert_R, weights_NK.flatten(), ends_E, top_k).to(hidden_NH.dtype)


def _dtype(weight: Tensor) -> torch.dtype:
    """Return autocast's dtype for a product with ``weight``; autocast itself does not cast for ``grouped_mm``."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


@functools.cache
def _ops() -> Any:
    """Return the module ``megablocks.ops``, with ``megablocks_ops`` supplied if needed. Raises ImportError."""
    if _interpreted() or importlib.util.find_spec("megablocks_ops") is None:
        sys.modules["megablocks_ops"] = _Supplied("megablocks_ops")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Grouped GEMM not available")
        ops = importlib.import_module("megablocks.ops")
        kernels = importlib.import_module("megablocks.backend.kernels")
    for kernel in vars(kernels).values():
        if hasattr(kernel, "configs"):
            del kernel.configs[1:]
    return ops


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class _Supplied(ModuleType):
    """The used functions of the compiled ``megablocks_ops`` in torch, with the signatures of its ``csrc``."""

    @staticmethod
    def sort(keys: Tensor, bits: int, sorted_keys: Tensor, order: Tensor) -> None:
        """Write the stably sorted ``keys``, (R,), and the old place of each, (R,)."""
        values, indices = keys.sort(stable=True)
        sorted_keys.copy_(values)
        order.copy_(indices)

    @staticmethod
    def histogram(keys: Tensor, bins: int) -> Tensor:
        """Return the count of each number below ``bins`` in ``keys``: (bins,), int32."""
        return torch.zeros(bins, dtype=torch.int32, device=keys.device).index_add_(
            0, keys, torch.ones_like(keys, dtype=torch.int32)
        )

    @staticmethod
    def inclusive_cumsum(counts: Tensor, dim: int, sums: Tensor) -> None:
        """Write the inclusive cumulative sums of ``counts`` to ``sums``."""
        sums.copy_(counts.cumsum(dim))
