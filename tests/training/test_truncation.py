"""Truncated sampling and mask replay against transformers' own warpers and closed forms.

Shapes: B sequences, T response positions, V vocabulary.
"""

from pathlib import Path

import pytest
import torch
from small_runs import PROPORTIONAL, assert_resumes, begun, responses, trainer, whole_logprobs
from torch import Tensor
from torch.testing import assert_close
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from steadymoe.bench.runs import compose, record
from steadymoe.bench.runs.fits import memory_need
from steadymoe.bench.training import token_metrics
from steadymoe.models.engine import Truncated

# Short responses beside long ones, and distributions that are far from even.
WORDS = ["engine=truncated", "task.max_operands=4", "task.spare_tokens=3", "model.config.initializer_range=0.3"]
REPLAY = [*WORDS, "engine.replay_mask=true"]


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"),
    [(0.8, 0, 0.0), (0.3, 0, 0.0), (1.0, 3, 0.0), (1.0, 0, 0.2), (0.8, 5, 0.0), (0.8, 0, 0.2), (0.7, 5, 0.1)],
)
def test_kept_tokens_match_transformers_warpers(top_p: float, top_k: int, min_p: float) -> None:
    logprobs_BV = torch.randn(500, 16, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(-1)
    scores_BV, ids = logprobs_BV, torch.zeros(500, 1, dtype=torch.long)
    for warper in (
        *([MinPLogitsWarper(min_p)] if min_p else []),
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
    ):
        scores_BV = warper(ids, scores_BV)
    kept_BV = Truncated(top_p=top_p, top_k=top_k, min_p=min_p).kept(logprobs_BV)
    assert torch.equal(kept_BV, scores_BV.isfinite())
    assert kept_BV.sum(-1).unique().numel() > 1 or top_k


def test_kept_tokens_match_hand_computed_examples() -> None:
    logprobs_BV = torch.tensor([[0.1, 0.5, 0.25, 0.15], [0.25, 0.25, 0.25, 0.25]]).log()
    by_hand = {
        Truncated(top_p=0.4): [[0, 1, 0, 0], [1, 1, 0, 0]],  # of equal probabilities the first
        Truncated(top_p=0.51): [[0, 1, 1, 0], [1, 1, 1, 0]],
        Truncated(top_p=1e-9): [[0, 1, 0, 0], [1, 0, 0, 0]],
        Truncated(top_k=3): [[0, 1, 1, 1], [1, 1, 1, 0]],
        Truncated(min_p=0.25): [[0, 1, 1, 1], [1, 1, 1, 1]],
        Truncated(top_p=0.6, top_k=2): [[0, 1, 0, 0], [1, 1, 0, 0]],  # 0.5 of 0.75, 0.25 of 0.5
    }
    for engine, expected in by_hand.items():
        kept_BV = engine.kept(logprobs_BV)
        assert kept_BV.int().tolist() == expected, engine


def test_without_mask_replay_the_ratio_is_the_kept_probability(tmp_path: Path) -> None:
    made = trainer(tmp_path, *WORDS)
    rollout, _, old = begun(made)
    tokens_BT, mask_BT = responses(rollout)
    with torch.no_grad():
        logprobs_NV = whole_logprobs(made, rollout)[mask_BT]
    kept_NV = made.sampler.engine.kept(logprobs_NV)
    assert kept_NV.gather(-1, tokens_BT[mask_BT][:, None]).all()
    kept_N = (logprobs_NV.exp() * kept_NV).sum(-1)
    assert kept_N.unique().numel() > 10
    assert_close((old.logprobs_BT - rollout.logprobs_BT)[mask_BT].exp(), kept_N, atol=1e-4, rtol=0)
    columns = token_metrics.of_mismatch(rollout.logprobs_BT, old.logprobs_BT, rollout.sequences.response_mask_BT)
    assert_close(columns["rollout_ratio_mean"], kept_N.mean(), atol=1e-4, rtol=0)
    assert rollout.kept_BTV is None


def test_mask_replay_renormalises_every_forward(tmp_path: Path) -> None:
    made = trainer(tmp_path, *REPLAY, *PROPORTIONAL, "probe.fraction=1.0", "algorithm.kl.coefficient=0.1")
    rollout, minibatches, old = begun(made)
    tokens_BT, mask_BT = responses(rollout)
    kept_BTV = rollout.kept_BTV
    assert kept_BTV[~mask_BT].all()
    assert not kept_BTV[mask_BT].all()

    def replayed_BT() -> Tensor:
        masked_BTV = whole_logprobs(made, rollout).masked_fill(~kept_BTV, -1e9).log_softmax(-1)
        return masked_BTV.gather(-1, tokens_BT[..., None]).squeeze(-1) * mask_BT

    before_BT = replayed_BT()
    assert_close(old.logprobs_BT * mask_BT, before_BT, atol=1e-4, rtol=0)
    assert_close(rollout.logprobs_BT, before_BT, atol=1e-4, rtol=0)
    assert torch.equal(old.reference_logprobs_BT, old.logprobs_BT)  # the cold start is the policy still

    probe, _ = made.probe(1, rollout, old, (rollout, old))
    (part,) = minibatches[0]
    now = made.learner.forwards(made.model, rollout, part)
    rows = part.rows_M
    assert torch.equal(now.logprobs_BT, old.logprobs_BT[rows])  # so the ratio is exactly 1
    signs_BT = torch.linspace(-1, 1, mask_BT.numel()).view(mask_BT.shape) * mask_BT
    weights = list(made.model.parameters())
    ours = torch.autograd.grad((now.logprobs_BT * signs_BT[rows]).sum(), weights)
    theirs = torch.autograd.grad((replayed_BT() * signs_BT)[rows].sum(), weights)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6
    with torch.no_grad():  # the entropy stays that of the whole vocabulary
        entropy_BT = torch.special.entr(whole_logprobs(made, rollout).exp()).sum(-1)
    assert_close(now.entropy_BT * mask_BT[rows], (entropy_BT * mask_BT)[rows], atol=1e-4, rtol=0)

    advantages_BT = torch.linspace(-1, 1, len(mask_BT))[:, None] * mask_BT
    made.learner.update(rollout, old, advantages_BT, minibatches[0], first=True)
    columns, _ = probe.after_update(made.model)
    with torch.no_grad():
        moved_BT = replayed_BT() - before_BT
    assert_close(columns["log_ratio_moment_free"], moved_BT[mask_BT].square().mean(), atol=1e-9, rtol=1e-2)


@pytest.mark.parametrize(
    "words",
    [[*REPLAY, "algorithm=dapo", "rollout.responses=3"], ["engine=weight_noise", "engine.strength=0.1"]],
    ids=["mask", "noise"],
)
def test_stopped_run_resumes_bit_for_bit(tmp_path: Path, words: list[str]) -> None:
    steps = record.read_table(assert_resumes(tmp_path, 4, "updates=8", *words).folder, "steps")
    replays = words[0] == "engine=truncated"
    assert (abs(steps["rollout_ratio_mean"] - 1) < 1e-5).all() == replays
    assert (steps["rollout_kl_k3"] < 1e-8).all() == replays
    assert (steps["prompts_sampled"] > 4).any() == replays  # groups of several rollouts


def test_masks_count_towards_the_memory_bound(tmp_path: Path) -> None:
    words = ["model=micro", "task=chain", "cold_start.batch_size=1", f"results_dir={tmp_path}"]
    task = trainer(tmp_path, *WORDS).task
    (made,), (without,) = (compose.plan([*REPLAY, *more, *words]) for more in ([], ["engine.replay_mask=false"]))
    masks = memory_need(made.config, task) - memory_need(without.config, task)
    responses = made.config.prompts * made.config.rollout.responses
    assert masks == responses * task.max_new_tokens * len(task.tokenizer)
