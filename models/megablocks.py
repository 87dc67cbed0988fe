"""MegaBlocks 0.10.0 as one more implementation of experts in transformers' registry, on each family's own weights.

    sort by expert → gather → grouped product with gate_up → gate → grouped product with down → weighted scatter

Sorting, counting, gathering and scattering, forward and backward, are MegaBlocks'; the grouped products are torch's
``grouped_mm``. MegaBlocks is imported when first asked for. Its compiled part, ``megablocks_ops``, is supplied here
where it was not built, and on the CPU, where its Triton kernels run in Triton's interpreter.

Differs from how MegaBlocks comes: 1. a kernel's block size is fixed and not the fastest of five at that moment, so that
a run repeats to the bit; 2. the grouped products need no ``grouped_gemm``, a package that cannot be installed without a
GPU; 3. routers stay the family's own.

Shapes: N tokens, K experts a token, R = N·K rows sorted by expert, E experts, H hidden width.
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


def why_unavailable(device: str) -> str | None:
    """One line on why MegaBlocks cannot run on ``device`` (cpu or cuda) and what to do; None where it can."""
    missing = [name for name in ("triton", "stk", "megablocks") if importlib.util.find_spec(name) is None]
    if missing:
        return f"it is not installed (no {', '.join(missing)}); `make megablocks` adds it to .venv"
    if device == "cpu" and not _interpreted():
        return "on the CPU it runs in Triton's interpreter alone, slowly: set TRITON_INTERPRET=1 in the environment"
    try:
        _ops()
    except ImportError as error:
        return f"it cannot be imported ({' '.join(str(error).split())}); `make megablocks` adds the version that can"
    return None


def register() -> None:
    """Make ``megablocks`` known to transformers' registry of experts implementations; ImportError if it is missing."""
    _ops()
    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)


def _forward(experts: Any, hidden_NH: Tensor, indices_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """The experts' weighted sum for each token, (N, H); ``experts`` is a module of transformers."""
    ops, top_k = _ops(), indices_NK.shape[1]
    bits = max((experts.num_experts - 1).bit_length(), 1)  # of an expert's number, all that a radix sort looks at
    expert_R, source_R = ops.sort(indices_NK.flatten().int(), bits)
    counts_E = ops.histogram(expert_R, experts.num_experts)
    ends_E = ops.inclusive_cumsum(counts_E, 0).view(-1)  # MegaBlocks makes a scalar of it for a single expert

    def product(name: str, rows: Tensor) -> Tensor:
        """Each row times its own expert's matrix."""
        weight = getattr(experts, name).to(rows.dtype)
        out = grouped_mm(rows, weight if experts.is_transposed else weight.transpose(1, 2), offs=ends_E)
        return out + getattr(experts, f"{name}_bias").to(rows.dtype)[expert_R] if experts.has_bias else out

    rows = ops.gather(hidden_NH.to(_dtype(experts.down_proj)), source_R, expert_R, ends_E, top_k)
    if experts.has_gate:
        rows = experts._apply_gate(product("gate_up_proj", rows))
    else:
        rows = experts.act_fn(product("up_proj", rows))
    rows = product("down_proj", rows)
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    return ops.scatter(rows, source_R, expert_R, weights_NK.flatten(), ends_E, top_k).to(hidden_NH.dtype)


def _dtype(weight: Tensor) -> torch.dtype:
    """What autocast makes of a product with ``weight``: ``grouped_mm`` is none that it casts for."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


@functools.cache
def _ops() -> Any:
    """``megablocks.ops``, with what it lacks; ImportError if it cannot be imported."""
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
    """What of the compiled ``megablocks_ops`` is used here, in torch; the signatures are those of its ``csrc``."""

    @staticmethod
    def sort(keys: Tensor, bits: int, sorted_keys: Tensor, order: Tensor) -> None:
        """Write ``keys``, stably sorted, and where each was."""
        values, indices = keys.sort(stable=True)
        sorted_keys.copy_(values)
        order.copy_(indices)

    @staticmethod
    def histogram(keys: Tensor, bins: int) -> Tensor:
        """How often each number below ``bins`` occurs."""
        return torch.zeros(bins, dtype=torch.int32, device=keys.device).index_add_(
            0, keys, torch.ones_like(keys, dtype=torch.int32)
        )

    @staticmethod
    def inclusive_cumsum(counts: Tensor, dim: int, sums: Tensor) -> None:
        """Write the sums up to and including each of ``counts``."""
        sums.copy_(counts.cumsum(dim))
