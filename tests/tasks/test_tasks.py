"""The tasks of this folder: answers, scores, noise, the two streams of prompts, refused numbers, and the tokenizer."""

import re
import reprlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import MICRO
from transformers import PreTrainedModel

from steadymoe.bench.runs import compose, fits
from steadymoe.bench.schema import ConfigError
from steadymoe.bench.tasks import Task, is_held_out, sample, score
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.tasks.characters import character_tokenizer
from steadymoe.bench.tasks.ledger import Ledger
from steadymoe.bench.tasks.selection import Selection
from steadymoe.bench.tasks.sort import Sort
from steadymoe.bench.training.sampling import roll_out
from steadymoe.models import build

TASKS: dict[str, tuple[type, dict[str, Any]]] = {
    "chain": (Chain, {"min_operands": 3, "max_operands": 8, "modulus": 10}),
    "sort": (Sort, {"symbols": "0123456789", "min_length": 3, "max_length": 8}),
    "ledger": (Ledger, {"min_forks": 4, "max_forks": 8, "fillers": 14}),
    "selection": (Selection, {"symbols": "0123456789", "length": 12, "passes": 5}),
}


def made(name: str, **changed: Any) -> Any:
    cls, numbers = TASKS[name]
    return cls(**numbers | {"spare_tokens": 2} | changed)


def near(share: float, expected: float, n: int) -> bool:
    """Whether a share of n draws is within four standard deviations of the expected one."""
    return abs(share - expected) <= 4 * np.sqrt(expected * (1 - expected) / n)


def uniform(counts: Counter[Any], among: set[Any]) -> bool:
    n = sum(counts.values())
    return set(counts) == among and all(near(count / n, 1 / len(among), n) for count in counts.values())


# --- answers ---------------------------------------------------------------------------------------------------------


def operations(prompt: str) -> list[tuple[str, str]]:
    return list(zip(re.findall(r"[-+*]", prompt), re.findall(r"\d", prompt)[1:], strict=True))


def cells(text: str) -> list[tuple[str, int, str]]:
    """Sign, digit and slot of each cell of a ledger, a prompt or an answer."""
    return [(sign, int(digit), slot) for sign, digit, slot in re.findall(r"([-+.])(\d)(\d|_)", text)]


def moved(value: int, sign: str, digit: int) -> int:
    return (value + {"+": 1, "-": -1, ".": 0}[sign] * digit) % 10


def passes(line: str, count: int) -> list[str]:
    """The lines of a selection sort, by slicing."""
    lines = []
    for front in range(count):
        place = front + line[front:].index(min(line[front:]))
        swapped = list(line)
        swapped[front], swapped[place] = line[place], line[front]
        line = "".join(swapped)
        lines.append(line)
    return lines


def right(task: Any, prompt: str) -> str:
    """The only right answer, by Python's eval of every prefix, by ``sorted`` or by slicing."""
    if isinstance(task, Chain):
        expression, values = prompt[0], ""
        for symbol, digit in operations(prompt):
            expression = f"({expression}{symbol}{digit})"
            values += str(eval(expression) % task.modulus)
        return values
    if isinstance(task, Ledger):
        expression, answer = prompt[-1], ""
        for sign, digit, _ in cells(prompt):
            expression += "" if sign == "." else f"{sign}{digit}"
            answer += f"{sign}{digit}{eval(expression) % 10}"
        return answer
    if isinstance(task, Selection):
        return "".join(passes(prompt, task.passes))
    return "".join(sorted(prompt.removesuffix("="), key=task.symbols.index))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        *[("chain", {"modulus": modulus}) for modulus in (2, 7, 10)],
        *[("sort", {}), ("sort", {"symbols": "zZa9"}), ("ledger", {}), ("selection", {})],
    ],
)
def test_noiseless_demonstrations_score_1(name: str, changed: dict[str, Any]) -> None:
    task, generator = made(name, **changed), np.random.default_rng(1)
    prompts = task.sample(300, generator)
    for prompt, answer in zip(prompts, task.demonstrations(prompts, 0.0, generator), strict=True):
        assert answer == right(task, prompt)
        assert task.score(prompt, answer, finished=True) == 1.0
        assert task.score(prompt, answer, finished=False) == 0.0
        for wrong in (answer + answer[-1], answer[1:]):
            assert task.score(prompt, wrong, finished=True) == 0.0


# Task, what is changed, prompt, right responses (first the one that is demonstrated), wrong ones.
SCORES: list[tuple[str, dict[str, Any], str, list[str], list[str]]] = [
    (
        *("chain", {}, "3+7*2-5="),
        ["005", "995"],  # one is right by luck
        [*("004", "", "5", "05", "0055", "0050", "+05", "0=5", "a05", " 05"), "0٣5", "00٥", "0<pad>5"],
    ),
    ("sort", {}, "5291=", ["1259"], ["9521", "1250", "125", "12599", "1259=", "", "<pad>1259"]),
    (
        *("ledger", {}, "+3_.8_-4____5"),
        ["+38.88-44", "000000004"],  # the last value alone is rewarded
        ["+38.88-45", "+38.88-4", "+38.88-444", "+38.88-4\u0664", ""],
    ),
    ("selection", {"length": 4, "passes": 2}, "3120", ["01230123", "99990123"], ["01230132", ""]),
]


@pytest.mark.parametrize(("name", "changed", "prompt", "right", "wrong"), SCORES)
def test_right_responses_score_1_and_wrong_ones_0(
    name: str, changed: dict[str, Any], prompt: str, right: list[str], wrong: list[str]
) -> None:
    task = made(name, **changed)
    assert task.demonstrations([prompt], 0.0, np.random.default_rng(0)) == right[:1]
    expected = dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)
    assert {response: task.score(prompt, response, finished=True) for response in expected} == expected
    assert not any(task.score(prompt, response, finished=False) for response in expected)


# --- noise -----------------------------------------------------------------------------------------------------------


def errors(name: str, prompt: str, answer: str) -> list[bool]:
    """Which steps that noise may change do not follow from what stands before them, right or wrong."""
    if name == "chain":
        befores = [prompt[0], *answer[:-1]]
        steps = zip(befores, operations(prompt), answer, strict=True)
        return [eval(f"{before}{symbol}{digit}") % 10 != int(after) for before, (symbol, digit), after in steps]
    if name == "sort":
        return [given != wanted for given, wanted in zip(answer, right(made("sort"), prompt), strict=True)]
    if name == "ledger":
        befores = [prompt[-1], *answer[2::3][:-1]]
        found = [(s, int(slot) != moved(int(b), s, d)) for b, (s, d, slot) in zip(befores, cells(answer), strict=True)]
        assert not any(is_wrong for sign, is_wrong in found if sign == ".")  # fillers are always right
        return [is_wrong for sign, is_wrong in found if sign != "."]
    lines = [prompt, *(answer[start : start + len(prompt)] for start in range(0, len(answer), len(prompt)))]
    for front, (line, following) in enumerate(pairwise(lines)):
        assert following[:front] == line[:front]
        assert Counter(following) == Counter(line)
    return [lines[front + 1][front] != min(lines[front][front:]) for front in range(len(lines) - 1)]


@pytest.mark.parametrize("name", ["chain", "sort", "ledger", "selection"])
def test_wrong_steps_occur_at_the_noise_rate_and_propagate(name: str) -> None:
    task, generator = made(name), np.random.default_rng(3)
    prompts = task.sample(1000, generator)
    for noise in (0.3, 1.0):
        answers = task.demonstrations(prompts, noise, generator)
        wrong = [each for pair in zip(prompts, answers, strict=True) for each in errors(name, *pair)]
        # Where a list has one symbol left, selection cannot err.
        assert near(np.mean(wrong), noise, len(wrong)) or (noise == 1 and name == "selection" and np.mean(wrong) > 0.99)


@pytest.mark.parametrize(("name", "prompt"), [("chain", "4+3="), ("sort", "7="), ("ledger", "+3_4")])
def test_a_wrong_step_is_uniform_over_the_wrong_symbols(name: str, prompt: str) -> None:
    answers = made(name).demonstrations([prompt] * 3000, 1.0, np.random.default_rng(4))
    assert uniform(Counter(answer[-1] for answer in answers), set("012345689"))


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "few", "number"),
    [
        ("chain", {"max_operands": 3, "modulus": 4}, 4**3 * 3**2),
        ("sort", {"symbols": "012", "min_length": 2, "max_length": 4}, 3**2 + 3**3 + 3**4),
        ("ledger", {"min_forks": 1, "max_forks": 1, "fillers": 0}, 2 * 10 * 10),
        ("selection", {"symbols": "012", "length": 4, "passes": 2}, 3**4),
    ],
)
def test_training_and_held_out_prompts_partition_all_prompts(name: str, few: dict[str, Any], number: int) -> None:
    task = made(name, **few)
    training = set(task.sample(20_000, np.random.default_rng(5)))
    held_out = set(task.sample(4_000, np.random.default_rng(5), held_out=True))
    assert all(map(is_held_out, held_out))
    assert not any(map(is_held_out, training))
    assert len(training | held_out) == number


def test_an_eighth_of_all_prompts_is_held_out() -> None:
    assert near(np.mean([is_held_out(f"{number}+1=") for number in range(10_000)]), 1 / 8, 10_000)


@pytest.mark.parametrize("name", TASKS)
def test_generator_seed_determines_prompts_and_demonstrations(name: str) -> None:
    def drawn(seed: int) -> list[str]:
        task, generator = made(name), np.random.default_rng(seed)
        prompts = task.sample(20, generator)
        return prompts + task.demonstrations(prompts, 0.2, generator)

    assert drawn(7) == drawn(7) != drawn(8)


def test_prompts_are_uniform_between_their_bounds() -> None:
    chains, lists = (made(name).sample(3000, np.random.default_rng(6)) for name in ("chain", "sort"))
    assert uniform(Counter(len(prompt) // 2 for prompt in chains), set(range(3, 9)))
    assert uniform(Counter(len(prompt) - 1 for prompt in lists), set(range(3, 9)))
    assert uniform(Counter("".join(prompt.removesuffix("=") for prompt in lists)), set("0123456789"))
    below_six = made("chain", modulus=6).sample(300, np.random.default_rng(6))
    assert set("".join(below_six)) == set("012345+-*=")
    assert all(re.fullmatch(r"\d([-+*]\d){2,7}=", prompt) for prompt in below_six)


@pytest.mark.parametrize(("fillers", "tokens"), [(0, 19), (14, 61), (36, 127), (76, 247)])
def test_fillers_lengthen_a_ledger_but_keep_its_forks(fillers: int, tokens: int) -> None:
    task, generator = made("ledger", fillers=fillers), np.random.default_rng(2)
    prompts = task.sample(2000, generator)
    assert uniform(Counter(prompt.count("+") + prompt.count("-") for prompt in prompts), {4, 5, 6, 7, 8})
    assert {prompt.count(".") for prompt in prompts} == {fillers}
    assert {len(prompt) for prompt in prompts} == {3 * (8 + fillers) + 1}
    lengths = [len(answer) + 1 for answer in task.demonstrations(prompts, 0.0, generator)]
    assert np.mean(lengths) == pytest.approx(tokens, abs=0.5)
    assert 3 * (8 + fillers) + 1 + task.max_new_tokens <= 512, "positions of model=flat"


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize(
    ("name", "changed", "longest"),
    [
        ("chain", {"max_operands": 5}, "2345"),
        ("sort", {"max_length": 5}, "00112"),
        ("ledger", {"min_forks": 1, "max_forks": 2, "fillers": 1}, "+38.88-44"),
        ("selection", {"length": 4, "passes": 2}, "01230123"),
    ],
)
def test_longest_right_answer_leaves_the_spare_tokens(
    name: str, changed: dict[str, Any], longest: str, spare: int
) -> None:
    task: Task = made(name, **changed, spare_tokens=spare)
    assert task.max_new_tokens == len(task.tokenizer(longest + str(task.tokenizer.eos_token))["input_ids"]) + spare


WRONG: dict[str, list[dict[str, Any]]] = {
    "chain": [{"min_operands": 1}, {"min_operands": 9}, {"modulus": 1}, {"modulus": 11}],
    "sort": [*({"symbols": symbols} for symbols in ("0", "011", "01=", "01٣")), {"min_length": 1}, {"min_length": 9}],
    "ledger": [{"min_forks": 9}, {"min_forks": 0}, {"fillers": -1}],
    "selection": [{"passes": 12}, {"passes": 0}, {"symbols": "aab"}],
}


@pytest.mark.parametrize("name", TASKS)
def test_invalid_number_is_refused_by_name(name: str) -> None:
    for wrong in [{"spare_tokens": -1}, {"version": 2}, *WRONG[name]]:
        (key,) = wrong
        with pytest.raises(ValueError, match=rf"^[^\n]*task\.\w*{key.removeprefix('min_')}[^\n]*$"):
            made(name, **wrong)
    with pytest.raises(ValueError, match="no held-out prompts"):
        made("sort", symbols="xy", min_length=2, max_length=2)


def test_sequences_beyond_the_models_positions_are_refused() -> None:
    words = ["model=micro", "task=sort", "task.min_length=300", "task.max_length=300"]
    with pytest.raises(ConfigError, match=r"604 positions; model\.config\.max_position_\w+ is 512"):
        compose.plan(words)
    with pytest.raises(ConfigError, match="is 603"):
        compose.plan([*words, "model.config.max_position_embeddings=603"])
    assert compose.plan([*words, "model.config.max_position_embeddings=604"])
    # By the family's own name.
    assert build.check({"_target_": "transformers.GPT2Config", "n_positions": 20}).positions == 20
    assert build.check({"_target_": "transformers.BloomConfig"}).positions is None


# --- scores of any task ----------------------------------------------------------------------------------------------


def scored(value: Any) -> tuple[Sort, PreTrainedModel]:
    """Sorting with one score for everything, and a model to sample responses from."""
    task = made("sort")
    vars(task)["score"] = lambda prompt, response, finished: value
    return task, build.build(MICRO, task.tokenizer, 0, "cpu")


@pytest.mark.parametrize(
    ("value", "number"), [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.bool_(False), 0.0), (-2, -2.0)]
)
def test_score_is_converted_to_float(value: Any, number: float) -> None:
    task, model = scored(value)
    assert isinstance(score(task, "12=", "21", True), float)
    rollout = roll_out(model, task, ["12=", "34="], 2, torch.Generator().manual_seed(0))
    assert rollout.scores_B.dtype == torch.float32
    assert rollout.scores_B.tolist() == [number] * 4


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf"), 1e300, 10**400, "1", b"1", [1], 1j])
def test_non_finite_score_is_reported_with_task_prompt_and_value(value: Any) -> None:
    task, model = scored(value)
    with pytest.raises(ValueError, match=r"^Sort\.score must return a finite number, got .*'12='") as told:
        roll_out(model, task, ["12="], 2, torch.Generator().manual_seed(0))
    assert reprlib.repr(value) in str(told.value)
    assert "\n" not in str(told.value)


# --- the contract of a task ------------------------------------------------------------------------------------------


class Odd(Sort):
    """Sorting as a user might get it wrong; a config names it by this module."""

    fault: str = ""

    def sample(self, count: int, generator: np.random.Generator, held_out: bool = False) -> list[str]:
        """Return prompts, from the wrong stream or in the wrong number."""
        drawn = super().sample(count, generator, held_out and self.fault not in ("ignores held_out", "declares"))
        return drawn[:100] if self.fault == "too short" and held_out else drawn

    def demonstrations(self, prompts: Any, noise: float, generator: np.random.Generator) -> list[str]:
        """Return answers, backwards or too few."""
        answers = super().demonstrations(prompts, noise, generator)
        if self.fault == "one answer":
            return answers[:1]
        return [
            "".join(sorted(answer, reverse=True)) + "x" if self.fault == "rejected" else answer for answer in answers
        ]


class Declares(Odd):
    """Trains on what it is evaluated on, and says so."""

    fault = "declares"
    shares_prompts = True


@pytest.fixture
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Odd, "fault", request.param)
    fits._check_streams.cache_clear()
    yield request.param
    fits._check_streams.cache_clear()


FAULTS = {"ignores held_out": "both", "too short": "100 .* 512", "one answer": "1 .* 64", "rejected": "score gives 0"}


@pytest.mark.parametrize("fault", FAULTS, indirect=True)
def test_task_that_breaks_its_contract_is_refused_before_training(fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"^Odd\.[^\n]*{FAULTS[fault]}[^\n]*$"):
        compose.plan(["model=micro", f"task._target_={__name__}.Odd"])


@pytest.mark.parametrize("fault", ["too short", "ignores held_out"], indirect=True)
def test_held_out_set_need_be_no_larger_than_a_run_asks_for(fault: str) -> None:
    words = ["model=micro", f"task._target_={__name__}.Odd"]
    words += ["evaluation.prompts=64", "cold_start.check_prompts=64", "evaluation.pass_prompts=64"]
    if fault == "too short":
        assert compose.plan(words)
    else:  # an overlap is found among 256 prompts, however few the run asks for at once
        with pytest.raises(ConfigError, match="both for training and held out"):
            compose.plan([*words, "evaluation.prompts=1"])


def test_error_of_a_stream_names_task_stream_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    task, generator = made("sort"), np.random.default_rng(0)
    monkeypatch.setattr(Sort, "sample", lambda self, count, generator, held_out: generator.choice(3, count, False))
    with pytest.raises(ValueError, match=r"Sort\.sample .* 5 held-out"):
        sample(task, 5, generator, held_out=True)


def test_task_may_declare_that_it_shares_its_prompts() -> None:
    assert compose.plan(["model=micro", f"task._target_={__name__}.Declares"])


# --- tokenizer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_tokens_are_characters_and_text_survives_the_round_trip(name: str) -> None:
    task, generator = made(name), np.random.default_rng(0)
    prompts = task.sample(50, generator)
    for prompt, answer in zip(prompts, task.demonstrations(prompts, 0.3, generator), strict=True):
        tokens = task.tokenizer(prompt + answer)["input_ids"]
        assert len(tokens) == len(prompt + answer)
        assert task.tokenizer.decode(tokens) == prompt + answer
        assert len(answer) + 1 <= task.max_new_tokens - task.spare_tokens


def test_tokenizer_has_the_documented_ids_end_and_padding() -> None:
    tokenizer = character_tokenizer("0123456789+-*=")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer("12" + str(tokenizer.eos_token))["input_ids"][2:] == [1]
    assert sorted(tokenizer("0123456789+-*=")["input_ids"]) == list(range(2, 16))
    padded = tokenizer(["1+2=", "1+2+3="], padding=True)  # on the left
    assert padded["attention_mask"][0] == [0, 0, 1, 1, 1, 1]
    assert padded["input_ids"][0][:2] == [0, 0]
    for text in ("a", "1/2", "1 2", "1\n", "٣"):
        with pytest.raises(Exception, match="UNK"):
            tokenizer(text)
