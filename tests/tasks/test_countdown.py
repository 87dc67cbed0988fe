"""The task countdown: its arithmetic against Python's own, its demonstrations and prompts."""

import re
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


VALUES = "7*3+5=26 7*(3+5)=56 5+7*3=26 9-5-3=1 9-(5-3)=7 8/4/2=1 8/(4/2)=4 8/4*2=4 (3-8)/5=-1 0/5=0 007=7 ((4))=4"
VALUES += " 2*9/6=3"  # the product first, so no remainder
# Divisions with a remainder on the way or by zero, and what is no expression.
WITHOUT = [
    *("9/6*2", "7/2", "7/0", "7/(3-3)", "", "()", "(4", "4)", "4+", "+4", "-4", "4--4", "4**2", "4//2", "2(3)"),
    *("(2)(3)", "2 3", "2+3 ", "2=2", "x", "2\n"),
]


def test_values_by_hand() -> None:
    expected = {expression: int(number) for expression, number in (each.split("=") for each in VALUES.split())}
    assert {expression: value(expression) for expression in expected} == expected
    assert [expression for expression in WITHOUT if value(expression) is not None] == []


@pytest.mark.parametrize("text", ["(" * 100_000 + "4" + ")" * 100_000, "(" * 100_000, "9" * 10_000])
def test_however_deep_or_long_a_response_is_it_is_only_wrong(text: str) -> None:
    assert value(text) is None
    assert countdown().score("4 9=4:", text, finished=True) == 0.0


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


def test_prompts_respect_every_bound_and_reach_it() -> None:
    task = countdown(largest_number=12, largest_target=30)
    prompts = task.sample(3000, np.random.default_rng(5))
    problems = [re.fullmatch(r"((?:\d+ )+\d+)=(\d+):", prompt) for prompt in prompts]
    numbers = [[int(number) for number in problem[1].split(" ")] for problem in problems if problem]
    targets = [int(problem[2]) for problem in problems if problem]
    assert len(targets) == len(prompts)
    assert {len(each) for each in numbers} == {2, 3, 4}
    assert all(each == sorted(each) for each in numbers)  # so no order of numbers makes a twin in the other stream
    assert {number for each in numbers for number in each} == set(range(1, 13))
    assert set(targets) == set(range(1, 31))
