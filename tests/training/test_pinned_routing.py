"""Pinned routes: every forward runs the experts that the cold start's weights choose on the same prefix.

Shapes: L MoE layers, B sequences, F positions fed, K experts a token.
"""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import assert_resumes, begun, finished, planned, tables, trainer, updated
from torch import Tensor
from torch.testing import assert_close

from steadymoe.bench.runs import record
from steadymoe.bench.support.errors import ConfigError
from steadymoe.bench.training.forward import Sequences, forward
from steadymoe.bench.training.sampling import Decoding, Rollout, roll_out
from steadymoe.bench.training.trainer import Trainer

FAST = ["optimizer.learning_rate=1e-2", "updates_per_rollout=4", "minibatch_prompts=1", "updates=24"]


def moved(made: Trainer) -> Trainer:
    """Move every weight, so that the routers would choose others."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.model.parameters():
            weight.add_(0.3 * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator))
    return made


def routes_by_hand(made: Trainer, start: object, sequences: Sequences) -> Tensor:
    """Choose with the start's weights, a prefix at a time, each sequence by itself and without a cache or padding."""
    routes_LBFK = None
    with torch.no_grad():
        for row, (tokens_S, mask_S) in enumerate(zip(sequences.tokens_BS, sequences.mask_BS, strict=True)):
            places = mask_S.bool().nonzero().squeeze(-1)
            for end in range(2, len(places) + 1):
                prefix = tokens_S[places[:end]][None]
                alone = Sequences(prefix, torch.ones_like(prefix), 1)
                chosen_LFK = forward(start, alone, "fp32").routes_LBFK[:, 0]
                if routes_LBFK is None:
                    shape = len(chosen_LFK), *sequences.route_mask_BF.shape, chosen_LFK.shape[-1]
                    routes_LBFK = torch.full(shape, -1, dtype=chosen_LFK.dtype)
                routes_LBFK[:, row, places[end - 2]] = chosen_LFK[:, -1]
    return routes_LBFK


def as_sets(routes_LBFK: Tensor) -> Tensor:
    return routes_LBFK.sort(-1).values


@pytest.mark.parametrize("experts", ["experts=grouped_mm", "experts=eager"])
@pytest.mark.parametrize("family", ["model=micro", "model=mixtral_micro", "model=deepseek_v3_micro"])
def test_every_forward_runs_what_the_start_chooses(tmp_path: Path, family: str, experts: str) -> None:
    made = trainer(tmp_path, "routing=pinned", family, experts)
    start = copy.deepcopy(made.model)
    moved(made)
    rollout, minibatches, old = begun(made)
    expected = routes_by_hand(made, start, rollout.sequences)
    assert torch.equal(as_sets(rollout.pinned_LBFK), as_sets(expected))
    assert torch.equal(old.executed_LBFK, rollout.pinned_LBFK)
    assert not torch.equal(as_sets(old.routes_LBFK), as_sets(expected)), "the routers would choose others"
    mask_BT = rollout.sequences.response_mask_BT
    assert_close(old.logprobs_BT * mask_BT, rollout.logprobs_BT, atol=2e-4, rtol=0)  # sampler and trainer agree
    (part,) = minibatches[0]
    forced = made.learner.replayed(rollout, old, minibatches[0])
    now = made.learner.forwards(made.model, rollout, part, forced)
    assert torch.equal(now.executed_LBFK, rollout.pinned_LBFK[:, part.rows_M])
    assert torch.equal(now.logprobs_BT, old.logprobs_BT[part.rows_M])
    greedy = made._respond("evaluation", made._held_out, 1, Decoding(greedy=True, pinned=made.learner.pinned))
    assert torch.equal(as_sets(greedy.pinned_LBFK), as_sets(routes_by_hand(made, start, greedy.sequences)))


@pytest.mark.parametrize("words", [[], ["savings.share_prompts=false"], ["microbatch=3"]], ids=str)
def test_gates_stay_live_and_routers_learn(tmp_path: Path, words: list[str]) -> None:
    made = trainer(tmp_path, "routing=pinned", *FAST, *words)
    before = [weight.clone() for name, weight in made.model.named_parameters() if name.endswith("gate.weight")]
    first, second = updated(made)
    after = [weight for name, weight in made.model.named_parameters() if name.endswith("gate.weight")]
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert first.overall["replay_share"] == second.overall["replay_share"] == 1
    assert first.overall["token_ratio_max"] == 1 != second.overall["token_ratio_max"]


def test_pinned_and_free_are_one_run_at_a_rate_of_0(tmp_path: Path) -> None:
    free, pinned = (
        finished(tmp_path / routing, f"routing={routing}", "optimizer.learning_rate=0") for routing in ("off", "pinned")
    )
    theirs = tables(pinned.folder)
    for name, frame in tables(free.folder).items():
        for column in frame:
            if not column.startswith("replay_"):
                assert frame[column].equals(theirs[name][column]), column


def test_routes_do_not_move_where_free_ones_do(tmp_path: Path) -> None:
    """What routing does to the ratio is 0 with pinned routes, and what the routers would change is measured."""
    words = ["optimizer.learning_rate=1e-2", "probe.every=2", "probe.fraction=1.0"]
    free, pinned = (finished(tmp_path / each, f"routing={each}", *words) for each in ("off", "pinned"))
    for run, is_pinned in ((free, False), (pinned, True)):
        updates = record.read_table(run.folder, "updates")
        assert (updates["expert_change_per_update"].dropna() > 0).any()
        assert ((updates["log_ratio_moment_routing"].dropna().abs() < 1e-12).all()) == is_pinned
    assert record.read_table(pinned.folder, "steps")["rollout_kl_k3"].abs().max() < 1e-6


def test_model_that_runs_all_experts_never_changes_them(tmp_path: Path) -> None:
    all_experts = "model.config.num_experts_per_tok=8"
    run = finished(tmp_path, all_experts, "optimizer.learning_rate=1e-2", "probe.every=2", "probe.fraction=1.0")
    updates = record.read_table(run.folder, "updates")
    for column in ("expert_change_per_update", "expert_set_change_rate", "expert_change_rate"):
        assert (updates[column].dropna() == 0).all(), column
    assert (updates["log_ratio_moment_routing"].dropna().abs() < 1e-12).all()
    assert (updates["token_ratio_variance"] > 0).any()


def test_stopped_pinned_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    assert_resumes(tmp_path, 3, "routing=pinned", *FAST, "updates=12", "algorithm.kl.coefficient=0.1")


def test_pinned_sampler_stands_in_for_the_old_policy(tmp_path: Path) -> None:
    words = ["routing=pinned", "savings.reuse_sampler_logprobs=1", *FAST]
    updates = record.read_table(finished(tmp_path, *words).folder, "updates")
    assert (updates.loc[updates["update"] == 1, "token_ratio_variance"] < 1e-8).all()


@pytest.mark.parametrize("engine", ["weight_noise", "router_noise", "bf16", "stale"])
def test_a_mismatch_of_the_sampler_moves_no_pinned_route(tmp_path: Path, engine: str) -> None:
    made = trainer(tmp_path, "routing=pinned", f"engine={engine}", "engine.strength=1")
    start = copy.deepcopy(made.model)
    rollout, _, old = begun(moved(made))
    assert torch.equal(as_sets(rollout.pinned_LBFK), as_sets(routes_by_hand(made, start, rollout.sequences)))
    assert torch.equal(old.executed_LBFK, rollout.pinned_LBFK)


def test_rows_that_leave_the_batch_keep_their_pinned_routes(tmp_path: Path) -> None:
    made = moved(trainer(tmp_path, "routing=pinned"))
    decoding = Decoding(pinned=made.learner.pinned)

    def drawn(prompts: list[str]) -> Rollout:
        return roll_out(made.model, made.task, prompts, 2, torch.Generator().manual_seed(1), decoding)

    prompts = made.task.sample(6, np.random.default_rng(0))
    rollout = drawn(prompts)
    expected = routes_by_hand(made, made.learner.pinned, rollout.sequences)
    lengths = rollout.sequences.response_mask_BT.sum(-1)
    assert lengths.min() < lengths.max()
    assert torch.equal(as_sets(rollout.pinned_LBFK), as_sets(expected))
    wide = rollout.padded(2, 1)
    assert wide.pinned_LBFK.shape[2] == rollout.pinned_LBFK.shape[2] + 3


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("model=dense_micro", "dense and has no routers"),
        ("evaluation.permuted_routes=true", "permuted_routes=false"),
        ("routing.bias_speed=0.01", "experts that never run"),
    ],
)
def test_what_cannot_be_pinned_is_refused(tmp_path: Path, words: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        planned(tmp_path, "routing=pinned", *words.split())
