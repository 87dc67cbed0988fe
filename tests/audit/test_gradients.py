"""The gradients of an audit: each is the loss's own, one forward serves all, and usefulness ranks by direction."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from test_execute import planned
from torch import Tensor

from steadymoe.algorithms import Batch, Surrogate
from steadymoe.algorithms.grpo import GRPO
from steadymoe.bench.audit import estimators, gradients, losses, rollouts
from steadymoe.bench.audit.gradients import BLOCKS, WHOLE, Sums, Weights
from steadymoe.bench.audit.losses import Loss
from steadymoe.bench.audit.rollouts import Frozen
from steadymoe.bench.config.schema import RunConfig
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.forward import Forward
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models import build

GROUPS = 4
ALGORITHMS = ("grpo", "gspo", "rspo_grpo", "vespo", "dppo")
LOSS = "algorithm.loss"


@dataclass(frozen=True, kw_only=True)
class Flipped(GRPO):
    """GRPO that makes good responses less likely."""

    def surrogate(self, batch: Batch) -> Surrogate:
        return super().surrogate(replace(batch, advantages_BT=-batch.advantages_BT))


@dataclass(frozen=True, kw_only=True)
class Longer(GRPO):
    """A bonus for length alone: the advantage of a response is how much longer than the others it is."""

    def surrogate(self, batch: Batch) -> Surrogate:
        length_B = batch.mask_BT.sum(-1).float()
        advantages_BT = ((length_B - length_B.mean()) / (length_B.std() + 1e-6))[:, None] * batch.mask_BT
        return super().surrogate(replace(batch, advantages_BT=advantages_BT))


@dataclass
class FirstSymbol(Chain):
    """A response is right if its first symbol has an odd code: a reward that a fresh model can learn at once."""

    def score(self, prompt: str, response: str, finished: bool) -> float:
        return float(ord(response[0]) % 2) if response else 0.0


@dataclass(frozen=True)
class Scene:
    """A model, its losses and the frozen rollout."""

    trainer: Trainer
    losses: list[Loss]
    truth: Loss
    prompts: rollouts.Prompts
    audited: Frozen


def config_of(results: Path, *words: str) -> RunConfig:
    small = {"algorithm": "grpo_unclipped", "rollout.prompts": "8", "updates_per_rollout": "4"}
    given = small | dict(word.split("=", 1) for word in words)
    return planned(results, *(f"{key}={value}" for key, value in given.items())).config


def scene(results: Path, algorithms: dict[str, list[str]], minibatches: int = 8, *words: str) -> Scene:
    """Everything before the drift, on a fresh model and a reward that it can learn."""
    config = config_of(results, *words)
    made = instantiate(config.task)
    task = FirstSymbol(made.min_operands, made.max_operands, made.modulus, made.spare_tokens)
    model = build.build(config.model["config"], task.tokenizer, 0, "cpu", config.experts)
    trainer = Trainer(model, task, config)
    configs = {label: config_of(results, *words, *own) for label, own in algorithms.items()}
    every, truth = losses.on_model(model, task, configs), losses.truth(model, task, config)
    prompts = rollouts.prompts(task, 0, 0, config.rollout.prompts, config.rollout.prompts // 4 * minibatches)
    rollout = rollouts.respond(trainer, prompts.audited, "audited", 0, 0)
    frozen = rollouts.freeze(trainer.learner, trainer, [*every, truth], rollout)
    return Scene(trainer, every, truth, prompts, frozen)


def moved(scene: Scene, updates: int) -> None:
    rollout = rollouts.respond(scene.trainer, scene.prompts.drift, "drift", 0, 0)
    for _ in rollouts.drifted(scene.trainer, rollout, [updates]):
        pass


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
    learner, rollout = loss.learner, made.audited.rollout
    now = learner.forwards(learner.model, rollout, part)
    mask_MT = rollout.sequences.response_mask_BT[part.rows_M]
    counts = int(mask_MT.any(-1).sum()), int(mask_MT.sum())
    old, advantages_BT = made.audited.old[loss.label], made.audited.advantages[loss.label]
    value = learner.objective(learner.batch(rollout, old, advantages_BT, part.rows_M, now, counts)).loss
    weights = Weights(learner.model)
    return weights.vector(torch.autograd.grad(value, weights.ordered, allow_unused=True))


def every_direct(made: Scene, loss: Loss) -> Tensor:
    return torch.stack([direct(made, loss, number) for number in range(len(made.audited.minibatches))]).double()


def test_one_forward_for_all_losses_gives_each_the_gradient_of_its_own_forward(one: Scene) -> None:
    found = gradients.collect(one.losses, one.audited, None, GROUPS)
    lengths = []
    for arm in one.losses:
        sums_GP = every_direct(one, arm).view(GROUPS, 2, -1).sum(1)
        assert torch.allclose(found[arm.label, None]._sums_GP.double(), sums_GP, rtol=1e-4, atol=1e-6), arm.label
        lengths.append(sums_GP.norm().item())
    assert min(lengths) > 1e-3  # and no two losses are the same
    assert len({round(length, 7) for length in lengths}) == len(lengths)


def test_the_squared_norm_is_that_of_the_mean_over_all_minibatches_less_its_noise(one: Scene) -> None:
    arm = one.losses[0]
    own = gradients.collect([arm], one.audited, None, GROUPS)[arm.label, None]
    gradients_MP, every_G = every_direct(one, arm), np.ones(GROUPS, dtype=bool)
    places = {WHOLE: slice(None)} | own._slices
    assert set(places) == {WHOLE, *BLOCKS}
    for block, place in places.items():
        products_MM = gradients_MP[:, place] @ gradients_MP[:, place].T
        apart = ~torch.eye(len(products_MM), dtype=torch.bool)
        assert own.by_block()[block].squared_norm(every_G) == pytest.approx(products_MM[apart].mean().item(), rel=1e-4)
        noise = gradients_MP[:, place].var(0).sum().item()
        assert own.by_block()[block].trace(every_G) == pytest.approx(noise, rel=1e-4)


def test_after_the_cut_each_minibatch_counts_as_an_update_takes_it(one: Scene) -> None:
    arm = one.losses[0]
    gradients_MP = every_direct(one, arm)
    cut = gradients_MP.norm(dim=1).median().item()
    own = gradients.collect([arm], one.audited, None, GROUPS, (cut,))[arm.label, cut]
    for row_P in gradients_MP:
        weight = torch.nn.Parameter(torch.zeros_like(row_P))
        weight.grad = row_P
        torch.nn.utils.clip_grad_norm_([weight], cut)  # changes the row in place
    assert torch.allclose(own._sums_GP.double(), gradients_MP.view(GROUPS, 2, -1).sum(1), rtol=1e-4, atol=1e-6)
    assert own.by_block()[WHOLE].squares_G.sum() == pytest.approx(gradients_MP.square().sum().item(), rel=1e-4)


def test_every_weight_is_in_one_block_and_the_names_fit(one: Scene) -> None:
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


def test_losses_whose_slopes_are_multiples_share_a_backward(one: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ours_GP, twins_GP = found[label, None]._sums_GP, found["twin", None]._sums_GP
    assert ours_GP.abs().max() > 0
    assert torch.allclose(twins_GP, 2.5 * ours_GP, rtol=1e-5, atol=1e-7 * float(ours_GP.abs().max()))


def test_slopes_of_another_direction_get_a_backward_of_their_own(one: Scene) -> None:
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


def test_a_gradient_that_is_not_finite_is_seen(one: Scene) -> None:
    weights = Weights(one.trainer.model)
    sums = Sums(weights, 2)
    assert sums.is_finite
    gradient_P = torch.ones(weights.count)
    gradient_P[0] = torch.nan
    sums.add(0, gradient_P, weights.squares(gradient_P))
    assert not sums.is_finite


@contextmanager
def in_double() -> Iterator[None]:
    """Forwards in double, also where models and losses ask for float32."""
    with pytest.MonkeyPatch.context() as patch:
        kept = torch.Tensor.float
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", lambda x: x.double() if x.is_floating_point() else kept(x).double())
        yield


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_gradients_are_the_slopes_of_the_loss_by_finite_differences(name: str, tmp_path: Path) -> None:
    wide = ["clip_low=0.9", "clip_high=0.9"]
    own = [f"algorithm={name}", *(f"{LOSS}.{word}" for word in wide)]
    made = scene(tmp_path, {name: own}, 4, "experts=eager")
    moved(made, 2)
    arm, model = made.losses[0], made.trainer.model.double()
    weights, (part,) = Weights(model), made.audited.minibatches[0]
    assert part.layout is not None  # torch's backward of attention is wrong where mask and query differ in precision
    part.layout = replace(part.layout, mask=part.layout.mask.double())
    model.get_input_embeddings().padding_idx = None  # type: ignore[union-attr]  # a fresh model says the padding token
    with in_double():
        generator = torch.Generator().manual_seed(0)
        now = arm.learner.forwards(model, made.audited.rollout, part)
        found = gradients.slopes(arm, made.audited, part.rows_M, now)
        (gradient_P,) = gradients.vectors(weights, now, [found])
        assert gradient_P.dtype == torch.float64

        def loss_at(step_P: Tensor) -> float:
            with torch.no_grad():
                _step(weights, step_P)
                moved_now: Forward = arm.learner.forwards(model, made.audited.rollout, part)
                _step(weights, -step_P)
            return gradients.slopes(arm, made.audited, part.rows_M, moved_now).output.loss.item()

        for direction_P in (gradient_P, torch.randn(gradient_P.shape, generator=generator, dtype=torch.float64)):
            small_P = 1e-5 * direction_P / direction_P.norm()
            slope = (loss_at(small_P) - loss_at(-small_P)) / 2
            assert slope == pytest.approx((gradient_P @ small_P).item(), rel=1e-4)
    assert gradient_P.norm() > 1e-3


def _step(weights: Weights, step_P: Tensor) -> None:
    first = 0
    for weight in weights.ordered:
        weight.add_(step_P[first : first + weight.numel()].view_as(weight))
        first += weight.numel()


def test_a_flipped_sign_ranks_last_and_a_bonus_for_length_not_first(tmp_path: Path) -> None:
    cheats = {label: [f"{LOSS}._target_={__name__}.{cls.__name__}"] for label, cls in _CHEATS.items()}
    own = {"grpo": ["algorithm=grpo"]} | {label: ["algorithm=grpo", *words] for label, words in cheats.items()}
    made = scene(tmp_path, own, 16, "rollout.prompts=64", "task.max_operands=5", "task.modulus=6")
    found = gradients.collect(made.losses, made.audited, None, 8)
    rollout = rollouts.respond(made.trainer, made.prompts.reference, "reference", 0, 0)
    fresh = rollouts.freeze(made.trainer.learner, made.trainer, [made.truth], rollout)
    truth: Sums = gradients.collect([made.truth], fresh, None, 8)[losses.TRUTH, None]
    useful, snr = {}, {}
    for label in own:
        against = estimators.against_truth(found[label, None].paired(truth)[WHOLE])
        useful[label] = against["usefulness"]
        snr[label] = estimators.signal(found[label, None].by_block()[WHOLE])["snr"].value
    assert max(useful, key=lambda label: useful[label].value) == "grpo"
    assert min(useful, key=lambda label: useful[label].value) == "flipped"
    assert useful["grpo"].low > 0 > useful["flipped"].high
    assert snr["flipped"] == pytest.approx(snr["grpo"], rel=1e-3)
    assert snr["longer"] > snr["grpo"]  # by SNR alone it would be first


_CHEATS = {"flipped": Flipped, "longer": Longer}
