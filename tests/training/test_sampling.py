"""The sampler against transformers' own ``generate``, against the training forward, and against a script.

Shapes: B sequences, T response positions, S positions in all, F = S − 1 positions fed, L MoE layers,
K experts a token, V vocabulary.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from fixtures import MICRO
from small_models import shipped
from small_runs import PROMPTS, sampled
from torch import Tensor
from torch.testing import assert_close
from transformers import BatchEncoding, PreTrainedModel

from steadymoe.bench.runs import compose
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.cold_start import demonstrate
from steadymoe.bench.training.forward import Forward, Sequences, forward, sharing_refusal
from steadymoe.bench.training.packing import positions
from steadymoe.bench.training.sampling import Rollout, check_routes, roll_out, sample
from steadymoe.models import build
from steadymoe.models.selection import NO_ROUTE

Script = Callable[[Chain, list[str], list[str]], Rollout]


@pytest.fixture(scope="module")
def lively(task: Chain) -> PreTrainedModel:
    """Random weights so large that log-probabilities and routes depend on every earlier token."""
    numbers = MICRO | {"initializer_range": 0.3, "tie_word_embeddings": False}
    return build.build(numbers, task.tokenizer, seed=0, device="cpu")


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "multinomial", lambda probs_BV, n, generator: probs_BV.argmax(-1, keepdim=True))


def trained(model: PreTrainedModel, sequences: Sequences) -> Forward:
    with torch.no_grad():
        return forward(model, sequences, "fp32")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, lively: PreTrainedModel) -> Script:
    """A rollout that samples given texts, one a row, and then a digit without end."""

    def play(task: Chain, prompts: list[str], texts: list[str]) -> Rollout:
        rows = [task.tokenizer(text)["input_ids"] + [4] * 20 for text in texts]
        columns = iter(torch.tensor([row[:20] for row in rows]).T)
        monkeypatch.setattr(torch, "multinomial", lambda probs_BV, n, generator: next(columns)[:, None])
        return roll_out(lively, task, prompts, len(texts) // len(prompts), torch.Generator())

    return play


# --- against generate --------------------------------------------------------------------------------


@pytest.mark.usefixtures("greedy")
def test_greedy_tokens_and_log_probabilities_match_generate(lively: PreTrainedModel, task: Chain) -> None:
    lively = copy.deepcopy(lively)
    with torch.no_grad():
        lively.get_output_embeddings().weight[1] *= 3  # a response ends at about every fourth token, at any weights
    encoded = task.tokenizer(PROMPTS, padding=True, return_tensors="pt")
    oracle = lively.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        do_sample=False,
        max_new_tokens=task.max_new_tokens,
        eos_token_id=1,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ours = sampled(lively, task, responses=2)
    assert torch.equal(ours.sequences.tokens_BS, oracle.sequences.repeat_interleave(2, 0))
    mask_BT = ours.sequences.response_mask_BT[::2]
    assert mask_BT.sum(-1).unique().numel() > 1, "no row ends early"
    tokens_BT = oracle.sequences[:, -mask_BT.shape[1] :]
    logprobs_BTV = torch.stack(oracle.logits, dim=1).log_softmax(-1)
    expected_BT = logprobs_BTV.gather(-1, tokens_BT[..., None]).squeeze(-1) * mask_BT
    assert_close(ours.logprobs_BT, expected_BT.repeat_interleave(2, 0), atol=5e-5, rtol=0)


@pytest.mark.parametrize("prompts", [PROMPTS, [prompt for prompt in PROMPTS if len(prompt) == len(PROMPTS[0])]])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prompts_cached_once_change_log_probabilities_only_by_rounding(
    monkeypatch: pytest.MonkeyPatch, lively: PreTrainedModel, task: Chain, attention: str, prompts: list[str]
) -> None:
    before = lively.config._attn_implementation
    lively.set_attn_implementation(attention)
    ours = roll_out(lively, task, prompts, 4, torch.Generator().manual_seed(0))
    assert lively.config._attn_implementation == attention
    monkeypatch.setattr(lively, "sharing_refusal", "a sliding window")
    theirs = roll_out(lively, task, prompts, 4, torch.Generator().manual_seed(0))
    lively.set_attn_implementation(before)
    assert ours.sequences.response_mask_BT.sum(-1).unique().numel() > 1, "no row ends early"
    assert torch.equal(ours.sequences.tokens_BS, theirs.sequences.tokens_BS)
    assert torch.equal(ours.routes_LBFK, theirs.routes_LBFK)
    assert_close(ours.logprobs_BT, theirs.logprobs_BT, atol=5e-6, rtol=0)


def test_model_with_custom_attention_decodes_from_its_own_cache(
    monkeypatch: pytest.MonkeyPatch, lively: PreTrainedModel, task: Chain
) -> None:
    monkeypatch.setattr(type(lively), "_supports_attention_backend", False)
    monkeypatch.delattr(lively, "sharing_refusal", raising=False)
    monkeypatch.setattr("steadymoe.bench.training.decoding.from_kept", lambda config: 1 / 0)
    ours = sampled(lively, task)
    expected_BT = trained(lively, ours.sequences).logprobs_BT * ours.sequences.response_mask_BT
    assert_close(ours.logprobs_BT, expected_BT, atol=5e-5, rtol=0)


def test_attention_with_sinks_shares_no_prompts_in_training_or_decoding(task: Chain) -> None:
    """Sinks are an input of the attention that its two parts would leave out; nothing in the config says so."""
    full = "+model.config.layer_types=[full_attention,full_attention]"
    words = ["model=gpt_oss_micro", "+model.config.sliding_window=0", "model.config.num_hidden_layers=2", full]
    config = compose.plan(words)[0].config
    model = build.build(config.model["config"], task.tokenizer, 0)
    assert "would differ by" in str(sharing_refusal(model))
    ours = roll_out(model, task, PROMPTS, 4, torch.Generator().manual_seed(0))
    expected_BT = trained(model, ours.sequences).logprobs_BT * ours.sequences.response_mask_BT
    assert_close(ours.logprobs_BT, expected_BT, atol=5e-5, rtol=0)


def test_prompts_may_have_a_single_token(lively: PreTrainedModel) -> None:
    tokens_PW = torch.tensor([[2], [5], [7]])
    encoded = BatchEncoding({"input_ids": tokens_PW, "attention_mask": torch.ones_like(tokens_PW)})
    ours = sample(lively, encoded, 4, [-1], 20, torch.Generator().manual_seed(0))  # longer than the first room
    assert_close(ours.logprobs_BT, trained(lively, ours.sequences).logprobs_BT, atol=5e-5, rtol=0)


# --- against the training forward --------------------------------------------------------------------


def test_training_forward_matches_a_plain_forward_per_sequence(lively: PreTrainedModel, task: Chain) -> None:
    sequences = sampled(lively, task, responses=1).sequences
    batched = trained(lively, sequences)
    for row, (tokens_S, mask_S) in enumerate(zip(sequences.tokens_BS, sequences.mask_BS.bool(), strict=True)):
        length = int(sequences.response_mask_BT[row].sum())
        with torch.no_grad():
            logprobs_SV = lively(tokens_S[mask_S][None]).logits[0].log_softmax(-1)[-length - 1 : -1]
        chosen_T = logprobs_SV.gather(-1, tokens_S[mask_S][-length:, None]).squeeze(-1)
        entropy_T = torch.special.entr(logprobs_SV.exp()).sum(-1)
        assert_close(batched.logprobs_BT[row, :length], chosen_T, atol=1e-5, rtol=0)
        assert_close(batched.entropy_BT[row, :length], entropy_T, atol=1e-5, rtol=0)


def padded_on_the_left(sequences: Sequences, by: int) -> Sequences:
    garbage_BX = torch.full((len(sequences.tokens_BS), by), 9)
    return replace(
        sequences,
        tokens_BS=torch.cat([garbage_BX, sequences.tokens_BS], 1),
        mask_BS=torch.cat([torch.zeros_like(garbage_BX), sequences.mask_BS], 1),
    )


def test_prompt_padding_changes_neither_a_log_probability_nor_a_route(lively: PreTrainedModel, task: Chain) -> None:
    sequences = sampled(lively, task).sequences
    narrow, wide = trained(lively, sequences), trained(lively, padded_on_the_left(sequences, 5))
    assert_close(wide.logprobs_BT, narrow.logprobs_BT, atol=1e-5, rtol=0)
    assert_close(wide.entropy_BT, narrow.entropy_BT, atol=1e-5, rtol=0)
    assert torch.equal(wide.routes_LBFK[:, :, 5:], narrow.routes_LBFK)
    assert (wide.routes_LBFK[:, :, :5] == NO_ROUTE).all()


def test_positions_do_not_count_padding(task: Chain) -> None:
    numbers = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "initializer_range": 0.3}
    numbers |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "_target_": "transformers.GPT2Config"}
    gpt2 = build.build(numbers, task.tokenizer, seed=0, device="cpu")
    sequences = sampled(gpt2, task).sequences
    narrow, wide = trained(gpt2, sequences), trained(gpt2, padded_on_the_left(sequences, 5))
    assert_close(wide.logprobs_BT, narrow.logprobs_BT, atol=1e-5, rtol=0)
    assert positions(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


# --- routes ------------------------------------------------------------------------------------------


def test_only_padding_and_the_last_sampled_token_have_no_route(lively: PreTrainedModel, task: Chain) -> None:
    made = sampled(lively, task)
    width = made.sequences.tokens_BS.shape[1] - made.sequences.response_width
    lengths = made.sequences.response_mask_BT.sum(-1).tolist()
    for row, (prompt, length) in enumerate(zip(np.repeat(PROMPTS, 4), lengths, strict=True)):
        for position in range(made.routes_LBFK.shape[2]):
            fed = width - len(prompt) <= position < width + length - 1
            route_LK: Tensor = made.routes_LBFK[:, row, position]
            assert ((route_LK >= 0) & (route_LK < 4)).all() if fed else (route_LK == NO_ROUTE).all()


def test_misplaced_routes_raise(lively: PreTrainedModel, task: Chain) -> None:
    made = sampled(lively, task)
    routes_LBFK = made.routes_LBFK
    check_routes(routes_LBFK, made.sequences)
    row, position = (int(found[0]) for found in made.sequences.route_mask_BF.nonzero(as_tuple=True))
    missing_LBFK, extra_LBFK = routes_LBFK.clone(), routes_LBFK.clone()
    missing_LBFK[1, row, position] = NO_ROUTE  # in one layer of three
    extra_LBFK[1, (~made.sequences.route_mask_BF)] = 0
    shifted = routes_LBFK.roll(1, 2), routes_LBFK.roll(-1, 2), routes_LBFK[:, :, 1:]
    for wrong_LBFK in (*shifted, missing_LBFK, extra_LBFK):
        with pytest.raises(RuntimeError, match="do not fall on the tokens"):
            check_routes(wrong_LBFK, made.sequences)


def test_a_dense_model_is_sampled_without_routes(task: Chain) -> None:
    dense = build.build(shipped("dense_micro"), task.tokenizer, seed=0, device="cpu")
    made = sampled(dense, task)
    again = trained(dense, made.sequences)
    assert made.routes_LBFK is again.routes_LBFK is None
    assert again.router_logits_LNE == []
    assert_close(again.logprobs_BT * made.sequences.response_mask_BT, made.logprobs_BT, atol=5e-5, rtol=0)


# --- what is sampled ---------------------------------------------------------------------------------


def test_generator_seed_determines_the_rollout(lively: PreTrainedModel, task: Chain) -> None:
    one, same, other = (sampled(lively, task, seed) for seed in (1, 1, 2))
    assert torch.equal(one.sequences.tokens_BS, same.sequences.tokens_BS)
    assert torch.equal(one.logprobs_BT, same.logprobs_BT)
    assert not torch.equal(one.logprobs_BT, other.logprobs_BT)
    firsts_B = one.sequences.tokens_BS[:, -one.sequences.response_width]
    assert len(set(firsts_B[:4].tolist())) > 1, "responses to one prompt are drawn apart"


def test_non_finite_weights_raise(task: Chain, model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        sampled(model, task)


def test_score_depends_on_the_text_and_its_end(scripted: Script, task: Chain) -> None:
    script = {  # 3+1 = 4, 4*2 = 2 modulo 6
        "42<eos>": 1.0,
        "52<eos>": 1.0,  # right by luck
        "41<eos>": 0.0,
        "42": 0.0,  # goes on
        "42<pad><eos>": 0.0,
        "<eos>": 0.0,
        "42<eos>3<eos>": 1.0,  # nothing counts after the end
    }
    rollout = scripted(task, ["3+1*2="], list(script))
    assert rollout.scores_B.tolist() == list(script.values())
    assert rollout.sequences.response_mask_BT.sum(-1).tolist() == [3, 3, 3, task.max_new_tokens, 4, 1, 3]
    assert scripted(task, ["3+1*2=", "1+1+1="], ["42<eos>", "23<eos>"] * 2).scores_B.tolist() == [1, 0, 0, 1]


def test_row_is_padding_with_log_probability_0_after_its_end(scripted: Script, task: Chain) -> None:
    made = scripted(task, ["3+1*2="], ["4<eos>", "4235<eos>", "<eos>"])
    assert made.sequences.response_mask_BT.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    ended_BT = made.sequences.response_mask_BT == 0
    assert (made.sequences.tokens_BS[:, -5:][ended_BT] == 0).all()
    assert (made.logprobs_BT[ended_BT] == 0).all()
    assert (made.logprobs_BT[~ended_BT] < 0).all()


def test_demonstrations_have_the_layout_of_a_rollout(scripted: Script, task: Chain) -> None:
    answers = task.demonstrations(PROMPTS, 0.0, np.random.default_rng(0))
    laid = demonstrate(PROMPTS, answers, task.tokenizer, torch.device("cpu"))
    made = scripted(task, PROMPTS, [f"{answer}<eos>" for answer in answers])
    assert made.scores_B.tolist() == [1.0] * len(PROMPTS)
    assert torch.equal(laid.tokens_BS, made.sequences.tokens_BS)
    assert torch.equal(laid.mask_BS, made.sequences.mask_BS)
    assert laid.response_width == made.sequences.response_width
