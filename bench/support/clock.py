"""Seconds of named stages."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up the seconds of named stages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
