"""TRL's trainer with the suite's losses: equal losses, equal splits, replayed routes, and runs that resume.

`make check-trainers` runs this file in an environment that has TRL.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl")

import side_by_side
from trl_runs import (
    PROMPTS,
    NoisySampler,
    assert_equal,
    disturb,
    folder_of,
    model,
    rollout_parts,
    run_with_processes,
    tables,
    trainer,
)

from steadymoe.algorithms import Batch, load, names
from steadymoe.algorithms.corrections import TruncatedIS, Uncorrected
from steadymoe.algorithms.objective import KL, Objective
from steadymoe.bench.report import report_page
from steadymoe.bench.report.results import Results
from steadymoe.bench.runs import record
from steadymoe.bench.runs.run_folder import read_state
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.training.forward import Extras, forward
from steadymoe.integrations.trl.trainer import SteadyGRPOTrainer, sequences_of

pytestmark = pytest.mark.trl

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, SteadyGRPOTrainer]:
    """A trainer of one micro-batch, for losses that need the whole mini-batch, and a trainer of four."""
    folder, settings = tmp_path_factory.mktemp("adapters"), {"beta": 0.1}
    return {
        True: trainer(folder, settings=settings),
        False: trainer(folder, rows=4, accumulation=4, settings=settings),
    }


@pytest.mark.parametrize("name", [name for name in names(presets=True) if not load(name).traits.top_k])
def test_every_loss_and_gradient_equals_the_suites(name: str, adapters: dict[bool, SteadyGRPOTrainer]) -> None:
    loss = load(name)
    correction = Uncorrected() if loss.traits.corrects_for_sampler else TruncatedIS()
    objective = Objective(loss=loss, correction=correction, kl=KL(coefficient=0.1), entropy_bonus=0.01)
    adapter = adapters[loss.traits.whole_minibatch]
    adapter.model.load_state_dict(model().state_dict())
    adapter.objective, adapter._loss_state, adapter._step = objective, loss.initial_state(), 0
    parts = rollout_parts(adapter)
    adapter._begin_rollout(parts)
    tensors = [name for name, value in parts[0].items() if isinstance(value, torch.Tensor) and value.ndim]
    whole = {name: torch.cat([part[name] for part in parts]) for name in tensors}
    sequences = sequences_of(whole)
    with torch.no_grad():
        old = forward(adapter.model, sequences, "fp32")
    disturb(adapter)
    now = forward(adapter.model, sequences, "fp32", extras=Extras(entropy_gradient=True))
    assert old.routes_LBFK is not None
    chosen_LBTK = old.routes_LBFK[:, :, -sequences.response_width :].long().clamp(min=0)
    batch = Batch(
        logprobs_BT=now.logprobs_BT,
        mask_BT=sequences.response_mask_BT,
        advantages_BT=whole["advantages"][:, None].expand(sequences.response_mask_BT.shape),
        old_logprobs_BT=old.logprobs_BT,
        rollout_logprobs_BT=whole["sampling_per_token_logps"],
        groups_B=whole["groups"],
        reference_logprobs_BT=whole["ref_per_token_logps"],
        entropy_BT=now.entropy_BT,
        router_log_ratio_LBTK=(now.router_logprobs_LBTE - old.router_logprobs_LBTE).gather(-1, chosen_LBTK),
        state=loss.initial_state(),
    )
    expected = objective(batch).loss
    gradients = torch.autograd.grad(expected, list(adapter.model.parameters()), allow_unused=True)

    adapter.model.zero_grad()
    value = torch.zeros(())
    for part in parts:
        part_loss = adapter._compute_loss(adapter.model, part)
        part_loss.backward()
        value, adapter._step = value + part_loss.detach(), adapter._step + 1
    adapter._steps.update.clear()
    assert expected.abs() > 1e-4
    assert_close(value, expected.detach(), atol=1e-6, rtol=1e-6)
    scale = max(float(gradient.abs().max()) for gradient in gradients if gradient is not None)
    assert scale > 0
    for weight, gradient in zip(adapter.model.parameters(), gradients, strict=True):
        if gradient is not None:
            assert_close(weight.grad, gradient, atol=2e-6 * max(1.0, scale), rtol=1e-5)


# --- splits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"rows": 4, "accumulation": 4}, {"settings": {"gradient_checkpointing": True}}])
def test_accumulation_and_checkpointed_layers_give_the_same_columns(
    settings: dict[str, Any], tmp_path: Path, whole: Path
) -> None:
    trainer(tmp_path, record=tmp_path, **settings).train()
    assert_equal(tables(tmp_path), tables(whole))
    updates = tables(whole)["updates"]
    assert (updates.loc[updates["update"] == 2, "expert_change_rate"] > 0).all()


def test_two_processes_match_one(tmp_path: Path, whole: Path) -> None:
    run_with_processes(tmp_path, 2, rows=4, accumulation=2)
    assert_equal(tables(tmp_path / "rank0"), tables(whole))
    assert not (tmp_path / "rank1").exists()


@pytest.mark.parametrize(
    ("sizes", "routing"), [({"fsdp_size": 2}, "off"), ({"fsdp_size": 2, "ep_size": 2}, "r2")], ids=["fsdp2", "experts"]
)
def test_two_processes_with_sharded_weights_match_one(
    tmp_path: Path, whole: Path, sizes: dict[str, int], routing: str
) -> None:
    if routing == "r2":
        trainer(tmp_path / "one", record=tmp_path / "one", routing=routing).train()
    settings = {"model_init_kwargs": {"distributed_config": sizes}}
    run_with_processes(tmp_path, 2, rows=8, settings=settings, routing=routing, probe=2)
    expected = tmp_path / "one" if routing == "r2" else whole
    assert_equal(tables(tmp_path / "rank0", probed=False), tables(expected, probed=False))
    assert not (tmp_path / "rank1").exists()
    probed = record.read_table(folder_of(tmp_path / "rank0"), "updates")
    assert (probed["log_ratio_moment_free"] > 0).all()
    shares = [json.loads((tmp_path / f"shares{rank}.json").read_text()) for rank in (0, 1)]
    assert shares[0]
    for name in shares[0]:  # every parameter is a DTensor, and the two processes hold it together, once
        assert sum(share[name] for share in shares) == pytest.approx(1), name
        assert 0 < shares[0][name] < 1, name


@pytest.mark.parametrize("accumulation", [1, 4])
def test_zero_learning_rate_changes_nothing(tmp_path: Path, accumulation: int) -> None:
    settings = {"learning_rate": 0.0}
    trainer(tmp_path, rows=16 // accumulation, accumulation=accumulation, record=tmp_path, settings=settings).train()
    updates = tables(tmp_path)["updates"]
    assert len(updates) == 4
    for name in ("token_ratio_variance", "sequence_ratio_variance", "expert_change_rate", "router_kl"):
        assert (updates[name] == 0).all(), name


def test_the_same_rollouts_give_the_same_columns_in_three_trainers(tmp_path: Path) -> None:
    short = ("cold_start.accuracy_low=0.1", "cold_start.accuracy_high=0.9", "evaluation.prompts=16")
    side_by_side.make(tmp_path, "updates=4", "minibatch_prompts=4", "updates_per_rollout=2", *short)
    differences = side_by_side.compare(tmp_path).set_index(["table", "column"])
    assert differences.loc["updates", "largest"]["expert_change_rate"] > 0
    assert len(differences.loc["updates"]) > 15
    for run in ("one process", "sharded"):
        first = differences[f"{run}, first step"].dropna()
        assert (first < 2e-4).all(), first.sort_values()
        assert (differences[run] < 0.1).all(), differences[run].sort_values()
        for name in ("expert_change_rate", "expert_set_change_rate", "token_any_layer_change_rate"):
            assert first["updates", name] < 1e-6, name  # equal counts; the suite divides in fp32
    report_page.make(tmp_path, formats=["svg"])
    assert (tmp_path / "tables" / "side_by_side-summary.csv").read_text().count("trl") >= 2


# --- routes -------------------------------------------------------------------------------------------


def test_replay_forces_routes_through_the_backward_pass(tmp_path: Path) -> None:
    for checkpointing in (False, True):
        results = tmp_path / str(checkpointing)
        trainer(results, record=results, routing="r2", settings={"gradient_checkpointing": checkpointing}).train()
    plain, checkpointed = (tables(tmp_path / str(checkpointing)) for checkpointing in (False, True))
    assert_equal(plain, checkpointed)
    second = plain["updates"]["update"] == 2
    assert (plain["updates"].loc[second, "replay_expert_disagreement"] > 0).all()


def test_frozen_routers_do_not_learn(tmp_path: Path) -> None:
    adapter = trainer(tmp_path, routing="freeze", updates=2)
    before = {name: weight.clone() for name, weight in adapter.model.named_parameters()}
    adapter.train()
    moved = {name for name, weight in adapter.model.named_parameters() if not torch.equal(weight, before[name])}
    routers = {name for name in before if "mlp.gate.weight" in name}
    assert len(routers) == 3
    assert moved
    assert not moved & routers


def test_generation_evaluation_and_a_reference_model_add_no_rows(tmp_path: Path, whole: Path) -> None:
    settings = {"beta": 1e-12, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    trainer(tmp_path, record=tmp_path, eval_prompts=2, settings=settings | {"num_generations_eval": 1}).train()
    ours, expected = tables(tmp_path), tables(whole)
    assert_equal({name: ours[name] for name in ("updates", "layers")}, expected)
    assert ours["steps"]["eval_accuracy"].notna().all()
    evaluations = record.read_table(folder_of(tmp_path), "evaluations")
    assert evaluations["step"].tolist() == [0, 0, 1, 1, 2, 2]
    assert set(evaluations["prompt"]) == set(PROMPTS[-2:])
    assert_close(float(ours["steps"]["reference_kl"].iloc[0]), 0.0, atol=1e-9, rtol=0)


# --- runs ---------------------------------------------------------------------------------------------


def test_killed_run_keeps_whole_steps_and_is_interrupted(tmp_path: Path) -> None:
    process = run_with_processes(tmp_path, 2, wait=False, rows=4, accumulation=2, updates=4000)
    deadline, steps = time.monotonic() + 300, pd.DataFrame()
    while len(steps) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
        if list(tmp_path.glob("rank0/runs/**/run.json")):
            steps = record.read_table(folder_of(tmp_path / "rank0"), "steps")
    for pid in [process.pid, *(int(path.read_text()) for path in tmp_path.glob("pid*"))]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    time.sleep(1)
    assert read_state(folder_of(tmp_path / "rank0")).status == "interrupted"
    recorded = tables(tmp_path / "rank0")
    assert len(recorded["steps"]) >= 2
    assert (recorded["updates"].groupby("step")["update"].max() == 2).all()
    assert set(recorded["updates"]["step"]) == set(recorded["layers"]["step"]) == set(recorded["steps"]["step"])


def test_a_run_resumes_from_a_checkpoint(tmp_path: Path, whole: Path) -> None:
    class Stop(Exception):
        pass

    class Breaks(NoisySampler):
        def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
            if trainer.state.global_step:
                raise Stop
            return super().__call__(prompts, trainer)

    saving = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(Stop):
        trainer(tmp_path, record=tmp_path, rollout=Breaks(0.1), settings=saving).train()
    assert read_state(folder_of(tmp_path)).status == "failed"
    resumed = trainer(tmp_path, record=tmp_path, settings=saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "trl" / "checkpoint-2"))
    assert read_state(folder_of(tmp_path)).status == "finished"
    assert_equal(tables(tmp_path), tables(whole))
    with pytest.raises(UserError, match="holds a run that is finished"):
        trainer(tmp_path, record=tmp_path)


def test_documented_script_trains_with_every_documented_command(tmp_path: Path) -> None:
    page = (ROOT / "integrations" / "README.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert '"max_steps": 40,' in script
    (tmp_path / "train_micro.py").write_text(script.replace('"max_steps": 40,', '"max_steps": 4,'))
    (tmp_path / "integrations").symlink_to(ROOT / "integrations")
    commands = [line for line in page.splitlines() if re.match(r"(python|accelerate|torchrun) .*train_micro\.py", line)]
    commands = [line for line in commands if "olmoe" not in line]  # never run
    assert len(commands) == 4
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command in commands:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path}
        done = subprocess.run(command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert not done.returncode, done.stderr
    runs = Results.load(tmp_path / "results", "trl_micro", foreign=True).runs
    axes = ["processes=1", "processes=2", "processes=2,sharded=experts", "processes=2,sharded=fsdp2"]
    assert set(runs["axes"]) == {f"engine=transformers,{each},trainer=trl" for each in axes}
    assert set(runs["status"]) == {"finished"}
    assert Results.load(tmp_path / "results", "trl_micro").runs.empty  # what scores and boards read
