"""What runs on a GPU, by `make gpu`; and the stages of `make gpu` on a CPU, as far as they go there."""

import sys
from pathlib import Path

import pandas as pd
import pytest
import stages
import torch
from small_runs import PROPORTIONAL, planned

from steadymoe.bench.runs import execute, record
from steadymoe.integrations import speed
from steadymoe.models import build, megablocks

WITHOUT = not torch.cuda.is_available()
TINY = {"micro": "model=micro"}
SHORT = "rollout.prompts=4 rollout.responses=4 updates_per_rollout=2 task=chain task.max_operands=3"


def updates(results: Path, device: str, *more: str) -> pd.DataFrame:
    run = planned(results, f"device={device}", *PROPORTIONAL, *more)
    assert execute.execute(run) == "finished", (record.read_run(run.folder) or {})["error"]
    return record.read_table(run.folder, "updates")[["loss", "grad_norm", "entropy", "ratio_mean"]]


@pytest.mark.gpu
@pytest.mark.skipif(WITHOUT, reason="torch finds no GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_run_on_a_gpu_repeats_bitwise(tmp_path: Path, precision: str) -> None:
    first, again = (updates(tmp_path / name, "cuda", f"precision={precision}") for name in ("a", "b"))
    assert first.equals(again)


@pytest.mark.gpu
@pytest.mark.skipif(WITHOUT, reason="torch finds no GPU")
def test_forward_on_a_gpu_matches_the_cpu() -> None:
    config, task, model = speed.prepared("model=micro")
    sequences = stages.random_sequences(model, (8, 32))
    moved = build.build(config.model["config"], task.tokenizer, 0, "cuda")
    moved.load_state_dict(model.state_dict())
    theirs = stages.forward(model, sequences, "fp32")
    ours = stages.forward(moved, stages.random_sequences(moved, (8, 32)), "fp32")
    torch.testing.assert_close(ours.logprobs_BT.cpu(), theirs.logprobs_BT, atol=1e-4, rtol=1e-4)


def test_missing_gpu_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert stages.main(tmp_path / "gpu") == 2
    assert capsys.readouterr().err == "make gpu: torch finds no GPU here, so there is nothing to measure\n"
    assert list(tmp_path.iterdir()) == []


def test_every_back_end_is_timed_or_says_why_not() -> None:
    table = stages.experts("cpu", TINY, shape=(4, 16), repeats=1)
    assert len(table) == len(build.EXPERTS) * len(stages.PRECISIONS)
    timed = table[table["note"] == ""]
    assert (timed[["forward (ms)", "with backward (ms)"]].astype(float) > 0).all(axis=None)
    why = megablocks.reason_against("cpu")
    assert set(table["note"]) == ({"", why} if why else {""})


def test_steps_are_timed_at_every_precision_with_and_without_instruments() -> None:
    table = stages.training("cpu", TINY, SHORT, repeats=1)
    ours = table[table["trainer"].str.startswith("steadymoe")]
    assert len(ours) == 2 * len(stages.PRECISIONS)
    assert (ours["seconds a step"].astype(float) > 0).all()


def test_finished_stage_is_skipped_and_failures_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def made(device: str) -> pd.DataFrame:
        calls.append(device)
        return pd.DataFrame({"what": ["x"]})

    monkeypatch.setattr(stages, "STAGES", {"one": made, "two": made})
    assert stages.main(tmp_path, "cpu") == 0
    (tmp_path / "tables" / "two.md").unlink()
    assert stages.main(tmp_path, "cpu") == 0
    assert calls == ["cpu"] * 3
    monkeypatch.setattr(stages, "STAGES", {"three": lambda device: pd.DataFrame({"exit code": [0, 1]})})
    assert stages.main(tmp_path, "cpu") == 1
    assert not (tmp_path / "tables" / "three.md").exists()
    commands = {"fails": [sys.executable, "-c", "import sys; print('a'); sys.exit('b')"]}
    (row,) = stages.suite("cpu", commands).to_dict("records")
    assert (row["what"], row["exit code"], row["last line"]) == ("fails", 1, "b")
