"""Independent calls, spread over all cores."""

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def in_processes(function: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    """``list(map(function, *arguments))`` with one process for each core; a single call runs in this process.

    ``pickle`` must be able to carry function, arguments and results from one process to another.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(len(arguments[0]), cores)
    if processes < 2:
        return list(map(function, *arguments))
    # At Ctrl-C a terminal interrupts the processes too: they end at once, and this one alone says so.
    with ProcessPoolExecutor(processes, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL)) as pool:
        return list(pool.map(function, *arguments))
