"""Prompts that are fed once, and padding that is not fed, change nothing but rounding."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import PreTrainedModel

from steadymoe.bench.runs import compose
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training import packing
from steadymoe.bench.training.forward import Forward, Sequences, forward, sharing_refusal
from steadymoe.models import build
from steadymoe.models.selection import NO_ROUTE

WIDTH = 5
# The lengths of the responses to three prompts: some groups are smaller than others, some responses shorter.
LENGTHS = [[4, 2, 3], [1, 4], [2]]
PROMPTS = [[0, 0, 5, 6, 7], [0, 3, 4, 5, 8], [0, 0, 0, 9, 3]]


def sequences(response_width: int = 6) -> tuple[Sequences, torch.Tensor]:
    """Six sequences, padded on both sides by more than is needed, and their prompts, in no order."""
    generator = torch.Generator().manual_seed(0)
    tokens, groups = [], []
    for prompt, lengths in enumerate(LENGTHS):
        for length in lengths:
            response = torch.randint(3, 12, (length,), generator=generator).tolist()
            tokens.append(PROMPTS[prompt] + response + [0] * (response_width - length))
            groups.append(prompt)
    order = torch.tensor([4, 0, 2, 5, 1, 3])
    tokens_BS = torch.tensor(tokens)[order]
    return Sequences(tokens_BS, (tokens_BS > 0).long(), response_width), torch.tensor(groups)[order] + 7


def made(name: str, task: Chain) -> PreTrainedModel:
    return build.build(compose.plan([f"model={name}"])[0].config.model["config"], task.tokenizer, 0, "cpu")


def passed(
    net: PreTrainedModel, said: Sequences, fed: packing.Layout | None, **more: Any
) -> tuple[Forward, torch.Tensor]:
    """A forward, and the gradient of a sum over the response tokens that weighs each differently."""
    net.zero_grad()
    found = forward(net, said, "fp32", layout=fed, **more)
    mask_BT = said.response_mask_BT
    weights_BT = torch.linspace(-1, 2, mask_BT.numel()).view(mask_BT.shape)
    (found.logprobs_BT * weights_BT * mask_BT).sum().backward()
    return found, torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def layouts(said: Sequences, groups_B: torch.Tensor) -> dict[str, packing.Layout]:
    numbers = said.tokens_BS, said.mask_BS, said.response_width
    return {
        "trimmed": packing.separate(*numbers, trim=True),
        "shared": packing.shared(*numbers, groups_B),
        "shared and trimmed": packing.shared(*numbers, groups_B, trim=True),
    }


FULL = ["micro", "olmoe_micro", "deepseek_v3_micro", "mixtral_micro", "qwen2_moe_micro", "granitemoe_micro"]
FULL += ["glm4_moe_micro", "dense_micro"]


@pytest.mark.parametrize(
    ("name", "how"), [("micro", "trimmed"), ("micro", "shared"), *((name, "shared and trimmed") for name in FULL)]
)
def test_every_family_has_the_same_outputs_and_gradients(name: str, how: str, task: Chain) -> None:
    net = made(name, task)
    assert sharing_refusal(net) is None
    said, groups_B = sequences()
    plain, expected = passed(net, said, None)
    found, gradient = passed(net, said, layouts(said, groups_B)[how])
    mask_BT = said.response_mask_BT.bool()
    assert_close(found.logprobs_BT[mask_BT], plain.logprobs_BT[mask_BT], rtol=0, atol=5e-6)
    assert_close(found.entropy_BT[mask_BT], plain.entropy_BT[mask_BT], rtol=0, atol=5e-6)
    assert (gradient - expected).norm() / expected.norm() < 5e-6
    if plain.routes_LBFK is None or found.routes_LBFK is None:
        return
    assert (found.routes_LBFK == plain.routes_LBFK).all()
    assert (found.routes_LBFK[:, ~said.route_mask_BF] == NO_ROUTE).all()
    assert_close(found.router_logprobs_LBTE[:, mask_BT], plain.router_logprobs_LBTE[:, mask_BT], rtol=0, atol=5e-5)
    assert_close(found.router_inputs_LBTH[:, mask_BT], plain.router_inputs_LBTH[:, mask_BT], rtol=0, atol=5e-5)


def test_layers_without_full_attention_are_refused(task: Chain) -> None:
    for name in ("gpt_oss_micro", "qwen3_next_micro"):
        assert "layers of" in str(sharing_refusal(made(name, task)))
    net = made("micro", task)
    net.config.layer_types = None
    assert packing.refusal(net) is None
    net.config.sliding_window = 4
    net.config.use_sliding_window = True
    assert packing.refusal(net) == "a sliding window"
    net.config.use_sliding_window = False
    assert packing.refusal(net) is None
    net.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in str(packing.refusal(net))


@pytest.mark.parametrize("how", ["shared", "shared and trimmed"])
def test_forced_and_predicted_routes_apply_in_every_layout(how: str, task: Chain, model: PreTrainedModel) -> None:
    said, groups_B = sequences()
    fed = layouts(said, groups_B)[how]
    generator = torch.Generator().manual_seed(1)
    shape = 3, *said.route_mask_BF.shape, 4
    forced_LBFK = torch.rand(shape, generator=generator).argsort(-1)[..., :2]
    # Of one prompt all responses were sampled behind the same routes.
    first_B = torch.tensor([(groups_B == group).nonzero()[0, 0] for group in groups_B])
    forced_LBFK[:, :, :WIDTH] = forced_LBFK[:, first_B, :WIDTH]
    forced_LBFK[:, ~said.route_mask_BF] = NO_ROUTE
    plain, expected = passed(model, said, None, forced_LBFK=forced_LBFK)
    found, gradient = passed(model, said, fed, forced_LBFK=forced_LBFK)
    assert (found.executed_LBFK == forced_LBFK).all()
    mask_BT = said.response_mask_BT.bool()
    assert_close(found.logprobs_BT[mask_BT], plain.logprobs_BT[mask_BT], rtol=0, atol=5e-6)
    assert (gradient - expected).norm() / expected.norm() < 5e-6
    heads = [torch.randn(32, 4, generator=generator) for _ in range(3)]
    by_plain, by_found = (forward(model, said, "fp32", heads_LHE=heads, layout=each) for each in (None, fed))
    assert (by_found.executed_LBFK == by_plain.executed_LBFK).all()
    assert (by_found.executed_LBFK != by_found.routes_LBFK).any()


def test_shared_rows_hold_the_prompt_once_then_each_response() -> None:
    said, groups_B = sequences()
    fed = packing.shared(said.tokens_BS, said.mask_BS, said.response_width, groups_B, trim=True)
    # The longest prompt has four tokens, the longest response four, whose last is not fed; no more than three share.
    assert fed.tokens_PX.shape == (3, 4 + 3 * 3)
    assert fed.scored == 1 + 3 * 3
    plain = packing.separate(said.tokens_BS, said.mask_BS, said.response_width, trim=True)
    extents = packing.extents(said.tokens_BS, said.mask_BS, said.response_width, groups_B, trim=True)
    assert extents == (tuple(plain.tokens_PX.shape), tuple(fed.tokens_PX.shape))
    whole = layouts(said, groups_B)["shared"].tokens_PX.shape
    assert packing.extents(said.tokens_BS, said.mask_BS, said.response_width, groups_B, trim=False)[1] == tuple(whole)
    counts = [(row > 0).sum().item() for row in fed.tokens_PX]
    expected = [
        sum(token > 0 for token in prompt) + sum(min(length, 3) for length in lengths)
        for prompt, lengths in zip(PROMPTS, LENGTHS, strict=True)
    ]
    assert counts == expected
    assert int(fed.positions_PX.max()) == 4 + 3 - 1


@torch.no_grad()
def test_token_attends_only_to_its_prompt_and_response(task: Chain, model: PreTrainedModel) -> None:
    said, groups_B = sequences()
    before = forward(model, said, "fp32", layout=layouts(said, groups_B)["shared"]).logprobs_BT
    for row in range(6):
        tokens_BS = said.tokens_BS.clone()
        tokens_BS[row, WIDTH] = 11 if tokens_BS[row, WIDTH] != 11 else 10
        other = Sequences(tokens_BS, said.mask_BS, said.response_width)
        after = forward(model, other, "fp32", layout=layouts(other, groups_B)["shared"]).logprobs_BT
        moved_B = ((before - after).abs() * said.response_mask_BT > 1e-6).any(-1)
        assert moved_B.tolist() == [each == row for each in range(6)]
