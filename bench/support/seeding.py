"""Randomness: every stage of a run draws from a generator of its own, made from (seed, stage, step).

No generator carries its state from one stage or step to the next. A cached cold start therefore gives the same numbers
as a fresh cold start, and an interrupted run the same numbers as an uninterrupted run.
"""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, stage: str, step: int = 0) -> int:
    """Return a 63-bit seed for one stage and step of a run; different arguments give unrelated seeds."""
    digest = hashlib.sha256(f"{seed}/{stage}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def torch_generator(seed: int, stage: str, step: int = 0, device: str = "cpu") -> torch.Generator:
    """Return a generator for tensors on ``device``, seeded with ``derive(seed, stage, step)``."""
    return torch.Generator(device).manual_seed(derive(seed, stage, step))


def numpy_generator(seed: int, stage: str, step: int = 0) -> np.random.Generator:
    """Return a generator for tasks and statistics, seeded with ``derive(seed, stage, step)``."""
    return np.random.default_rng(derive(seed, stage, step))


@contextmanager
def seeded_globals(seed: int, stage: str, step: int = 0) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch for a user's code, and restore them afterwards.

    The suite draws from none of them; a user's loss or task that does is reproducible, and resumes.
    """
    derived = derive(seed, f"globals {stage}", step)
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        random.seed(derived)
        np.random.seed(derived % 2**32)  # noqa: NPY002
        torch.manual_seed(derived)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


def repeatable(device: str, threads: int) -> None:
    """Let torch compute with ``threads`` threads and, where ``device`` is cuda, with deterministic kernels.

    An operation that has no such kernel warns. Attention takes its plain form, in products and a softmax: the fused
    backwards are not deterministic.
    """
    torch.set_num_threads(threads)
    on_gpu = device == "cuda"
    if on_gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, by the first product on the GPU
    torch.use_deterministic_algorithms(on_gpu, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = not on_gpu  # type: ignore[attr-defined]
    for fused in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{fused}_sdp")(not on_gpu)  # flash is the CPU's, too
