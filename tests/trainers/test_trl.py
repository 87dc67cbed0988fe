"""TRL's trainer with the suite's losses and columns: equal losses, equal splits, and what it refuses.

`make check-trainers` runs this file in an environment that has TRL.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("trl")

from accelerate.commands.config import load_config_from_file
from transformers import DistributedConfig
from trl import GRPOConfig, GRPOTrainer
from trl_runs import GROUP, PROMPTS, Frozen, model, trainer

from steadymoe.algorithms import Batch, load, names
from steadymoe.algorithms.corrections import TruncatedIS, Uncorrected
from steadymoe.algorithms.objective import KL, Objective
from steadymoe.bench import cli
from steadymoe.bench.claims.study import Arm, Study
from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.measurement import columns, routing_drift, token_metrics
from steadymoe.bench.report import archive
from steadymoe.bench.runs import record
from steadymoe.bench.trainers import moments, objectives, trl_record, trl_refusals
from steadymoe.bench.trainers.scoring import Scored
from steadymoe.bench.trainers.trl import SteadyGRPOTrainer
from steadymoe.bench.training.forward import Extras, Sequences, forward

pytestmark = pytest.mark.trl

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
EXACT = (
    "expert_change_rate",
    "expert_set_change_rate",
    "token_any_layer_change_rate",
    "response_tokens",
    "step",
    "update",
)
PROBED = [name for name in columns.TABLES["updates"] if name.startswith(("log_ratio_", "routing_share"))]
PROBED += ["expert_change_per_update"]
FIELDS = ("advantages", "groups", "sampling_per_token_logps")
TENSORS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
ENTROPY = Extras(entropy_gradient=True)
TIMES = [name for name in columns.TABLES["steps"] if name.endswith(("_seconds", "_per_second"))]


def folder_of(results: Path) -> Path:
    (path,) = results.glob("runs/**/run.json")
    return path.parent


def tables(results: Path) -> dict[str, pd.DataFrame]:
    """The tables of the one run below ``results``, without columns of times."""
    found = {name: record.read_table(folder_of(results), name) for name in ("steps", "updates", "layers")}
    return {name: table.drop(columns=TIMES, errors="ignore") for name, table in found.items()}


def assert_equal(one: dict[str, pd.DataFrame], other: dict[str, pd.DataFrame], within: float) -> None:
    """Equal tables: changes of experts and counts exactly, everything else ``within`` of it."""
    for name, table in one.items():
        assert list(table.columns) == list(other[name].columns)
        assert len(table) == len(other[name]) > 0
        for column in table:
            ours, theirs = table[column], other[name][column]
            if str(column) in EXACT:
                pd.testing.assert_series_equal(ours, theirs)
            elif ours.dtype == object:
                pairs = zip(ours, theirs, strict=True)
                assert all(left is right or np.array_equal(left, right) for left, right in pairs)
            else:
                np.testing.assert_allclose(ours, theirs, rtol=within, atol=within, err_msg=str(column))


def run_with_processes(folder: Path, processes: int, wait: bool = True, **arguments: Any) -> subprocess.Popen[str]:
    """``trl_runs.py`` on several gloo processes; each records below ``folder/rank<n>``."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with (folder / "log").open("w") as log:
        started = subprocess.Popen(
            [*command, str(HERE / "trl_runs.py"), str(folder), json.dumps(arguments)],
            env=environment,
            stdout=log,
            stderr=log,
            text=True,
        )
    if wait:
        assert started.wait() == 0, (folder / "log").read_text()
    return started


# --- the loss -----------------------------------------------------------------------------------------


def parts_of(made: SteadyGRPOTrainer) -> list[dict[str, Any]]:
    """The micro-batches of one rollout of the trainer, in the order of its groups."""
    made.model.train()
    made.current_gradient_accumulation_steps = made.args.gradient_accumulation_steps
    whole = made._generate_and_score_completions([{"prompt": text} for text in PROMPTS[:2] for _ in range(GROUP)])
    size = made.args.per_device_train_batch_size
    return [
        {name: each[start : start + size] if each.ndim else each for name, each in whole.items()}
        for start in range(0, 2 * GROUP, size)
    ]


def sequences_of(parts: list[dict[str, Any]]) -> Sequences:
    """The same rollout as the suite's own forward takes it."""
    joined = {name: torch.cat([part[name] for part in parts]) for name in TENSORS}
    tokens_BS = torch.cat([joined["prompt_ids"], joined["completion_ids"]], 1)
    mask_BS = torch.cat([joined["prompt_mask"], joined["completion_mask"]], 1)
    return Sequences(tokens_BS, mask_BS, joined["completion_ids"].shape[1])


def disturb(made: SteadyGRPOTrainer) -> None:
    """Move the weights, so that ratios differ from 1."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in made.model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)


def admissible() -> list[str]:
    return [name for name in names(presets=True) if not load(name).traits.top_k]


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, SteadyGRPOTrainer]:
    """A trainer of one micro-batch, for losses that need the whole mini-batch, and a trainer of four."""
    folder, settings = tmp_path_factory.mktemp("splits"), {"beta": 0.1}
    return {
        True: trainer(folder, settings=settings),
        False: trainer(folder, rows=4, accumulation=4, settings=settings),
    }


@pytest.mark.parametrize("name", admissible())
def test_every_admissible_loss_and_gradient_is_the_objectives(name: str, splits: dict[bool, Any]) -> None:
    loss = load(name)
    correction = Uncorrected() if loss.traits.corrects_for_sampler else TruncatedIS()
    objective = Objective(loss=loss, correction=correction, kl=KL(coefficient=0.1), entropy_bonus=0.01)
    made = splits[loss.traits.whole_minibatch]
    made.model.load_state_dict(model().state_dict())
    made.objective, made._loss_state, made._step = objective, loss.initial_state(), 0
    parts = parts_of(made)
    made._begin_rollout(parts)
    sequences = sequences_of(parts)
    with torch.no_grad():
        old = forward(made.model, sequences, "fp32")
    disturb(made)

    now = forward(made.model, sequences, "fp32", extras=ENTROPY)
    joined = {key: torch.cat([part[key] for part in parts]) for key in FIELDS}
    assert now.routes_LBFK is not None
    assert old.routes_LBFK is not None
    chosen_LBTK = old.routes_LBFK[:, :, -sequences.response_width :].long().clamp(min=0)
    batch = Batch(
        logprobs_BT=now.logprobs_BT,
        mask_BT=sequences.response_mask_BT,
        advantages_BT=joined["advantages"][:, None].expand(sequences.response_mask_BT.shape),
        old_logprobs_BT=old.logprobs_BT,
        rollout_logprobs_BT=joined["sampling_per_token_logps"],
        groups_B=joined["groups"],
        reference_logprobs_BT=torch.cat([part["ref_per_token_logps"] for part in parts]),
        entropy_BT=now.entropy_BT,
        router_log_ratio_LBTK=(now.router_logprobs_LBTE - old.router_logprobs_LBTE).gather(-1, chosen_LBTK),
        state=loss.initial_state(),
    )
    expected = objective(batch).loss
    gradients = torch.autograd.grad(expected, list(made.model.parameters()), allow_unused=True)

    made.model.zero_grad()
    found = torch.zeros(())
    for part in parts:
        part_loss = made._compute_loss(made.model, part)
        part_loss.backward()
        found, made._step = found + part_loss.detach(), made._step + 1
    made._steps.of_update.clear()
    assert expected.abs() > 1e-4
    assert_close(found, expected.detach(), atol=1e-6, rtol=1e-6)
    scale = max(float(each.abs().max()) for each in gradients if each is not None)
    assert scale > 0
    for weight, gradient in zip(made.model.parameters(), gradients, strict=True):
        if gradient is not None:
            assert_close(weight.grad, gradient, atol=2e-6 * max(1.0, scale), rtol=1e-5)


# --- splits -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of a run on one process without accumulation."""
    results = tmp_path_factory.mktemp("whole")
    trainer(results, record=results).train()
    return results


def test_accumulated_micro_batches_are_one_micro_batch(tmp_path: Path, whole: Path) -> None:
    trainer(tmp_path, rows=4, accumulation=4, record=tmp_path).train()
    assert_equal(tables(tmp_path), tables(whole), 1e-6)
    updates = tables(whole)["updates"]
    assert (updates.loc[updates["update"] == 2, "expert_change_rate"] > 0).all()


@pytest.mark.parametrize(("rows", "accumulation"), [(8, 1), (4, 2)])
def test_two_processes_are_one(tmp_path: Path, whole: Path, rows: int, accumulation: int) -> None:
    run_with_processes(tmp_path, 2, rows=rows, accumulation=accumulation)
    assert_equal(tables(tmp_path / "rank0"), tables(whole), 1e-6)
    assert not (tmp_path / "rank1").exists()


@pytest.mark.parametrize(
    ("sizes", "routing"), [({"fsdp_size": 2}, "off"), ({"fsdp_size": 2, "ep_size": 2}, "r2")], ids=["fsdp2", "experts"]
)
def test_two_processes_with_half_of_the_weights_each_are_one(
    tmp_path: Path, whole: Path, sizes: dict[str, int], routing: str
) -> None:
    if routing == "r2":
        trainer(tmp_path / "one", record=tmp_path / "one", routing=routing).train()
    settings = {"model_init_kwargs": {"distributed_config": sizes}}
    run_with_processes(tmp_path, 2, rows=8, settings=settings, routing=routing, probe=2)
    found, expected = tables(tmp_path / "rank0"), tables(tmp_path / "one" if routing == "r2" else whole)
    for table in found.values():
        table.drop(columns=[name for name in PROBED if name in table], inplace=True)
    for table in expected.values():
        table.drop(columns=[name for name in PROBED if name in table], inplace=True)
    assert_equal(found, expected, 1e-6)
    assert not (tmp_path / "rank1").exists()
    probed = record.read_table(folder_of(tmp_path / "rank0"), "updates")
    assert (probed["log_ratio_moment_free"] > 0).all()
    shares = [json.loads((tmp_path / f"shares{rank}.json").read_text()) for rank in (0, 1)]
    assert shares[0]
    for name in shares[0]:  # every parameter is a DTensor, and the two processes hold it together, once
        assert sum(share[name] for share in shares) == pytest.approx(1), name
        assert 0 < shares[0][name] < 1, name


def test_checkpointed_layers_give_the_same_columns(tmp_path: Path, whole: Path) -> None:
    trainer(tmp_path, record=tmp_path, settings={"gradient_checkpointing": True}).train()
    assert_equal(tables(tmp_path), tables(whole), 1e-6)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_without_a_learning_rate_nothing_moves(tmp_path: Path, accumulation: int) -> None:
    settings = {"learning_rate": 0.0}
    trainer(tmp_path, rows=16 // accumulation, accumulation=accumulation, record=tmp_path, settings=settings).train()
    updates = tables(tmp_path)["updates"]
    assert len(updates) == 4
    for name in ("token_ratio_variance", "sequence_ratio_variance", "expert_change_rate", "router_kl"):
        assert (updates[name] == 0).all(), name


# --- routes -------------------------------------------------------------------------------------------


def test_replay_forces_routes_through_the_backward_pass(tmp_path: Path) -> None:
    for checkpointing in (False, True):
        results = tmp_path / str(checkpointing)
        trainer(results, record=results, routing="r2", settings={"gradient_checkpointing": checkpointing}).train()
    free, forced = (tables(tmp_path / str(each)) for each in (False, True))
    assert_equal(free, forced, 1e-6)
    second = free["updates"]["update"] == 2
    assert (free["updates"].loc[second, "replay_expert_disagreement"] > 0).all()


def test_frozen_routers_stay(tmp_path: Path) -> None:
    made = trainer(tmp_path, routing="freeze", updates=2)
    before = {name: weight.clone() for name, weight in made.model.named_parameters()}
    made.train()
    moved = {name for name, weight in made.model.named_parameters() if not torch.equal(weight, before[name])}
    routers = {name for name in before if "mlp.gate.weight" in name}
    assert len(routers) == 3
    assert moved
    assert not moved & routers


def test_generation_evaluation_and_a_reference_model_add_no_rows(tmp_path: Path, whole: Path) -> None:
    settings = {"beta": 1e-12, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    made = trainer(tmp_path, record=tmp_path, eval_prompts=2, settings=settings | {"num_generations_eval": 1})
    made.train()
    found, expected = tables(tmp_path), tables(whole)
    for table in ("updates", "layers"):
        ours = found[table]
        assert_equal({table: ours}, {table: expected[table]}, 1e-6)
    assert found["steps"]["eval_accuracy"].notna().all()
    evaluations = record.read_table(folder_of(tmp_path), "evaluations")
    assert evaluations["step"].tolist() == [0, 0, 1, 1, 2, 2]
    assert set(evaluations["prompt"]) == set(PROMPTS[-2:])
    assert_close(float(found["steps"]["reference_kl"].iloc[0]), 0.0, atol=1e-9, rtol=0)


# --- the sampler ----------------------------------------------------------------------------------------


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
    left = {name: table.drop(columns=PROBED, errors="ignore") for name, table in found.items()}
    assert_equal(left, {name: table.drop(columns=PROBED, errors="ignore") for name, table in without.items()}, 1e-6)
    # All sixteen responses are probed: after an update they moved as far as the next update finds them.
    first, second = (found["updates"][found["updates"]["update"] == update] for update in (1, 2))
    moved, change = first["expert_change_per_update"].to_numpy(), second["expert_change_rate"].to_numpy()
    np.testing.assert_allclose(moved, change, atol=1e-6)
    assert (moved > 0).all()
    assert record.read_table(folder_of(tmp_path), "steps")["probe_seconds"].gt(0).all()


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
    trainer(tmp_path, record=whole, loss="grpo").train()

    def answer(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["steadymoe", *words, "--results", str(whole)])
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
    answer("report", "--experiment", "trl", "--keep", str(whole / "kept"))
    for results in (whole, whole / "kept"):
        assert archive.load(results, "trl")["runs"].empty
        assert archive.load(results, "trl")["steps"].empty
        assert len(archive.load(results, "trl", foreign=True)["runs"]) == 2
        axes = {"engine": "rollout_func", "trainer": "trl"}
        assert not Study(results).has(Arm("gspo", "trl", "gspo", axes))


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"loss": "gspoo"}, "unknown algorithm"),
        ({"loss": "gspo@trl-9"}, "unknown algorithm"),
        ({"loss": "gepo", "rows": 4, "accumulation": 4}, "needs the whole mini-batch"),
        ({"loss": "trm"}, "most likely tokens"),
        ({"loss": "rspo", "dense": True}, "router_log_ratio_LBTK"),
        ({"loss": load("grpo", anchor="rollout"), "with_rollout": False}, "rollout_logprobs_BT"),
        ({"correction": "tis", "with_rollout": False}, "rollout_logprobs_BT"),
        ({"correction": "tiss"}, "unknown correction"),
        ({"loss": load("grpo", anchor="rollout"), "correction": "tis"}, "another correction"),
        ({"routing": "r3"}, "the sampler's routes"),
        ({"routing": "free"}, "unknown routing"),
        ({"routing": "r2", "dense": True}, "the model is dense"),
        ({"routing": "freeze", "dense": True}, "the model is dense"),
        ({"settings": {"epsilon": 0.3}}, "belongs to TRL's own loss"),
        ({"settings": {"loss_type": "grpo"}}, "belongs to TRL's own loss"),
        ({"settings": {"use_vllm": True}, "correction": "tis"}, "two corrections at once"),
        ({"settings": {"use_vllm": True}}, "TRL's own correction"),
        ({"probe": -1}, "probe is a number of responses"),
        ({"settings": {"model_init_kwargs": {"distributed_config": {"tp_size": 2}}}}, "tp_size=2 processes share"),
        ({"rows": 4, "accumulation": 4, "settings": {"steps_per_generation": 6}}, "must be a multiple"),
        ({"task": "a/b", "record": "results"}, "task must be letters"),
    ],
)
def test_bad_requests_are_one_line_before_any_work(
    named: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOTrainer, "__init__", lambda *_, **__: pytest.fail("work was done"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        trainer(tmp_path, **named)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "results").exists()


def test_sharding_that_would_silently_be_left_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="accelerate does not shard"):
        trainer(tmp_path)


def test_an_unknown_field_names_the_fields() -> None:
    with pytest.raises(TypeError, match="did you mean clip_low"):
        load("gspo", epsilon=0.1)


def test_a_kl_term_is_the_trainers(tmp_path: Path) -> None:
    objective = Objective(loss=load("grpo"), correction=Uncorrected(), kl=KL(coefficient=0.1))
    with pytest.raises(ConfigError, match="the two must be equal"):
        objectives.chosen(objective, "none", beta=0.0)
    with pytest.raises(ConfigError, match="already has a correction"):
        objectives.chosen(replace(objective, correction=TruncatedIS()), "mis", beta=0.1)
    assert objectives.chosen(objective, "tis", beta=0.1).correction == TruncatedIS()


def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trl_refusals.check_trl().startswith("1.16.")
    with monkeypatch.context() as changed:
        changed.setattr(trl_refusals, "version", lambda _: "1.17.0")
        with pytest.raises(ConfigError, match=r"made for TRL 1\.16"):
            trl_refusals.check_trl()
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs, more: None)
    with pytest.raises(ConfigError, match="_compute_loss takes"):
        trl_refusals.check_trl()


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


def test_the_pages_script_trains_by_every_command_of_the_page(tmp_path: Path) -> None:
    page = (DOCS / "on_your_trainer.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert '"max_steps": 40,' in script
    (tmp_path / "train_micro.py").write_text(script.replace('"max_steps": 40,', '"max_steps": 4,'))
    (tmp_path / "docs").symlink_to(DOCS)
    commands = [line for line in page.splitlines() if re.match(r"(python|accelerate|torchrun) .*train_micro\.py", line)]
    commands = [line for line in commands if "olmoe" not in line]  # never run
    assert len(commands) == 4
    for command in commands:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        done = subprocess.run(command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert not done.returncode, done.stderr
    runs = archive.load(tmp_path / "results", "trl_micro", foreign=True)["runs"]
    axes = ["processes=1", "processes=2", "processes=2,sharded=experts", "processes=2,sharded=fsdp2"]
    assert sorted(runs["axes"]) == [f"engine=transformers,{each},trainer=trl" for each in axes]
    assert set(runs["status"]) == {"finished"}
    assert set(runs["model"]) == {"micro"}


@pytest.mark.parametrize("path", sorted((DOCS / "trainers").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_file_is_one_that_trl_accelerate_and_the_adapter_take(path: Path) -> None:
    given = yaml.safe_load(path.read_text())
    if path.stem.startswith("accelerate"):
        loaded = load_config_from_file(str(path))
        assert loaded.fsdp_config["fsdp_version"] == 2
        assert not loaded.use_cpu
        return
    assert given.keys() <= {"model", "axes", "trainer", "settings"}
    settings = {"output_dir": "x", "num_generations": 8, **given["settings"], "use_cpu": True}  # no GPU is at hand
    args, chosen = GRPOConfig(**settings), given.get("trainer", {})
    trl_refusals.check_settings(args, corrects="correction" in chosen)
    trl_refusals.check_routing(chosen.get("routing", "off"), layers=1)
    assert objectives.chosen("gspo", chosen.get("correction", "none"), args.beta)
    assert ("model" in given) == ("Never run." in path.read_text())
    if "model" not in given:
        assert DistributedConfig(**args.model_init_kwargs["distributed_config"]).dp_size == 2
