"""Models are built from checked numbers, and what their routers choose is recorded as it happened.

Shapes: L MoE layers, N tokens of a forward, K experts a token, E experts, H hidden width.
"""

from typing import Any

import pytest
import torch
from fixtures import MICRO
from small_models import TOKENS_BS, make
from torch.testing import assert_close
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from steadymoe.bench.tasks.chain import Chain
from steadymoe.models import build
from steadymoe.models.routing import RouteRecorder, load_balancing_loss, routers
from steadymoe.models.selection import NO_ROUTE

# --- the check ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        ({"num_expertz": 4}, r"num_expertz; did you mean num_experts"),
        ({"num_experts_per_tok": 5}, "cannot be built from .*num_experts_per_tok=5"),
        ({"num_key_value_heads": 3}, "cannot be built from .*num_key_value_heads=3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 1}, r"num_attention_heads \(5\) must divide hidden_size"),
        ({"_target_": "os.system"}, r"_target_ must name a transformers config class .*, got 'os\.system'"),
        ({"_target_": "transformers.T5Config"}, "no causal language model for T5Config"),
        ({"vocab_size": 99}, "vocab_size is given by the task's tokenizer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be between 1 and 100000; got 0"),
        ({"num_hidden_layers": "a"}, "num_hidden_layers"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_act": "a"}, "hidden_act"),
        ({"attention_dropout": 0.5}, "attention_dropout would have no effect"),
        ({"router_aux_loss_coef": 0.5}, r"router_aux_loss_coef would have no effect here: routing\.aux_loss is"),
        ({"dtype": "bfloat16"}, r"\.dtype would have no effect here: weights are fp32"),
    ],
)
def test_invalid_number_is_refused_by_name(wrong: dict[str, Any], answer: str) -> None:
    with pytest.raises(ValueError, match=answer) as refusal:
        build.check(MICRO | wrong)
    assert "\n" not in str(refusal.value)


def test_field_read_only_by_the_model_takes_effect() -> None:
    numbers = MICRO | {"head_dim": 24}
    build.check(numbers)
    assert make(numbers).model.layers[0].self_attn.q_proj.out_features == 4 * 24


# --- what is built -----------------------------------------------------------------------------------


def test_seed_alone_determines_the_weights() -> None:
    first = make(MICRO, seed=1).state_dict()
    torch.rand(7)
    before = torch.get_rng_state()
    assert_close(make(MICRO, seed=1).state_dict(), first, atol=0, rtol=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(make(MICRO, seed=2).state_dict()["lm_head.weight"], first["lm_head.weight"])


def test_router_scale_multiplies_only_the_initial_router_weights() -> None:
    plain, flat = make(MICRO), make({**MICRO, "router_scale": 0.25})
    for (name, before), after in zip(plain.named_parameters(), flat.parameters(), strict=True):
        assert torch.equal(before * 0.25 if name.endswith(".mlp.gate.weight") else before, after)


def test_vocabulary_and_special_tokens_come_from_the_tokenizer(task: Chain, model: PreTrainedModel) -> None:
    assert model.get_input_embeddings().num_embeddings == len(task.tokenizer)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)


# --- recorded routes ---------------------------------------------------------------------------------


def test_recorder_requires_one_forward_before_each_take(model: PreTrainedModel) -> None:
    with RouteRecorder(model) as recorder, torch.no_grad():
        with pytest.raises(RuntimeError, match="ran 0 times"):
            recorder.take(10)
        model(TOKENS_BS)
        recorder.take(10)
        with pytest.raises(RuntimeError, match="ran 0 times"):
            recorder.take(10)
        model(TOKENS_BS)
        model(TOKENS_BS)
        with pytest.raises(RuntimeError, match="ran 2 times"):
            recorder.take(10)
    with RouteRecorder(model) as recorder, torch.no_grad():
        model(TOKENS_BS)
        with pytest.raises(RuntimeError, match="saw 10 tokens; the forward had 9"):
            recorder.take(9)


def test_recorder_removes_its_hooks_even_after_an_error(model: PreTrainedModel) -> None:
    hooked = []

    def interrupted() -> None:
        with RouteRecorder(model):
            hooked.extend("forward" in router.__dict__ for router in routers(model))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert hooked == [True] * 3
    assert not any("forward" in router.__dict__ for router in routers(model))


# --- load balancing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [[], [0, 1, 2, 11]])
def test_load_balancing_loss_matches_transformers_and_ignores_padding(padding: list[int]) -> None:
    draw = torch.Generator().manual_seed(0)
    logits_LNE = [3 * torch.randn(12, 5, generator=draw, requires_grad=True) for _ in range(3)]
    indices_LNK = torch.stack([logits_NE.topk(2).indices for logits_NE in logits_LNE]).to(torch.int16)
    mask_N = torch.ones(12)
    mask_N[padding] = 0
    theirs = load_balancing_loss_func(tuple(logits_LNE), 5, 2, mask_N.view(2, 6) if padding else None)
    indices_LNK[:, padding] = NO_ROUTE
    ours = load_balancing_loss(logits_LNE, indices_LNK, mask_N)
    assert_close(ours, theirs)
    assert_close(torch.autograd.grad(ours, logits_LNE), torch.autograd.grad(theirs, logits_LNE))


def test_load_balancing_loss_per_layer_sees_layers_that_collapse_on_different_experts() -> None:
    logits_LNE = [torch.tensor([[50.0, 0.0]] * 3), torch.tensor([[0.0, 50.0]] * 3)]
    indices_LNK = torch.stack([logits_NE.topk(1).indices for logits_NE in logits_LNE])
    assert load_balancing_loss(logits_LNE, indices_LNK, torch.ones(3)) == pytest.approx(1)  # as if perfectly even
    assert load_balancing_loss(logits_LNE, indices_LNK, torch.ones(3), per_layer=True) == pytest.approx(2)
    even_LNE = [torch.tensor([[50.0, 0.0], [0.0, 50.0]])] * 2
    even_LNK = torch.stack([logits_NE.topk(1).indices for logits_NE in even_LNE])
    assert load_balancing_loss(even_LNE, even_LNK, torch.ones(2), per_layer=True) == pytest.approx(1)
    alone = load_balancing_loss(logits_LNE[:1], indices_LNK[:1], torch.ones(3))
    assert load_balancing_loss(logits_LNE[:1], indices_LNK[:1], torch.ones(3), per_layer=True) == alone


def test_dropout_is_switched_off() -> None:
    noisy = make({"_target_": "transformers.GPT2Config", "n_layer": 1, "n_head": 2, "n_embd": 8})  # dropout 0.1
    tokens = torch.tensor([[2, 3, 4, 5]])
    assert torch.equal(noisy(tokens).logits, noisy(tokens).logits)
