"""Deterministic kernels are switched on for a GPU, and off again for the CPU."""

import pytest
import torch

from steadymoe.bench.support.seeding import repeatable


def switches() -> list[bool]:
    fused = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "cudnn")]
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return [torch.are_deterministic_algorithms_enabled(), not fills, *(not each for each in fused)]


def test_cpu_run_after_a_gpu_run_computes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    repeatable("cuda", 1)
    assert all(switches())
    repeatable("cpu", 2)
    assert not any(switches())
    assert torch.get_num_threads() == 2
    repeatable("cpu", 1)
