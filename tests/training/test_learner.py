"""Gradient updates in a run: micro-batches, the loss's memory, what losses ask for, shaped rewards, sampling."""

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import PROPORTIONAL, assert_resumes, begun, executed, finished, planned, sampled, trainer, updated
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from steadymoe.algorithms import Batch
from steadymoe.algorithms.parts import dimensions_of
from steadymoe.bench.runs import identity, record
from steadymoe.bench.schema import OverlongConfig
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training import trainer as trainer_module
from steadymoe.bench.training.forward import Extras, forward
from steadymoe.bench.training.learner import Learner
from steadymoe.bench.training.sampling import Decoding, Rollout, join, roll_out
from steadymoe.bench.training.trainer import Trainer, overlong_penalty, shaped_rewards
from steadymoe.models.engine import Truncated
from steadymoe.models.selection import NO_ROUTE


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Batch]]:
    """The rows and the batch of each loss, as they come."""
    seen: list[tuple[Tensor, Batch]] = []
    plain = Learner.batch

    def spy(self: Learner, *arguments: Any) -> Batch:
        seen.append((arguments[3], plain(self, *arguments)))
        return seen[-1][1]

    monkeypatch.setattr(Learner, "batch", spy)
    return seen


# --- micro-batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["gspo", "rspo", "trm", "score_centering_tis", "gspo engine=truncated engine.replay_mask=true"]
)
def test_micro_batches_change_an_update_only_by_rounding(tmp_path: Path, words: str) -> None:
    more = [*f"algorithm={words}".split(), "algorithm.kl.coefficient=0.1", "algorithm.entropy_bonus=0.1", *PROPORTIONAL]
    whole, split = trainer(tmp_path, *more), trainer(tmp_path, *more, "microbatch=3")
    one, other = updated(whole), updated(split)
    assert len(split.learner.forwards.split(torch.arange(16))) == 6
    for first, second in zip(one, other, strict=True):
        assert first.overall.keys() == second.overall.keys()
        for name in first.overall:
            assert_close(first.overall[name], second.overall[name], atol=2e-5, rtol=2e-4, check_dtype=False)
        for name in first.histograms:
            assert first.histograms[name].sum() == second.histograms[name].sum()


@pytest.mark.parametrize("algorithm", ["m2po", "gepo", "r2vpo"])
def test_a_loss_that_needs_the_whole_mini_batch_is_never_split(
    tmp_path: Path, algorithm: str, batches: list[tuple[Tensor, Batch]]
) -> None:
    split = trainer(tmp_path, f"algorithm={algorithm}", "microbatch=1")
    assert len(split.learner.forwards.split(torch.arange(16))) == 1
    updated(split)
    for rows_M, batch in batches:  # rows share a group where they share a prompt
        groups_M = batch.get("groups_B")
        assert torch.equal(groups_M[:, None] == groups_M, (rows_M // 8)[:, None] == rows_M // 8)
        assert len(groups_M.unique()) == 2


def test_stages_and_steps_draw_independently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = trainer(tmp_path, "engine=router_noise", "evaluation.every=18"), []
    for name in ("torch_generator", "numpy_generator"):
        plain = getattr(trainer_module, name)

        def spy(seed: int, stage: str, step: int = 0, *device: str, plain: Any = plain) -> Any:
            seen.append((stage, step))
            return plain(seed, stage, step, *device)

        monkeypatch.setattr(trainer_module, name, spy)
    made.step(1)
    made.step(2)
    assert len(seen) == len(set(seen))
    assert {step for _, step in seen} == {1, 2}


# --- the loss's memory -------------------------------------------------------------------------------


def test_stopped_run_resumes_with_loss_predictor_and_sampler_state(tmp_path: Path) -> None:
    words = ["algorithm=r2vpo", "algorithm.loss.multiplier_step=1.0", "routing=pr2"]
    whole = assert_resumes(tmp_path, 5, *words, "engine=stale", "engine.strength=2")
    updates, steps = record.read_table(whole.folder, "updates"), record.read_table(whole.folder, "steps")
    assert updates["loss_number"].nunique() == 12
    assert updates.loc[updates["update"] == 1, "route_prediction_kl"].isna().all()
    assert (updates.loc[updates["update"] > 1, "route_prediction_kl"] > 0).all()
    assert (steps["rollout_kl_k3"].iloc[1:] > 1e-6).all()


# --- what losses ask for -----------------------------------------------------------------------------


def test_the_routers_log_ratio_is_zero_before_the_first_update_and_not_after(
    tmp_path: Path, batches: list[tuple[Tensor, Batch]]
) -> None:
    updated(trainer(tmp_path, "algorithm=rspo"))
    seen = [batch.get("router_log_ratio_LBTK") * batch.mask_BT[None, ..., None] for _, batch in batches]
    assert seen[0].shape[0] == 2  # layers
    assert seen[0].shape[-1] == 2  # experts a token
    assert (seen[0] == 0).all()
    assert seen[1].abs().max() > 1e-4


def test_router_log_probabilities_come_from_the_preceding_position(model: PreTrainedModel, task: Chain) -> None:
    made = sampled(model, task)
    with torch.no_grad():
        now = forward(model, made.sequences, "fp32")
    found_LBTE = now.router_logprobs_LBTE
    width = made.sequences.response_width
    for layer, logits_NE in enumerate(now.router_logits_LNE):
        logits_BFE = logits_NE.view(*now.routes_LBFK.shape[1:3], -1).log_softmax(-1)
        for row, column in made.sequences.response_mask_BT.nonzero().tolist():
            assert_close(found_LBTE[layer, row, column], logits_BFE[row, logits_BFE.shape[1] - width + column])


@pytest.mark.parametrize("top_k", [2, 40])
def test_the_most_likely_tokens_and_the_sampled_one_are_recorded(
    model: PreTrainedModel, task: Chain, top_k: int
) -> None:
    prompts = ["1+2+3=", "5*4-3="]
    made = roll_out(model, task, prompts, 4, torch.Generator().manual_seed(0), Decoding(top_k=top_k))
    plain = roll_out(model, task, prompts, 4, torch.Generator().manual_seed(0))
    assert torch.equal(plain.sequences.tokens_BS, made.sequences.tokens_BS)
    tokens_BT = made.sequences.tokens_BS[:, -made.sequences.response_width :]
    with torch.no_grad():
        extras = Extras(top_tokens_BTK=made.top_tokens_BTK)
        again_BTK = forward(model, made.sequences, "fp32", extras).top_logprobs_BTK
    for row, column in made.sequences.response_mask_BT.nonzero().tolist():
        tokens, logprobs = made.top_tokens_BTK[row, column], made.top_logprobs_BTK[row, column]
        assert len(tokens) == min(top_k, len(task.tokenizer)) + 1
        assert (logprobs[:-1].diff() <= 0).all()
        assert tokens[-1] == tokens_BT[row, column]
        listed = tokens_BT[row, column] in tokens[:-1]
        assert (logprobs[-1] == -torch.inf) == listed
        assert logprobs.exp().sum() <= 1 + 1e-5
        real = logprobs.isfinite()
        assert_close(again_BTK[row, column][real], logprobs[real], atol=1e-4, rtol=0)
        if top_k == 40:
            assert logprobs.exp().sum() == pytest.approx(1, abs=1e-5)


def test_gradients_flow_through_the_most_likely_tokens(model: PreTrainedModel, task: Chain) -> None:
    """The last of them is the sampled token: its log-probability has the gradient of the plain one."""
    made = roll_out(model, task, ["1+2+3=", "5*4-3="], 4, torch.Generator().manual_seed(0), Decoding(top_k=3))
    now = forward(model, made.sequences, "fp32", Extras(top_tokens_BTK=made.top_tokens_BTK))
    weights_BT = made.sequences.response_mask_BT * torch.arange(1, now.logprobs_BT.shape[1] + 1)
    one, other = (
        torch.autograd.grad((weights_BT * values_BT).sum(), list(model.parameters()), retain_graph=True)
        for values_BT in (now.logprobs_BT, now.top_logprobs_BTK[..., -1])
    )
    assert max(float(gradient.abs().max()) for gradient in one) > 1e-3
    for gradient, again in zip(one, other, strict=True):
        assert_close(gradient, again)


# --- rewards -----------------------------------------------------------------------------------------


def test_overlong_penalty_rises_over_the_buffer() -> None:
    lengths_B = torch.tensor([1, 8, 9, 10, 10])
    taken = overlong_penalty(lengths_B, budget=10, penalty=2.0, buffer=0.2)
    assert taken.tolist() == pytest.approx([0, 0, 1, 2, 2])


def test_overlong_penalty_and_kl_are_subtracted_from_rewards() -> None:
    scores_B, mask_BT = torch.tensor([1.0, 1.0]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    kl_BT = torch.tensor([[0.1, 0.2, 9.0, 9.0], [0.0, 0.0, 0.0, 0.5]])
    shaped = shaped_rewards(scores_B, mask_BT, 4, OverlongConfig(penalty=1.0, buffer=0.5), kl_BT)
    assert shaped.tolist() == pytest.approx([0.7, 1 - 1 - 0.5])
    assert shaped_rewards(scores_B, mask_BT, 4, OverlongConfig(penalty=0.0, buffer=0.5), None) is scores_B


def test_a_kl_term_in_the_reward_is_subtracted_before_advantages(tmp_path: Path) -> None:
    made = trainer(tmp_path, "algorithm.kl.coefficient=0.5", "algorithm.kl.place=reward", "algorithm.kl.estimator=k1")
    updated(made)  # away from the cold start
    sampled_, _, old = begun(made, 2)
    mask_BT = sampled_.sequences.response_mask_BT
    kl_B = ((old.logprobs_BT - old.reference_logprobs_BT) * mask_BT).sum(-1)
    assert kl_B.abs().min() > 0
    assert_close(made.rewards(sampled_, old), sampled_.scores_B - 0.5 * kl_B)
    assert made.step(3).rows["steps"][0]["reward"] * 32 % 1 == 0  # the scores as the task gives them, 0 or 1


def test_trainer_subtracts_the_overlong_penalty_from_the_reward(tmp_path: Path) -> None:
    made = trainer(tmp_path, "algorithm=dapo")
    sampled_, _, old = begun(made)
    lengths_B = sampled_.sequences.response_mask_BT.sum(-1)
    assert made.task.max_new_tokens == 5
    expected_B = sampled_.scores_B - 0.5 * (lengths_B - 4).clamp(0, 1)
    assert (lengths_B == 5).any()
    assert_close(made.rewards(sampled_, old), expected_B)


def test_kl_reference_stays_at_the_cold_start(tmp_path: Path) -> None:
    made = trainer(tmp_path, "algorithm.kl.coefficient=0.1")
    sampled_, minibatches, first = begun(made)
    assert torch.equal(first.logprobs_BT, first.reference_logprobs_BT)
    updated(made)
    second = made.learner.old_policy(sampled_, minibatches)
    assert not torch.equal(second.logprobs_BT, first.logprobs_BT)
    assert torch.equal(second.reference_logprobs_BT, first.reference_logprobs_BT)


# --- dynamic sampling --------------------------------------------------------------------------------


def scripted_scores(made: Trainer, rounds: list[list[list[float]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the scores of successive rollouts of four groups, each group's eight from its short list."""
    plain, left = made._rollout, iter(rounds)

    def fake(*arguments: Any) -> Rollout:
        rollout_ = plain(*arguments)
        scores = torch.tensor([(group * 8)[:8] for group in next(left)])
        return Rollout(**vars(rollout_) | {"scores_B": scores.flatten()})

    monkeypatch.setattr(made, "_rollout", fake)


SIGNAL, NONE = [0.0, 1.0], [1.0, 1.0]


def test_groups_without_signal_are_dropped_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, "algorithm=dapo")
    scripted_scores(made, [[NONE, SIGNAL, NONE, SIGNAL], [SIGNAL, NONE, SIGNAL, SIGNAL]], monkeypatch)
    kept, scores_PG, _ = made.sample(1)
    assert scores_PG.shape == (8, 8)
    assert len(kept.scores_B) == 32
    kept_PG = kept.scores_B.view(4, 8)
    assert (kept_PG != kept_PG[:, :1]).any(-1).all()
    # They come in the order in which they were sampled: prompts 1 and 3, then 4 and 6.
    made = trainer(tmp_path, "algorithm=dapo")
    parts = [made._rollout("rollout", 1, 4, 8, made.model), made._rollout("rollout_refill_1", 1, 4, 8, made.model)]
    together = join(parts).sequences
    rows = [row for prompt in (1, 3, 4, 6) for row in range(8 * prompt, 8 * prompt + 8)]
    assert torch.equal(kept.sequences.tokens_BS, together.tokens_BS[rows])
    assert torch.equal(kept.sequences.mask_BS, together.mask_BS[rows])


def test_remaining_places_go_to_groups_without_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, "algorithm=dapo", "algorithm.sampling.max_rollouts=2")
    scripted_scores(made, [[NONE, NONE, SIGNAL, NONE], [NONE, SIGNAL, NONE, NONE]], monkeypatch)
    kept_PG = made.sample(1)[0].scores_B.view(4, 8)
    assert (kept_PG != kept_PG[:, :1]).any(-1).tolist() == [True, True, False, False]


def test_step_counts_all_samples_and_trains_on_the_kept_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, "algorithm=dapo")
    scripted_scores(made, [[NONE, SIGNAL, NONE, SIGNAL], [SIGNAL, NONE, SIGNAL, SIGNAL]], monkeypatch)
    (row,) = made.step(1).rows["steps"]
    assert row["prompts_sampled"] == 8
    assert row["groups_without_signal"] == 3 / 8
    assert row["reward"] == pytest.approx((3 * 1 + 5 * 0.5) / 8)
    assert row["response_tokens"] < row["tokens_sampled"] <= 8 * 8 * 5


def test_group_with_only_different_length_penalties_has_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(tmp_path, "algorithm=dapo", "algorithm.sampling.max_rollouts=1")
    scripted_scores(made, [[NONE] * 4] * 2, monkeypatch)
    rollout = made.sample(1)[0]
    lengths_PG = rollout.sequences.response_mask_BT.sum(-1).view(4, 8).clamp(min=4)  # punished from the fifth token on
    (row,) = made.step(1).rows["steps"]
    expected = (lengths_PG == lengths_PG[:, :1]).all(-1).float().mean()
    assert row["groups_without_signal"] == expected < 1


def test_rollouts_of_different_widths_are_aligned_when_joined(model: PreTrainedModel, task: Chain) -> None:
    decoding = Decoding(engine=Truncated(top_k=8, replay_mask=True), top_k=3, gates=True, pinned=copy.deepcopy(model))
    prompts = ("1+2+3=", "1+2+3*4-5=")
    parts = [roll_out(model, task, [text], 4, torch.Generator().manual_seed(1), decoding) for text in prompts]
    together = join([parts[0], parts[1].padded(0, 2)])
    assert (together.routes_LBFK[:, ~together.sequences.route_mask_BF] == NO_ROUTE).all()
    assert not together.gates_LBFK[together.routes_LBFK == NO_ROUTE].any()
    assert together.kept_BTV[~together.sequences.response_mask_BT.bool()].all()
    for number, part in enumerate(parts):
        ours = together.rows(torch.arange(4 * number, 4 * number + 4))
        tokens = [each.sequences.tokens_BS[each.sequences.mask_BS.bool()] for each in (ours, part)]
        assert torch.equal(*tokens)
        for each in fields(Rollout):
            letters, values = dimensions_of(each) or "", []
            for rollout in (ours, part):
                sequences, of = rollout.sequences, getattr(rollout, each.name)
                mask = sequences.route_mask_BF if "F" in letters else sequences.response_mask_BT.bool()
                values.append(of[:, mask] if letters.startswith("L") else of[mask] if "T" in letters else of)
            assert not letters or torch.equal(*values), each.name
        with torch.no_grad():
            again, alone = (forward(model, rollout.sequences, "fp32") for rollout in (ours, part))
        mask_BT, part_BT = ours.sequences.response_mask_BT.bool(), part.sequences.response_mask_BT.bool()
        assert_close(again.logprobs_BT[mask_BT], alone.logprobs_BT[part_BT], atol=1e-5, rtol=0)
        assert_close(again.router_logprobs_LBTE[:, mask_BT], ours.router_logprobs_LBTE[:, mask_BT], atol=1e-5, rtol=0)


# --- corrections in a run ----------------------------------------------------------------------------


def test_a_correction_is_applied_and_recorded(tmp_path: Path) -> None:
    made = planned(tmp_path, "correction=icepop", "updates=2")
    assert made.axes["correction"] == "icepop"
    assert executed(made) == "finished"
    steps = record.read_table(made.folder, "steps")
    assert steps["correction_weight"].item() == pytest.approx(1, abs=1e-3)  # sampler and trainer agree
    assert steps["correction_rejected"].item() == 0
    plain = planned(tmp_path, "updates=2")
    assert plain.config_hash != made.config_hash
    assert identity.settings_hash(plain.plain, made.axes) == identity.settings_hash(made.plain, made.axes)


def test_learning_rates_decay_linearly_over_the_last_updates(tmp_path: Path) -> None:
    """The same factor for routers and other weights; the last update still moves; without a decay nothing changes."""
    made = trainer(tmp_path, "optimizer.decay=0.5", "optimizer.router_factor=0.1", "optimizer.learning_rate=1e-3")
    seen = []
    for update in range(1, 9):
        made.learner.schedule(update, of=8)
        seen.append([group["lr"] for group in made.learner.optimizer.param_groups])
    factors = [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert_close(torch.tensor(seen), torch.tensor([[1e-3 * factor, 1e-4 * factor] for factor in factors]))
    constant = trainer(tmp_path, "optimizer.learning_rate=1e-3").learner
    constant.schedule(8, of=8)
    assert constant.learning_rate == 1e-3


def test_run_records_its_decaying_rate_and_clipped_gradients(tmp_path: Path) -> None:
    run = finished(tmp_path, "optimizer.decay=1.0", "optimizer.learning_rate=1e-3", "optimizer.max_grad_norm=1e-3")
    updates = record.read_table(run.folder, "updates")
    count = len(updates)
    assert updates["learning_rate"].tolist() == pytest.approx([1e-3 * (count - k) / count for k in range(count)])
    assert (updates["norm_cut"] == (updates["grad_norm"] > 1e-3)).all()  # a mini-batch without a signal has no gradient
    assert updates["norm_cut"].any()
    wide = finished(tmp_path, "optimizer.max_grad_norm=1e6", "experiment_name=wide")
    assert (record.read_table(wide.folder, "steps")["norm_cut"] == 0).all()


def test_autoclip_cuts_the_gradient_that_the_optimizer_sees(tmp_path: Path) -> None:
    learner = trainer(tmp_path, "optimizer.autoclip=0.5", "optimizer.max_grad_norm=1.9").learner
    for norm, allowed in [(1.0, 1.0), (3.0, 1.9), (0.0, 1.9), (0.5, 1.0), (1.5, 1.25)]:
        for weight in learner.model.parameters():
            weight.grad = torch.zeros_like(weight)
        first = next(learner.model.parameters())
        first.grad.view(-1)[0] = norm  # type: ignore[union-attr]
        before, largest = learner._clip()
        assert before.item() == pytest.approx(norm)
        assert largest == pytest.approx(allowed)
        assert first.grad.norm().item() == pytest.approx(min(norm, allowed), rel=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer.decay=0.75"],
        # To the smallest norm so far: a run that had forgotten the norms would not clip its next update.
        ["optimizer.autoclip=0.0", "optimizer.max_grad_norm=1e6"],
    ],
)
def test_stopped_run_resumes_at_its_decayed_rate_with_the_norms_so_far(tmp_path: Path, words: list[str]) -> None:
    assert_resumes(tmp_path, 5, *words)
