"""The task sort: what it asks, demonstrates and rewards; responses of hundreds of tokens."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MICRO
from torch.testing import assert_close

from steadymoe.bench.config import compose
from steadymoe.bench.config.schema import ConfigError
from steadymoe.bench.tasks import is_held_out
from steadymoe.bench.tasks.sort import Sort
from steadymoe.bench.training.forward import forward
from steadymoe.bench.training.sampling import sample
from steadymoe.models import build


def sort(**changed: Any) -> Sort:
    return Sort(**{"symbols": "0123456789", "min_length": 3, "max_length": 8, "spare_tokens": 2} | changed)


def test_the_documented_example() -> None:
    assert sort().demonstrations(["5291="], 0.0, np.random.default_rng(0)) == ["1259"]


def test_demonstrations_without_noise_are_sorted_and_score_one() -> None:
    task, generator = sort(), np.random.default_rng(1)
    prompts = task.sample(300, generator)
    for prompt, answer in zip(prompts, task.demonstrations(prompts, 0.0, generator), strict=True):
        assert answer == "".join(sorted(prompt.removesuffix("=")))
        assert task.score(prompt, answer, finished=True) == 1.0


def test_the_order_is_that_of_the_symbols() -> None:
    task = sort(symbols="zZa9")
    assert task.demonstrations(["9aZzZ="], 0.0, np.random.default_rng(0)) == ["zZZa9"]
    assert [task.score("9aZzZ=", response, finished=True) for response in ("zZZa9", "9ZZaz")] == [1.0, 0.0]


def test_each_symbol_is_wrong_at_the_rate_of_the_noise_and_then_any_other() -> None:
    answers = sort().demonstrations(["0987654321="] * 1000, 0.3, np.random.default_rng(2))
    wrong = [(right, given) for answer in answers for right, given in zip("0123456789", answer, strict=True)]
    wrong = [(right, given) for right, given in wrong if right != given]
    assert len(wrong) / 10_000 == pytest.approx(0.3, abs=4 * np.sqrt(0.3 * 0.7 / 10_000))
    shares = Counter(given for right, given in wrong if right == "3")
    expected, four_sigma = sum(shares.values()) / 9, 4 * np.sqrt(sum(shares.values()) / 9)
    assert set(shares) == set("012456789")
    assert all(count == pytest.approx(expected, abs=four_sigma) for count in shares.values())


@pytest.mark.parametrize(
    ("response", "finished", "score"),
    [
        ("1259", True, 1.0),
        ("1259", False, 0.0),
        ("9521", True, 0.0),
        ("1250", True, 0.0),
        ("125", True, 0.0),
        ("12599", True, 0.0),
        ("1259=", True, 0.0),
        ("", True, 0.0),
        ("<pad>1259", True, 0.0),
    ],
)
def test_score(response: str, finished: bool, score: float) -> None:
    assert sort().score("5291=", response, finished) == score


def test_training_and_held_out_prompts_never_overlap_and_together_are_all() -> None:
    task = sort(symbols="012", min_length=2, max_length=4)
    training = set(task.sample(6_000, np.random.default_rng(3)))
    held_out = set(task.sample(3_000, np.random.default_rng(3), held_out=True))
    assert held_out
    assert all(map(is_held_out, held_out))
    assert not training & held_out
    assert len(training | held_out) == 3**2 + 3**3 + 3**4


def test_lengths_are_uniform_between_their_bounds_and_symbols_are_uniform() -> None:
    prompts = sort().sample(2000, np.random.default_rng(4))
    lengths = Counter(len(prompt) - 1 for prompt in prompts)
    assert set(lengths) == {3, 4, 5, 6, 7, 8}
    assert all(count / 2000 == pytest.approx(1 / 6, abs=4 * np.sqrt(5 / 36 / 2000)) for count in lengths.values())
    symbols = Counter("".join(prompt.removesuffix("=") for prompt in prompts))
    total = sum(symbols.values())
    assert set(symbols) == set("0123456789")
    assert all(count / total == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / total)) for count in symbols.values())


@pytest.mark.parametrize("spare", [0, 3])
def test_the_longest_right_answer_and_its_end_fit_with_the_spare_tokens_left(spare: int) -> None:
    task = sort(max_length=5, spare_tokens=spare)
    assert task.max_new_tokens == len(task.tokenizer("00112" + task.tokenizer.eos_token)["input_ids"]) + spare


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"symbols": "0"}, r"task\.symbols"),
        ({"symbols": "011"}, r"task\.symbols"),
        ({"symbols": "01="}, r"task\.symbols"),
        ({"symbols": "01٣"}, r"task\.symbols"),
        ({"min_length": 1}, r"task\.min_length"),
        ({"min_length": 9}, r"task\.max_length; got 9 and 8"),
        ({"spare_tokens": -1}, r"task\.spare_tokens"),
        ({"version": 2}, r"task\.version"),
        ({"symbols": "xy", "min_length": 2, "max_length": 2}, "leave no held-out prompts"),
    ],
)
def test_a_wrong_number_is_refused_by_its_name(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as refusal:
        sort(**wrong)
    assert "\n" not in str(refusal.value)


# --- hundreds of tokens ------------------------------------------------------------------------------


def test_a_response_of_200_tokens_is_sampled_as_it_is_trained() -> None:
    task = sort(min_length=200, max_length=200)
    model = build.build(MICRO, task.tokenizer, 0, "cpu")
    encoded = task.tokenizer(task.sample(2, np.random.default_rng(5)), return_tensors="pt")
    made = sample(
        model,
        encoded,
        responses=1,
        end=-1,  # no token, so that no response ends early
        max_new_tokens=task.max_new_tokens,
        generator=torch.Generator().manual_seed(0),
    )
    assert made.logprobs_BT.shape == (2, 203)
    with torch.no_grad():
        assert_close(forward(model, made.sequences, "fp32").logprobs_BT, made.logprobs_BT, atol=2e-5, rtol=0)


def test_prompts_and_responses_beyond_the_models_positions_are_refused_unless_it_is_given_more() -> None:
    words = ["model=micro", "task=sort", "task.min_length=300", "task.max_length=300"]
    refused = r"prompts of 301 tokens and responses of 303 need 604 positions; model\.config\.max_position_\w+ is 512"
    with pytest.raises(ConfigError, match=refused):
        compose.plan(words)
    with pytest.raises(ConfigError, match="is 603"):
        compose.plan([*words, "model.config.max_position_embeddings=603"])
    assert compose.plan([*words, "model.config.max_position_embeddings=604"])


def test_positions_go_by_the_familys_own_name() -> None:
    assert build.check({"_target_": "transformers.GPT2Config", "n_positions": 20}).positions == 20
    assert build.check({"_target_": "transformers.BloomConfig"}).positions is None
