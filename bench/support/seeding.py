"""Randomness: every stage of a run draws from a generator of its own, made from (seed, stage, step).

Nothing is carried from one stage or step to the next, so a cached cold start and a fresh one, or a run
that was interrupted and one that was not, draw the same numbers.
"""

import hashlib

import numpy as np
import torch


def derive(seed: int, stage: str, step: int = 0) -> int:
    """A 63-bit seed for one stage and step of a run; different arguments give unrelated seeds."""
    digest = hashlib.sha256(f"{seed}/{stage}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def torch_generator(seed: int, stage: str, step: int = 0, device: str = "cpu") -> torch.Generator:
    """For sampling and shuffling tensors."""
    return torch.Generator(device).manual_seed(derive(seed, stage, step))


def numpy_generator(seed: int, stage: str, step: int = 0) -> np.random.Generator:
    """For tasks and statistics."""
    return np.random.default_rng(derive(seed, stage, step))
