"""The task countdown: its arithmetic against Python's own, what it accepts, demonstrates and refuses."""

import re
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadymoe.bench.tasks import is_held_out
from steadymoe.bench.tasks.countdown import Countdown, value


def countdown(**changed: Any) -> Countdown:
    numbers = {"min_numbers": 2, "max_numbers": 4, "largest_number": 9, "largest_target": 99, "operators": "+-*/"}
    return Countdown(**{**numbers, "spare_tokens": 4, **changed})


# --- arithmetic --------------------------------------------------------------------------------------

OPERANDS = st.integers(0, 99).map(str)
EXPRESSIONS = st.recursive(
    OPERANDS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join) | inner.map(lambda each: f"({each})"),
    max_leaves=8,
)


def by_python(expression: str) -> Fraction | None:
    """With fractions for numbers, so that nothing is rounded; None where there is no number to read."""
    try:
        result = eval(re.sub(r"\d+", r"Fraction('\g<0>')", expression), {"Fraction": Fraction})
    except (ZeroDivisionError, SyntaxError, TypeError):  # Fraction(3)(4) is a call of a number
        return None
    return result if isinstance(result, Fraction) else None  # () is a tuple


@given(EXPRESSIONS)
def test_values_are_pythons(expression: str) -> None:
    expected, found = by_python(expression), value(expression)
    if found is not None:
        assert found == expected
    else:  # so somewhere a division has a remainder, or is by zero
        assert "/" in expression


@given(EXPRESSIONS.map(lambda expression: expression.replace("/", "-")))
def test_without_a_division_every_expression_has_a_value(expression: str) -> None:
    assert value(expression) == by_python(expression) is not None


@given(st.text("0123456789+-*/()", max_size=7))
def test_what_python_cannot_read_has_no_value(text: str) -> None:
    expected = by_python(text)
    if expected is None:
        assert value(text) is None
    elif "/" not in text and not re.search(r"(^|[-+*(])[-+]|\*\*", text):  # nor signs and powers, which Python has
        assert value(text) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("7*3+5", 26),
        ("7*(3+5)", 56),
        ("5+7*3", 26),
        ("9-5-3", 1),
        ("9-(5-3)", 7),
        ("8/4/2", 1),
        ("8/(4/2)", 4),
        ("8/4*2", 4),
        ("2*9/6", 3),  # the product first, so no remainder
        ("9/6*2", None),  # a remainder on the way
        ("7/2", None),
        ("7/0", None),
        ("7/(3-3)", None),
        ("(3-8)/5", -1),
        ("0/5", 0),
        ("007", 7),
        ("((4))", 4),
        ("", None),
        ("()", None),
        ("(4", None),
        ("4)", None),
        ("4+", None),
        ("+4", None),
        ("-4", None),
        ("4--4", None),
        ("4**2", None),
        ("4//2", None),
        ("2(3)", None),
        ("(2)(3)", None),
        ("2 3", None),
        ("2+3 ", None),
        ("2=2", None),
        ("x", None),
        ("2\n", None),
    ],
)
def test_value(expression: str, expected: int | None) -> None:
    assert value(expression) == expected


@pytest.mark.parametrize("text", ["(" * 100_000 + "4" + ")" * 100_000, "(" * 100_000, "9" * 10_000])
def test_however_deep_or_long_a_response_is_it_is_only_wrong(text: str) -> None:
    assert value(text) is None
    assert countdown().score("4 9=4:", text, finished=True) == 0.0


# --- scores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "finished", "score"),
    [
        ("7*3+5", True, 1.0),
        ("5+3*7", True, 1.0),
        ("5+(7*3)", True, 1.0),
        ("((7*3))+5", True, 1.0),
        ("7*3+5", False, 0.0),
        ("7*(3+5)", True, 0.0),  # not the target
        ("26", True, 0.0),  # not a given number
        ("5*5+1", True, 0.0),  # 5 is given once, 1 not at all
        ("7+7+7+5", True, 0.0),
        ("3*7+5+5-5", True, 0.0),
        ("07*3+5", True, 0.0),  # 07 is not how 7 is given
        ("7*3+5=26", True, 0.0),
        ("7*3+5:", True, 0.0),
        ("7 *3+5", True, 0.0),
        ("7*3+5<pad>", True, 0.0),
        ("٧*3+5", True, 0.0),
        ("7*3+", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_score(response: str, finished: bool, score: float) -> None:
    assert countdown().score("3 5 7=26:", response, finished) == score


def test_a_number_may_be_left_out_and_one_given_twice_used_twice() -> None:
    task = countdown()
    assert task.score("2 5 6=30:", "5*6", finished=True) == 1.0
    assert [task.score("4 4=8:", response, finished=True) for response in ("4+4", "4*4", "4+4-4+4")] == [1.0, 0.0, 0.0]
    assert task.score("4 5=8:", "4+4", finished=True) == 0.0
    assert task.score("1 2 12=12:", "12", finished=True) == 1.0


def test_an_operator_that_the_task_has_not_is_wrong() -> None:
    assert countdown(operators="+-").score("2 3=6:", "2*3", finished=True) == 0.0
    assert countdown(operators="+*").score("2 3=6:", "2*3", finished=True) == 1.0


# --- demonstrations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("operators", ["+-", "+-*", "+-*/", "/", "*+"])
def test_demonstrations_without_noise_are_right_and_use_every_number_once(operators: str) -> None:
    task, generator = countdown(operators=operators), np.random.default_rng(1)
    prompts = task.sample(200, generator)
    for prompt, answer in zip(prompts, task.demonstrations(prompts, 0.0, generator), strict=True):
        given, target = prompt.removesuffix(":").split("=")
        assert Counter(re.findall(r"\d+", answer)) == Counter(given.split(" "))
        assert set(re.findall(r"\D", answer)) <= set(operators)
        assert by_python(answer) == int(target)
        assert task.score(prompt, answer, finished=True) == 1.0
        assert len(answer) + 1 <= task.max_new_tokens - task.spare_tokens
        assert len(task.tokenizer(prompt + answer)["input_ids"]) == len(prompt + answer)


def test_every_right_answer_is_demonstrated() -> None:
    answers = countdown().demonstrations(["2 3 4=9:"] * 500, 0.0, np.random.default_rng(2))
    orders = {"2+3+4", "2+4+3", "3+2+4", "3+4+2", "4+2+3", "4+3+2"}
    assert set(answers) == orders


def test_noise_replaces_digits_by_digits_and_operators_by_operators() -> None:
    answers = countdown().demonstrations(["2 3=5:"] * 2000, 0.3, np.random.default_rng(3))
    assert all(re.fullmatch(r"\d[-+*/]\d", answer) for answer in answers)
    kept = np.mean([answer[1] == "+" for answer in answers])
    assert kept == pytest.approx(0.7, abs=4 * np.sqrt(0.3 * 0.7 / 2000))


def test_a_prompt_without_an_answer_cannot_be_demonstrated() -> None:
    with pytest.raises(ValueError, match=r"no expression of all of \[2, 3\] makes 99"):
        countdown().demonstrations(["2 3=99:"], 0.0, np.random.default_rng(0))


# --- prompts -----------------------------------------------------------------------------------------


def test_training_and_held_out_prompts_never_overlap_and_no_order_of_numbers_makes_a_twin() -> None:
    task = countdown(max_numbers=3, largest_number=4, operators="+-")  # few, so that both streams draw all of theirs
    training = set(task.sample(5000, np.random.default_rng(4)))
    held_out = set(task.sample(3000, np.random.default_rng(4), held_out=True))
    assert training
    assert held_out
    assert all(map(is_held_out, held_out))
    assert not training & held_out
    given = [[int(number) for number in prompt.split("=")[0].split(" ")] for prompt in training | held_out]
    assert all(numbers == sorted(numbers) for numbers in given)


def test_prompts_respect_every_bound_and_reach_it() -> None:
    task = countdown(largest_number=12, largest_target=30)
    prompts = task.sample(3000, np.random.default_rng(5))
    problems = [re.fullmatch(r"((?:\d+ )+\d+)=(\d+):", prompt) for prompt in prompts]
    numbers = [[int(number) for number in problem[1].split(" ")] for problem in problems if problem]
    targets = [int(problem[2]) for problem in problems if problem]
    assert len(targets) == len(prompts)
    assert {len(each) for each in numbers} == {2, 3, 4}
    assert {number for each in numbers for number in each} == set(range(1, 13))
    assert set(targets) == set(range(1, 31))


def test_a_generators_seed_decides_prompts_and_demonstrations() -> None:
    task = countdown()

    def made(seed: int) -> list[str]:
        generator = np.random.default_rng(seed)
        prompts = task.sample(20, generator)
        return prompts + task.demonstrations(prompts, 0.2, generator)

    assert made(7) == made(7) != made(8)


@pytest.mark.parametrize(("largest", "spare"), [(9, 0), (99, 4)])
def test_the_longest_demonstration_and_its_end_fit_with_the_spare_tokens_left(largest: int, spare: int) -> None:
    task = countdown(max_numbers=3, largest_number=largest, spare_tokens=spare)
    longest = f"{largest}+{largest}+{largest}{task.tokenizer.eos_token}"
    assert task.max_new_tokens == len(task.tokenizer(longest)["input_ids"]) + spare


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"min_numbers": 1}, r"task\.min_numbers"),
        ({"min_numbers": 5}, r"task\.max_numbers <= 6, .* got 5 and 4"),
        ({"max_numbers": 7}, r"task\.max_numbers <= 6, .* got 2 and 7"),
        ({"largest_number": 0}, r"task\.largest_number"),
        ({"largest_target": 0}, r"task\.largest_target"),
        ({"operators": ""}, r"task\.operators"),
        ({"operators": "++"}, r"task\.operators"),
        ({"operators": "+%"}, r"task\.operators .* got '\+%'"),
        ({"spare_tokens": -1}, r"task\.spare_tokens"),
        ({"version": 2}, r"task\.version"),
        ({"largest_target": 1, "operators": "+"}, "leave no training prompts"),  # two numbers make two at least
    ],
)
def test_a_wrong_number_is_refused_by_its_name(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as refusal:
        countdown(**wrong)
    assert "\n" not in str(refusal.value)
