"""Models to build, and what their routers do."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe import conf
from steadymoe.bench.tasks.chain import Chain
from steadymoe.models import build
from steadymoe.models.routing import Routed, RouteRecorder

BUILT = [name for name in conf.names("model") if name != "pretrained"]
FAMILIES = ["micro", "deepseek_v3_micro", "gpt_oss_micro"]
TOKENS_BS = torch.tensor([[2, 3, 4, 5, 6], [7, 8, 9, 10, 11]])
RANDOM_TOKENS_BS = torch.randint(2, 12, (4, 8), generator=torch.Generator().manual_seed(0))
# Of ``TOKENS_BS`` and micro: tokens, layers with experts, routes of a token, experts.
N, L, K, E = 10, 3, 2, 4


def shipped(name: str) -> dict[str, Any]:
    numbers = conf.read("model", name)
    return numbers.get("model", numbers)["config"]  # flat sets its cold start too


def make(numbers: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A model with the tokenizer of the shipped task, whose vocabulary the documented sizes include."""
    task = Chain(min_operands=3, max_operands=8, modulus=10, spare_tokens=2)
    return build.build(numbers, task.tokenizer, seed, "cpu")


def count(model: PreTrainedModel, part: str = "") -> int:
    return sum(weight.numel() for name, weight in model.named_parameters() if part in name)


@torch.no_grad()
def routed(
    model: PreTrainedModel,
    forced_LNK: Tensor | None = None,
    gates_LNK: Tensor | None = None,
    heads_LHE: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Routed]:
    """The logits of ``TOKENS_BS``, and what the routers did; routes and gates forced, or routes predicted, or not."""
    with RouteRecorder(model, gates=True) as recorder:
        recorder.force(forced_LNK, gates_LNK)
        recorder.predict(heads_LHE)
        logits_BSV = model(TOKENS_BS, use_cache=False).logits
        return logits_BSV, recorder.take(TOKENS_BS.numel())


def own_routes(model: PreTrainedModel) -> Tensor:
    _, found = routed(model)
    assert torch.equal(found.live_LNK, found.executed_LNK)
    return found.live_LNK


def other_routes(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(L * N)]).view(L, N, K)


def forward_and_gradients(model: PreTrainedModel, experts: str) -> dict[str, Tensor]:
    """Logits, and the gradient of every weight for a sum of log-probabilities, by name."""
    model.set_experts_implementation(experts)
    model.zero_grad()
    logits_BSV = model(RANDOM_TOKENS_BS).logits
    logits_BSV.log_softmax(-1)[:, :-1].gather(-1, RANDOM_TOKENS_BS[:, 1:, None]).sum().backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"logits": logits_BSV.detach(), **found}
