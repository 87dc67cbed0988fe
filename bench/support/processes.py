"""Independent calls, spread over all cores, and what ends a process: the user, or the user's code."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

from steadymoe.bench.support import blame

T = TypeVar("T")

# Holds an entry inside ``interruptible``.
_tells: list[bool] = []


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, unlike a KeyboardInterrupt that code raises by itself."""


def interrupt(*_: Any) -> NoReturn:
    """Handle a signal that ends the process."""
    raise Interrupted


@contextmanager
def interruptible() -> Iterator[None]:
    """Tell Ctrl-C from a KeyboardInterrupt that code raises, until the block ends; not where others handle Ctrl-C."""
    before, in_main = signal.getsignal(signal.SIGINT), threading.current_thread() is threading.main_thread()
    if not in_main or before not in (signal.default_int_handler, signal.SIG_IGN):
        yield
        return
    if before is not signal.SIG_IGN:  # of a shell's background jobs
        signal.signal(signal.SIGINT, interrupt)
    _tells.append(True)
    try:
        yield
    finally:
        _tells.pop()
        signal.signal(signal.SIGINT, before)


def is_interrupt(error: BaseException) -> bool:
    """Return whether the user ended the process; outside ``interruptible``, any KeyboardInterrupt counts."""
    return isinstance(error, Interrupted if _tells else KeyboardInterrupt)


def in_processes(function: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    """``list(map(function, *arguments))`` with one process for each core; a single call runs in this process.

    ``pickle`` must be able to carry function, arguments and results from one process to another.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(len(arguments[0]), cores)
    if processes < 2:
        return list(map(function, *arguments))
    from concurrent.futures import ProcessPoolExecutor  # the command line imports this module, too

    # At Ctrl-C a terminal interrupts the processes too: they end at once, and this one alone says so.
    with ProcessPoolExecutor(processes, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL)) as pool:
        return list(pool.map(partial(_call, function), *arguments))


def _call(function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except BaseException as error:
        if isinstance(error, Exception) or is_interrupt(error):
            raise
        raise RuntimeError(blame.one_line(error)) from error  # a SystemExit would end the caller too, in silence
