"""What runs on a GPU, by `make gpu`; and the stages of `make gpu` on a CPU, as far as they go there."""

import copy
from pathlib import Path

import gpu
import pandas as pd
import pytest
import speed
import torch
from small_runs import PROPORTIONAL, planned

from steadymoe.bench.runs import execute, record, run_folder
from steadymoe.models import build, megablocks

TINY = {"micro": "model=micro"}
SHORT = (
    "minibatch_prompts=2 rollout.responses=4 updates_per_rollout=2 task=chain task.max_operands=3 "
    "savings.reuse_sampler_logprobs=10"  # as in the setting that is timed
)
# The suite runs these tests on the CPU, where they show that the tests themselves work.
WITHOUT = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, WITHOUT])])


def updates(results: Path, *words: str) -> pd.DataFrame:
    run = planned(results, *words, *PROPORTIONAL, "updates=4")
    assert execute.execute(run) == "finished", (run_folder.read_run(run.folder) or {})["error"]
    table = record.read_table(run.folder, "updates")
    return table[["loss", "grad_norm", "entropy", "token_ratio_mean", "expert_change_rate"]]


@DEVICES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_run_repeats_bitwise(tmp_path: Path, device: str, precision: str) -> None:
    words = (f"device={device}", f"precision={precision}")
    first, again = (updates(tmp_path / name, *words) for name in ("a", "b"))
    assert len(first) == 4
    assert first.equals(again)


@DEVICES
def test_forward_matches_the_cpu(device: str) -> None:
    _, _, model = speed.prepared("model=micro")
    moved = copy.deepcopy(model).to(device)
    theirs, ours = (
        gpu.forward(each, gpu.random_sequences(each, (8, 32)), "fp32").logprobs_BT.cpu() for each in (model, moved)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_missing_gpu_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(tmp_path / "gpu") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_back_end_is_timed_or_says_why_not() -> None:
    table = gpu.experts("cpu", TINY, shape=(4, 16), repeats=1)
    assert len(table) == len(build.EXPERTS) * len(gpu.PRECISIONS)
    timed = table[table["note"] == ""]
    assert (timed[["forward (ms)", "with backward (ms)"]].astype(float) > 0).all(axis=None)
    why = megablocks.reason_against("cpu")
    assert set(table["note"]) == ({"", why} if why else {""})


def test_steps_are_timed_at_every_precision_with_and_without_instruments() -> None:
    table = gpu.training("cpu", TINY, SHORT, repeats=1)
    ours = table[table["trainer"].str.startswith("steadymoe")]
    assert len(ours) == 2 * len(gpu.PRECISIONS)
    assert (ours["seconds a step"].astype(float) > 0).all()


def test_finished_stage_is_skipped_and_a_failed_one_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    table = pd.DataFrame({"exit code": [0]})
    monkeypatch.setattr(gpu, "STAGES", {"one": lambda device: calls.append(device) or table})
    assert [gpu.main(tmp_path, "cpu"), gpu.main(tmp_path, "cpu"), calls] == [0, 0, ["cpu"]]
    monkeypatch.setattr(gpu, "STAGES", {"two": lambda device: table + 1})
    assert gpu.main(tmp_path, "cpu") == 1
    assert not (tmp_path / "tables" / "two.md").exists()
