"""MegaBlocks computes what ``eager`` computes, and trains: ``make test-megablocks``.

With TRITON_INTERPRET=1 on the CPU, in Triton's interpreter; otherwise on a GPU. Whole models are compared in fp32 on
the CPU. In bf16 single layers of experts are compared, on their inputs in one forward of their model: between whole
models a near tie of a router may fall differently, with ``grouped_mm`` as well.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import FAMILIES, RANDOM_TOKENS_BS, forward_and_gradients, make, shipped
from small_runs import PROPORTIONAL, planned
from torch import Tensor, nn
from transformers import PreTrainedModel

from steadymoe.bench.runs import execute, record, run_folder
from steadymoe.models import megablocks

pytestmark = pytest.mark.megablocks

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}


@pytest.fixture(scope="module", autouse=True)
def available() -> None:
    """Register the back end, or fail with the line that says why it cannot run."""
    why = megablocks.reason_against(DEVICE)
    if why is not None:
        pytest.fail(why)
    megablocks.register()


def differences(ours: dict[str, Tensor], eager: dict[str, Tensor]) -> dict[str, float]:
    """‖ours − eager‖ / ‖eager‖ of each tensor; infinite where only one of the two is zero or finite."""
    assert ours.keys() == eager.keys()
    return {
        key: 0.0
        if torch.equal(ours[key], eager[key])
        else ((ours[key] - eager[key]).float().norm() / eager[key].float().norm()).nan_to_num(float("inf")).item()
        for key in eager
    }


def layers(model: PreTrainedModel) -> list[tuple[nn.Module, Tensor, Tensor, Tensor]]:
    """Every layer's experts, with the hidden states, experts and gate weights that one forward in bf16 gave them."""
    seen: list[Any] = []
    found = [module for module in model.modules() if hasattr(module, "down_proj") and hasattr(module, "has_gate")]
    hooks = [
        each.register_forward_pre_hook(lambda each, given: seen.append((each, *(part.detach() for part in given))))
        for each in found
    ]
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        model(RANDOM_TOKENS_BS.to(DEVICE))
    for hook in hooks:
        hook.remove()
    return seen


def through(
    experts: nn.Module, hidden_NH: Tensor, indices_NK: Tensor, weights_NK: Tensor, implementation: str, precision: str
) -> dict[str, Tensor]:
    """The output of one layer's experts, and its gradients to hidden states, gate weights and every parameter."""
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    hidden_NH, weights_NK = hidden_NH.clone().requires_grad_(), weights_NK.clone().requires_grad_()
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=precision == "bf16"):
        out_NH = experts(hidden_NH, indices_NK, weights_NK)
    pull_NH = torch.randn(out_NH.shape, generator=torch.Generator().manual_seed(1)).to(out_NH)
    out_NH.backward(pull_NH)
    given = {"forward": out_NH.detach(), "hidden_states": hidden_NH.grad, "top_k_weights": weights_NK.grad}
    return given | {name: weight.grad for name, weight in experts.named_parameters()}


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is compared in bf16")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_agrees_with_eager_in_forward_and_all_gradients(name: str) -> None:
    model = make(shipped(name))
    ours, eager = (forward_and_gradients(model, implementation) for implementation in (megablocks.NAME, "eager"))
    found = differences(ours, eager)
    assert {key for key in found if key.endswith("down_proj")}
    assert max(found.values()) <= TOLERANCES["fp32"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_of_experts_agrees_with_eager_in_bf16(name: str) -> None:
    given = layers(make(shipped(name)).to(DEVICE))
    assert len(given) >= 3
    for each in given:
        ours, eager = (through(*each, implementation, "bf16") for implementation in (megablocks.NAME, "eager"))
        assert max(differences(ours, eager).values()) <= TOLERANCES["bf16"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chosen", [(1, 4), (7, 0)])
def test_experts_without_tokens_get_zero_gradient(name: str, chosen: tuple[int, int]) -> None:
    experts, hidden_NH, indices_NK, weights_NK = layers(make(shipped(name)).to(DEVICE))[0]
    indices_NK = torch.tensor(chosen, device=DEVICE).expand_as(indices_NK).contiguous()
    ours, eager = (
        through(experts, hidden_NH, indices_NK, weights_NK, implementation, "bf16")
        for implementation in (megablocks.NAME, "eager")
    )
    assert max(differences(ours, eager).values()) <= TOLERANCES["bf16"]
    idle = [expert for expert in range(8) if expert not in chosen]
    for key, _ in experts.named_parameters():
        assert (ours[key][idle] == 0).all(), key
        assert (ours[key][list(chosen)] != 0).any(), key


def test_run_matches_the_default_back_end_and_repeats_bitwise(tmp_path: Path) -> None:
    tiny = [f"device={DEVICE}", *PROPORTIONAL, "algorithm.entropy_bonus=1"]  # random responses are all worth nothing
    tiny += ["task=chain", "task.max_operands=2", "updates=2", "minibatch_prompts=1", "rollout.responses=2"]
    tiny += [
        "evaluation.prompts=1",
        "cold_start.check_every=1",
        "cold_start.batch_size=2",
        "cold_start.check_prompts=1",
    ]

    def updates(folder: str, implementation: str, *words: str) -> Any:
        made = planned(tmp_path / folder, *tiny, f"experts={implementation}", *words)
        assert execute.execute(made) == "finished", (run_folder.read_run(made.folder) or {})["error"]
        facts = run_folder.read_run(made.folder) or {}
        assert ("megablocks" in facts["versions"]) == (implementation == megablocks.NAME)
        return record.read_table(made.folder, "updates")[["loss", "grad_norm", "entropy", "router_margin"]]

    usual = updates("a", "grouped_mm")
    (cold_start,) = (tmp_path / "a" / "cold_starts").rglob("*.safetensors")  # one for both back ends
    ours, again = (updates(folder, megablocks.NAME, f"cold_start.path={cold_start}") for folder in ("b", "c"))
    assert (usual["grad_norm"] > 0).all()
    assert ours.equals(again)
    if DEVICE == "cpu":
        assert len(usual) == 2
        assert ours.sub(usual).abs().to_numpy().max() < 1e-4
