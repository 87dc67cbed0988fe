"""Bias balancing: closed forms of the update and of the choice, and where the bias must be found again in a run."""

from pathlib import Path

import pytest
import torch
from small_models import E, K, L, other_routes, routed, shipped
from small_runs import assert_resumes, begun, trainer, updated
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.bench.tasks.chain import Chain
from steadymoe.models import balancing, build
from steadymoe.models.balancing import BIAS
from steadymoe.models.routing import routers
from steadymoe.models.selection import NO_ROUTE

BALANCED = ["routing.bias_speed=0.01"]
FAMILIES = ["micro", "granitemoe_micro", "gpt_oss_micro", "mixtral_micro", "deepseek_v3_micro", "glm4_moe_micro"]


def stacked(model: PreTrainedModel) -> Tensor:
    return torch.stack([value.clone() for value in balancing.biases(model).values()])


def test_bias_moves_by_its_speed_towards_an_even_load(model: PreTrainedModel) -> None:
    balancing.install(model)
    routes_LBFK = torch.tensor([[[[0, 1], [0, 1]], [[0, 2], [0, 3]]]] * L, dtype=torch.int16)  # loads 4, 2, 1, 1
    routes_LBFK[1] = torch.tensor([[[0, 1], [2, 3]], [[3, 2], [1, 0]]])  # even
    routes_LBFK[2, 0] = NO_ROUTE  # loads 2, 0, 1, 1
    for _ in range(2):
        balancing.balance(model, routes_LBFK, 0.25)
    expected = torch.tensor([[-0.5, 0.0, 0.5, 0.5], [0.0] * E, [-0.5, 0.5, 0.0, 0.0]])
    assert torch.equal(stacked(model), expected)


def test_bias_affects_the_choice_of_experts_but_not_gates(model: PreTrainedModel) -> None:
    _, free = routed(model)
    balancing.install(model)
    _, still = routed(model)
    assert torch.equal(still.executed_LNK, free.executed_LNK)
    assert torch.equal(still.gates_LNK, free.gates_LNK)
    bias_E = torch.tensor([0.0, 0.2, 0.0, 0.4])
    for each in balancing.biases(model).values():
        each.copy_(bias_E)
    _, found = routed(model)
    assert not torch.equal(found.live_LNK, free.live_LNK)
    for logits_NE, live_NK, gates_NK in zip(found.logits_LNE, found.live_LNK, found.gates_LNK, strict=True):
        scores_NE = logits_NE.softmax(-1)
        chosen_NK = (scores_NE + bias_E).topk(K).indices
        assert torch.equal(live_NK.long(), chosen_NK)
        own_NK = scores_NE.gather(-1, chosen_NK)
        torch.testing.assert_close(gates_NK, own_NK / own_NK.sum(-1, keepdim=True))
    _, forced = routed(model, other_routes())
    assert torch.equal(forced.executed_LNK.long(), other_routes())
    assert torch.equal(forced.live_LNK[0], found.live_LNK[0])  # the first layer's inputs are the same


@pytest.mark.parametrize("name", FAMILIES)
def test_large_bias_fills_an_expert_in_every_family(name: str, task: Chain) -> None:
    model = build.build(shipped(name), task.tokenizer, 0, "cpu")
    own = hasattr(routers(model)[0], BIAS)
    assert own == name.startswith(("deepseek", "glm4"))
    classes = [type(router) for router in routers(model)]
    balancing.install(model)
    balancing.install(model)  # a second time changes nothing
    assert ([type(router) for router in routers(model)] == classes) == own
    assert len(balancing.biases(model)) == len(classes)
    assert {f"{each}" for each in balancing.biases(model)} <= model.state_dict().keys()
    for each in balancing.biases(model).values():
        each[5] = 1e3
    _, found = routed(model)
    assert (found.live_LNK == 5).any(-1).all()


# --- in a run ----------------------------------------------------------------------------------------


def test_biases_do_not_depend_on_micro_batches_or_shared_prompts(tmp_path: Path) -> None:
    found = []
    for words in ([], ["microbatch=3"], ["savings.share_prompts=false"]):
        made = trainer(tmp_path, *BALANCED, "optimizer.learning_rate=0", *words)
        updated(made)
        found.append(stacked(made.model))
    assert found[0].abs().max() == pytest.approx(0.02)  # two updates
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_biases_alone_even_out_the_load(tmp_path: Path) -> None:
    uneven = []
    for speed in (0.0, 0.01):
        made = trainer(tmp_path, f"routing.bias_speed={speed}", "optimizer.learning_rate=0")
        entropies = [made.step(step).rows["steps"][0]["load_entropy"] for step in range(1, 21)]
        uneven.append(1 - sum(entropies[10:]) / 10)
    assert 0 < uneven[1] < 0.7 * uneven[0]


@pytest.mark.parametrize("engine", ["router_noise", "bf16", "stale"])
def test_sampler_uses_the_trainers_biases(tmp_path: Path, engine: str) -> None:
    made = trainer(tmp_path, *BALANCED, f"engine={engine}")
    made.sample(1)
    before = stacked(made.model)
    updated(made)
    after = stacked(made.model)
    assert not torch.equal(after, before)
    made.sampler.model(torch.Generator())
    sampler = made.sampler._copy
    made.sampler.model(torch.Generator())
    assert torch.equal(stacked(sampler), after)


def test_skipped_update_does_not_move_biases(tmp_path: Path) -> None:
    made = trainer(tmp_path, *BALANCED, "algorithm.kl.coefficient=0.1")
    updated(made)
    assert not stacked(made.learner._reference).any()
    before = stacked(made.model)
    rollout, minibatches, old = begun(made)
    with torch.no_grad():
        next(made.model.parameters()).mul_(float("nan"))
    made.learner.update(rollout, old, rollout.logprobs_BT, minibatches[0])
    assert torch.equal(stacked(made.model), before)


@pytest.mark.parametrize("model", ["micro", "deepseek_v3_micro"])
def test_balanced_run_resumes_bit_for_bit(tmp_path: Path, model: str) -> None:
    words = [*BALANCED, f"model={model}", "engine=stale", "engine.strength=2", "updates=8"]
    assert_resumes(tmp_path, 4, *words)


def test_unbalanced_model_has_no_biases(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    classes = {type(router) for router in routers(made.model)}
    updated(made)
    assert not balancing.biases(made.model)
    assert {type(router) for router in routers(made.model)} == classes
