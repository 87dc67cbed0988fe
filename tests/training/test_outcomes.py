"""The three outcomes of an evaluation, and shuffled rewards, a control that must gain none."""

from pathlib import Path

import pytest
import torch
from small_runs import PROMPTS, trainer
from transformers import PreTrainedModel

from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.sampling import Decoding, roll_out
from steadymoe.bench.training.trainer import Trainer


def scored(made: Trainer) -> Trainer:
    """The trainer with a task that random weights can solve: to write a 7."""
    vars(made.task)["score"] = lambda prompt, response, finished: float("7" in response)
    return made


def test_greedy_responses_take_the_most_likely_token_without_drawing(model: PreTrainedModel, task: Chain) -> None:
    one, other = (
        roll_out(model, task, PROMPTS, 1, torch.Generator().manual_seed(seed), Decoding(greedy=True)) for seed in (0, 1)
    )
    assert torch.equal(one.sequences.tokens_BS, other.sequences.tokens_BS)
    drawn = roll_out(model, task, PROMPTS, 8, torch.Generator().manual_seed(2))
    best_P1, drawn_PG = one.logprobs_BT[:, :1], drawn.logprobs_BT[:, 0].view(len(PROMPTS), -1)
    assert (drawn_PG <= best_P1 + 1e-6).all()
    assert (drawn_PG < best_P1 - 1e-3).any()


def test_first_and_last_evaluations_have_three_outcomes(tmp_path: Path) -> None:
    words = ["updates=4", "evaluation.every=2", "evaluation.pass_k=4", "evaluation.pass_prompts=5"]
    made = trainer(tmp_path, *words, "evaluation.prompts=8")
    start, middle, end = (made.evaluate(step) for step in (0, 1, 2))
    for rows in (start, end):
        has = [("score_greedy" in row, "score_pass" in row) for row in rows]
        assert has == [(True, True)] * 5 + [(True, False)] * 3
        assert start == made.evaluate(0)
    assert [("score_greedy" in row, "score_pass" in row) for row in middle] == [(True, False)] * 8
    assert [row["score"] for row in start] == [row["score"] for row in middle]  # greedy and pass@k draw on their own


def test_measure_little_scores_greedy_only_at_the_ends(tmp_path: Path) -> None:
    made = trainer(tmp_path, "updates=4", "measure=little", "evaluation.pass_k=0")
    assert ["score_greedy" in made.evaluate(step)[0] for step in (0, 1, 2)] == [True, False, True]
    assert "score_pass" not in made.evaluate(2)[0]


def test_pass_at_k_is_the_best_of_k_and_grows_with_k(tmp_path: Path) -> None:
    found = {}
    for k in (1, 2, 16):
        made = scored(trainer(tmp_path, "updates=2", f"evaluation.pass_k={k}", "evaluation.prompts=64"))
        found[k] = sum(row["score_pass"] for row in made.evaluate(1)) / 64
    assert found[1] <= found[2] <= found[16]
    assert found[1] < found[16]


def test_step_records_the_mean_of_each_outcome(tmp_path: Path) -> None:
    made = trainer(tmp_path, "updates=2", "evaluation.every=2", "evaluation.prompts=8", "evaluation.pass_prompts=4")
    result = made.step(1)
    (row,), evaluations = result.rows["steps"], result.rows["evaluations"]
    assert row["eval_greedy"] == pytest.approx(sum(each["score_greedy"] for each in evaluations) / 8)
    assert row["eval_pass"] == pytest.approx(sum(each["score_pass"] for each in evaluations[:4]) / 4)


def test_shuffling_permutes_rewards_but_not_scores(tmp_path: Path) -> None:
    made = trainer(tmp_path, "rollout.shuffle_rewards=true")
    rewards_B = torch.arange(32.0)
    moved_B = made._shuffled(rewards_B, 1)
    assert not torch.equal(moved_B, rewards_B)
    assert torch.equal(moved_B.sort().values, rewards_B)
    assert torch.equal(moved_B, made._shuffled(rewards_B, 1))
    assert not torch.equal(moved_B, made._shuffled(rewards_B, 2))
    plain, moved = (scored(trainer(tmp_path, f"rollout.shuffle_rewards={flag}")).step(1) for flag in ("false", "true"))
    ours, theirs = (each.rows["steps"][0] for each in (moved, plain))
    assert ours["reward"] == theirs["reward"] > 0
    assert ours["grad_norm"] != theirs["grad_norm"]
