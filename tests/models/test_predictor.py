"""PR²: predicted routes by hand, the predictors' loss as a loop over scalars, and what they learn in a run.

Shapes: L MoE layers, B sequences, T response positions, N tokens, K experts a token, E experts, H hidden.
"""

import math
from pathlib import Path

import torch
from small_models import K, L, own_routes, routed
from small_runs import FOUR_UPDATES, advantages, begun, trainer
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from steadymoe.models.predictor import RoutePredictor
from steadymoe.models.routing import routers


def random_heads(model: PreTrainedModel, size: float = 0.3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [size * torch.randn(head.shape, generator=generator) for head in RoutePredictor(model).heads_LHE]


def test_experts_use_predicted_logits_and_gates_the_original_ones(model: PreTrainedModel) -> None:
    heads_LHE = random_heads(model)
    gates: list[Tensor] = []
    handles = [r.register_forward_hook(lambda router, args, output: gates.append(output[1])) for r in routers(model)]
    _, found = routed(model, heads_LHE=heads_LHE)
    for handle in handles:
        handle.remove()
    assert not torch.equal(found.executed_LNK, found.live_LNK)
    layers = zip(routers(model), heads_LHE, gates, strict=True)
    for layer, (router, head_HE, weights_NK) in enumerate(layers):
        inputs_NH, logits_NE = found.inputs_LNH[layer], found.logits_LNE[layer]
        assert_close(logits_NE, inputs_NH @ router.get_parameter("weight").T)
        moved_NE = logits_NE + inputs_NH @ head_HE
        assert torch.equal(found.executed_LNK[layer], moved_NE.topk(K).indices.to(torch.int16))
        assert torch.equal(found.live_LNK[layer], logits_NE.topk(K).indices.to(torch.int16))
        chosen_NK = logits_NE.softmax(-1).gather(-1, found.executed_LNK[layer].long())
        assert_close(weights_NK, chosen_NK / chosen_NK.sum(-1, keepdim=True))


def test_loss_matches_the_paper_and_trains_only_the_heads(model: PreTrainedModel) -> None:
    predictor = RoutePredictor(model)
    with torch.no_grad():
        for head, values in zip(predictor.heads_LHE, random_heads(model), strict=True):
            head.copy_(values)
    generator = torch.Generator().manual_seed(1)
    hidden, experts = predictor.heads_LHE[0].shape
    inputs = torch.randn(L, 2, 3, hidden, generator=generator, requires_grad=True)
    old = torch.randn(L, 2, 3, experts, generator=generator).log_softmax(-1)
    now = torch.randn(L, 2, 3, experts, generator=generator).log_softmax(-1).requires_grad_()
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 0]])
    total = 0.0
    for layer in range(L):
        tokens = []
        for b, t in mask_BT.nonzero().tolist():
            moved = [
                float(old[layer, b, t, e]) + float((inputs[layer, b, t] @ predictor.heads_LHE[layer][:, e]).detach())
                for e in range(experts)
            ]
            normaliser = math.log(sum(math.exp(each) for each in moved))
            current = now[layer, b, t].tolist()
            tokens.append(sum(math.exp(p) * (p - (m - normaliser)) for p, m in zip(current, moved, strict=True)))
        total += sum(tokens) / len(tokens)
    loss = predictor(inputs, old, now, mask_BT)
    assert_close(loss.item(), total, atol=1e-4, rtol=1e-4)
    loss.backward()
    assert now.grad is None
    assert all(head.grad is not None and head.grad.abs().max() > 0 for head in predictor.heads_LHE)


def test_predicted_experts_run_in_the_old_policy_and_every_update(tmp_path: Path) -> None:
    made = trainer(tmp_path, "routing=pr2", "optimizer.learning_rate=1e-2", *FOUR_UPDATES)
    heads = list(made.learner.predictor.heads_LHE)
    for step in (1, 2):
        rollout, minibatches, old = begun(made, step)
        assert torch.equal(old.executed_LBFK, old.routes_LBFK) == (step == 1), "at first the heads are zero"
        assert made.learner.replayed(rollout, old, ()) is old.executed_LBFK
        before = [head.detach().clone() for head in heads]
        for number, rows_M in enumerate(minibatches):
            measured = made.learner.update(rollout, old, advantages(rollout), rows_M, first=number == 0)
            assert ("route_prediction_kl" in measured.overall) == (number > 0)
            assert all(torch.equal(a, b) for a, b in zip(heads, before, strict=True)) == (number == 0)
            if number == 0:
                assert measured.overall["token_ratio_max"] == 1, "the old policy ran the same experts"
            assert (measured.overall["replay_expert_disagreement"] > 0) == (number > 0 or step > 1)
    assert len(own_routes(made.model)) == len(heads), "nothing of the predictors stays in the model"
