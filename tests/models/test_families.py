"""Families of models: each has the size that a run records, chooses and weighs its experts by its family's formula,
samples what it trains, learns, and is itself again when saved and loaded; a family outside the contract is refused.

Shapes: B sequences, N tokens of a forward, K experts a token, E experts, F positions fed, L MoE layers.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from small_models import BUILT, TOKENS_BS, count, make, routed, shipped
from small_runs import trainer
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import PreTrainedModel

from steadymoe.bench.runs import compose
from steadymoe.bench.support.seeding import numpy_generator, torch_generator
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training import checkpoint
from steadymoe.bench.training.forward import Forward, forward
from steadymoe.bench.training.sampling import roll_out
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models import build, contract
from steadymoe.models.predictor import RoutePredictor
from steadymoe.models.routing import routers
from steadymoe.models.selection import NO_ROUTE


def softmax(logits_E: Tensor, chosen_K: Tensor) -> Tensor:
    return logits_E.softmax(-1)[chosen_K]


def softmax_renormalised(logits_E: Tensor, chosen_K: Tensor) -> Tensor:
    return softmax(logits_E, chosen_K) / softmax(logits_E, chosen_K).sum()


def softmax_of_the_chosen(logits_E: Tensor, chosen_K: Tensor) -> Tensor:
    return logits_E[chosen_K].softmax(-1)


def sigmoid(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits_E, chosen_K: scale * logits_E[chosen_K].sigmoid() / logits_E[chosen_K].sigmoid().sum()


# Model → its gate weights, and its groups of experts with how many of them may be chosen from.
FORMULAS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, int]] = {
    "micro": (softmax_renormalised, 1, 1),
    "qwen2_moe_micro": (softmax, 1, 1),
    "olmoe_micro": (softmax, 1, 1),
    "mixtral_micro": (softmax_renormalised, 1, 1),
    "deepseek_v3_micro": (sigmoid(2.5), 4, 2),
    "gpt_oss_micro": (softmax_of_the_chosen, 1, 1),
    "granitemoe_micro": (softmax_of_the_chosen, 1, 1),
    "glm4_moe_micro": (sigmoid(1.0), 1, 1),
    "qwen3_next_micro": (softmax_renormalised, 1, 1),
}
# All at micro; what is larger takes longer and shows little more.
ALL = [
    pytest.param(name, marks=[] if "micro" in name else pytest.mark.check)
    for name in BUILT
    if not name.startswith("dense")
]


# --- sizes -------------------------------------------------------------------------------------------


def active(model: PreTrainedModel) -> int:
    """How many weights one token uses, routers included."""
    if not routers(model):
        return count(model)
    shares = model.config.num_experts_per_tok, experts(model)
    return count(model) - count(model, ".experts.") * (shares[1] - shares[0]) // shares[1]


def experts(model: PreTrainedModel) -> int:
    return int(routers(model)[0].get_parameter("weight").shape[0])


def of_routing(model: PreTrainedModel) -> int:
    """The weights that exist for routing alone: routers, and the gate of a shared expert."""
    gates = count(model, "shared_expert_gate")
    return gates + sum(weight.numel() for router in routers(model) for weight in router.parameters())


@pytest.mark.parametrize("name", BUILT)
def test_recorded_size_counts_weights_layers_and_experts(name: str) -> None:
    build.check(shipped(name))
    model = make(shipped(name))
    size, moe = build.size(model), len(routers(model))
    assert [size["parameters"], size["active_parameters"], size["moe_layers"]] == [count(model), active(model), moe]
    assert not moe or [size["top_k"], size["experts"]] == [model.config.num_experts_per_tok, experts(model)]


# Model, its dense twin, a model of its own or the same with overrides, and which of the model's weights the twin has.
TWINS: list[tuple[str, str, dict[str, Any], Callable[[PreTrainedModel], int]]] = [
    *((name.removeprefix("dense_"), name, {}, active) for name in BUILT if re.match("dense_(?!total)", name)),
    *((name, f"dense_total_{name}", {}, count) for name in ("flat", "micro")),
    *((name, name, {"first_k_dense_replace": 4}, active) for name in ("deepseek_v3_micro", "glm4_moe_micro")),
    ("qwen3_next_micro", "qwen3_next_micro", {"mlp_only_layers": [0, 1, 2, 3]}, active),
]


@pytest.mark.parametrize(("name", "twin", "overrides", "weighed"), TWINS)
def test_dense_twin_has_the_active_or_all_weights_but_those_of_routing(
    name: str, twin: str, overrides: dict[str, Any], weighed: Callable[[PreTrainedModel], int]
) -> None:
    build.check(shipped(twin) | overrides)
    moe, dense = make(shipped(name)), make(shipped(twin) | overrides)
    assert routers(dense) == []
    assert count(moe, "_attn") == count(dense, "_attn")
    assert weighed(moe) - of_routing(moe) == count(dense)


ONE_EXPERT = {
    "flat": {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 64},
    "micro": {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 128},
    "mixtral_micro": {"num_local_experts": 1, "num_experts_per_tok": 1, "intermediate_size": 128},
}


@pytest.mark.parametrize("name", ONE_EXPERT)
def test_model_with_one_expert_is_its_dense_twin(name: str) -> None:
    moe, dense = make(shipped(name) | ONE_EXPERT[name]), make(shipped(f"dense_{name}"))
    weights = dict(moe.named_parameters())
    with torch.no_grad():
        for of, weight in dense.named_parameters():
            block, _, part = of.rpartition(".mlp.")
            if not block:
                weight.copy_(weights[of])
            elif part == "down_proj.weight":
                weight.copy_(weights[f"{block}.mlp.experts.down_proj"][0])
            else:  # the gate is the first half, the values are the second
                halves = weights[f"{block}.mlp.experts.gate_up_proj"][0].chunk(2)
                weight.copy_(halves[part == "up_proj.weight"])
    tokens_BS = TOKENS_BS.clamp(max=len(dense.get_input_embeddings().weight) - 1)
    with torch.no_grad():
        assert_close(moe(tokens_BS).logits, dense(tokens_BS).logits, atol=2e-5, rtol=1e-4)


# --- routers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMULAS)
def test_routers_follow_the_formula_of_their_family(name: str) -> None:
    formula, groups, chosen_groups = FORMULAS[name]
    model = make(shipped(name))
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    for router in routers(model):
        if "e_score_correction_bias" in dict(router.named_buffers()):
            nn.init.normal_(router.get_buffer("e_score_correction_bias"), generator=torch.Generator().manual_seed(0))
        router.register_forward_hook(lambda router, args, output: calls.append((router, *output)))
    _, found = routed(model)
    assert len(calls) == len(found.logits_LNE) == contract.moe_layers(model.config)
    for (router, logits_NE, weights_NK, indices_NK), recorded_NE, recorded_NK in zip(
        calls, found.logits_LNE, found.live_LNK, strict=True
    ):
        assert torch.equal(recorded_NE, logits_NE)
        assert torch.equal(recorded_NK, indices_NK.to(torch.int16))
        for logits_E, weights_K, indices_K in zip(logits_NE.double(), weights_NK.double(), indices_NK, strict=True):
            assert_close(weights_K, formula(logits_E, indices_K), rtol=1e-5, atol=1e-6)
            scores_E = dict(router.named_buffers()).get("e_score_correction_bias", 0) + (
                logits_E.sigmoid() if formula.__name__ == "<lambda>" else logits_E
            )
            members = scores_E.view(groups, -1)
            best_groups = sorted(range(groups), key=lambda g, m=members: -m[g].topk(min(2, m.shape[1])).values.sum())
            allowed = [e for e in range(len(scores_E)) if e // members.shape[1] in best_groups[:chosen_groups]]
            best = sorted(allowed, key=lambda e, s=scores_E: -s[e])[: len(indices_K)]
            assert sorted(indices_K.tolist()) == sorted(best)


# --- a small run -------------------------------------------------------------------------------------


def small(tmp_path: Path, name: str, *words: str) -> Trainer:
    """A trainer of a few short rollouts at random weights."""
    sizes = [f"model.config.{key}={shipped(name)[key]}" for key in ("hidden_size", "num_hidden_layers")]
    return trainer(tmp_path, f"model={name}", *sizes, *words)


@pytest.mark.parametrize("name", ALL)
def test_family_samples_as_it_trains(name: str, task: Chain) -> None:
    model = build.build(shipped(name), task.tokenizer, 0, "cpu")
    prompts = task.sample(4, numpy_generator(0, "test"))
    made = roll_out(model, task, prompts, 3, torch_generator(0, "test"))
    with torch.no_grad():
        now = forward(model, made.sequences, "fp32")
    mask_BT = made.sequences.response_mask_BT
    # Linear attention computes a sequence at once and token by token in different orders.
    assert_close(now.logprobs_BT * mask_BT, made.logprobs_BT, atol=3e-4 if "next" in name else 2e-5, rtol=0)
    assert (now.routes_LBFK != made.routes_LBFK).float().mean() < 0.01
    assert len({tuple(route) for route in made.routes_LBFK.flatten(0, 2).tolist()}) > 3


@pytest.mark.parametrize("name", ALL)
def test_replayed_routes_are_the_experts_that_run(name: str, task: Chain) -> None:
    model = build.build(shipped(name), task.tokenizer, 0, "cpu")
    made = roll_out(model, task, task.sample(4, numpy_generator(0, "test")), 3, torch_generator(0, "test"))

    def replayed(forced_LBFK: Tensor | None) -> tuple[Forward, dict[str, Tensor]]:
        model.zero_grad()
        now = forward(model, made.sequences, "fp32", forced_LBFK=forced_LBFK)
        now.logprobs_BT.sum().backward()
        return now, {key: weight.grad.clone() for key, weight in model.named_parameters() if weight.grad is not None}

    free, gradients = replayed(None)
    same, same_gradients = replayed(free.routes_LBFK)
    assert torch.equal(same.logprobs_BT, free.logprobs_BT)
    assert_close(same_gradients, gradients, atol=0, rtol=0)
    placed_LBFK = free.routes_LBFK != NO_ROUTE
    others_LBFK = torch.where(placed_LBFK, (free.routes_LBFK + 1) % experts(model), NO_ROUTE)
    other, other_gradients = replayed(others_LBFK)
    assert torch.equal(other.executed_LBFK, others_LBFK.to(torch.int16))
    assert torch.equal(other.routes_LBFK[0], free.routes_LBFK[0]), "the first router's own choice stays on record"
    assert not torch.equal(other.logprobs_BT, free.logprobs_BT)
    for key, weight in routers(model)[0].named_parameters():
        name_of = next(each for each, parameter in model.named_parameters() if parameter is weight)
        assert other_gradients[name_of].abs().sum() > 0, key


@pytest.mark.parametrize("name", ALL)
def test_routers_choose_by_shifted_logits(name: str) -> None:
    """What router noise and predicted routes rest on: no head is the identity, a head that shouts is heard."""
    model = make(shipped(name))
    predictor = RoutePredictor(model)

    free_logits, free = routed(model)
    same_logits, same = routed(model, heads_LHE=list(predictor.heads_LHE))
    assert torch.equal(same_logits, free_logits)
    assert torch.equal(same.executed_LNK, free.executed_LNK)
    assert torch.equal(same.live_LNK, free.live_LNK), "what the router selects is what it returns"
    # Heads that turn every router around: the experts are those of the opposite logits.
    heads_LHE = [-2 * router.get_parameter("weight").T.detach() for router in routers(model)]
    _, turned = routed(model, heads_LHE=heads_LHE)
    assert torch.equal(turned.live_LNK[0], free.live_LNK[0]), "the first router's own choice stays on record"
    biased = any("bias" in key for router in routers(model) for key, _ in router.named_parameters())
    grouped = getattr(model.config, "n_group", None) or 1  # of which some groups of experts are left out beforehand
    if not biased and grouped == 1:
        lowest_NK = turned.logits_LNE[0].topk(turned.live_LNK.shape[-1], largest=False).indices
        assert torch.equal(turned.executed_LNK[0].sort(-1).values, lowest_NK.sort(-1).values.to(torch.int16))
    assert not torch.equal(turned.executed_LNK, turned.live_LNK)


@pytest.mark.parametrize("name", ALL)
def test_family_takes_a_step_and_survives_save_and_load(name: str, tmp_path: Path) -> None:
    made = small(tmp_path, name, "algorithm.entropy_bonus=1")  # random responses are all worth nothing
    before = copy.deepcopy(made.model.state_dict())
    result = made.step(1)
    assert result.diverged_at_update is None
    after = made.model.state_dict()
    weights = dict(made.model.named_parameters(remove_duplicate=False))
    moved = {key for key in after if not torch.equal(after[key], before[key])}
    still = {key for key in set(after) - moved if key in weights and weights[key].dim() > 1}
    assert still == set(), "weights that no gradient reaches"
    assert all(key in weights for key in moved), "a buffer was trained"

    save_model(made.model, str(tmp_path / "model.safetensors"))
    checkpoint.save(tmp_path / "checkpoint.safetensors", made.learner, made.sampler, 1)
    for load in (
        lambda into: load_model(into.model, tmp_path / "model.safetensors"),
        lambda into: checkpoint.load(tmp_path / "checkpoint.safetensors", into.learner, into.sampler),
    ):
        other = small(tmp_path, name, "seed=1")
        load(other)
        assert_close(other.model.state_dict(), after, atol=0, rtol=0)
        with torch.no_grad():
            assert torch.equal(other.model(TOKENS_BS % 8).logits, made.model(TOKENS_BS % 8).logits)


# --- overrides ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral_micro", "deepseek_v3_micro"])
def test_router_dtype_overrides_the_precision(name: str) -> None:
    def logits(dtype: str | None, precision: str) -> Tensor:
        """Of the first router; of a copy, since a reference policy is one."""
        words = [f"model={name}", *([] if dtype is None else [f"+model.config.router_dtype={dtype}"])]
        model = copy.deepcopy(make(compose.plan(words)[0].config.model["config"]))
        seen: list[tuple[Tensor, Tensor]] = []
        for router in routers(model):
            nn.init.ones_(router.get_parameter("weight")[0])  # of the copy: what it says must change with it
            router.register_forward_hook(lambda router, args, output: seen.append((args[0], output[0])))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            model(TOKENS_BS)
        hidden, said_NE = seen[0]
        assert_close(said_NE[:, 0].float(), hidden.flatten(0, -2).float().sum(-1), atol=0.2, rtol=0.02)
        return said_NE

    assert logits(None, "fp32").dtype == logits("float32", "bf16").dtype == torch.float32
    assert logits(None, "bf16").dtype == logits("bfloat16", "fp32").dtype == torch.bfloat16
    assert torch.equal(logits("float32", "fp32"), logits(None, "fp32"))


# --- the contract ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("Phimoe", "topk"),
        ("Llama4Text", "no class of routers"),
        ("JetMoe", "2 classes of routers"),
        ("Afmoe", "no weight with a row for each expert"),
        ("Zaya", "4 values"),
        ("LongcatFlash", "registry"),
    ],
)
def test_a_family_outside_the_contract_is_refused_with_the_reason(family: str, reason: str) -> None:
    with pytest.raises(contract.OutsideContractError, match=rf"^(?=.*{family}Config)[^\n]*{reason}[^\n]*$"):
        build.check({"_target_": f"transformers.{family}Config"})


def test_family_with_an_unknown_top_k_field_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = shipped("micro")
    build.check(config)
    monkeypatch.setattr(build, "_TOP_K", ("moe_topk",))
    with pytest.raises(ValueError, match="Qwen3MoeConfig has its top-k in a field that"):
        build.check(config)


def test_dense_models_fulfil_the_contract_and_stay_unchanged() -> None:
    model = make(shipped("mixtral_micro"))
    before = model.config.to_dict()
    assert contract.moe_layers(model.config) == 4
    assert model.config.to_dict() == before
    assert model.config._experts_implementation == "grouped_mm"
    assert contract.moe_layers(make(shipped("dense_tiny")).config) == 0
    implementations = {name: make(shipped(name)).config._attn_implementation for name in ("gpt_oss_micro", "micro")}
    assert implementations == {"gpt_oss_micro": "eager", "micro": "sdpa"}
