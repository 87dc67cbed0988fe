"""TRL's trainer with the suite's losses: equal losses, equal splits, replayed routes.

`make check-trainers` runs this file in an environment that has TRL.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl")

from trl_runs import PROMPTS, disturb, model, parts_of, sequences_of, trainer
from trl_tables import assert_equal, folder_of, run_with_processes, tables

from steadymoe.algorithms import Batch, load, names
from steadymoe.algorithms.corrections import TruncatedIS, Uncorrected
from steadymoe.algorithms.objective import KL, Objective
from steadymoe.bench.runs import record
from steadymoe.bench.trainers.trl import SteadyGRPOTrainer
from steadymoe.bench.training.forward import Extras, forward

pytestmark = pytest.mark.trl

FIELDS = ("advantages", "groups", "sampling_per_token_logps")
ENTROPY = Extras(entropy_gradient=True)


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
    expected = tmp_path / "one" if routing == "r2" else whole
    assert_equal(tables(tmp_path / "rank0", probed=False), tables(expected, probed=False), 1e-6)
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
