"""Scalars for TensorBoard (``log=tensorboard``) or Weights & Biases (``log=wandb``).

The run's own record is written first, and no number of a run depends on a logger. Each step is sent once: the file
``logged.json`` holds the last step sent, so that steps repeated after an interruption are not sent again.
"""

import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steadymoe.bench.config.schema import RunConfig
from steadymoe.bench.support import atomic_files

# Each table with its own count from 1, of steps and of gradient updates of the whole run.
_TABLES = ("steps", "updates")

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
Write = Callable[[str, dict[str, float], int], None]


@contextmanager
def sending(config: RunConfig, folder: Path, resumed: bool) -> Iterator[Callable[[Rows], None]]:
    """Give what sends the rows of a recorded step to ``config.log``; its files lie in the run's ``folder``."""
    tracker = _Tracker(config, folder, resumed)
    try:
        yield tracker.send
    finally:
        tracker.close()


class _Tracker:
    def __init__(self, config: RunConfig, folder: Path, resumed: bool) -> None:
        self._folder, self._tool = folder, config.log
        self._updates_per_step = config.updates_per_rollout
        self._mark = folder / "logged.json"
        self._write: Write | None = None
        self._close: Callable[[], object] = _nothing
        if self._tool is None:
            return
        with self._one_warning():
            if not resumed:  # the rows begin anew, and so does the log
                self._mark.unlink(missing_ok=True)
                shutil.rmtree(folder / "tensorboard", ignore_errors=True)
            self._logged: dict[str, Any] = {"step": 0, "id": uuid.uuid4().hex[:16]}
            if self._mark.exists():
                self._logged = json.loads(self._mark.read_text())
            opened = _tensorboard(folder) if self._tool == "tensorboard" else _wandb(folder, config, self._logged["id"])
            self._write, self._close = opened

    def send(self, rows: Rows) -> None:
        """Send a step's scalars, unless they were sent before."""
        step = rows["steps"][0]["step"]
        if self._write is None or step <= self._logged["step"]:
            return
        with self._one_warning():
            # The mark is written first: a kill between mark and sending leaves a step out and sends none twice.
            self._logged["step"] = step
            atomic_files.write_json(self._mark, self._logged)
            for table in _TABLES:
                for row in rows[table]:
                    at = step if table == "steps" else (step - 1) * self._updates_per_step + row["update"]
                    self._write(table, _scalars(row), at)

    def close(self) -> None:
        with self._one_warning():
            self._close()

    @contextmanager
    def _one_warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the run goes on, whatever fails in a logger or its network
            last = " ".join(str(error).split())
            print(f"steadymoe: {self._folder}: log={self._tool} has stopped: {last}", file=sys.stderr)
            close, self._write, self._close = self._close, None, _nothing
            with suppress(Exception):
                close()


def _tensorboard(folder: Path) -> tuple[Write, Callable[[], object]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(table: str, scalars: dict[str, float], at: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(f"{table}/{name}", value, at)
        writer.flush()  # without it a kill loses two minutes of scalars

    return write, writer.close


def _wandb(folder: Path, config: RunConfig, name: str) -> tuple[Write, Callable[[], object]]:
    import wandb

    # wandb's own environment variables take precedence.
    run = wandb.init(
        id=name,
        resume="allow",
        project=os.environ.get("WANDB_PROJECT", "steadymoe"),
        group=os.environ.get("WANDB_RUN_GROUP", config.experiment_name),
        dir=os.environ.get("WANDB_DIR", str(folder)),
        config=asdict(config),
        settings=wandb.Settings(console="off", silent=True),
    )
    for table in _TABLES:
        run.define_metric(f"{table}/*", step_metric=f"{table}/at")

    def write(table: str, scalars: dict[str, float], at: int) -> None:
        run.log({f"{table}/{name}": value for name, value in scalars.items()} | {f"{table}/at": at})

    return write, run.finish


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value for name, value in row.items() if isinstance(value, int | float) and name not in ("step", "update")
    }


def _nothing() -> None:
    pass
