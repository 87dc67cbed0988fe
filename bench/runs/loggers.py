"""Scalars for TensorBoard (``log=tensorboard``) or Weights & Biases (``log=wandb``).

The run's own record is written first, and no number of a run depends on a logger. Each step is sent once: the file
``logged.json`` holds the last step sent, so that steps repeated after an interruption are not sent again.
"""

import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steadymoe.bench.schema import RunConfig
from steadymoe.bench.support import files

# Each table with its own count from 1, of steps and of gradient updates of the whole run.
_TABLES = ("steps", "updates")

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
Write = Callable[[str, dict[str, float], int], None]


@contextmanager
def sending(config: RunConfig, folder: Path, resumed: bool) -> Iterator[Callable[[Rows], None]]:
    """Yield a function that sends the rows of a recorded step to ``config.log``; its files lie in ``folder``.

    If the logger or its network fails, one warning is printed and the run goes on without it.
    """
    if config.log is None:
        yield lambda rows: None
        return
    mark = folder / "logged.json"
    sent: dict[str, Any] = {"step": 0, "id": uuid.uuid4().hex[:16]}
    opened: list[tuple[Write, Callable[[], object]]] = []

    @contextmanager
    def one_warning() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            print(f"steadymoe: {folder}: log={config.log} has stopped: {' '.join(str(error).split())}", file=sys.stderr)
            while opened:
                with suppress(Exception):
                    opened.pop()[1]()

    def send(rows: Rows) -> None:
        step = rows["steps"][0]["step"]
        if not opened or step <= sent["step"]:
            return
        with one_warning():
            # The mark is written first: a kill between mark and sending leaves a step out and sends none twice.
            sent["step"] = step
            files.write_json(mark, sent)
            for table in _TABLES:
                for row in rows[table]:
                    at = step if table == "steps" else (step - 1) * config.updates_per_rollout + row["update"]
                    opened[0][0](table, _scalars(row), at)

    with one_warning():
        if not resumed:  # the rows begin again, and so does the log
            mark.unlink(missing_ok=True)
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        sent |= files.read_json(mark) if mark.exists() else {}
        opened.append(_tensorboard(folder) if config.log == "tensorboard" else _wandb(folder, config, sent["id"]))
    try:
        yield send
    finally:
        with one_warning():
            if opened:
                opened.pop()[1]()


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
    return {name: v for name, v in row.items() if isinstance(v, int | float) and name not in ("step", "update")}
