"""The task reasoning_gym: datasets by name with options, their own verifiers, and what is refused."""

import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from steadymoe.bench.runs import compose
from steadymoe.bench.schema import ConfigError
from steadymoe.bench.tasks import is_held_out
from steadymoe.bench.tasks.reasoning_gym import ReasoningGym

NUMBERS = {"questions": 1000, "max_prompt_tokens": 128, "max_new_tokens": 16, "allow_eval": False}


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    """Without the extra `reasoning` one test is left: that of the answer then given."""
    if request.function is not test_where_the_package_is_missing_the_answer_is_how_to_install_it:
        pytest.importorskip("reasoning_gym")


def gym(dataset: str = "spell_backward", options: dict[str, Any] | None = None, **changed: Any) -> ReasoningGym:
    return ReasoningGym(**{"dataset": dataset, "options": options or {}, **NUMBERS, **changed})


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def refusal(dataset: str = "spell_backward", options: dict[str, Any] | None = None, **changed: Any) -> str:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the caller looks at the message
        gym(dataset, options, **changed)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset that asks every question twenty times, with another answer each time, and an odd verifier."""
    factory = pytest.importorskip("reasoning_gym.factory")

    @dataclass
    class Config:
        seed: int | None = None
        size: int = 500

        def validate(self) -> None: ...

    class Twins(factory.ProceduralDataset):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"question": f"{index % 50}?", "answer": str(index), "metadata": {}}

        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            return {"too much": 7.0, "too little": -7.0, entry["answer"]: 0.5}[answer]

    monkeypatch.setitem(factory.DATASETS, "twins", (lambda config: Twins(config, config.seed, config.size), Config))
    return "twins"


# --- datasets and their verifiers --------------------------------------------------------------------

# Dataset, options, and the budget with which most of its questions fit.
FITTING: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("spell_backward", {}, {}),
    ("spell_backward", {}, {"max_new_tokens": 10}),  # longer words are passed over
    ("chain_sum", {"max_terms": 3, "max_digits": 1}, {}),
    ("gcd", {}, {}),
    ("letter_counting", {"max_words": 8}, {}),
    ("number_sequence", {}, {}),
    ("calendar_arithmetic", {}, {"max_prompt_tokens": 256}),
    ("word_sorting", {"max_words": 4}, {"max_prompt_tokens": 400, "max_new_tokens": 64}),
]


@pytest.mark.parametrize(("name", "options", "budget"), FITTING)
def test_a_datasets_own_answers_are_demonstrated_and_its_verifier_gives_them_one(
    name: str, options: dict[str, Any], budget: dict[str, int]
) -> None:
    task = gym(name, options, **budget)
    prompts = task.sample(20, generator())
    for prompt, answer in zip(prompts, task.demonstrations(prompts, 0.0, generator()), strict=True):
        assert len(task.tokenizer(prompt)["input_ids"]) == len(prompt) <= task.max_prompt_tokens
        assert len(task.tokenizer(answer + task.tokenizer.eos_token)["input_ids"]) <= task.max_new_tokens
        assert task.score(prompt, answer, finished=True) == 1.0
        assert task.score(prompt, answer, finished=False) == 0.0
        assert task.score(prompt, "~", finished=True) < 1.0


def test_a_prompt_is_the_question_and_a_line_break() -> None:
    (prompt,) = gym(options={"min_word_len": 4, "max_word_len": 4}).sample(1, generator())
    assert re.fullmatch(r"Spell this word backward \(example: sun -> nus\): \w{4}\n", prompt)


def test_options_are_the_datasets_own() -> None:
    prompts = gym("chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 1}).sample(50, generator())
    assert all(re.fullmatch(r"[^\d]+\d [-+] \d =[^\d]*\n", prompt) for prompt in prompts), prompts[0]


def test_options_come_from_the_command_line_as_documented() -> None:
    words = ["task=reasoning_gym", "task.dataset=chain_sum", "+task.options.max_terms=3", "+task.options.max_digits=1"]
    (made,) = compose.plan(words)
    assert made.config.task["options"] == {"max_terms": 3, "max_digits": 1}


def test_partial_rewards_are_the_verifiers_own() -> None:
    import reasoning_gym

    task, data = gym(questions=50), reasoning_gym.create_dataset("spell_backward", seed=0, size=50)
    entries = {f"{data[index]['question']}\n": data[index] for index in range(50)}
    scores = []
    for prompt in task.sample(20, generator()):
        response = entries[prompt]["answer"][:-1] + "?"
        scores.append(task.score(prompt, response, finished=True))
        assert scores[-1] == data.score_answer(response, entries[prompt])
    assert all(0 < score < 1 for score in scores)


def test_rewards_stay_between_zero_and_one_and_a_verifier_that_fails_gives_none(twins: str) -> None:
    task = gym(twins)
    (prompt,) = task.sample(1, generator())
    (answer,) = task.demonstrations([prompt], 0.0, generator())
    responses = {answer: 0.5, "too much": 1.0, "too little": 0.0, "a KeyError": 0.0}
    assert {response: task.score(prompt, response, finished=True) for response in responses} == responses


def test_noise_keeps_digits_digits_and_letters_letters_of_their_case() -> None:
    task = gym("calendar_arithmetic", max_prompt_tokens=256)  # answers are Yes, No, weekdays and numbers
    prompts = task.sample(200, generator())
    right, wrong = (task.demonstrations(prompts, noise, generator()) for noise in (0.0, 1.0))

    def kinds(answer: str) -> str:
        return re.sub(r"\d", "0", re.sub("[a-z]", "a", re.sub("[A-Z]", "A", answer)))

    assert [kinds(answer) for answer in wrong] == [kinds(answer) for answer in right]
    assert {character for answer in right for character in kinds(answer)} == set("Aa0")
    assert not any(one == other for pair in zip(right, wrong, strict=True) for one, other in zip(*pair, strict=True))


# --- prompts -----------------------------------------------------------------------------------------


def test_training_and_held_out_prompts_never_overlap() -> None:
    task = gym(options={"max_word_len": 3})
    training = set(task.sample(3000, generator()))
    held_out = set(task.sample(3000, generator(), held_out=True))
    assert training
    assert held_out
    assert not training & held_out
    assert all(map(is_held_out, held_out))


def test_equal_seeds_give_equal_prompts_and_demonstrations() -> None:
    def made(seed: int) -> list[str]:
        task, draw = gym(), generator(seed)
        prompts = task.sample(20, draw)
        return prompts + task.demonstrations(prompts, 0.2, draw)

    assert made(7) == made(7) != made(8)


def test_of_questions_with_the_same_words_the_last_sampled_counts_so_that_a_resumed_run_scores_alike(
    twins: str,
) -> None:
    uninterrupted, resumed = gym(twins), gym(twins)
    earlier = uninterrupted.sample(200, generator(1))
    answers_then = dict(zip(earlier, uninterrupted.demonstrations(earlier, 0.0, generator()), strict=True))
    prompts = uninterrupted.sample(40, generator(2))
    assert resumed.sample(40, generator(2)) == prompts
    answers = uninterrupted.demonstrations(prompts, 0.0, generator())
    assert answers == resumed.demonstrations(prompts, 0.0, generator())
    assert [uninterrupted.score(prompt, answer, True) for prompt, answer in zip(prompts, answers, strict=True)] == [
        0.5
    ] * 40
    assert any(answers_then.get(prompt, answer) != answer for prompt, answer in zip(prompts, answers, strict=True)), (
        "no question came up twice: no test of which one counts"
    )


def test_a_prompt_that_was_not_sampled_cannot_be_scored() -> None:
    with pytest.raises(ValueError, match="is no prompt that this task has sampled"):
        gym().score("1+1=\n", "2", finished=True)


# --- refused -----------------------------------------------------------------------------------------


def test_an_unknown_dataset_is_answered_with_near_names_or_all() -> None:
    assert refusal("spell_backwards").startswith("reasoning-gym has no dataset 'spell_backwards'; spell_backward")
    assert "chain_sum, " in refusal("###")


@pytest.mark.parametrize("option", ["max_word_length", "seed", "size"])
def test_an_unknown_option_is_answered_with_those_there_are(option: str) -> None:
    answer = refusal(options={option: 4})
    assert answer.startswith(f"spell_backward has no option task.options.{option}; ")
    assert "max_word_len" in answer


def test_an_option_that_the_dataset_refuses_is_named() -> None:
    answer = refusal(options={"min_word_len": 0})
    assert "cannot make spell_backward of 1000 questions from min_word_len=0: AssertionError min_word_len" in answer


@pytest.mark.parametrize(
    "name", ["countdown", "number_sorting", "n_queens", "puzzle24", "polynomial_multiplication", "simple_integration"]
)
def test_a_verifier_that_runs_responses_as_code_is_refused(name: str) -> None:
    assert f"the verifier of {name} runs what the policy wrote as Python code" in refusal(name)


def test_a_verifier_that_runs_responses_as_code_can_be_permitted() -> None:
    task = gym("countdown", {"max_numbers": 4}, max_prompt_tokens=1000, max_new_tokens=64, allow_eval=True)
    (prompt,) = task.sample(1, generator())
    assert task.score(prompt, task.demonstrations([prompt], 0.0, generator())[0], finished=True) == 1.0


def test_a_dataset_beyond_its_budget_is_refused_with_a_budget_that_fits() -> None:
    answer = refusal(max_prompt_tokens=20, max_new_tokens=4)
    assert "16 of the first 16 questions of spell_backward do not fit (more than task.max_prompt_tokens)" in answer
    needed = dict(re.findall(r"task\.(max_\w+)=(\d+)", answer))
    assert gym(**{name: int(number) for name, number in needed.items()}).sample(1, generator())
    assert "(more than task.max_new_tokens)" in refusal(max_new_tokens=4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("quantum_lock", "characters outside printable ASCII"),
        ("rubiks_cube", "no answer to demonstrate"),
        ("list_functions", "draws its questions from a global generator"),
    ],
)
def test_a_dataset_that_cannot_be_a_task_is_refused_with_the_reason(name: str, reason: str) -> None:
    assert reason in refusal(name, max_prompt_tokens=4000, max_new_tokens=400)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"questions": 0}, "task.questions must be at least 1"),
        ({"max_prompt_tokens": 0}, "task.max_prompt_tokens must be at least 1"),
        ({"max_new_tokens": 0}, "task.max_new_tokens must be at least 1"),
        ({"version": 2}, "got task.version=2"),
        ({"questions": 1}, "leave no held-out prompts"),
    ],
)
def test_a_wrong_number_is_refused_by_its_name(wrong: dict[str, int], named: str) -> None:
    assert named in refusal(**wrong)


def test_where_the_package_is_missing_the_answer_is_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    with pytest.raises(ConfigError, match=r"pip install 'steadymoe\[reasoning\]'") as refused:
        compose.plan(["task=reasoning_gym"])
    assert "\n" not in str(refused.value)
