"""A sweep of four small runs in processes of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from small_runs import SMALL, assert_same

from steadymoe.bench.runs import compose, record, run_folder

SWEEP = [*SMALL, "-m", "algorithm=grpo,gspo", "seed=0,1", "experiment_name=small"]


def launched(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """The sweep of ``SWEEP`` by a launcher of its own."""
    command = [sys.executable, "-m", "steadymoe.bench.cli", "run", *SWEEP, f"results_dir={tmp_path}", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def runs_of(tmp_path: Path, *words: str) -> list[compose.Run]:
    return compose.plan([word for word in SWEEP if word != "-m"] + [f"results_dir={tmp_path}", *words], multirun=True)


def wait_for(condition: Callable[[], Any], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def at_work(runs: list[compose.Run], steps: int = 1) -> list[compose.Run]:
    """Those that have recorded some steps and have not ended."""
    return [
        each
        for each in runs
        if run_folder.read_state(each.folder).status == "running"
        and len(record.read_table(each.folder, "steps")) >= steps
    ]


def assert_complete(runs: list[compose.Run], undisturbed: list[compose.Run]) -> None:
    for one, other in zip(runs, undisturbed, strict=True):
        assert run_folder.read_state(one.folder).status == "finished"
        assert_same(one.folder, other.folder)


def holder(run: compose.Run) -> int:
    """The process that has the lock of a run open."""
    lock = str(run.folder / ".lock")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile
            if any(os.readlink(link) == lock for link in (process / "fd").iterdir()):
                return int(process.name)
    raise AssertionError(f"no process has {lock} open")
