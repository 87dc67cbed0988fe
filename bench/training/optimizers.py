"""Which optimizer steps which weight, from the section ``optimizer`` of a config.

AdamW, SGD and sign descent step every weight. Muon steps matrices, and stacks of them, such as a layer's experts;
AdamW steps the rest (``optimizer.adamw.weights``). The rate of routers is ``router_factor`` ×, that of experts
``expert_factor`` × that of other weights.

How Muon differs from other trainers':

1. Stacks are orthogonalized in fp32 and torch's matrices in bfloat16, 16 times as slow on CPUs without bfloat16.
2. An expert's gate and up projections are one matrix of its stack, and are orthogonalized as one.
3. GPT-OSS stores its experts transposed: ``adjust_lr_fn=original`` scales them by columns over rows.

Shapes: E experts, R rows, C columns.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Muon, Optimizer
from transformers import PreTrainedModel

from steadymoe.bench.schema import AdamWConfig, MomentumConfig, MuonConfig, OptimizerConfig
from steadymoe.models.build import is_expert
from steadymoe.models.routing import routers

Named = Sequence[tuple[str, Tensor]]


def build(model: PreTrainedModel, config: OptimizerConfig) -> Optimizer:
    """Return the optimizer of a run, for all weights of ``model``."""
    rate, decay = config.learning_rate, config.weight_decay

    def groups(named: Named) -> list[dict[str, Any]]:
        return _groups(model, named, rate, config.router_factor, config.expert_factor)

    named = list(model.named_parameters())
    match config:
        case AdamWConfig():
            numbers: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.epsilon}
            return adamw(model, rate, config.router_factor, config.expert_factor, weight_decay=decay, **numbers)
        case MomentumConfig(kind="sgd"):
            return SGD(groups(named), lr=rate, momentum=config.momentum, weight_decay=decay)
        case MomentumConfig():
            return SignDescent(groups(named), lr=rate, momentum=config.momentum, weight_decay=decay)
        case MuonConfig():
            return _muon(model, named, groups, config)
    raise TypeError(f"no optimizer has a {type(config).__name__}")


def adamw(
    model: PreTrainedModel, learning_rate: float, router_factor: float = 1.0, expert_factor: float = 1.0, **numbers: Any
) -> AdamW:
    """AdamW whose routers and experts learn at their factor × ``learning_rate``; ``numbers`` are AdamW's arguments."""
    groups = _groups(model, list(model.named_parameters()), learning_rate, router_factor, expert_factor)
    return AdamW(groups, lr=learning_rate, fused=True, **numbers)


def _groups(
    model: PreTrainedModel, named: Named, learning_rate: float, router_factor: float, expert_factor: float
) -> list[dict[str, Any]]:
    """Return ``named`` as parameter groups, one for each learning rate; that of most weights comes first."""
    factors = {id(weight): expert_factor for name, weight in named if is_expert(name)}
    factors |= {id(weight): router_factor for router in routers(model) for weight in router.parameters()}
    by_factor: dict[float, list[tuple[str, Tensor]]] = {1.0: []}
    for each in named:
        by_factor.setdefault(factors.get(id(each[1]), 1.0), []).append(each)
    return [{"params": its, "lr": factor * learning_rate} for factor, its in by_factor.items() if its]


def _muon(
    model: PreTrainedModel, named: Named, groups: Callable[[Named], list[dict[str, Any]]], config: MuonConfig
) -> Optimizer:
    matrices, stacks, others = _by_shape(model, named, config.adamw.weights)
    rate, decay, numbers = config.learning_rate, config.weight_decay, config.adamw
    rule: Any = {"lr": rate, "weight_decay": decay, "momentum": config.momentum, "nesterov": config.nesterov}
    rule |= {"ns_coefficients": config.ns_coefficients, "ns_steps": config.ns_steps, "eps": config.ns_epsilon}
    rule |= {"adjust_lr_fn": config.adjust_lr_fn}
    parts: list[Optimizer] = [Muon(groups(matrices), **rule)]
    if stacks:
        parts.append(StackedMuon(groups(stacks), **rule))
    betas = numbers.beta1, numbers.beta2
    parts.append(AdamW(groups(others), lr=rate, betas=betas, eps=numbers.epsilon, weight_decay=decay, fused=True))
    return ChainedOptimizer(parts)


def _by_shape(model: PreTrainedModel, named: Named, of_adamw: Collection[str]) -> tuple[Named, Named, Named]:
    """Return the matrices, the stacks of matrices, and what AdamW steps.

    ``of_adamw``: see ``schema.MuonConfig``. Vectors are all weights that are no matrix of two rows and columns or more,
    nor a stack of such: norms, biases (an expert's too), the filters of a convolution by channel.
    """
    modules: dict[str, list[Any]] = {
        "embeddings": [model.get_input_embeddings()],
        "head": [model.get_output_embeddings()],
        "routers": list(routers(model)),
    }
    chosen = {id(w) for key in of_adamw for module in modules.get(key, ()) for w in module.parameters()}

    def is_adamws(name: str, weight: Tensor) -> bool:
        is_vector = weight.ndim not in (2, 3) or 1 in weight.shape[-2:] or name.endswith("bias")
        return is_vector or id(weight) in chosen

    of_muon = [each for each in named if not is_adamws(*each)]
    matrices, stacks = ([each for each in of_muon if each[1].ndim == dimensions] for dimensions in (2, 3))
    return matrices, stacks, [each for each in named if is_adamws(*each)]


class ChainedOptimizer(Optimizer):
    """Several optimizers, each with weights of its own, as one (Megatron-LM's ``ChainedOptimizer``).

    It shares its parameter groups and its state with them, so ``checkpoint.restore_training`` sets the state in place.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self._optimizers = optimizers
        for each in optimizers:
            each.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every weight by its own optimizer."""
        for each in self._optimizers:
            each.step()


class SignDescent(Optimizer):
    """Sign descent with momentum (Signum, 1802.04434, algorithm 2): m ← β·m + (1 − β)·g, θ ← θ − η·(sign(m) + λ·θ).

    With β = 0 it is prime-rl's ``sign_sgd`` (#2148). Every weight moves by η, an expert without tokens too, while its
    average is not 0.
    """

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    average = _average(self, weight, group["momentum"])
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(average.sign(), alpha=-group["lr"])


class StackedMuon(Optimizer):
    """``torch.optim.Muon`` for stacks of matrices, (E, R, C): each matrix steps as if it were a weight of its own."""

    def __init__(self, params: Any, **numbers: Any) -> None:
        super().__init__(params, numbers)  # torch's arguments, all of them

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for weight_ERC in group["params"]:
                if weight_ERC.grad is None:
                    continue
                average_ERC = _average(self, weight_ERC, group["momentum"])
                update_ERC = weight_ERC.grad.lerp(average_ERC, group["momentum"]) if group["nesterov"] else average_ERC
                update_ERC = orthogonalized(update_ERC, group["ns_coefficients"], group["ns_steps"], group["eps"])
                rows, columns = weight_ERC.shape[1:]
                is_rms = group["adjust_lr_fn"] == "match_rms_adamw"
                adjusted = 0.2 * math.sqrt(max(rows, columns)) if is_rms else math.sqrt(max(1, rows / columns))
                weight_ERC.mul_(1 - group["lr"] * group["weight_decay"])
                weight_ERC.add_(update_ERC, alpha=-adjusted * group["lr"])


def orthogonalized(matrices_ERC: Tensor, coefficients: Sequence[float], steps: int, epsilon: float) -> Tensor:
    """Return U·S·Vᵀ with singular values S near 1 for each matrix M = U·Σ·Vᵀ, (E, R, C).

    Newton–Schulz (Jordan, 2024, https://kellerjordan.github.io/posts/muon): X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ,
    from X = M / ‖M‖; ``coefficients`` are a, b and c.
    """
    a, b, c = coefficients
    is_tall = matrices_ERC.shape[1] > matrices_ERC.shape[2]
    x = matrices_ERC.mT if is_tall else matrices_ERC
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=epsilon)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _average(optimizer: Optimizer, weight: Tensor, momentum: float) -> Tensor:
    """Return the moving average of a weight's gradient, with the gradient of this step in it."""
    state = optimizer.state[weight]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    return state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
