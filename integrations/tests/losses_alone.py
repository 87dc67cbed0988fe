"""Every loss, advantage and correction that ships, called once with nothing but torch and PyYAML.

``test_builds.py`` calls ``numbers()`` beside the whole suite and runs this file where the losses alone are
installed; both must give the same. Shapes: B responses, T response positions, P prompts, G responses to each, L MoE
layers, K experts or most likely tokens.
"""

import importlib
import json
import pkgutil
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from steadymoe import algorithms, conf
from steadymoe.algorithms.objective import KL, Objective

P, G, T, L, K = 2, 3, 5, 2, 4
LENGTHS = [[5, 3, 4], [1, 5, 2]]


def numbers() -> dict[str, list[float]]:
    """What each gives on one random mini-batch: of a loss its value and gradient, else advantages or loss."""
    torch.set_num_threads(1)
    for module in pkgutil.iter_modules(algorithms.__path__):
        importlib.import_module(f"steadymoe.algorithms.{module.name}")
    return (
        {f"algorithm/{name}": of_loss(algorithms.load(name)) for name in algorithms.names(presets=True)}
        | {f"{name}'s advantage": of_advantage(read(name)["advantage"]) for name in shipped("algorithm")}
        | {name: of_advantage(read(name)) for name in shipped("advantage")}
        | {name: of_correction(read(name)) for name in shipped("correction")}
    )


def shipped(group: str) -> list[str]:
    """The configs of a group, as ``group/name``, sorted."""
    return [f"{group}/{name}" for name in conf.names(group)]


def read(name: str) -> dict[str, Any]:
    """The content of one config."""
    return conf.read(*name.split("/"))


def batch(state: Mapping[str, Tensor]) -> algorithms.Batch:
    """Every field that a loss may read. The policy has hardly moved on the first two responses, far on the others."""
    generator = torch.Generator().manual_seed(0)
    moved_B1 = torch.tensor([1e-5, 1e-4, 0.1, 0.3, 0.3, 0.3])[:, None]

    def near(values: Tensor) -> Tensor:
        return values + moved_B1.view(-1, *[1] * (values.dim() - 1)) * torch.randn(values.shape, generator=generator)

    old_BT = -1.5 - torch.rand(P * G, T, generator=generator)
    logits_BTK = torch.randn(P * G, T, K + 2, generator=generator)
    policy_BTK, old_BTK, rollout_BTK = (near(logits_BTK).log_softmax(-1)[..., : K + 1] for _ in range(3))
    return algorithms.Batch(
        logprobs_BT=near(old_BT).requires_grad_(),
        mask_BT=(torch.arange(T) < torch.tensor(LENGTHS).flatten()[:, None]).long(),
        advantages_BT=torch.tensor([1.0, -0.5, -0.5, 0.8, -1.2, 0.4])[:, None].expand(P * G, T),
        old_logprobs_BT=old_BT,
        rollout_logprobs_BT=near(old_BT),
        groups_B=torch.arange(P).repeat_interleave(G),
        reference_logprobs_BT=near(old_BT),
        router_log_ratio_LBTK=0.1 * torch.randn(L, P * G, T, K, generator=generator),
        top_logprobs_BTK=policy_BTK,
        old_top_logprobs_BTK=old_BTK,
        rollout_top_logprobs_BTK=rollout_BTK,
        state=state,
    )


def of_loss(loss: algorithms.PolicyLoss | Objective) -> list[float]:
    """Value and gradient on ``batch``. Raises AssertionError for a gradient that is 0 everywhere or not finite."""
    sampled = batch(loss.initial_state() if isinstance(loss, algorithms.PolicyLoss) else {})
    output = loss(sampled)
    (gradient_BT,) = torch.autograd.grad(output.loss, sampled.logprobs_BT)
    assert gradient_BT.isfinite().all(), loss
    assert gradient_BT.any(), loss
    return [output.loss.item(), *gradient_BT.flatten().tolist()]


def of_advantage(config: dict[str, Any]) -> list[float]:
    """Its advantages of six rewards."""
    rewards_PG = torch.tensor([[1.0, 0.0, 0.25], [0.0, 0.0, 1.0]])
    return algorithms.build(config)(rewards_PG, torch.tensor(LENGTHS)).flatten().tolist()


def of_correction(config: dict[str, Any]) -> list[float]:
    """GRPO under it, with a KL term."""
    return of_loss(Objective(loss=algorithms.load("grpo"), correction=algorithms.build(config), kl=KL(coefficient=0.1)))


if __name__ == "__main__":
    print(json.dumps({"version": version("steadymoe"), "conf": str(conf.ROOT), "numbers": numbers()}))
