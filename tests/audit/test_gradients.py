"""The gradients of an audit: each is the loss's own, and one forward serves all."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_audits import Scene, batch_of, moved, scene
from torch import Tensor

from steadymoe.bench.audit import gradients
from steadymoe.bench.audit.gradients import BLOCKS, WHOLE, Sums, Weights
from steadymoe.bench.audit.losses import Loss
from steadymoe.bench.audit.rollouts import Frozen

GROUPS = 4
ALGORITHMS = ("grpo", "gspo", "rspo_grpo", "vespo", "dppo")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Five losses four updates off policy."""
    torch.set_num_threads(1)
    made = scene(tmp_path_factory.mktemp("one"), {name: [f"algorithm={name}"] for name in ALGORITHMS})
    moved(made, 4)
    return made


def direct(made: Scene, loss: Loss, number: int) -> Tensor:
    """The gradient of a mini-batch as an update takes it: one forward, one loss, one backward."""
    (part,) = made.audited.minibatches[number]
    value = loss.learner.objective(batch_of(made, loss, part)).loss
    weights = Weights(loss.learner.model)
    return weights.vector(torch.autograd.grad(value, weights.ordered, allow_unused=True))


def every_direct(made: Scene, loss: Loss) -> Tensor:
    return torch.stack([direct(made, loss, number) for number in range(len(made.audited.minibatches))]).double()


def test_shared_forward_gives_each_loss_its_own_gradient(one: Scene) -> None:
    found = gradients.collect(one.losses, one.audited, None, GROUPS)
    lengths = []
    for arm in one.losses:
        sums_GP = every_direct(one, arm).view(GROUPS, 2, -1).sum(1)
        assert torch.allclose(found[arm.label]._sums_GP.double(), sums_GP, rtol=1e-4, atol=1e-6), arm.label
        lengths.append(sums_GP.norm().item())
    assert min(lengths) > 1e-3  # and no two losses are the same
    assert len({round(length, 7) for length in lengths}) == len(lengths)


def test_squared_norm_is_that_of_the_mean_minus_noise(one: Scene) -> None:
    arm = one.losses[0]
    own = gradients.collect([arm], one.audited, None, GROUPS)[arm.label]
    gradients_MP, every_G = every_direct(one, arm), np.ones(GROUPS, dtype=bool)
    places = {WHOLE: slice(None)} | own._slices
    assert set(places) == {WHOLE, *BLOCKS}
    for block, place in places.items():
        products_MM = gradients_MP[:, place] @ gradients_MP[:, place].T
        apart = ~torch.eye(len(products_MM), dtype=torch.bool)
        assert own.by_block[block].squared_norm(every_G) == pytest.approx(products_MM[apart].mean().item(), rel=1e-4)
        noise = gradients_MP[:, place].var(0).sum().item()
        assert own.by_block[block].trace(every_G) == pytest.approx(noise, rel=1e-4)


def test_every_weight_is_in_one_block(one: Scene) -> None:
    model, weights = one.trainer.model, Weights(one.trainer.model)
    assert {id(weight) for weight in weights.ordered} == {id(weight) for weight in model.parameters()}
    assert weights.count == sum(weight.numel() for weight in model.parameters())
    names = {id(weight): name for name, weight in model.named_parameters()}
    at, found = 0, dict[str, str]()
    for weight in weights.ordered:
        (block,) = [name for name, place in weights.slices.items() if place.start <= at < place.stop]
        found[names[id(weight)]] = block
        at += weight.numel()
    assert found["model.embed_tokens.weight"] == "embeddings"
    assert found["model.layers.0.mlp.gate.weight"] == "router"
    assert {block for name, block in found.items() if ".experts." in name} == {"experts"}
    assert {block for name, block in found.items() if "self_attn" in name or "norm" in name} == {"attention"}


def test_proportional_slopes_share_a_backward(one: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    grad = torch.autograd.grad

    def counted(outputs: object, *given: object, **named: object) -> object:
        calls.append(isinstance(outputs, list))
        return grad(outputs, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.autograd, "grad", counted)
    twin = Loss("twin", one.losses[0].trainer)
    label = one.losses[0].label
    shared = Frozen(
        one.audited.rollout,
        one.audited.minibatches[:4],
        {label: one.audited.old[label], "twin": one.audited.old[label]},
        {label: one.audited.advantages[label], "twin": 2.5 * one.audited.advantages[label]},
    )
    found = gradients.collect([one.losses[0], twin], shared, None, GROUPS)
    assert sum(calls) == 4
    ours_GP, twins_GP = found[label]._sums_GP, found["twin"]._sums_GP
    assert ours_GP.abs().max() > 0
    assert torch.allclose(twins_GP, 2.5 * ours_GP, rtol=1e-5, atol=1e-7 * float(ours_GP.abs().max()))


def test_only_proportional_slopes_have_a_factor(one: Scene) -> None:
    (part,) = one.audited.minibatches[0]
    now = one.losses[0].learner.forwards(one.trainer.model, one.audited.rollout, part)
    own, *others = (gradients.slopes(arm, one.audited, part.rows_M, now) for arm in one.losses)
    assert own.times(own) == pytest.approx(1.0)
    for factor in (-3.0, 1e-3):
        scaled = replace(own, by_logprobs_MT=factor * own.by_logprobs_MT)
        assert scaled.times(own) == pytest.approx(factor, rel=1e-5)
    first = own.by_logprobs_MT.clone()
    first.view(-1)[first.abs().argmax()] *= 1.001
    assert replace(own, by_logprobs_MT=first).times(own) is None
    zero = replace(own, by_logprobs_MT=torch.zeros_like(own.by_logprobs_MT))
    assert own.times(zero) is None
    assert zero.times(own) == 0.0
    assert replace(own, by_entropy_MT=torch.ones_like(first)).times(own) is None
    assert any(other.times(own) is None for other in others)


def test_non_finite_gradient_is_detected(one: Scene) -> None:
    weights = Weights(one.trainer.model)
    sums = Sums(weights, 2)
    assert sums.is_finite
    gradient_P = torch.ones(weights.count)
    gradient_P[0] = torch.nan
    sums.add(0, gradient_P)
    assert not sums.is_finite


def test_reference_is_the_policy_gradient_with_a_leave_one_out_baseline(one: Scene) -> None:
    """REINFORCE, summed over tokens and averaged over responses: −Σ (r − mean of the others' r) log π / B."""
    (part,) = one.audited.minibatches[0]
    rollout, learner = one.audited.rollout, one.truth.learner
    logprobs_MT = learner.forwards(learner.model, rollout, part).logprobs_BT
    scores_PR = rollout.scores_B[part.rows_M].view(-1, 8)
    advantages_M = (8 / 7 * (scores_PR - scores_PR.mean(-1, keepdim=True))).flatten()
    mask_MT = rollout.sequences.response_mask_BT[part.rows_M]
    value = -(advantages_M[:, None] * logprobs_MT * mask_MT).sum() / len(mask_MT)
    weights = Weights(learner.model)
    expected_P = weights.vector(torch.autograd.grad(value, weights.ordered, allow_unused=True))
    found_P = direct(one, one.truth, 0)
    assert expected_P.norm() > 1e-3
    assert torch.allclose(found_P, expected_P, rtol=1e-4, atol=1e-6)
