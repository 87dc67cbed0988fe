"""TensorBoard and W&B show what was recorded, once, and a run depends on neither."""

import importlib.metadata
import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import Said
from small_runs import assert_same, finished, interrupt, planned, scalars

from steadymoe.bench.runs import compose, execute, loggers, record, validate


def assert_shows_the_record(values: Mapping[str, Mapping[int, list[float]]], folder: Path) -> None:
    """Each number that was recorded, once, as TensorBoard's and W&B's precision allows."""
    for table in ("steps", "updates"):
        frame = record.read_table(folder, table)
        for name in frame.select_dtypes("number").columns.difference(["step", "update"]):
            recorded = {index + 1: value for index, value in enumerate(frame[name]) if not math.isnan(value)}
            sent = values.get(f"{table}/{name}", {})
            assert {at: len(several) for at, several in sent.items()} == dict.fromkeys(recorded, 1), name
            if name.endswith(("_seconds", "_per_second")):  # of a repeated step they differ, as nothing else does
                continue
            np.testing.assert_allclose([sent[at][0] for at in recorded], list(recorded.values()), rtol=1e-6)


def test_tensorboard_shows_every_step_once_after_an_interruption(whole: compose.Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    made = planned(tmp_path, "log=tensorboard", "checkpoint_every=8")
    interrupt(made, 4)  # before a checkpoint: the run begins anew, and so do its scalars
    interrupt(made, 6)  # from the checkpoint at 4: step 5 comes twice
    assert set(scalars(made.folder)["steps/reward"]) == {1, 2, 3, 4, 5}
    assert execute.execute(made) == "finished"
    assert_shows_the_record(scalars(made.folder), made.folder)
    assert_same(whole.folder, made.folder)


def entries(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of seven bytes."""
    block, at, parts = 32768, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # too little is left of the block for another header
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_offline_holds_every_step_once(
    whole: compose.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    made = planned(tmp_path, "log=wandb", "checkpoint_every=8")
    interrupt(made, 6)
    assert execute.execute(made) == "finished"
    assert_same(whole.folder, made.folder)
    values: dict[str, dict[int, list[float]]] = {}
    files = sorted(made.folder.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1  # both parts are one run
    for path in files:
        for data in entries(path.read_bytes()):
            entry = Record()
            entry.ParseFromString(data)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in entry.history.item}
            for name, value in row.items():
                if name.partition("/")[0] in ("steps", "updates"):
                    values.setdefault(name, {}).setdefault(row[name.partition("/")[0] + "/at"], []).append(value)
    assert_shows_the_record(values, made.folder)


@pytest.mark.parametrize("tool", ["tensorboard", "wandb"])
def test_missing_package_says_how_to_install_it(tool: str, monkeypatch: pytest.MonkeyPatch, refusal_of: Said) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(validate, "version", absent)
    assert f"pip install 'steadymoe[{tool}]'" in refusal_of(f"log={tool}")


@pytest.mark.parametrize("fails", ["open", "write", "close"])
def test_logger_gets_recorded_rows_and_its_failure_does_not_stop_the_run(
    fails: str, whole: compose.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    behind: list[int] = []

    def stumble(where: str) -> None:
        if where == fails:
            raise RuntimeError("no\nnetwork")

    def opened(folder: Path) -> Any:
        def write(table: str, _: dict[str, float], at: int) -> None:
            behind.append(at - len(record.read_table(folder, table)))
            stumble("write")

        stumble("open")
        return write, lambda: stumble("close")

    monkeypatch.setattr(validate, "version", lambda _: "1")
    monkeypatch.setattr(loggers, "_tensorboard", opened)
    made = finished(tmp_path, "log=tensorboard")
    assert_same(whole.folder, made.folder)
    assert capfd.readouterr().err == f"steadymoe: {made.folder}: log=tensorboard has stopped: no network\n"
    assert len(behind) == {"open": 0, "write": 1, "close": 6 * (1 + 2)}[fails]
    assert max(behind, default=0) <= 0
