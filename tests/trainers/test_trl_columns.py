"""What is measured inside TRL's trainer, and what a run of it records.

`make check-trainers` runs this file in an environment that has TRL.
"""

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("trl")

from trl_runs import Frozen, disturb, parts_of, sequences_of, trainer
from trl_tables import PROBED, assert_equal, folder_of, run_with_processes, tables

from steadymoe.algorithms import Batch, load
from steadymoe.bench import cli
from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.measurement import routing_drift, token_metrics
from steadymoe.bench.report import archive
from steadymoe.bench.runs import record
from steadymoe.bench.score.recorded import Arm, Recorded
from steadymoe.bench.trainers import moments, scoring, trl_record
from steadymoe.bench.trainers.scoring import Scored
from steadymoe.bench.training.forward import forward

pytestmark = pytest.mark.trl


@pytest.mark.parametrize("missing", [0, 3])
def test_known_noise_on_the_samplers_logprobs_gives_the_suites_columns(tmp_path: Path, missing: int) -> None:
    frozen = Frozen(noise=0.3, missing=missing)
    made = trainer(tmp_path, rollout=frozen, record=tmp_path, updates=2, rows=4, accumulation=4)
    made.train()
    gaps = np.array(frozen.gaps)
    known = gaps[~np.isnan(gaps)]
    step = tables(tmp_path)["steps"].iloc[0]
    expected = {
        "rollout_kl_k1": -known.mean(),
        "rollout_kl_k3": (np.expm1(known) - known).mean(),
        "rollout_chi2_token": np.exp(2 * known).mean() - 1,
        "rollout_ess": np.exp(known).sum() ** 2 / (np.exp(2 * known).sum() * len(known)),
        "rollout_extreme_share": (np.abs(known) > np.log(2)).mean(),
        "rollout_logprob_gap_max": np.abs(known).max(),
    }
    for name, value in expected.items():
        assert step[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert (
        json.loads((folder_of(tmp_path) / "run.json").read_text())["sampler_logprobs_missing"] == np.isnan(gaps).sum()
    )
    assert (np.isnan(gaps).sum() > 0) == bool(missing)


def test_a_missing_logprob_is_not_corrected(tmp_path: Path) -> None:
    made = trainer(tmp_path, rollout=Frozen(noise=0.3, missing=2), correction="is", loss="grpo")
    (part,) = parts_of(made)
    made._step = 0
    made._begin_rollout([part])
    old: Scored = part["steadymoe"]
    batch = made._batch(part, old, old)
    weights_BT = made.objective.correction.weights(batch)
    assert weights_BT is not None
    absent_BT = part["sampling_per_token_logps"].isnan()
    assert absent_BT.any()
    assert (weights_BT[absent_BT] == 1).all()
    assert (weights_BT[~absent_BT & part["completion_mask"].bool()] != 1).all()


# --- columns --------------------------------------------------------------------------------------------


def test_the_columns_of_a_frozen_rollout_are_the_suites_own(tmp_path: Path) -> None:
    made = trainer(tmp_path, rows=4, accumulation=4)
    parts = parts_of(made)
    rollout = moments.columns_of_rollout(made._begin_rollout(parts))
    sequences = sequences_of(parts)
    mask_BT = sequences.response_mask_BT
    with torch.no_grad():
        old = forward(made.model, sequences, "fp32")
        disturb(made)
        now = forward(made.model, sequences, "fp32")
    for part in parts:
        made._compute_loss(made.model, part)
        made._step += 1
    found = moments.columns_of_update(trl_record.gathered(made._steps.of_update))

    sampler_BT = torch.cat([part["sampling_per_token_logps"] for part in parts])
    for name, value in token_metrics.of_mismatch(sampler_BT, old.logprobs_BT, mask_BT).items():
        assert_close(rollout.overall[name].float(), value.float(), atol=2e-6, rtol=2e-5, msg=name)
    assert old.routes_LBFK is not None
    assert now.routes_LBFK is not None
    for name, value_L in routing_drift.load(old.routes_LBFK, mask_BT, 4).columns.items():
        assert_close(rollout.layers[name].float(), value_L, atol=1e-6, rtol=1e-6)
    advantages_B = torch.cat([part["advantages"] for part in parts])
    batch = Batch(
        logprobs_BT=now.logprobs_BT,
        mask_BT=mask_BT,
        advantages_BT=advantages_B[:, None].expand(mask_BT.shape),
        old_logprobs_BT=old.logprobs_BT,
        entropy_BT=now.entropy_BT,
    )
    numbers, histograms = token_metrics.of_update(batch, made.objective(batch))
    change = routing_drift.change(old.routes_LBFK, now.routes_LBFK, mask_BT)
    logprobs = old.router_logprobs_LBTE, now.router_logprobs_LBTE
    shift = routing_drift.shift(*logprobs, old.routes_LBFK, mask_BT)
    decision = routing_drift.decision(now.router_logprobs_LBTE, now.routes_LBFK, mask_BT)
    numbers |= {
        "expert_change_rate": change.expert,
        "expert_set_change_rate": change.set,
        "token_any_layer_change_rate": change.any_layer,
        "top1_change_rate": routing_drift.top1_change(old.routes_LBFK, now.routes_LBFK, *logprobs, mask_BT).mean(),
        **shift.columns,
        "router_margin": decision.margin_L.mean(),
        "router_confidence": decision.confidence_L.mean(),
        "entropy": token_metrics.mean(now.entropy_BT, mask_BT),
        "loss": made.objective(batch).loss.detach(),
    }
    assert found.overall.keys() == numbers.keys()
    for name, value in numbers.items():
        assert_close(found.overall[name].float(), value.float(), atol=2e-6, rtol=2e-5, msg=name)
    for name, counts in (histograms | {"changed_slots_histogram": change.slots_C}).items():
        assert torch.equal(found.histograms[name], counts), name
    assert_close(found.layers["expert_change_rate"].float(), change.expert_L)
    assert change.expert > 0


def test_a_probe_measures_what_each_update_moved(tmp_path: Path, whole: Path) -> None:
    trainer(tmp_path, record=tmp_path, probe=16).train()
    found, without = tables(tmp_path), tables(whole)
    assert found["updates"][PROBED].notna().any().all()
    assert without["updates"][PROBED].isna().all().all()
    assert_equal(tables(tmp_path, probed=False), tables(whole, probed=False), 1e-6)
    # All sixteen responses are probed: after an update they moved as far as the next update finds them.
    first, second = (found["updates"][found["updates"]["update"] == update] for update in (1, 2))
    moved, change = first["expert_change_per_update"].to_numpy(), second["expert_change_rate"].to_numpy()
    np.testing.assert_allclose(moved, change, atol=1e-6)
    assert (moved > 0).all()
    assert record.read_table(folder_of(tmp_path), "steps")["probe_seconds"].gt(0).all()


def test_a_probe_takes_responses_that_have_tokens() -> None:
    tokens_BT, mask_BT = torch.arange(12).view(4, 3), torch.tensor([[0, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1]])
    inputs = {"prompt_ids": tokens_BT + 20, "prompt_mask": mask_BT * 0 + 1}
    found = scoring.sequences_of(inputs | {"completion_ids": tokens_BT, "completion_mask": mask_BT}, 3)
    assert found.tokens_BS[:, 3:].tolist() == [[3, 4, 5], [9, 10, 11], [0, 1, 2]]
    assert found.response_mask_BT.tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0]]


def test_a_micro_batch_without_tokens_adds_nothing() -> None:
    values_BT: Tensor = torch.zeros(2, 3)
    batch = Batch(
        logprobs_BT=values_BT,
        mask_BT=values_BT,
        advantages_BT=values_BT,
        old_logprobs_BT=values_BT,
        entropy_BT=values_BT,
        responses=4,
        tokens=9,
    )
    empty = moments.of_update(batch, load("grpo")(batch))
    full_mask = replace(batch, mask_BT=values_BT + 1, entropy_BT=values_BT + 0.5)
    full = moments.of_update(full_mask, load("grpo")(full_mask))
    found, alone = (moments.columns_of_update(moments.pooled(parts)) for parts in ([empty, full], [full]))
    assert found.overall.keys() == alone.overall.keys()
    assert all(torch.equal(value, alone.overall[name]) for name, value in found.overall.items())


# --- the record -----------------------------------------------------------------------------------------


def test_a_killed_run_has_whole_steps_and_is_interrupted(tmp_path: Path) -> None:
    started = run_with_processes(tmp_path, 2, wait=False, rows=4, accumulation=2, updates=4000)
    deadline, steps = time.monotonic() + 300, pd.DataFrame()
    while len(steps) < 2 and time.monotonic() < deadline and started.poll() is None:
        time.sleep(0.2)
        if list(tmp_path.glob("rank0/runs/**/run.json")):
            steps = record.read_table(folder_of(tmp_path / "rank0"), "steps")
    for process in [started.pid, *(int(path.read_text()) for path in tmp_path.glob("pid*"))]:
        os.kill(process, signal.SIGKILL)
    started.wait()
    time.sleep(1)
    folder = folder_of(tmp_path / "rank0")
    assert record.status(folder) == "interrupted"
    found = tables(tmp_path / "rank0")
    assert len(found["steps"]) >= 2
    assert (found["updates"].groupby("step")["update"].max() == 2).all()
    assert set(found["updates"]["step"]) == set(found["layers"]["step"]) == set(found["steps"]["step"])
    assert not (tmp_path / "rank1").exists()


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path, whole: Path) -> None:
    class Stop(Exception):
        pass

    class Breaks(Frozen):
        def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
            if trainer.state.global_step:
                raise Stop
            return super().__call__(prompts, trainer)

    saving = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(Stop):
        trainer(tmp_path, record=tmp_path, rollout=Breaks(0.1), settings=saving).train()
    assert record.status(folder_of(tmp_path)) == "failed"
    again = trainer(tmp_path, record=tmp_path, settings=saving)
    again.train(resume_from_checkpoint=str(tmp_path / "trl" / "checkpoint-2"))
    assert record.status(folder_of(tmp_path)) == "finished"
    assert_equal(tables(tmp_path), tables(whole), 1e-6)
    with pytest.raises(ConfigError, match="holds a run that is finished"):
        trainer(tmp_path, record=tmp_path)


def test_a_foreign_run_is_reported_and_enters_no_claim(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    shutil.copytree(whole / "runs", results / "runs")
    trainer(tmp_path, record=results, loss="grpo").train()

    def answer(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["steadymoe", *words, "--results", str(results)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert not stopped.value.code
        return capsys.readouterr().out

    status = answer("status")
    assert "trl: 2 finished" in status
    assert "made by another trainer, trl 1.16.0" in status
    assert "stale" not in status
    report = answer("report", "--experiment", "trl", "--format", "svg")
    assert "| gspo" in report
    assert "| grpo" in report
    assert "wrote" in answer("report", "--experiment", "trl", "--export", "csv")
    answer("report", "--experiment", "trl", "--keep", str(results / "kept"))
    for place in (results, results / "kept"):
        assert archive.load(place, "trl")["runs"].empty
        assert archive.load(place, "trl")["steps"].empty
        assert len(archive.load(place, "trl", foreign=True)["runs"]) == 2
        axes = {"engine": "rollout_func", "trainer": "trl"}
        assert not Recorded(place).has(Arm("gspo", "trl", "gspo", axes))


def test_a_router_loss_that_is_on_is_recorded_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = trainer(tmp_path, record=tmp_path, updates=2, settings={"router_aux_loss_coef": None})
    assert "a router auxiliary loss is on, coefficient 0.001" in capsys.readouterr().out
    made.train()
    assert json.loads((folder_of(tmp_path) / "run.json").read_text())["router_aux_loss"] == 0.001
    without = trainer(tmp_path / "without", record=tmp_path / "without", updates=2)
    assert "auxiliary" not in capsys.readouterr().out
    without.train()
    with_it, none = (tables(each)["updates"]["loss"] for each in (tmp_path, tmp_path / "without"))
    assert 0.0005 < with_it[0] - none[0] < 0.004  # 0.001 × a balanced load's K = 2


def test_a_dense_model_has_ratios_and_no_routes(tmp_path: Path) -> None:
    trainer(tmp_path, record=tmp_path, dense=True, updates=2).train()
    found = {name: record.read_table(folder_of(tmp_path), name) for name in ("updates", "layers")}
    assert (found["updates"]["token_ratio_variance"] > 0).tolist() == [False, True]
    assert found["updates"]["expert_change_rate"].isna().all()
    assert found["layers"].empty
