"""Each optimizer against its equation, torch's own, and a stopped run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import assert_resumes, gradients, trainer, updated
from torch import Tensor
from torch.testing import assert_close

from steadymoe.bench.training import optimizers
from steadymoe.bench.training.optimizers import SignDescent, StackedMuon, orthogonalized
from steadymoe.models import build

JORDAN = (3.4445, -4.775, 2.0315)
RULE: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "eps": 1e-7}
RULE |= {"ns_coefficients": JORDAN, "ns_steps": 5}
SHAPES = [(3, 8, 4), (3, 4, 8), (2, 6, 6)]


def stepped(ours: torch.optim.Optimizer, weight: Tensor, steps: int, theirs: Any = None, alone: Any = ()) -> None:
    """Take steps on gradients drawn anew each time, ``theirs`` on the same ones, of which each matrix gets its own."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape, generator=generator)
        for matrix, gradient in zip(alone, weight.grad, strict=False):
            matrix.grad = gradient.clone()
        for optimizer in (ours, theirs) if theirs else (ours,):
            optimizer.step()


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def by_singular_values(matrix: Tensor, steps: int) -> Tensor:
    """Newton–Schulz as what it does to singular values: s ← a·s + b·s³ + c·s⁵, in double precision."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = JORDAN[0] * s + JORDAN[1] * s**3 + JORDAN[2] * s**5
    return u @ torch.diag_embed(s) @ v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 5])
def test_newton_schulz_changes_only_singular_values(shape: tuple[int, ...], steps: int) -> None:
    matrices = drawn(*shape)
    found = orthogonalized(matrices, JORDAN, steps, 1e-7)
    assert_close(found.double(), torch.stack([by_singular_values(m, steps) for m in matrices]), atol=1e-5, rtol=1e-5)


def test_zero_matrix_stays_zero() -> None:
    assert not orthogonalized(torch.zeros(2, 3, 4), JORDAN, 5, 1e-7).any()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_stacked_expert_steps_like_a_matrix_under_torchs_muon(shape: tuple[int, ...], adjust: str) -> None:
    stack = drawn(*shape)
    alone, rule = [matrix.clone() for matrix in stack], RULE | {"adjust_lr_fn": adjust}
    stepped(StackedMuon([stack], **rule), stack, 3, torch.optim.Muon(alone, **rule), alone)
    moved = stack - drawn(*shape)
    assert moved.abs().max() > 1e-3
    # torch orthogonalizes in bfloat16, which has 8 bits
    assert_close(stack, torch.stack(alone), atol=0.05 * moved.abs().max().item(), rtol=0)


def test_stacked_momentum_matches_torchs_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no Newton–Schulz step in either, what is left is average, look-ahead, decay and the step's length."""
    stack = drawn(3, 8, 4)
    alone = [matrix.clone() for matrix in stack]

    def normalized(matrix: Tensor, _coefficients: Any, _steps: int, eps: float) -> Tensor:
        return matrix / matrix.norm().clamp(min=eps)

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", normalized)
    rule = RULE | {"ns_steps": 0, "adjust_lr_fn": "match_rms_adamw"}
    stepped(StackedMuon([stack], **rule), stack, 5, torch.optim.Muon(alone, **rule), alone)
    assert_close(stack, torch.stack(alone), atol=1e-6, rtol=1e-6)


def test_model_matrices_step_as_under_torchs_muon(tmp_path: Path) -> None:
    made = trainer(tmp_path, "optimizer=muon", "optimizer.learning_rate=1e-2", "updates_per_rollout=2")
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = made.model.get_parameter(name)
    alone = weight.detach().clone().requires_grad_()
    numbers = made.config.optimizer
    rule = RULE | {"lr": 1e-2, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    assert (numbers.momentum, numbers.ns_coefficients, numbers.ns_steps) == (0.95, JORDAN, 5)  # type: ignore[union-attr]
    found = gradients(made)
    updated(made, updates=1)
    alone.grad = found[0][name]
    torch.optim.Muon([alone], **rule).step()
    assert_close(weight, alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sign_descent_moves_every_weight_by_the_rate(momentum: float) -> None:
    weight, average = drawn(4, 5), torch.zeros(4, 5)
    expected, generator = weight.clone(), torch.Generator().manual_seed(1)
    stepped(SignDescent([weight], lr=0.01, momentum=momentum, weight_decay=0.1), weight, 3)
    for _ in range(3):
        gradient = torch.randn(4, 5, generator=generator)
        average = momentum * average + (1 - momentum) * gradient
        expected = expected - 0.01 * (average.sign() + 0.1 * expected)
    assert_close(weight, expected, atol=1e-6, rtol=1e-6)


def test_first_sgd_step_is_the_rate_times_the_gradient(tmp_path: Path) -> None:
    made = trainer(tmp_path, "optimizer=sgd", "optimizer.learning_rate=0.5", "updates_per_rollout=2")
    before = {name: weight.detach().clone() for name, weight in made.model.named_parameters()}
    found = gradients(made)
    updated(made, updates=1)
    moved = [(before[name] - weight, 0.5 * found[0][name]) for name, weight in made.model.named_parameters()]
    assert max(step.abs().max() for step, _ in moved) > 0
    for step, expected in moved:
        assert_close(step, expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(("words", "of_experts"), [([], 0.01), (["optimizer.expert_factor=4"], 0.04)], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd", "sign"])
def test_experts_and_routers_each_have_their_rate(
    tmp_path: Path, kind: str, words: list[str], of_experts: float
) -> None:
    words = ["optimizer.learning_rate=0.01", "optimizer.router_factor=0.25", *words]
    made = trainer(tmp_path, f"optimizer={kind}", *words)
    rates = {id(w): group["lr"] for group in made.learner.optimizer.param_groups for w in group["params"]}
    stacked = {name for name, weight in made.model.named_parameters() if weight.ndim == 3}
    assert stacked == {name for name, _ in made.model.named_parameters() if build.is_expert(name)}
    for name, weight in made.model.named_parameters():
        assert rates[id(weight)] == (of_experts if name in stacked else 0.0025 if "mlp.gate." in name else 0.01), name
    assert made.learner.learning_rate == 0.01


@pytest.mark.parametrize(
    "of_adamw", [["vectors"], ["vectors", "routers"], ["embeddings", "head", "vectors"]], ids=" ".join
)
def test_muon_and_adamw_partition_the_weights(tmp_path: Path, of_adamw: list[str]) -> None:
    made = trainer(tmp_path, "optimizer=muon", f"optimizer.adamw.weights=[{','.join(of_adamw)}]")
    model, named = made.model, list(made.model.named_parameters())
    matrices, stacks, others = optimizers._by_shape(model, named, of_adamw)
    parts = [{name for name, _ in part} for part in (matrices, stacks, others)]
    assert sum(map(len, parts)) == len(named)
    assert set.union(*parts) == {name for name, _ in named}
    assert {weight.ndim for _, weight in stacks} == {3}
    is_expert = {name for name, weight in named if weight.ndim == 3}
    assert parts[1] == is_expert
    routing = {name for name, _ in named if name.endswith("mlp.gate.weight")}
    assert routing
    assert routing <= (parts[2] if "routers" in of_adamw else parts[0])
    assert ("model.embed_tokens.weight" in parts[2]) == ("embeddings" in of_adamw)
    assert {name for name, weight in named if weight.ndim == 1} <= parts[2]


@pytest.mark.parametrize("words", ["muon", "sgd", "sign", "sign optimizer.momentum=0"])
def test_stopped_run_resumes_bit_for_bit(tmp_path: Path, words: str) -> None:
    assert_resumes(tmp_path, 4, "updates=8", *f"optimizer={words}".split())
