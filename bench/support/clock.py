"""A stopwatch for the named stages of a training step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up the wall-clock seconds of named stages: ``with clock("update"): …`` adds to ``seconds["update"]``.

    On a CUDA device the clock waits for the device at the end of a stage, so that a stage pays for its own kernels.
    """

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
