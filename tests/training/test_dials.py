"""The dials of routers: scale, learning rate, auxiliary losses of the cold start, noise relative to the logits."""

from pathlib import Path

import pytest
import torch
from small_runs import planned
from torch.testing import assert_close
from transformers import PreTrainedModel

from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training import cold_start
from steadymoe.bench.training.forward import Sequences, forward, router_losses
from steadymoe.models import build
from steadymoe.models.engine import RouterNoise, Sampler
from steadymoe.models.routing import RouteRecorder, load_balancing_loss, routers, z_loss


def test_cold_start_adds_router_losses_with_its_coefficients(task: Chain, tmp_path: Path) -> None:
    one = ["max_updates=1", "check_every=1", "check_prompts=2", "accuracy_low=0.99", "accuracy_high=1.0"]

    def trained(*words: str) -> list[torch.Tensor]:
        """The routers' weights after one update."""
        words = (*(f"cold_start.{word}" for word in (*one, *words)), "optimizer.learning_rate=1e-2")
        config = planned(tmp_path, *words).config
        model = build.build(config.model["config"], task.tokenizer, 0, "cpu")
        with pytest.raises(cold_start.ColdStartError):
            cold_start.train(model, task, config)
        return [router.get_parameter("weight") for router in routers(model)]

    plain, even, small = trained(), trained("aux_loss=1.0"), trained("z_loss=1.0")
    assert not torch.equal(plain[0], even[0])
    assert not torch.equal(plain[0], small[0])
    assert not torch.equal(even[0], small[0])
    assert not torch.equal(even[0], trained("aux_loss=1.0", "aux_loss_per_layer=true")[0])


def test_router_losses_are_weighted_by_their_coefficients(model: PreTrainedModel) -> None:
    tokens_BS = torch.arange(2, 14).view(2, 6)
    sequences = Sequences(tokens_BS, torch.ones_like(tokens_BS), 3)
    now = forward(model, sequences, "fp32")
    mask_N = sequences.route_mask_BF.flatten()
    balance = load_balancing_loss(now.router_logits_LNE, now.executed_LBFK.flatten(1, 2), mask_N)
    expected = 0.3 * balance + 0.2 * z_loss(now.router_logits_LNE, mask_N)
    assert_close(router_losses(now, sequences, 0.3, 0.2), expected)
    assert router_losses(now, sequences, 0.0, 0.0) == 0
    per_layer = load_balancing_loss(now.router_logits_LNE, now.executed_LBFK.flatten(1, 2), mask_N, per_layer=True)
    assert_close(router_losses(now, sequences, 0.3, 0.0, per_layer=True), 0.3 * per_layer)


def test_relative_noise_follows_the_spread_of_each_tokens_logits(model: PreTrainedModel) -> None:
    def moved(engine: RouterNoise, scale: float) -> torch.Tensor:
        """By how much the engine moves the logits of a model whose routers are ``scale`` times as large."""
        tokens, found = torch.arange(2, 10)[None], []
        with torch.no_grad():
            for router in routers(model):
                router.get_parameter("weight").mul_(scale)
            for sampler in (model, Sampler(engine, model).model(torch.Generator().manual_seed(0))):
                with RouteRecorder(sampler) as recorder:
                    sampler(input_ids=tokens)
                    routed = recorder.take(tokens.numel())
                    found.append(routed.logits_LNE[0])
            for router in routers(model):
                router.get_parameter("weight").div_(scale)
        return (found[1] - found[0]) / scale

    # The first layer's inputs do not depend on routers, so that its logits scale exactly.
    assert_close(
        moved(RouterNoise(strength=0.5, relative=True), 1.0), moved(RouterNoise(strength=0.5, relative=True), 64.0)
    )
    assert_close(moved(RouterNoise(strength=0.5), 1.0), 64.0 * moved(RouterNoise(strength=0.5), 64.0))
