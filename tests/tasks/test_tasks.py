"""The chain task: its answers against Python's own arithmetic, its scores, its two streams of prompts."""

import re
from collections import Counter

import numpy as np
import pytest

from steadymoe.bench.tasks import is_held_out
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.tasks.characters import character_tokenizer


def chain(**changed: int) -> Chain:
    return Chain(**{"min_operands": 3, "max_operands": 8, "modulus": 10, "spare_tokens": 2} | changed)


def running_values(prompt: str, modulus: int) -> list[int]:
    """By Python's eval of every prefix, bracketed from the left."""
    digits, symbols = re.findall(r"\d", prompt), re.findall(r"[-+*]", prompt)
    expression, values = digits[0], []
    for symbol, digit in zip(symbols, digits[1:], strict=True):
        expression = f"({expression}{symbol}{digit})"
        values.append(eval(expression) % modulus)
    return values


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return chain().sample(2000, np.random.default_rng(0))


def test_the_documented_example() -> None:
    assert chain().demonstrations(["3+7*2-5="], 0.0, np.random.default_rng(0)) == ["005"]


@pytest.mark.parametrize("modulus", [2, 7, 10])
def test_demonstrations_without_noise_are_the_running_values_and_score_one(modulus: int) -> None:
    task, generator = chain(modulus=modulus), np.random.default_rng(1)
    prompts = task.sample(500, generator)
    for prompt, answer in zip(prompts, task.demonstrations(prompts, 0.0, generator), strict=True):
        assert [int(digit) for digit in answer] == running_values(prompt, modulus)
        assert task.score(prompt, answer, finished=True) == 1.0


def wrong_steps(prompt: str, answer: str) -> list[bool]:
    """Which steps do not follow from the one before, right or wrong."""
    digits, symbols = re.findall(r"\d", prompt), re.findall(r"[-+*]", prompt)
    befores = [digits[0], *answer[:-1]]
    return [
        eval(f"{before}{symbol}{digit}") % 10 != int(after)
        for before, symbol, digit, after in zip(befores, symbols, digits[1:], answer, strict=True)
    ]


def test_noise_one_is_wrong_at_every_step(prompts: list[str]) -> None:
    answers = chain().demonstrations(prompts, 1.0, np.random.default_rng(2))
    assert all(all(wrong_steps(prompt, answer)) for prompt, answer in zip(prompts, answers, strict=True))


def test_the_rate_of_wrong_steps_is_the_noise_and_a_wrong_digit_is_uniform(prompts: list[str]) -> None:
    answers = chain().demonstrations(prompts, 0.3, np.random.default_rng(3))
    wrong = [step for prompt, answer in zip(prompts, answers, strict=True) for step in wrong_steps(prompt, answer)]
    four_sigma = 4 * np.sqrt(0.3 * 0.7 / len(wrong))
    assert np.mean(wrong) == pytest.approx(0.3, abs=four_sigma)
    ones = ["4+3="] * 3000  # 7 is right: nine wrong digits, each a ninth
    shares = Counter(chain().demonstrations(ones, 1.0, np.random.default_rng(4)))
    assert set(shares) == set("012345689")
    assert all(shares[digit] / 3000 == pytest.approx(1 / 9, abs=4 * np.sqrt(1 / 9 * 8 / 9 / 3000)) for digit in shares)


# --- scores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "finished", "score"),
    [
        ("005", True, 1.0),
        ("995", True, 1.0),  # right by luck
        ("004", True, 0.0),
        ("005", False, 0.0),
        ("", True, 0.0),
        ("5", True, 0.0),
        ("05", True, 0.0),
        ("0055", True, 0.0),
        ("0050", True, 0.0),
        ("+05", True, 0.0),
        ("0=5", True, 0.0),
        ("a05", True, 0.0),
        (" 05", True, 0.0),
        ("0٣5", True, 0.0),  # a digit, but not an ASCII one
        ("00٥", True, 0.0),
        ("0<pad>5", True, 0.0),
    ],
)
def test_score(response: str, finished: bool, score: float) -> None:
    assert chain().score("3+7*2-5=", response, finished) == score


def test_exactly_one_final_digit_is_right(prompts: list[str]) -> None:
    for prompt in prompts[:100]:
        zeros = "0" * (len(prompt) // 2 - 2)
        scores = [chain().score(prompt, f"{zeros}{final}", finished=True) for final in range(10)]
        assert scores.index(1.0) == running_values(prompt, 10)[-1]
        assert sum(scores) == 1


# --- prompts -----------------------------------------------------------------------------------------


def test_training_and_held_out_prompts_never_overlap() -> None:
    task = chain(max_operands=3, modulus=4)  # few prompts exist, so that both streams draw all of theirs
    training = set(task.sample(20_000, np.random.default_rng(5)))
    held_out = set(task.sample(4_000, np.random.default_rng(5), held_out=True))
    assert not training & held_out
    assert len(training | held_out) == 4**3 * 3**2, "together they are all prompts"
    assert all(map(is_held_out, held_out))
    assert len(held_out) / len(training | held_out) == pytest.approx(1 / 8, abs=0.05)


def test_the_number_of_operands_is_uniform_between_its_bounds(prompts: list[str]) -> None:
    counts = Counter(len(prompt) // 2 for prompt in prompts)
    assert set(counts) == {3, 4, 5, 6, 7, 8}
    four_sigma = 4 * np.sqrt(1 / 6 * 5 / 6 / len(prompts))
    assert all(count / len(prompts) == pytest.approx(1 / 6, abs=four_sigma) for count in counts.values())


def test_prompts_use_all_digits_below_the_modulus_and_all_operators() -> None:
    prompts = chain(modulus=6).sample(300, np.random.default_rng(6))
    assert set("".join(prompts)) == set("012345+-*=")
    assert all(re.fullmatch(r"\d([-+*]\d){2,7}=", prompt) for prompt in prompts)


def test_a_generators_seed_decides_the_prompts() -> None:
    one, same, other = (chain().sample(20, np.random.default_rng(seed)) for seed in (7, 7, 8))
    assert one == same != other


@pytest.mark.parametrize("spare", [0, 3])
def test_the_longest_right_answer_and_its_end_fit_with_the_spare_tokens_left(spare: int) -> None:
    task = chain(max_operands=5, spare_tokens=spare)
    longest = task.demonstrations(["1+1+1+1+1="], 0.0, np.random.default_rng(0))[0]
    tokens = task.tokenizer(longest + task.tokenizer.eos_token)["input_ids"]
    assert task.max_new_tokens == len(tokens) + spare


# --- tokenizer ---------------------------------------------------------------------------------------


def test_a_token_is_a_character_and_text_survives_the_round_trip(prompts: list[str]) -> None:
    tokenizer = chain().tokenizer
    for prompt in prompts[:50]:
        tokens = tokenizer(prompt)["input_ids"]
        assert len(tokens) == len(prompt)
        assert tokenizer.decode(tokens) == prompt
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer("12" + tokenizer.eos_token)["input_ids"][2:] == [1]
    assert sorted(tokenizer("0123456789+-*=")["input_ids"]) == list(range(2, 16))


def test_padding_is_on_the_left_by_default() -> None:
    padded = chain().tokenizer(["1+2=", "1+2+3="], padding=True)
    assert padded["attention_mask"][0] == [0, 0, 1, 1, 1, 1]
    assert padded["input_ids"][0][:2] == [0, 0]


@pytest.mark.parametrize("text", ["a", "1/2", "1 2", "1\n", "٣"])
def test_an_unknown_character_is_an_error(text: str) -> None:
    with pytest.raises(Exception, match="UNK"):
        character_tokenizer("0123456789+-*=")(text)


# --- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"min_operands": 1}, r"task\.min_operands"),
        ({"min_operands": 9}, r"task\.max_operands"),
        ({"modulus": 1}, r"task\.modulus"),
        ({"modulus": 11}, r"task\.modulus"),
        ({"spare_tokens": -1}, r"task\.spare_tokens"),
        ({"version": 2}, r"task\.version"),
    ],
)
def test_a_wrong_number_is_refused_by_its_name(wrong: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        chain(**wrong)
