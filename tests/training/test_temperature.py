"""``rollout.temperature`` in sampler and trainer, against log_softmax(logits / T) of a plain forward.

Shapes: B sequences, T response positions, V vocabulary, K most likely tokens.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import (
    PROPORTIONAL,
    advantages,
    assert_resumes,
    begun,
    finished,
    planned,
    responses,
    trainer,
    whole_logprobs,
)
from torch import Tensor
from torch.testing import assert_close

from steadymoe.bench.runs import record
from steadymoe.bench.training import old_policy
from steadymoe.bench.training.sampling import Rollout
from steadymoe.bench.training.trainer import Trainer

TEMPERATURES = [0.5, 3.0]
# Distributions that are far from even, and responses that end before others.
LIVELY = ["task.max_operands=4", "task.spare_tokens=3", "model.config.initializer_range=0.3"]


def at(temperature: float) -> list[str]:
    return [*LIVELY, f"rollout.temperature={temperature}"]


@torch.no_grad()
def expected(made: Trainer, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / T) of the drawn tokens, 0 on padding, and its entropy, (B, T) each."""
    tokens_BT, mask_BT = responses(rollout)
    logprobs_BTV = (whole_logprobs(made, rollout) / temperature).log_softmax(-1)
    entropy_BT = torch.special.entr(logprobs_BTV.exp()).sum(-1)
    return logprobs_BTV.gather(-1, tokens_BT[..., None])[..., 0] * mask_BT, entropy_BT * mask_BT


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("words", [[], ["savings.share_prompts=false", "microbatch=5"]], ids=["shared", "apart"])
def test_sampler_old_policy_and_entropy_use_the_temperature(
    tmp_path: Path, temperature: float, words: list[str]
) -> None:
    made = trainer(tmp_path, *at(temperature), *words, "algorithm.kl.coefficient=0.1")
    rollout, minibatches, old = begun(made)
    mask_BT = rollout.sequences.response_mask_BT
    logprobs_BT, entropy_BT = expected(made, rollout, temperature)
    tolerance = 1e-4 / min(temperature, 1)
    assert (logprobs_BT - expected(made, rollout, 1.0)[0]).abs().max() > 0.1
    assert_close(rollout.logprobs_BT, logprobs_BT, atol=tolerance, rtol=0)
    assert_close(old.logprobs_BT * mask_BT, logprobs_BT, atol=tolerance, rtol=0)
    assert torch.equal(old.reference_logprobs_BT, old.logprobs_BT)  # the cold start, before any update
    part = minibatches[0][0]
    now = made.learner.forwards(made.model, rollout, part)
    assert torch.equal(now.logprobs_BT.detach(), old.logprobs_BT[part.rows_M])
    assert_close(now.entropy_BT * mask_BT[part.rows_M], entropy_BT[part.rows_M], atol=tolerance, rtol=0)


def test_gradient_is_that_of_logits_divided_by_the_temperature(tmp_path: Path) -> None:
    made = trainer(tmp_path, *at(0.5))
    rollout, minibatches, _ = begun(made)
    part, weights = minibatches[0][0], list(made.model.parameters())
    signs_BT = advantages(rollout)
    tokens_BT, _ = responses(rollout)
    cold_BTV = (whole_logprobs(made, rollout) / 0.5).log_softmax(-1)
    plain_BT = cold_BTV.gather(-1, tokens_BT[..., None])[..., 0] * signs_BT
    now = made.learner.forwards(made.model, rollout, part)
    ours = torch.autograd.grad((now.logprobs_BT * signs_BT[part.rows_M]).sum(), weights, allow_unused=True)
    theirs = torch.autograd.grad(plain_BT[part.rows_M].sum(), weights, allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        if other is not None:
            assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6


def test_token_frequencies_match_the_temperature(tmp_path: Path) -> None:
    made = trainer(tmp_path, *at(0.5), "rollout.responses=4000", "minibatch_prompts=1")
    rollout, _, _ = made.sample(1)
    with torch.no_grad():
        first_BV = whole_logprobs(made, rollout.rows(torch.tensor([0, 4000])))[:, 0]
    tokens_2G = responses(rollout)[0][:, 0].view(2, 4000)
    for tokens_G, first_V in zip(tokens_2G, first_BV, strict=True):
        shares_V = tokens_G.bincount(minlength=len(first_V)) / 4000
        drawn_V, plain_V = (first_V / 0.5).softmax(-1), first_V.exp()
        bound_V = 5 * (drawn_V * (1 - drawn_V) / 4000).sqrt() + 1e-3  # five standard deviations
        assert ((shares_V - drawn_V).abs() <= bound_V).all()
        assert ((shares_V - plain_V).abs() > bound_V).any()


@pytest.mark.parametrize("words", [[], ["engine.strength=0.0"]], ids=["hotter", "exact"])
def test_engine_temperature_is_relative(tmp_path: Path, words: list[str]) -> None:
    made = trainer(tmp_path, *at(0.5), "engine=temperature", *words)
    rollout, _, old = begun(made)
    factor = 1 + made.sampler.engine.strength
    assert_close(rollout.logprobs_BT, expected(made, rollout, 0.5 * factor)[0], atol=2e-4, rtol=0)
    trained_BT = expected(made, rollout, 0.5)[0]
    assert_close(old.logprobs_BT * rollout.sequences.response_mask_BT, trained_BT, atol=2e-4, rtol=0)


def test_truncation_applies_after_the_temperature(tmp_path: Path) -> None:
    made = trainer(tmp_path, *at(3.0), "engine=truncated", "engine.top_p=0.6", "engine.replay_mask=true")
    rollout, _, old = begun(made)
    _, mask_BT = responses(rollout)
    with torch.no_grad():
        hot_BTV = (whole_logprobs(made, rollout) / 3.0).softmax(-1)
    kept_N = (hot_BTV * rollout.kept_BTV).sum(-1)[mask_BT]
    assert (kept_N >= 0.6 - 1e-4).all()
    logprobs_N = expected(made, rollout, 3.0)[0][mask_BT] - kept_N.log()
    assert_close(rollout.logprobs_BT[mask_BT], logprobs_N, atol=1e-4, rtol=0)
    assert_close(old.logprobs_BT[mask_BT], logprobs_N, atol=1e-4, rtol=0)


@pytest.mark.parametrize("engine", ["exact", "temperature"])
def test_centred_score_has_mean_0_at_the_temperature(tmp_path: Path, engine: str) -> None:
    """With one advantage for all tokens, the expected gradient over the sampler's draws vanishes.

    The head holds the whole vocabulary: Σ_v q_v ∇log p_v is subtracted exactly if q is the sampler's distribution.
    """
    made = trainer(tmp_path, *at(0.5), "algorithm=score_centering", f"engine={engine}")
    rollout, minibatches, old = begun(made)
    _, mask_BT = responses(rollout)
    sampler_BTK, tokens_BTK = rollout.top_logprobs_BTK, rollout.top_tokens_BTK
    assert_close(sampler_BTK.exp().sum(-1)[mask_BT], torch.ones(int(mask_BT.sum())), atol=1e-5, rtol=0)
    with torch.no_grad():
        whole_BTV = whole_logprobs(made, rollout)
    for found_BTK, temperature in ((sampler_BTK, 0.5 * made.sampler.engine.temperature), (old.top_logprobs_BTK, 0.5)):
        expected_BTK = (whole_BTV / temperature).log_softmax(-1).gather(-1, tokens_BTK)
        real_BTK = sampler_BTK.isfinite() & mask_BT[..., None]
        assert_close(found_BTK[real_BTK], expected_BTK[real_BTK], atol=3e-4, rtol=0)
    part = minibatches[0][0]
    now = made.learner.forwards(made.model, rollout, part)
    counts = len(part.rows_M), int(mask_BT[part.rows_M].sum())
    batch = made.learner.batch(rollout, old, mask_BT.float(), part.rows_M, now, counts)
    q_BTK = batch.rollout_top_logprobs_BTK.exp()

    def mean_gradient(batch_q_BTK: Tensor) -> float:
        """Σ_v q_v of the gradient if v had been drawn, at each position; the largest over positions and tokens."""
        leaf_BTK = batch.top_logprobs_BTK.detach().requires_grad_()
        total_BT: Tensor | float = 0.0
        for place in range(leaf_BTK.shape[-1]):
            values_BT = made.learner.objective.loss.surrogate(
                replace(batch, logprobs_BT=leaf_BTK[..., place], top_logprobs_BTK=leaf_BTK)
            ).values_BT
            total_BT = total_BT + batch_q_BTK[..., place].detach() * values_BT
        (gradient_BTK,) = torch.autograd.grad(total_BT.sum(), leaf_BTK)
        return float(gradient_BTK.abs().max())

    assert mean_gradient(q_BTK) < 1e-4
    assert mean_gradient(q_BTK.square() / q_BTK.square().sum(-1, keepdim=True)) > 1e-2  # another sampler


def test_probes_and_replay_columns_use_the_temperature(tmp_path: Path) -> None:
    made = trainer(tmp_path, *at(0.5), "routing=r3", *PROPORTIONAL, "probe.fraction=1.0")
    rollout, minibatches, old = begun(made)
    probe, measured = made.probe(1, rollout, old, (rollout, old))
    watched = rollout.rows(made.sampled_rows(1))
    _, mask_BT = responses(watched)
    before_BT = expected(made, watched, 0.5)[0]
    assert_close(probe.before_BT * mask_BT, before_BT, atol=2e-4, rtol=0)
    assert measured.overall["replay_kl"] < 1e-6
    assert measured.overall["replay_kl_free"] < 1e-6
    assert measured.overall["rollout_kl_k3"] < 1e-6
    made.learner.update(rollout, old, advantages(rollout), minibatches[0], first=True)
    columns, _ = probe.after_update(made.model)
    moved_BT = expected(made, watched, 0.5)[0] - before_BT
    assert_close(columns["log_ratio_moment_free"], moved_BT[mask_BT].square().mean(), atol=1e-9, rtol=1e-2)


def test_evaluation_stays_at_temperature_1(tmp_path: Path) -> None:
    assert trainer(tmp_path, *at(3.0)).evaluate(1) == trainer(tmp_path, *LIVELY).evaluate(1)


@pytest.mark.parametrize("temperature", [0.1, 30.0])
def test_sampler_replaces_the_old_policy_at_any_temperature(tmp_path: Path, temperature: float) -> None:
    words = [f"rollout.temperature={temperature}", "savings.reuse_sampler_logprobs=1", "updates=4", *PROPORTIONAL]
    made = finished(tmp_path, *words)
    updates = record.read_table(made.folder, "updates")
    assert (updates.loc[updates["update"] == 1, "token_ratio_variance"] < 1e-4).all()
    held = trainer(tmp_path, *words)
    rollout, _, old = begun(held)
    near, far = (replace(rollout, logprobs_BT=old.logprobs_BT + by / min(temperature, 1)) for by in (9e-5, 2e-4))
    old_policy.check_sampler(near, old, 8, temperature)
    with pytest.raises(RuntimeError, match="of the tokens"):
        old_policy.check_sampler(far, old, 8, temperature)
    hot = replace(rollout, logprobs_BT=expected(held, rollout, 2 * temperature)[0])
    with pytest.raises(RuntimeError, match="of the tokens"):
        old_policy.check_sampler(hot, old, 8, temperature)


def test_run_at_a_temperature_resumes_and_has_its_own_hash(tmp_path: Path) -> None:
    made = assert_resumes(tmp_path, 4, "updates=8", "rollout.temperature=0.7")
    steps = record.read_table(made.folder, "steps")
    assert (steps["rollout_kl_k3"] < 1e-8).all()
    assert planned(tmp_path).config_hash == planned(tmp_path, "rollout.temperature=1").config_hash != made.config_hash
    assert made.axes["rollout.temperature"] == 0.7
