"""Work that need not be done: with each saving and without it a step says the same, but for rounding."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import PROPORTIONAL, begun, executed, finished, gradients, planned, trainer
from torch.testing import assert_close

from steadymoe.bench.runs import record, run_folder
from steadymoe.bench.training import decoding, forward, old_policy
from steadymoe.bench.training import trainer as trainer_module
from steadymoe.bench.training.learner import Measured
from steadymoe.bench.training.sampling import Rollout
from steadymoe.bench.training.trainer import Trainer

# Lengths that differ, so that there is padding, and responses that end before others.
WORDS = ["task.max_operands=4", "task.spare_tokens=3", "optimizer.learning_rate=3e-3"]


def weights(made: Trainer) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in made.model.parameters()])


def updated(made: Trainer, order: Sequence[int] = (0, 1)) -> list[Measured]:
    """Updates on two mini-batches of one rollout; half of the groups, and all of the second, have no advantage."""
    rollout, minibatches, old = begun(made)
    advantages_BT = torch.linspace(-1, 1.5, len(rollout.scores_B))[:, None] * rollout.sequences.response_mask_BT
    plain = [torch.cat([part.rows_M for part in minibatch]) for minibatch in minibatches]
    advantages_BT[plain[0][:8]] = 0.0
    advantages_BT[plain[1]] = 0.0
    return [
        made.learner.update(rollout, old, advantages_BT, minibatches[which], first=update == 0)
        for update, which in enumerate(order)
    ]


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Apart by rounding: by a small share of the length, and not at all where there is nothing."""
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def assert_same(saved: Trainer, plain: Trainer) -> None:
    """Three updates from the same weights: at ratio 1, without a signal, and at ratios that have moved."""
    start = weights(plain)
    assert torch.equal(weights(saved), start)
    made, expected = gradients(saved), gradients(plain)
    for ours, theirs in zip(updated(saved, (0, 1, 0)), updated(plain, (0, 1, 0)), strict=True):
        assert ours.overall.keys() == theirs.overall.keys()
        for name, value in theirs.overall.items():
            assert_close(ours.overall[name], value, atol=5e-6, rtol=1e-5, check_dtype=False, msg=name)
        for name, value in theirs.layers.items():
            assert_close(ours.layers[name], value, atol=5e-6, rtol=1e-5, check_dtype=False, msg=name)
    assert len(made) == len(expected) == 3
    for number, both in enumerate(zip(made, expected, strict=True)):
        one, other = (torch.cat([gradient.flatten() for gradient in found.values()]) for found in both)
        assert number > 0 or other.any()
        assert_near(one, other)
    moved = weights(plain) - start
    assert moved.norm() > 1e-2
    assert_near(weights(saved) - start, moved)


@pytest.mark.parametrize(
    "more",
    [
        ["algorithm=gspo", "microbatch=5"],
        ["algorithm=trm"],  # the most likely tokens
        ["algorithm=rspo", "routing=r3"],
        ["algorithm=r2vpo", "model=dense_micro"],
        ["engine=truncated", "engine.replay_mask=true", "microbatch=5"],
    ],
)
def test_an_update_is_the_same_with_shared_prompts_and_without(tmp_path: Path, more: list[str]) -> None:
    words = [*WORDS, *PROPORTIONAL, *more]
    assert_same(trainer(tmp_path, *words), trainer(tmp_path, *words, "savings.share_prompts=false"))


def test_dropping_finished_responses_does_not_change_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [*WORDS, "task.spare_tokens=12", "rollout.responses=32", "routing=r3_gates"]
    fed: list[int] = []
    made = trainer(tmp_path, *many)
    made.model.register_forward_pre_hook(
        lambda module, arguments, more: fed.append(len(more["input_ids"])), with_kwargs=True
    )
    ours, _, _ = made.sample(1)
    monkeypatch.setattr(decoding, "MIN_ALIVE", 0.0)
    theirs, _, _ = trainer(tmp_path, *many).sample(1)
    assert min(fed[1:]) < len(ours.scores_B)  # some have left
    assert torch.equal(ours.sequences.tokens_BS, theirs.sequences.tokens_BS)
    assert torch.equal(ours.scores_B, theirs.scores_B)
    assert torch.equal(ours.routes_LBFK, theirs.routes_LBFK)
    assert_close(ours.logprobs_BT, theirs.logprobs_BT, atol=5e-6, rtol=0)
    assert_close(ours.gates_LBFK, theirs.gates_LBFK, atol=1e-5, rtol=0)
    mask_BT = ours.sequences.response_mask_BT.bool()
    assert_close(ours.router_logprobs_LBTE[:, mask_BT], theirs.router_logprobs_LBTE[:, mask_BT], atol=5e-5, rtol=0)


def test_prompts_are_not_shared_if_log_probabilities_would_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(tmp_path, *WORDS)
    assert made.learner.forwards.unshared is None
    plain = forward.forward

    def leaky(*arguments: Any, layout: Any) -> Any:
        if layout is not None and layout.mask.ndim == 4:  # as a window would: the mask is not what was asked for
            layout.mask.zero_()
        return plain(*arguments, layout=layout)

    monkeypatch.setattr(forward, "forward", leaky)
    del made.model.sharing_refusal  # what was decided
    assert "would differ by" in str(forward.sharing_refusal(made.model))
    assert forward.sharing_refusal(copy.deepcopy(made.model)) == made.model.sharing_refusal


def test_unshared_prompts_have_a_reason(tmp_path: Path) -> None:
    for words, reason in (
        ([], None),
        (["savings.share_prompts=false"], "savings.share_prompts is off"),
        (["routing.aux_loss=0.01"], "router losses"),
        (["model=gpt_oss_micro"], "layers of sliding_attention"),
    ):
        assert trainer(tmp_path, *words).learner.forwards.unshared == reason


def test_sampler_replaces_the_old_policy_and_is_verified(tmp_path: Path) -> None:
    made = finished(tmp_path, "savings.reuse_sampler_logprobs=3", "updates=10", *PROPORTIONAL)
    steps = record.read_table(made.folder, "steps")
    compared = steps["rollout_kl_k3"].notna()
    assert compared.tolist() == [True, False, False, True, False]
    assert (steps["rollout_expert_disagreement"].notna() == compared).all()
    assert steps["expert_change_rate"].notna().all()
    updates = record.read_table(made.folder, "updates")
    first = updates[updates["update"] == 1]
    assert (first["token_ratio_variance"] < 1e-8).all()
    plain = finished(tmp_path, "updates=10", "experiment_name=plain", *PROPORTIONAL)
    theirs = record.read_table(plain.folder, "steps")
    assert_close(steps["reward"].iloc[0], theirs["reward"].iloc[0])
    assert abs(steps["grad_norm"].iloc[0] - theirs["grad_norm"].iloc[0]) < 1e-3 * theirs["grad_norm"].iloc[0]


def test_reused_sampler_is_verified_on_a_sixteenth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, "savings.reuse_sampler_logprobs=1", "updates_per_rollout=32", "minibatch_prompts=1")
    rollout, minibatches, whole = begun(made)
    seen = []
    monkeypatch.setattr(trainer_module, "check_sampler", lambda *args: seen.append(args))
    old, (rows, own) = made.old_policy(rollout, minibatches, 1)
    ((watched, computed, *_),) = seen
    assert (watched, computed) == (rows, own)
    index = torch.cat([part.rows_M for minibatch in minibatches[:2] for part in minibatch]).sort().values
    assert len(index) == 2 * made.config.rollout.responses
    assert_close(own.logprobs_BT, whole.logprobs_BT[index])
    assert torch.equal(rows.logprobs_BT, rollout.logprobs_BT[index])
    assert old.logprobs_BT is rollout.logprobs_BT


def test_near_tie_in_a_router_does_not_stop_a_run(tmp_path: Path) -> None:
    """One token in a hundred may be far apart, two may not; nor may the responses of two prompts, but those of one."""
    made = trainer(tmp_path, "savings.reuse_sampler_logprobs=1")
    rollout, _, old = begun(made)
    mask_BT, responses = rollout.sequences.response_mask_BT.bool(), made.config.rollout.responses
    places = mask_BT.nonzero()

    def moved(is_moved_BT: torch.Tensor) -> Rollout:
        return replace(rollout, logprobs_BT=rollout.logprobs_BT - 3.0 * is_moved_BT)

    def of_prompts(count: int) -> torch.Tensor:
        return mask_BT & (torch.arange(len(mask_BT))[:, None] < count * responses)

    def every(nth: int) -> torch.Tensor:
        is_moved_BT = torch.zeros_like(mask_BT)
        is_moved_BT[tuple(places[::nth].T)] = True
        return is_moved_BT

    for is_moved_BT, ends in ((every(100), False), (every(50), True), (of_prompts(1), False), (of_prompts(2), True)):
        with pytest.raises(RuntimeError, match="of the tokens") if ends else nullcontext():
            old_policy.check_sampler(moved(is_moved_BT), old, responses)
    with pytest.raises(RuntimeError, match="of the tokens"):  # a rollout of one prompt
        old_policy.check_sampler(moved(mask_BT), old, len(mask_BT))


def test_measure_little_does_not_change_training(tmp_path: Path) -> None:
    words = ["updates=6", "probe.every=4", "evaluation.every=6", *PROPORTIONAL]
    every, little = planned(tmp_path, *words), planned(tmp_path, *words, "measure=little")
    for made in (every, little):
        executed(made)
    assert run_folder.read_state(little.folder).status == "finished"
    ours, theirs = (record.read_table(made.folder, "steps") for made in (little, every))
    assert ours["reward"].iloc[0] == theirs["reward"].iloc[0]
    for name in ("loss", "grad_norm", "entropy"):
        assert ours[name].iloc[0] == pytest.approx(theirs[name].iloc[0], abs=1e-4)
    assert ours["eval_accuracy"].notna().tolist() == [False, False, True]
    assert ours["rollout_kl_k3"].iloc[0] == pytest.approx(theirs["rollout_kl_k3"].iloc[0], abs=1e-9)
    for name in ("expert_change_rate", "token_ratio_variance", "load_entropy", "routing_share"):
        assert ours[name].isna().all(), name
    assert record.read_table(little.folder, "layers").empty
    for name in ("expert_change_per_update", "expert_change_since_start", "log_ratio_moment_free"):
        assert theirs[name].notna().tolist() == [True, False, True], name


def test_measure_little_still_records_routes_needed_for_training(tmp_path: Path) -> None:
    assert not trainer(tmp_path, "measure=little").learner.forwards.records_routes
    for word in ("routing=r2", "routing=r3", "algorithm=rspo", "routing.aux_loss=0.01"):
        made = trainer(tmp_path, "measure=little", word)
        assert made.learner.forwards.records_routes
        made.step(1)
