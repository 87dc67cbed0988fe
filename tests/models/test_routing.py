"""Routing replay against references made by hand, and the rollout engines.

Shapes: L MoE layers, B sequences, S positions, N = B·S tokens, K experts a token, E experts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import TOKENS_BS, K, L, N, make, other_routes, own_routes, routed, shipped
from small_runs import FOUR_UPDATES, advantages, begun, trainer, updated
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import PreTrainedModel

from steadymoe import conf
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training import routing_drift
from steadymoe.bench.training.forward import forward
from steadymoe.bench.training.microbatches import Forwards
from steadymoe.bench.training.probes import UpdateProbe
from steadymoe.bench.training.step_rows import rollout_columns
from steadymoe.models import build, engine
from steadymoe.models.engine import Rounding, RouterBF16, RouterNoise, RouterSync, Sampler, Stale, WeightNoise
from steadymoe.models.routing import RouteRecorder, routers, z_loss
from steadymoe.models.selection import NO_ROUTE, filtered


def logits_and_gradients(
    model: PreTrainedModel, forced_LNK: Tensor | None = None, gates_LNK: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The model's logits on ``TOKENS_BS`` and the gradients of their mean square; routes and gates forced or not."""
    model.zero_grad()
    with RouteRecorder(model) as recorder:
        recorder.force(forced_LNK, gates_LNK)
        logits_BSV = model(TOKENS_BS, use_cache=False).logits
        recorder.take(N)
        logits_BSV.square().mean().backward()
    return logits_BSV.detach(), [w.grad.clone() if w.grad is not None else w * 0 for w in model.parameters()]


# --- replay ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recalls", [False, True])
def test_forced_routes_and_gates_match_a_manual_forward(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, recalls: bool
) -> None:
    forced_LNK = other_routes()
    gates_LNK = torch.rand(L, N, K, generator=torch.Generator().manual_seed(0)) if recalls else None
    assert not torch.equal(forced_LNK, own_routes(model).long())
    found, gradients = logits_and_gradients(model, forced_LNK, gates_LNK)
    model.zero_grad()
    for layer, (router, indices_NK) in enumerate(zip(routers(model), forced_LNK, strict=True)):

        def by_hand(
            hidden: Tensor, router: nn.Module = router, indices_NK: Tensor = indices_NK, layer: int = layer
        ) -> Any:
            logits_NE = hidden.reshape(-1, hidden.shape[-1]) @ router.get_parameter("weight").T
            weights_NK = logits_NE.softmax(-1).gather(-1, indices_NK)
            own_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
            return logits_NE, own_NK if gates_LNK is None else gates_LNK[layer], indices_NK

        monkeypatch.setattr(router, "forward", by_hand, raising=False)
    expected = model(TOKENS_BS, use_cache=False).logits
    expected.square().mean().backward()
    assert_close(found, expected.detach())
    of_routers = {id(router.get_parameter("weight")) for router in routers(model)}
    for one, weight in zip(gradients, model.parameters(), strict=True):
        if recalls and id(weight) in of_routers:
            assert weight.grad is None
            assert not one.any()
            continue
        assert_close(one, weight.grad)


def test_router_chooses_where_no_route_is_given(model: PreTrainedModel) -> None:
    forced_LNK, gates_LNK = other_routes(), torch.full((L, N, K), 7.0)
    forced_LNK[:, ::2] = NO_ROUTE
    for given in (gates_LNK, None):
        _, found = routed(model, forced_LNK, given)
        assert torch.equal(found.executed_LNK[:, 1::2].long(), forced_LNK[:, 1::2])
        assert torch.equal(found.executed_LNK[:, ::2], found.live_LNK[:, ::2])
        assert not torch.equal(found.executed_LNK, found.live_LNK)
        of_routers_LNK = found.gates_LNK if given is None else found.gates_LNK[:, ::2]
        assert_close(of_routers_LNK.sum(-1), torch.ones_like(of_routers_LNK[..., 0]))
        assert given is None or (found.gates_LNK[:, 1::2] == 7).all()


def by_hand(forced: list[int], own: list[int], scores: list[float], share: float) -> list[int]:
    kept = [expert for expert in forced if scores[expert] >= share * min(scores[each] for each in own)]
    spare = iter([expert for expert in own if expert not in kept])
    return [expert if expert in kept else next(spare) for expert in forced]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0, float("inf")])
def test_filtered_routes_match_a_loop_over_tokens(share: float) -> None:
    scores_NE = torch.randn(200, 8, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    own_NK, forced_NK = scores_NE.topk(3).indices, torch.randn_like(scores_NE).topk(3).indices
    forced_NK[:100] = own_NK[:100].flip(-1).where(torch.arange(3) < 2, forced_NK[:100])  # two of three are its own
    forced_NK[:100, 2] = scores_NE[:100].topk(4).indices[:, 3]
    forced_NK[-1] = NO_ROUTE
    found_NK = filtered(forced_NK, own_NK, scores_NE, share)
    rows = zip(forced_NK[:-1].tolist(), own_NK.tolist(), scores_NE.tolist(), strict=False)
    assert found_NK[:-1].tolist() == [by_hand(forced, own, scores, share) for forced, own, scores in rows]
    assert (found_NK[-1] == NO_ROUTE).all()
    assert torch.equal(found_NK, forced_NK) == (share == 0)
    assert torch.equal(found_NK[:-1].sort(-1).values, own_NK[:-1].sort(-1).values) == (share >= 1)
    assert torch.equal(found_NK[:-1], own_NK[:-1]) == (share > 1)


def test_gradient_checkpointing_reruns_routers_under_the_same_routes(model: PreTrainedModel) -> None:
    forced_LNK = other_routes()
    plain, gradients = logits_and_gradients(model, forced_LNK)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode alone
    again, checkpointed = logits_and_gradients(model, forced_LNK)
    assert torch.equal(again, plain)
    assert all(torch.equal(one, other) for one, other in zip(checkpointed, gradients, strict=True))


@pytest.mark.parametrize(
    ("routes_LNK", "answer"),
    [
        (torch.zeros(2, N, K, dtype=torch.long), "routes of 2 layers for a model with 3 MoE layers"),
        (torch.full((L, N, K), 4), "a route names expert 4; the model has 4"),
        (torch.zeros(L, N - 1, K, dtype=torch.long), "for a router that chose"),
        (torch.zeros(L, N, K + 1, dtype=torch.long), "for a router that chose"),
    ],
)
def test_routes_that_do_not_fit_are_refused(model: PreTrainedModel, routes_LNK: Tensor, answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        routed(model, routes_LNK)


def test_routers_that_return_another_order_than_they_select_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = type(routers(trainer(tmp_path).model)[0])
    plain = cls.forward

    def turned(self: Any, hidden: Tensor) -> Any:
        logits, weights, indices = plain(self, hidden)
        return logits, weights.flip(-1), indices.flip(-1)  # the same experts with the same weights

    monkeypatch.setattr(cls, "forward", turned)
    with pytest.raises(RuntimeError, match="in another order"):
        trainer(tmp_path)
    monkeypatch.setattr(cls, "forward", lambda self, hidden: (plain(self, hidden), plain(self, hidden))[0])
    with pytest.raises(RuntimeError, match="2 times in one call"):
        trainer(tmp_path)


def test_z_loss_closed_form() -> None:
    logits_LNE = [torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0, 2.0], [9.0, 9.0]])]
    log2 = torch.tensor(2.0).log()
    found = z_loss(logits_LNE, torch.tensor([1, 0]))
    assert_close(found, (log2**2 + (2 + log2) ** 2) / 2)


# --- routing as an axis ------------------------------------------------------------------------------


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The forwards of updates, as they come."""
    seen: list[Any] = []
    plain = Forwards.__call__

    def spy(self: Forwards, *arguments: Any) -> Any:
        found = plain(self, *arguments)
        if torch.is_grad_enabled():
            seen.append((arguments[2], found))
        return found

    monkeypatch.setattr(Forwards, "__call__", spy)
    return seen


@pytest.mark.parametrize("routing", ["r2", "r3"])
def test_replay_runs_recorded_experts_and_drift_is_still_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, routing: str
) -> None:
    made = trainer(tmp_path, f"routing={routing}", "optimizer.learning_rate=1e-2", *FOUR_UPDATES)
    seen = watched(monkeypatch)
    rollout, minibatches, old = begun(made)
    measured = [made.learner.update(rollout, old, advantages(rollout), parts) for parts in minibatches]
    recorded = old.routes_LBFK if routing == "r2" else rollout.routes_LBFK
    for block, found in seen:
        assert torch.equal(found.executed_LBFK, recorded[:, block.rows_M])
    assert not torch.equal(seen[-1][1].routes_LBFK, seen[-1][1].executed_LBFK)
    assert measured[0].overall["token_ratio_max"] == 1
    assert measured[-1].overall["expert_change_rate"] > 0  # the live choice, or there would be no drift by construction


@pytest.mark.parametrize("words", [[], ["microbatch=3"], ["savings.share_prompts=false"]])
def test_recalled_gates_match_the_samplers(tmp_path: Path, words: list[str]) -> None:
    words = ["engine=router_noise", "engine.strength=2.0", *words]
    kl, first = {}, {}
    for routing in ("off", "r3", "r3_gates"):
        made = trainer(tmp_path, f"routing={routing}", *words)
        rollout, _, old = begun(made)
        measured = rollout_columns(rollout, old, (rollout, old), None, made.learner.experts).overall
        kl[routing] = float(measured["rollout_kl_k3"])
        assert (rollout.gates_LBFK is None) == (routing != "r3_gates")
        first[routing] = updated(made, 1)[0].overall
        assert first[routing]["token_ratio_max"] == 1
    assert kl["off"] > kl["r3"] > 1e-4
    assert kl["r3_gates"] < 1e-9
    assert "replay_share" not in first["off"]
    assert first["r3"]["replay_share"] == first["r3_gates"]["replay_share"] == 1
    has_route_LBF = (rollout.routes_LBFK != NO_ROUTE).all(-1)
    assert not rollout.gates_LBFK[~has_route_LBF].any()
    assert_close(rollout.gates_LBFK[has_route_LBF].sum(-1), torch.ones(int(has_route_LBF.sum())))


def test_filtered_replay_is_r3_at_share_0_and_off_at_share_1(tmp_path: Path) -> None:
    words = ["engine=router_noise", "engine.strength=2.0"]
    logprobs, kept = {}, {}
    for name, more in {
        "off": ["routing=off"],
        "r3": ["routing=r3"],
        **{share: ["routing=r3_filtered", f"routing.score_share={share}"] for share in ("0.0", "0.5", "1.0")},
    }.items():
        made = trainer(tmp_path, *words, *more)
        logprobs[name] = begun(made)[2].logprobs_BT
        measured = updated(made, 1)[0].overall
        assert measured["token_ratio_max"] == 1, "the old policy runs the same experts"
        kept[name] = measured.get("replay_kept")
        assert ("replay_share" in measured) == (name == "r3")
    assert torch.equal(logprobs["0.0"], logprobs["r3"])
    assert_close(logprobs["1.0"], logprobs["off"])
    for name in ("off", "r3"):
        assert not torch.allclose(logprobs["0.5"], logprobs[name], atol=1e-3)
    assert kept["0.0"] == 1 > kept["0.5"] > kept["1.0"] > 0


@pytest.mark.parametrize("routing", ["freeze", "r3_gates"])
def test_frozen_and_recalled_routers_do_not_learn(tmp_path: Path, routing: str) -> None:
    made = trainer(tmp_path, f"routing={routing}")
    before = {name: weight.detach().clone() for name, weight in made.model.named_parameters()}
    updated(made)
    moved = {name for name, weight in made.model.named_parameters() if not torch.equal(weight, before[name])}
    frozen = {name for name in before if name.endswith("gate.weight")}
    assert frozen
    assert moved == before.keys() - frozen


# --- engines -----------------------------------------------------------------------------------------

ENGINES = dict.fromkeys(["bf16", "fp8", "int8", "router_bf16", "router_sync", "stale", "truncated"], 1.0)
ENGINES |= {"router_noise": 0.5, "temperature": 0.2, "weight_noise": 0.02, "weight_noise_bf16": 0.005}


@pytest.mark.parametrize(("name", "strength"), ENGINES.items())
def test_engine_changes_sampling_but_not_the_trainer(tmp_path: Path, name: str, strength: float) -> None:
    made = trainer(tmp_path, f"engine={name}")
    assert made.sampler.engine.strength == strength
    updated(made)  # so that old weights differ
    made.sample(2)
    updated(made)
    past = made.sampler.state()
    before = {name: weight.detach().clone() for name, weight in made.model.named_parameters()}
    rollout, _, old = begun(made, 3)
    mask_BT = rollout.sequences.response_mask_BT.bool()
    gap_N = (rollout.logprobs_BT - old.logprobs_BT)[mask_BT].abs()
    assert gap_N.max() > 1e-5
    assert all(torch.equal(weight, before[name]) for name, weight in made.model.named_parameters())
    made.sampler.load(past)
    again, _, _ = made.sample(3)
    assert torch.equal(again.logprobs_BT, rollout.logprobs_BT)  # its noise has a generator of its own


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_strength_zero_samples_with_the_trained_model_itself(tmp_path: Path, name: str) -> None:
    assert set(conf.names("engine")) == {*ENGINES, "exact"}
    sampler = trainer(tmp_path, f"engine={name}", "engine.strength=0").sampler
    assert sampler.model(torch.Generator()) is sampler._trained
    assert sampler.engine.temperature == 1
    assert sampler.engine.kept(torch.zeros(1, 4).log_softmax(-1)) is None


def test_rounding_closed_forms() -> None:
    row = torch.tensor([[127.0, 63.4, -1.6], [1.27, 0.634, 0.0]])
    assert_close(engine._quantised(row, "int8", False), torch.tensor([[127.0, 63.0, -2.0], [1.27, 0.63, 0.0]]))
    # One scale for all: the second row is below half a step but for its largest.
    assert_close(engine._quantised(row, "int8", True), torch.tensor([[127.0, 63.0, -2.0], [1.0, 1.0, 0.0]]))
    # e4m3 has three bits after the point: between 256 and 448 its steps are 32.
    assert_close(engine._quantised(torch.tensor([[448.0, 300.0]]), "fp8", False), torch.tensor([[448.0, 288.0]]))
    assert_close(engine._quantised(torch.tensor([1 + 2.0**-9]), "bf16", True), torch.tensor([1.0]))
    assert (engine._quantised(torch.zeros(2, 3), "fp8", False) == 0).all()


def test_router_noise_changes_routes_but_router_bf16_only_gates(model: PreTrainedModel) -> None:
    free_LNK = own_routes(model)
    noisy = Sampler(RouterNoise(strength=2.0), model).model(torch.Generator().manual_seed(0))
    assert not torch.equal(own_routes(noisy), free_LNK)
    assert torch.equal(own_routes(model), free_LNK)
    logits = [routed(noisy)[1].logits_LNE[0] for _ in range(2)]
    assert not torch.allclose(*logits, atol=0.1), "each forward has its own noise"
    _, found = routed(Sampler(RouterBF16(), model).model(torch.Generator()))
    logits_NE = found.logits_LNE[0]
    assert torch.equal(logits_NE, logits_NE.to(torch.bfloat16).float())


@pytest.mark.parametrize("name", ["micro", "mixtral_micro", "gpt_oss_micro", "granitemoe_micro", "deepseek_v3_micro"])
def test_router_sync_rounds_every_router_and_nothing_else(name: str) -> None:
    made = make(shipped(name))
    of_routers = {id(weight) for router in routers(made) for weight in [router.get_parameter("weight")]}
    names = {name for name, weight in made.named_parameters() if id(weight) in of_routers}
    copied = dict(Sampler(RouterSync(), made).model(torch.Generator()).named_parameters())
    for each, weight in made.named_parameters():
        sent = weight.to(torch.bfloat16).float() if each in names else weight
        assert torch.equal(copied[each], sent), each
    assert names


def test_weight_noise_is_relative_to_each_matrix_and_new_for_each_rollout(model: PreTrainedModel) -> None:
    with torch.no_grad():
        next(weight for weight in model.parameters() if weight.dim() == 3)[0] *= 100  # one expert of four
    sampler, trained = Sampler(WeightNoise(strength=0.25), model), dict(model.named_parameters())

    def noises(seed: int) -> dict[str, Tensor]:
        copy = sampler.model(torch.Generator().manual_seed(seed))
        return {name: (weight - trained[name]).detach() for name, weight in copy.named_parameters()}

    one, same, other = noises(0), noises(0), noises(1)
    assert any(noise.dim() == 3 for noise in one.values())
    assert any(noise.dim() == 1 for noise in one.values())
    for name, noise in one.items():
        assert torch.equal(noise, same[name])
        if noise.dim() == 1:
            assert not noise.any(), name
            continue
        assert not torch.equal(noise, other[name]), name
        for matrix, of_matrix in zip(
            trained[name].view(-1, *noise.shape[-2:]), noise.view(-1, *noise.shape[-2:]), strict=True
        ):
            size = float(of_matrix.norm() / matrix.detach().norm())
            assert size == pytest.approx(0.25, rel=5 / matrix.numel() ** 0.5), name  # five deviations


def test_stale_weights_have_the_given_age_in_steps(model: PreTrainedModel) -> None:
    sampler = Sampler(Stale(strength=2), model)
    weight = next(model.parameters())
    seen = []
    for step in range(5):
        with torch.no_grad():
            weight.fill_(float(step))
        seen.append(float(next(sampler.model(torch.Generator()).parameters()).detach().flatten()[0]))
    assert seen == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(
    "words", [["engine=router_noise", "engine.strength=5.0"], ["engine=truncated", "engine.top_k=1"]]
)
def test_evaluation_and_probes_use_the_trained_model(tmp_path: Path, words: list[str]) -> None:
    made = trainer(tmp_path, *words)
    plain = trainer(tmp_path)
    assert made.evaluate(1) == plain.evaluate(1)
    probes = (each._since_start._sequences.tokens_BS for each in (made, plain))
    assert torch.equal(*probes)


# --- what the engines round, and what the probe pins to -----------------------------------------------


def test_bf16_rounds_routers_and_linear_layers(model: PreTrainedModel) -> None:
    copy = Sampler(Rounding(dtype="bf16"), model).model(torch.Generator())
    seen: dict[str, Tensor] = {}
    for name, module in copy.named_modules():
        if isinstance(module, nn.Linear) or module in routers(copy):
            # After the engine's own hook: what the module is really given.
            module.register_forward_pre_hook(lambda module, args, name=name: seen.update({name: args[0]}))
    for name, router in zip("abc", routers(copy), strict=True):
        router.register_forward_hook(lambda module, args, output, name=name: seen.update({name: output[0]}))
    with torch.no_grad():
        copy(TOKENS_BS, use_cache=False)
    assert len(seen) > 6
    for name, values in seen.items():
        assert torch.equal(values, values.bfloat16().float()), name


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_fp8_and_int8_round_linear_layers_only(model: PreTrainedModel, dtype: str) -> None:
    copy = Sampler(Rounding(dtype=dtype), model).model(torch.Generator())
    weights = dict(model.named_parameters())
    for name, weight in copy.named_parameters():
        spared = weight.dim() < 2 or any(part in name for part in ("gate.weight", "embed_tokens", "lm_head"))
        assert torch.equal(weight, weights[name]) == spared, name
    inputs: dict[str, Tensor] = {}
    for name in ("model.layers.0.self_attn.q_proj", "lm_head", "model.layers.0.mlp.gate"):
        copy.get_submodule(name).register_forward_pre_hook(lambda m, args, name=name: inputs.update({name: args[0]}))
    with torch.no_grad():
        copy(TOKENS_BS, use_cache=False)
    levels = {name: values[0, 0].unique().numel() for name, values in inputs.items() if values.dim() == 3}
    rounded = engine._quantised(inputs["model.layers.0.self_attn.q_proj"], dtype, False)
    assert_close(inputs["model.layers.0.self_attn.q_proj"], rounded, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(inputs["lm_head"], engine._quantised(inputs["lm_head"], dtype, False), atol=1e-6)
    assert levels["lm_head"] == 32


def test_channels_are_outputs_in_both_expert_layouts(task: Chain) -> None:
    numbers = {"_target_": "transformers.GptOssConfig", "num_hidden_layers": 1, "hidden_size": 16, "head_dim": 8}
    numbers |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
    numbers |= {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.1}
    model = build.build(numbers, task.tokenizer, 0, "cpu")
    copy = Sampler(Rounding(dtype="int8"), model).model(torch.Generator())
    (name,) = [name for name, _ in model.named_parameters() if name.endswith("gate_up_proj")]
    trained, rounded = model.get_parameter(name), copy.get_parameter(name)
    step_E1O = trained.abs().amax(-2, keepdim=True) / 127  # (E, inputs, outputs)
    grid = rounded / step_E1O
    assert_close(grid, grid.round(), atol=1e-3, rtol=0)
    assert ((trained - rounded).abs() <= step_E1O / 2 + 1e-7).all()
    assert torch.equal(copy.get_parameter(f"{name}_bias"), model.get_parameter(f"{name}_bias"))


def test_probe_pins_to_the_routes_before_the_first_update(tmp_path: Path) -> None:
    made = trainer(tmp_path, "optimizer.learning_rate=1e-2", *FOUR_UPDATES)
    rollout, minibatches, old = begun(made)
    watched_ = UpdateProbe(made.model, rollout.sequences, "fp32")
    with torch.no_grad():
        before = forward(made.model, rollout.sequences, "fp32")
    mask_BT = rollout.sequences.response_mask_BT.bool()
    last = before
    for rows_M in minibatches:
        made.learner.update(rollout, old, advantages(rollout), rows_M)
        columns, _ = watched_.after_update(made.model)
        with torch.no_grad():
            free = forward(made.model, rollout.sequences, "fp32")
            pinned = forward(made.model, rollout.sequences, "fp32", forced_LBFK=before.routes_LBFK)
        free_N, pinned_N = ((each.logprobs_BT - before.logprobs_BT)[mask_BT] for each in (free, pinned))
        assert_close(columns["log_ratio_moment_free"], free_N.square().mean())
        assert_close(columns["log_ratio_moment_pinned"], pinned_N.square().mean())
        moved = routing_drift.change(last.routes_LBFK, free.routes_LBFK, mask_BT)
        assert_close(columns["expert_change_per_update"], moved.expert)
        last = free
    assert columns["log_ratio_moment_free"] != columns["log_ratio_moment_pinned"]


def test_router_kl_is_of_the_sampler_from_the_trainer(tmp_path: Path) -> None:
    made = trainer(tmp_path, "engine=router_noise", "engine.strength=2.0")
    rollout, _, old = begun(made)
    since = made._since_start.since_start(made.model)
    columns = rollout_columns(rollout, old, (rollout, old), since, made.learner.experts).overall
    mask_BT = rollout.sequences.response_mask_BT.bool()
    p, q = rollout.router_logprobs_LBTE[:, mask_BT], old.router_logprobs_LBTE[:, mask_BT]
    one, other = (p.exp() * (p - q)).sum(-1).mean(), (q.exp() * (q - p)).sum(-1).mean()
    assert_close(columns["rollout_router_kl"], one)
    assert not torch.isclose(one, other, rtol=1e-2)
