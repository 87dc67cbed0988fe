"""The tasks with long responses, ledger and selection: prompts, demonstrations, scores, and what is refused."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from steadymoe.bench.config import compose
from steadymoe.bench.config.schema import ConfigError
from steadymoe.bench.tasks import is_held_out
from steadymoe.bench.tasks.ledger import Ledger
from steadymoe.bench.tasks.selection import Selection


def ledger(**changed: int) -> Ledger:
    return Ledger(**{"min_forks": 4, "max_forks": 8, "fillers": 14, "spare_tokens": 2} | changed)


def selection(**changed: Any) -> Selection:
    return Selection(**{"symbols": "0123456789", "length": 12, "passes": 5, "spare_tokens": 2} | changed)


TASKS = [ledger(), selection()]


def values(prompt: str) -> list[int]:
    """The running values of a ledger by Python's eval of every prefix."""
    cells = re.findall(r"([-+.])(\d)_", prompt)
    expression, found = prompt[-1], []
    for sign, digit in cells:
        expression += "" if sign == "." else sign + digit
        found.append(eval(expression) % 10)
    return found


def passes(prompt: str, count: int) -> list[str]:
    """The lines of a selection sort, by slicing."""
    line, lines = prompt, []
    for front in range(count):
        place = front + line[front:].index(min(line[front:]))
        swapped = list(line)
        swapped[front], swapped[place] = line[place], line[front]
        line = "".join(swapped)
        lines.append(line)
    return lines


def test_the_documented_examples() -> None:
    none = np.random.default_rng(0)
    assert ledger().demonstrations(["+3_.8_-4_5"], 0.0, none) == ["+38.88-44"]
    assert selection(length=4, passes=2).demonstrations(["3120"], 0.0, none) == ["01230123"]


def test_demonstrations_without_noise_are_right_and_score_one() -> None:
    generator = np.random.default_rng(1)
    for task in TASKS:
        prompts = task.sample(300, generator)
        for prompt, answer in zip(prompts, task.demonstrations(prompts, 0.0, generator), strict=True):
            if isinstance(task, Ledger):
                cells = re.findall(r"([-+.])(\d)_", prompt)
                right = "".join(f"{s}{d}{v}" for (s, d), v in zip(cells, values(prompt), strict=True))
            else:
                right = "".join(passes(prompt, 5))
            assert answer == right
            assert task.score(prompt, answer, finished=True) == 1.0
            assert task.score(prompt, answer, finished=False) == 0.0
            assert task.score(prompt, answer + answer[-1], finished=True) == 0.0
            assert task.score(prompt, answer[1:], finished=True) == 0.0


@pytest.mark.parametrize(("fillers", "tokens"), [(0, 19), (14, 61), (36, 127), (76, 247)])
def test_fillers_make_a_ledger_longer_and_leave_its_forks(fillers: int, tokens: int) -> None:
    task, generator = ledger(fillers=fillers), np.random.default_rng(2)
    prompts = task.sample(2000, generator)
    forks = Counter(prompt.count("+") + prompt.count("-") for prompt in prompts)
    assert set(forks) == {4, 5, 6, 7, 8}
    assert all(count == pytest.approx(400, abs=4 * np.sqrt(400 * 0.8)) for count in forks.values())
    assert {prompt.count(".") for prompt in prompts} == {fillers}
    assert {len(prompt) for prompt in prompts} == {3 * (8 + fillers) + 1}
    lengths = [len(answer) + 1 for answer in task.demonstrations(prompts, 0.0, generator)]
    assert np.mean(lengths) == pytest.approx(tokens, abs=0.5)
    assert max(lengths) + 2 == task.max_new_tokens
    assert 3 * (8 + fillers) + 1 + task.max_new_tokens <= 512, "positions of model=flat"


def test_a_cell_and_its_copy_stand_equally_far_apart() -> None:
    task, generator = ledger(), np.random.default_rng(3)
    for prompt in task.sample(50, generator):
        whole = prompt + task.demonstrations([prompt], 0.0, generator)[0]
        for at in range(len(prompt), len(whole), 3):
            assert whole[at : at + 2] == whole[at - len(prompt) : at - len(prompt) + 2]
            step = {"+": 1, "-": -1, ".": 0}[whole[at]] * int(whole[at + 1])
            assert int(whole[at + 2]) == (int(whole[at - 1]) + step) % 10, "the value before it is three back"


def test_a_ledger_errs_at_forks_alone_and_goes_on_from_the_wrong_value() -> None:
    task, generator = ledger(), np.random.default_rng(4)
    prompts = task.sample(1000, generator)
    wrong = forks = 0
    shifts: Counter[int] = Counter()
    for prompt, answer in zip(prompts, task.demonstrations(prompts, 0.3, generator), strict=True):
        before = int(prompt[-1])
        for sign, digit, value in re.findall(r"([-+.])(\d)(\d)", answer):
            shift = (int(value) - before - {"+": 1, "-": -1, ".": 0}[sign] * int(digit)) % 10
            before = int(value)
            assert sign != "." or shift == 0
            forks += sign != "."
            wrong += shift != 0
            shifts[shift] += 1
    assert wrong / forks == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / forks))
    assert all(shifts[shift] == pytest.approx(wrong / 9, abs=4 * np.sqrt(wrong / 9)) for shift in range(1, 10))


def test_selection_errs_at_the_rate_of_the_noise_and_goes_on_from_the_wrong_list() -> None:
    task, generator = selection(), np.random.default_rng(5)
    prompts = task.sample(1000, generator)
    wrong = 0
    for prompt, answer in zip(prompts, task.demonstrations(prompts, 0.3, generator), strict=True):
        line = prompt
        for front in range(5):
            following = answer[12 * front : 12 * (front + 1)]
            assert following[:front] == line[:front]
            assert Counter(following) == Counter(line)
            wrong += following[front] != min(line[front:])
            line = following
    assert wrong / 5000 == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / 5000))


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("+38.88-44", 1.0),
        ("000000004", 1.0),  # the last value alone is rewarded
        ("+38.88-45", 0.0),
        ("+38.88-4", 0.0),
        ("+38.88-444", 0.0),
        ("+38.88-4\u0664", 0.0),
        ("", 0.0),
    ],
)
def test_score_of_a_ledger(response: str, score: float) -> None:
    assert ledger().score("+3_.8_-4____5", response, finished=True) == score


@pytest.mark.parametrize(("response", "score"), [("01230123", 1.0), ("99990123", 1.0), ("01230132", 0.0), ("", 0.0)])
def test_score_of_a_selection(response: str, score: float) -> None:
    assert selection(length=4, passes=2).score("3120", response, finished=True) == score


def test_streams_never_overlap_and_a_seed_decides_them() -> None:
    for task in [ledger(min_forks=1, max_forks=1, fillers=0), selection(symbols="012", length=4, passes=2)]:
        training = set(task.sample(4000, np.random.default_rng(6)))
        held_out = set(task.sample(2000, np.random.default_rng(6), held_out=True))
        assert not training & held_out
        assert len(training | held_out) == (2 * 10 * 10 if isinstance(task, Ledger) else 3**4)
        assert all(map(is_held_out, held_out))
    one, same, other = (ledger().sample(9, np.random.default_rng(seed)) for seed in (7, 7, 8))
    assert one == same != other


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["task=ledger", "task.min_forks=9"], "min_forks"),
        (["task=ledger", "task.min_forks=0"], "min_forks"),
        (["task=ledger", "task.fillers=-1"], "fillers"),
        (["task=ledger", "task.fillers=78"], "512"),
        (["task=ledger", "cold_start.noise=1"], "noise"),
        (["task=ledger", "cold_start.noise=-0.1"], "noise"),
        (["task=ledger", "probe.fraction=1.5"], "fraction"),
        (["task=selection", "task.passes=12"], "passes"),
        (["task=selection", "task.symbols='aab'"], "symbols"),
        (["task=selection", "task.length=120"], "512"),
    ],
)
def test_bad_numbers_are_refused_in_one_line(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        compose.plan(["model=flat", *words])
    assert "\n" not in str(caught.value)
