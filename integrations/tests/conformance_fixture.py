"""The conformance fixture, and the suite's own tensors for it.

``python integrations/tests/conformance_fixture.py FOLDER`` rebuilds it: weights, rollouts, routes and gradient.

Shapes: B responses, T response positions, L MoE layers, E experts, H hidden.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from steadymoe.bench.support.seeding import torch_generator
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.forward import Forward, Sequences, forward
from steadymoe.bench.training.sampling import roll_out
from steadymoe.integrations.rollouts.conformance import EXPECTED, PADDING, ROLLOUTS
from steadymoe.models import build
from steadymoe.models.routing import routers
from steadymoe.models.selection import NO_ROUTE

EXPERTS, TOP_K = 4, 2
MODEL = {
    "_target_": "transformers.Qwen3MoeConfig",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "router_scale": 3.0,
    "initializer_range": 0.3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
PROMPTS, RESPONSES, SEED = ("3+3+1*0=", "5*3=", "1-4*4=", "3-0-1+2+2="), 2, 24
# No router may be this close to another choice, in probability: rounding could then decide a route.
_MIN_MARGIN = 1e-3


def made() -> tuple[PreTrainedModel, dict[str, Tensor], dict[str, str], dict[str, Tensor]]:
    """Return the model, its rollouts with their metadata, and what is expected of its routers.

    The sampler is one whose routers take the next expert in place of each: its routes are another's, and
    its log-probabilities are computed under them. In one row a token that is fed has no route.
    """
    task = Chain(min_operands=2, max_operands=5, modulus=6, spare_tokens=2)
    model = build.build(MODEL, task.tokenizer, SEED, "cpu")
    rollout = roll_out(model, task, PROMPTS, RESPONSES, torch_generator(SEED, "conformance"))
    sequences = rollout.sequences
    rewards_B = torch.tensor([1.0, 0.0]).repeat(len(PROMPTS))
    with torch.no_grad():
        old = forward(model, sequences, "fp32")
    assert old.routes_LBFK is not None  # of a model with routers
    _check_fit(sequences, old)
    other_LBFK = torch.where(old.routes_LBFK == NO_ROUTE, NO_ROUTE, (old.routes_LBFK + 1) % EXPERTS)
    row = int(sequences.response_mask_BT.sum(-1).argmax())
    other_LBFK[:, row, -sequences.response_width + 1] = NO_ROUTE
    with torch.no_grad():
        sampled = forward(model, sequences, "fp32", forced_LBFK=other_LBFK)
    rollouts = {
        "tokens_BS": (sequences.tokens_BS * sequences.mask_BS).int(),
        "mask_BS": sequences.mask_BS.byte(),
        "groups_B": (torch.arange(len(rewards_B)) // RESPONSES).int(),
        "rewards_B": rewards_B,
        "advantages_BT": (rewards_B - 0.5)[:, None] * sequences.response_mask_BT,
        "rollout_logprobs_BT": sampled.logprobs_BT * sequences.response_mask_BT,
        "old_logprobs_BT": old.logprobs_BT * sequences.response_mask_BT,
    }
    about = {
        "made_by": "integrations/tests/conformance_fixture.py",
        "model": "a random Qwen3-MoE of two layers",
        "task": "chain",
        "engine": "the next expert in place of each",
    }
    facts = {"response_width": sequences.response_width, "about": about}
    routes = {"old_routes_LBFK": old.routes_LBFK.short(), "rollout_routes_LBFK": other_LBFK.short()}
    gradient_LEH = router_gradient(model, sequences, rollouts, old.routes_LBFK)
    return model, rollouts, {"steadymoe_bundle": json.dumps(facts)}, routes | {"router_gradient_LEH": gradient_LEH}


def _check_fit(sequences: Sequences, old: Forward) -> None:
    """Raise RuntimeError unless the rollout has what the lines need, and no route that rounding could decide."""
    prompts = sequences.mask_BS[:, : -sequences.response_width]
    ordered = torch.stack(
        [logits_NE.softmax(-1).sort(-1, descending=True).values for logits_NE in old.router_logits_LNE]
    )
    margin_LN = (ordered[..., TOP_K - 1] - ordered[..., TOP_K])[:, sequences.route_mask_BF.flatten()]
    if not margin_LN.min() > _MIN_MARGIN:
        raise RuntimeError(f"a router's choice is as near as {float(margin_LN.min()):.1e}; take another seed")
    for what, lengths in (("prompts", prompts.sum(-1)), ("responses", sequences.response_mask_BT.sum(-1))):
        if len(lengths.unique()) < 2:
            raise RuntimeError(f"all {what} have one length, so nothing is padded; take another seed")


def tensors(model: PreTrainedModel, sequences: Sequences, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute ``conformance.TENSORS`` with this suite's own forward; ``expected`` are all tensors of the fixture."""
    width = sequences.response_width
    wider = Sequences(pad(sequences.tokens_BS, PADDING), pad(sequences.mask_BS, PADDING), width + PADDING[1])
    now = forward(model, sequences, "fp32")
    with torch.no_grad():
        old = forward(model, sequences, "fp32")
        replayed = forward(model, sequences, "fp32", forced_LBFK=old.routes_LBFK)
        forced = forward(model, sequences, "fp32", forced_LBFK=expected["rollout_routes_LBFK"])
        padded = forward(model, wider, "fp32")
    assert old.routes_LBFK is not None  # of a model with routers
    return {
        "logprobs_BT": now.logprobs_BT.detach(),
        "old_logprobs_BT": old.logprobs_BT,
        "routes_LBFK": old.routes_LBFK,
        "replayed_logprobs_BT": replayed.logprobs_BT,
        "forced_logprobs_BT": forced.logprobs_BT,
        "padded_logprobs_BT": padded.logprobs_BT[:, :width].contiguous(),
        "router_gradient_LEH": router_gradient(model, sequences, expected, expected["old_routes_LBFK"]),
    }


def router_gradient(
    model: PreTrainedModel, sequences: Sequences, rollouts: Mapping[str, Tensor], forced_LBFK: Tensor
) -> Tensor:
    """Return the gradient of −Σ A log π / Σ mask by the routers' weights under replayed routes, (L, E, H)."""
    replayed = forward(model, sequences, "fp32", forced_LBFK=forced_LBFK)
    mask_BT = sequences.response_mask_BT
    loss = -(rollouts["advantages_BT"] * replayed.logprobs_BT * mask_BT).sum() / mask_BT.sum()
    weights = [router.get_parameter("weight") for router in routers(model)]
    slopes = torch.autograd.grad(loss, weights, allow_unused=True)
    return torch.stack([torch.zeros_like(w) if g is None else g for w, g in zip(weights, slopes, strict=True)])


def write(folder: Path) -> None:
    """Write the fixture. Raises FileExistsError if there is something at ``folder``."""
    folder.mkdir()
    model, rollouts, metadata, expected = made()
    save_file(rollouts, folder / ROLLOUTS, metadata=metadata)
    model.save_pretrained(folder / "model")
    (folder / "model" / "generation_config.json").unlink(missing_ok=True)
    save_file(expected, folder / EXPECTED)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
