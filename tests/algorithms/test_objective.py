"""Corrections, the KL term and the entropy bonus of an objective; mini-batches in parts; switches; the advantages."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_algorithms import ROOT
from test_family import run, same
from torch import Tensor
from torch.testing import assert_close

from steadymoe.algorithms import Batch, PolicyLoss, Surrogate, build, load, names, ops
from steadymoe.algorithms.advantages import (
    BatchWhitened,
    BatchWhitenedPopulation,
    GroupMean,
    GroupMeanBatchStd,
    GroupMeanStd,
    LeaveOneOut,
    LeaveOneOutStd,
    PlusMinus,
)
from steadymoe.algorithms.corrections import (
    BinaryKL,
    Correction,
    GeometricRejection,
    MaskedIS,
    TruncatedIS,
    Uncorrected,
)
from steadymoe.algorithms.gepo import GEPO
from steadymoe.algorithms.objective import KL, Objective
from steadymoe.bench.check import properties
from steadymoe.bench.check.batches import ADVANTAGES, LENGTHS, RESPONSES, TOKENS, ragged

CORRECTIONS: list[Correction] = [
    TruncatedIS(),
    TruncatedIS(unit="product"),
    TruncatedIS(unit="sequence"),
    TruncatedIS(ratio_cap=None),
    MaskedIS(),
    MaskedIS(unit="product"),
    MaskedIS(ratio_low=0.5, ratio_high=5.0),
    GeometricRejection(),
    GeometricRejection(weighted=True),
    BinaryKL(),
    BinaryKL(weighted=True),
]


def objective(loss: PolicyLoss, correction: Correction | None = None, **added: Any) -> Objective:
    kl = KL(**{key: value for key, value in added.items() if key != "entropy_bonus"})
    bonus = added.get("entropy_bonus", 0.0)
    return Objective(loss=loss, correction=correction or Uncorrected(), kl=kl, entropy_bonus=bonus)


def mismatched(rhos: list[list[float]], mu: float = 0.25) -> Batch:
    """A batch with given ρ = π_old/μ; π_θ equals π_old, and μ is ``mu`` for every token."""
    width = max(map(len, rhos))
    mask_BT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rhos])
    log_BT = torch.tensor([[math.log(x) for x in row] + [0.0] * (width - len(row)) for row in rhos]).double()
    rollout_BT = torch.full_like(log_BT, math.log(mu))
    return Batch(
        logprobs_BT=(rollout_BT + log_BT).requires_grad_(),
        old_logprobs_BT=rollout_BT + log_BT,
        rollout_logprobs_BT=rollout_BT,
        mask_BT=mask_BT,
        advantages_BT=torch.ones_like(log_BT),
    )


# --- corrections -------------------------------------------------------------------------------------


def weights(correction: Correction, rhos: list[list[float]], mu: float = 0.25) -> list[list[float]]:
    weights_BT = correction.weights(mismatched(rhos, mu))
    assert weights_BT is not None
    assert not weights_BT.requires_grad
    return [row[: len(rho)] for row, rho in zip(weights_BT.tolist(), rhos, strict=True)]


def close(found: list[list[float]], expected: list[list[float]]) -> None:
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other)


def test_truncated_importance_sampling_closed_form() -> None:
    rhos = [[0.5, 2.0, 3.0], [1.5, 1.6]]
    close(weights(TruncatedIS(ratio_cap=2.0), rhos), [[0.5, 2.0, 2.0], [1.5, 1.6]])
    close(weights(TruncatedIS(ratio_cap=None), [[0.5, 2.0, 1e6]]), [[0.5, 2.0, 1e6]])
    close(weights(TruncatedIS(unit="product", ratio_cap=2.9), rhos), [[2.9] * 3, [2.4] * 2])
    close(weights(TruncatedIS(unit="sequence", ratio_cap=1.5), rhos), [[3 ** (1 / 3)] * 3, [1.5] * 2])


def test_masked_importance_sampling_and_icepop_closed_form() -> None:
    rhos = [[0.4, 0.5, 3.0], [1.5, 1.2]]
    close(weights(MaskedIS(ratio_high=2.0), rhos), [[0.4, 0.5, 0.0], [1.5, 1.2]])
    close(weights(MaskedIS(ratio_low=0.45, ratio_high=5.0), rhos), [[0.0, 0.5, 3.0], [1.5, 1.2]])
    close(weights(MaskedIS(unit="product", ratio_high=1.7), rhos), [[0.6] * 3, [0.0] * 2])


def test_geometric_rejection_keeps_or_drops_whole_responses() -> None:
    rhos = [[2.0, 0.5, 1.0], [1.5, 1.2]]
    close(weights(GeometricRejection(ratio_low=0.99, ratio_high=1.01), rhos), [[1.0] * 3, [0.0] * 2])
    band = GeometricRejection(ratio_low=0.99, ratio_high=1.01, weighted=True)
    close(weights(band, rhos), [[2.0, 0.5, 1.0], [0.0] * 2])


def test_kpop_needs_both_directions() -> None:
    # μ = 0.01 and π_old = 0.2: D(μ‖π) is 0.18 and D(π‖μ) 0.43.
    forward = 0.01 * math.log(0.01 / 0.2) + 0.99 * math.log(0.99 / 0.8)
    backward = 0.2 * math.log(0.2 / 0.01) + 0.8 * math.log(0.8 / 0.99)
    assert forward < 0.3 < backward
    rhos = [[20.0, 1.1]]
    close(weights(BinaryKL(max_kl=0.3), rhos, mu=0.01), [[0.0, 1.0]])
    close(weights(BinaryKL(max_kl=backward * 1.001), rhos, mu=0.01), [[1.0, 1.0]])
    close(weights(BinaryKL(max_kl=backward * 0.999, weighted=True), rhos, mu=0.01), [[0.0, 1.1]])


@pytest.mark.parametrize("correction", CORRECTIONS, ids=repr)
def test_a_correction_is_the_identity_where_both_policies_agree(correction: Correction) -> None:
    batch = ragged()
    batch = replace(batch, rollout_logprobs_BT=batch.old_logprobs_BT)
    weights_BT = correction.weights(batch)
    assert weights_BT is not None
    assert (weights_BT[batch.mask_BT.bool()] == 1).all()
    same(objective(load("grpo"), correction), load("grpo"), batch)


def test_truncation_without_a_cap_is_plain_importance_sampling() -> None:
    batch = ragged()
    rho_BT = (batch.get("old_logprobs_BT") - batch.get("rollout_logprobs_BT")).exp()
    assert rho_BT.max() > 1.2
    weighted = replace(batch, advantages_BT=batch.advantages_BT * rho_BT)
    _, grad_BT, _ = run(objective(load("grpo_unclipped"), TruncatedIS(ratio_cap=1e9)), batch)
    _, plain_BT, _ = run(load("grpo_unclipped"), weighted)
    assert_close(grad_BT, plain_BT)
    # π_θ/π_old · π_old/μ = π_θ/μ.
    _, anchored_BT, _ = run(load("grpo_unclipped", anchor="rollout"), batch)
    assert_close(grad_BT, anchored_BT)


@pytest.mark.parametrize("name", sorted(set(names()) - {"dppo", "dppo_kl", "gepo", "minirl", "trm"}))
def test_a_correction_weighs_each_token_after_the_hosts_clip(name: str) -> None:
    """With a sequence ratio too: the gradient of token t is multiplied by the weight of token t, as in GSPO-token."""
    batch = ragged()
    _, grad_BT, plain = run(load(name), batch)
    _, weighted_BT, output = run(objective(load(name), MaskedIS(ratio_low=0.9, ratio_high=1.2)), batch)
    weights_BT = output.metrics["weights_BT"]
    assert (weights_BT == 0).any()
    assert_close(weighted_BT, grad_BT * weights_BT * batch.mask_BT)
    for marks in ("clipped_low_BT", "clipped_high_BT"):
        assert (marks in output.metrics) == (marks in plain.metrics)
        if marks in plain.metrics:
            assert torch.equal(output.metrics[marks], plain.metrics[marks])


@pytest.mark.parametrize("loss", [load("dppo"), load("minirl"), load("trm"), load("grpo", anchor="rollout")], ids=repr)
def test_a_loss_with_its_ratio_to_the_sampler_takes_no_correction(loss: PolicyLoss) -> None:
    objective(loss)
    with pytest.raises(ValueError, match="count the discrepancy twice"):
        objective(loss, TruncatedIS())


@pytest.mark.parametrize(
    ("made", "answer"),
    [
        (lambda: TruncatedIS(ratio_cap=1.0), "ratio_cap"),
        (lambda: TruncatedIS(unit="prefix"), "token, sequence, product"),
        (lambda: MaskedIS(ratio_low=1.1), "ratio_low"),
        (lambda: MaskedIS(ratio_high=0.9), "ratio_high"),
        (lambda: GeometricRejection(ratio_low=-0.1), "ratio_low"),
        (lambda: BinaryKL(max_kl=0.0), "max_kl"),
        (lambda: KL(coefficient=-1.0), "kl.coefficient"),
        (lambda: KL(estimator="k4"), "k1, k2, k3"),
        (lambda: KL(place="advantage"), "loss, reward"),
        (lambda: objective(load("grpo"), entropy_bonus=-1.0), "entropy_bonus"),
    ],
)
def test_an_impossible_addition_is_refused(made: Any, answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        made()


# --- KL and entropy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["grpo", "cispo", "dr_grpo", "luspo"])
def test_the_kl_term_closed_form(name: str, estimator: str) -> None:
    batch = ragged()
    reference_BT = batch.get("old_logprobs_BT") - 0.2
    x_BT = (batch.logprobs_BT - reference_BT).detach()
    kl_BT, slope_BT = {
        "k1": (x_BT, torch.ones_like(x_BT)),
        "k2": (x_BT**2 / 2, x_BT),
        "k3": ((-x_BT).exp() - 1 + x_BT, 1 - (-x_BT).exp()),
    }[estimator]
    share_BT = {
        "grpo": 1 / torch.tensor(LENGTHS)[:, None] / RESPONSES,
        "cispo": torch.ones(RESPONSES, 1) / TOKENS,
        "dr_grpo": torch.ones(RESPONSES, 1) / 10 / RESPONSES,
        "luspo": torch.ones(RESPONSES, 1) / RESPONSES,
    }[name] * batch.mask_BT
    loss, grad_BT, _ = run(load(name), batch)
    added = objective(load(name), coefficient=0.7, estimator=estimator)
    with_kl, with_kl_BT, _ = run(added, replace(batch, reference_logprobs_BT=reference_BT))
    assert with_kl == pytest.approx(loss + 0.7 * (kl_BT * share_BT).sum().item())
    assert_close(with_kl_BT, grad_BT + 0.7 * slope_BT * share_BT)
    assert not added.traits.zero_advantage_is_free
    with pytest.raises(ValueError, match="reference_logprobs_BT"):
        added(replace(batch, reference_logprobs_BT=None))


def test_k2_and_k3_are_never_negative_and_k3_has_the_mean_of_k1() -> None:
    from steadymoe.algorithms.ops import kl_estimate

    policy, reference = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    kl = (policy * (policy / reference).log()).sum()
    for estimator in ("k1", "k3"):
        assert_close((policy * kl_estimate(policy.log(), reference.log(), estimator)).sum(), kl)
    for estimator in ("k2", "k3"):
        assert (kl_estimate(policy.log(), reference.log(), estimator) >= 0).all()


def test_a_kl_in_the_reward_adds_nothing_to_the_loss() -> None:
    batch = ragged()
    batch = replace(batch, reference_logprobs_BT=batch.get("old_logprobs_BT") - 0.2)
    added = objective(load("grpo"), coefficient=0.7, place="reward")
    same(added, load("grpo"), batch)
    assert added.traits.zero_advantage_is_free


def test_the_entropy_bonus_is_the_aggregated_entropy() -> None:
    batch = ragged()
    entropy_BT = torch.rand(batch.mask_BT.shape, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    plain = load("grpo")(batch).loss
    output = objective(load("grpo"), entropy_bonus=0.3)(replace(batch, entropy_BT=entropy_BT))
    means = [entropy_BT[i, :length].mean() for i, length in enumerate(LENGTHS)]
    assert_close(output.loss, plain - 0.3 * sum(means) / RESPONSES)
    (slope_BT,) = torch.autograd.grad(output.loss, entropy_BT)
    assert_close(slope_BT, -0.3 * batch.mask_BT / torch.tensor(LENGTHS).double()[:, None] / RESPONSES)


# --- properties of every loss ------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.02, 0.4, 1.5]),
    order=st.permutations(range(6)),
    cuts=st.sets(st.integers(1, 5)),
)
def test_micro_batches_add_up_to_the_mini_batch(
    name: str, seed: int, scale: float, order: list[int], cuts: set[int]
) -> None:
    loss, batch = load(name), ragged(scale, seed)
    if loss.traits.whole_minibatch:
        return  # the learner never splits it: test_learner.py
    whole, whole_BT, _ = run(loss, batch)
    rows = [torch.tensor(order[first:last]) for first, last in itertools.pairwise([0, *sorted(cuts), 6])]
    total, total_BT, _ = properties.of_parts(loss, batch, rows)
    assert total.item() == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert_close(total_BT, whole_BT)


@pytest.mark.parametrize("name", names())
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), far=st.floats(-1e6, 1e6), row=st.integers(0, 5))
def test_any_log_ratio_gives_a_finite_loss_and_gradient(name: str, seed: int, far: float, row: int) -> None:
    batch = ragged(0.4, seed)
    logprobs_BT = batch.logprobs_BT.detach().clone()
    logprobs_BT[row, 0] += far
    loss, grad_BT, _ = run(load(name), replace(batch, logprobs_BT=logprobs_BT))
    assert math.isfinite(loss)
    assert grad_BT.isfinite().all()


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(name: str, dtype: torch.dtype) -> None:
    batch = ragged()
    halves: dict[str, Any] = {
        key: values.detach().to(dtype) if values.is_floating_point() else values
        for key, values in vars(batch).items()
        if isinstance(values, Tensor)
    }
    leaf_BT = halves["logprobs_BT"].clone().requires_grad_()
    loss = load(name)
    output = loss(Batch(**halves | {"logprobs_BT": leaf_BT}, state=loss.initial_state()))
    assert output.loss.dtype == torch.float32
    (grad_BT,) = torch.autograd.grad(output.loss, leaf_BT)
    singles = {key: values.float() if values.dtype == dtype else values for key, values in halves.items()}
    expected, expected_BT, _ = run(loss, Batch(**singles))
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    assert_close(grad_BT, expected_BT.to(dtype))


def test_a_batch_without_what_a_loss_reads_is_answered_with_its_name() -> None:
    batch = ragged()
    for name, missing in (
        ("grpo", "old_logprobs_BT"),
        ("dppo", "rollout_logprobs_BT"),
        ("trm", "rollout_top_logprobs_BTK"),
        ("rspo", "router_log_ratio_LBTK"),
        ("gepo", "groups_B"),
    ):
        empty: dict[str, Any] = {missing: None}
        with pytest.raises(ValueError, match=missing):
            load(name)(replace(batch, **empty))
    load("dppo", anchor="old")(replace(batch, rollout_logprobs_BT=None))


@pytest.mark.parametrize(
    ("name", "wrong", "answer"),
    [
        # One number a response: with B = T these would be taken for positions, in silence.
        ("advantages_BT", torch.ones(4), r"advantages_BT must have the shape \(B, T\) = \(4, 4\).*got \(4,\)"),
        ("advantages_BT", torch.ones(4, 1), r"advantages_BT .* = \(4, 4\), as mask_BT has \(4, 4\); got \(4, 1\)"),
        ("logprobs_BT", torch.ones(4, 3), r"logprobs_BT .* got \(4, 3\)"),
        ("weights_BT", torch.ones(4), r"weights_BT .* got \(4,\)"),
        ("groups_B", torch.zeros(4, 1), r"groups_B must have the shape \(B\) = \(4\).*got \(4, 1\)"),
        ("top_logprobs_BTK", torch.ones(4, 4), r"top_logprobs_BTK .* \(B, T, K\) = \(4, 4, K\).*got \(4, 4\)"),
        ("router_log_ratio_LBTK", torch.ones(4, 2, 4, 2), r"\(L, B, T, K\) = \(L, 4, 4, K\).*got \(4, 2, 4, 2\)"),
        ("mask_BT", torch.ones(4), r"mask_BT must have two dimensions, \(B, T\); got \(4,\)"),
        ("mask_BT", torch.full((4, 4), 0.5), "mask_BT must hold 0 and 1 alone"),
        ("mask_BT", torch.full((4, 4), 2), "mask_BT must hold 0 and 1 alone"),
        ("advantages_BT", torch.ones(4, 4).long(), r"advantages_BT must hold floating-point numbers; got torch.int64"),
    ],
)
def test_a_field_of_another_shape_than_its_name_says_is_refused_with_both_shapes(
    name: str, wrong: Tensor, answer: str
) -> None:
    right = {key: torch.zeros(4, 4) for key in ("logprobs_BT", "old_logprobs_BT", "advantages_BT")}
    made = Batch(**right, mask_BT=torch.ones(4, 4), router_log_ratio_LBTK=torch.zeros(3, 4, 4, 2))
    for dtype in (torch.bool, torch.long, torch.float64):
        replace(made, mask_BT=torch.ones(4, 4, dtype=dtype))
    with pytest.raises(ValueError, match=answer):
        replace(made, **{name: wrong})


# --- switches ----------------------------------------------------------------------------------------


def test_grpo_with_the_sequence_ratio_is_gspo_token() -> None:
    same(load("grpo", ratio="sequence", clip_low=3e-4, clip_high=4e-4), load("gspo_token"), ragged(0.001))


def test_the_ratio_units_closed_form() -> None:
    batch = ragged()
    r_BT = (batch.logprobs_BT - batch.get("old_logprobs_BT")).exp().detach()
    for unit in ("sequence", "product"):
        _, grad_BT, _ = run(load("grpo_unclipped", ratio=unit, aggregation="seq-mean-token-sum"), batch)
        for i, length in enumerate(LENGTHS):
            r = r_BT[i, :length].tolist()
            for t in range(length):
                values = {"sequence": math.prod(r) ** (1 / length), "product": math.prod(r)}
                assert grad_BT[i, t].item() == pytest.approx(-values[unit] * ADVANTAGES[i] / RESPONSES)


def test_the_anchor_is_the_policy_in_the_denominator() -> None:
    batch = ragged()
    moved = replace(batch, old_logprobs_BT=batch.rollout_logprobs_BT)
    same(load("grpo", anchor="rollout"), load("grpo"), replace(moved, rollout_logprobs_BT=batch.rollout_logprobs_BT))
    assert run(load("grpo", anchor="rollout"), batch)[0] != run(load("grpo"), batch)[0]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"])
def test_the_aggregation_is_a_switch(mode: str) -> None:
    batch = ragged()
    length = 7 if mode == "constant" else None
    _, grad_BT, _ = run(load("reinforce", aggregation=mode, constant_length=length), batch)
    share = {
        "token-mean": lambda T: 1 / TOKENS,
        "seq-mean-token-mean": lambda T: 1 / T / RESPONSES,
        "seq-mean-token-sum": lambda T: 1 / RESPONSES,
        "constant": lambda T: 1 / 7 / RESPONSES,
    }[mode]
    for i, n in enumerate(LENGTHS):
        assert_close(grad_BT[i, :n], torch.full((n,), -share(n) * ADVANTAGES[i], dtype=torch.float64))


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo", "gepo"])
@pytest.mark.parametrize("wrong", [{"aggregation": "seq-mean-token-sum"}, {"aggregation": "constant"}])
def test_a_token_sum_of_a_sequence_ratio_is_refused_with_the_algorithm_that_has_it(
    name: str, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="luspo"):
        load(name, **wrong)


@pytest.mark.parametrize(
    ("name", "wrong", "answer"),
    [
        ("grpo", {"anchor": "sampler"}, "anchor must be one of old, rollout"),
        ("grpo", {"ratio": "geometric"}, "ratio must be one of token, sequence, product"),
        ("gspo", {"ratio": "token"}, "ratio must be one of sequence"),
        ("grpo", {"aggregation": "mean"}, "aggregation must be one of token-mean"),
        ("grpo", {"constant_length": 5}, "constant_length is the L of aggregation=constant"),
        ("dppo", {"divergence": "js"}, "tv, kl"),
        ("dppo", {"max_divergence": 0.0}, "max_divergence"),
        ("rspo", {"form": "v2"}, "before_clip, after_clip"),
        ("rspo", {"gamma_min": 0.0}, "gamma_min"),
        ("opsm", {"max_divergence": -1.0}, "max_divergence"),
        ("trm", {"max_kl": 0.0}, "max_kl"),
        ("m2po", {"max_second_moment": 0.0}, "max_second_moment"),
        ("r2vpo", {"max_variance": 0.0}, "max_variance"),
        ("r2vpo", {"multiplier_start": -1.0}, "multiplier_start"),
        ("aspo", {"ratio_cap": 0.5}, "ratio_cap"),
        ("fspo", {"log_clip_high": 0.0}, "log_clip_high"),
        ("minpro", {"clip_low": -0.1}, "clip_low"),
        ("cispo", {"clip_high": 0.0}, "clip_high"),
        ("trm", {"max_kl": None}, "both null"),
        ("rspo", {"host": load("reinforce")}, "host must be a loss with a ratio"),
        ("opsm", {"host": load("opsm")}, "host must be a loss with a ratio"),
        ("dapo", {"clip_low": 1.0}, "clip_low"),
    ],
)
def test_an_impossible_switch_is_refused_with_the_choices(name: str, wrong: dict[str, Any], answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        load(name, **wrong)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("gmpo", "clip_low", "log_clip_low"),
        ("gmpo", "epsilon", "log_clip_low"),
        ("fspo", "clip_high", "log_clip_high"),
        ("grpo", "log_clip_high", "clip_high"),
        ("grpo", "epsilon", "clip_low"),
        ("grpo", "epsilon_high", "clip_high"),
        ("grpo", "clip_ratio_c", "dual_clip"),
        ("minirl", "ratio_clip_max", "clip_high"),
        ("dppo", "clip_high", "max_divergence"),
        ("cispo", "ratio_cap", "clip_high"),
        ("trm", "delta", "max_kl"),
        ("gspo", "loss_agg_mode", "aggregation"),
        ("gspo", "importance_sampling_level", "ratio"),
    ],
)
def test_the_name_of_another_unit_or_trainer_is_answered_with_ours(name: str, wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=f"has no '{wrong}'; did you mean {right}\\?"):
        load(name, **{wrong: 0.2})


# --- relations of the second tier --------------------------------------------------------------------


def test_dapo_with_equal_clips_is_grpo_with_a_token_mean() -> None:
    same(load("dapo", clip_high=0.2), load("grpo", aggregation="token-mean"), ragged())


def test_a_divergence_that_nothing_exceeds_masks_nothing() -> None:
    batch = ragged(1.5)
    unmasked = load("grpo_unclipped", anchor="rollout", aggregation="seq-mean-token-sum")
    same(load("dppo", max_divergence=1.0), unmasked, batch)
    same(load("dppo_kl", max_divergence=math.inf), unmasked, batch)


def test_dppos_cap_bounds_the_weight_of_a_token() -> None:
    batch = ragged(1.5)
    _, grad_BT, _ = run(load("dppo", max_divergence=1.0, ratio_cap=1.5), batch)
    u_BT = (batch.logprobs_BT - batch.get("rollout_logprobs_BT")).exp().clamp(max=1.5)
    assert_close(grad_BT, -u_BT * batch.advantages_BT * batch.mask_BT / RESPONSES)


def test_the_top_k_divergence_is_over_the_listed_tokens_and_the_rest() -> None:
    """One position: μ = (½, ¼, ⅛, ⅛), π_θ = (¼, ¼, ¼, ¼), the two most likely listed and the sampled one."""
    one = torch.ones(1, 1).double()

    def batch(duplicate: bool) -> Batch:
        last_mu = -math.inf if duplicate else math.log(0.125)
        return Batch(
            logprobs_BT=one * math.log(0.25),
            rollout_logprobs_BT=one * math.log(0.5 if duplicate else 0.125),
            mask_BT=one,
            advantages_BT=-one if duplicate else one,
            rollout_top_logprobs_BTK=torch.tensor([[[math.log(0.5), math.log(0.25), last_mu]]]).double(),
            top_logprobs_BTK=torch.full((1, 1, 3), math.log(0.25)).double(),
        )

    # The sampled token apart: ½(|½−¼| + 0 + |⅛−¼| + |⅛−¼|) = ¼. Among the others: ½(¼ + 0 + |¼−½|) = ¼.
    kl = 0.5 * math.log(2) + 0.25 * math.log(0.5)  # ½ log 2 + 2 · ⅛ log ½; and the same with the rest as one
    for duplicate in (False, True):
        for kind, far in (("tv", 0.25), ("kl", kl)):
            numbers = {"divergence": kind, "top_k": 2}
            inside = load("dppo", max_divergence=far * 1.001, **numbers)(batch(duplicate))
            outside = load("dppo", max_divergence=far * 0.999, **numbers)(batch(duplicate))
            assert inside.loss.abs() > 0
            assert outside.loss == 0


def test_unchanged_routing_leaves_rspos_host_alone_and_both_forms_agree_on_its_floor() -> None:
    batch = ragged()
    still = replace(batch, router_log_ratio_LBTK=torch.zeros(2, *batch.mask_BT.shape, 3).double())
    for name, host in (("rspo", "gmpo"), ("rspo_grpo", "grpo"), ("rspo_gspo", "gspo")):
        for form in ("before_clip", "after_clip"):
            same(load(name, form=form), load(host), still)
        same(load(name, gamma_min=1.0), load(host), batch)


def test_rspos_first_form_weighs_after_the_clip_by_the_sign_of_the_advantage() -> None:
    batch = ragged()
    shift_BT = batch.get("router_log_ratio_LBTK").abs().mean((0, 3))
    gamma_BT = (-shift_BT).exp().clamp(min=0.8)
    _, host_BT, _ = run(load("grpo"), batch)
    _, grad_BT, _ = run(load("rspo_grpo", form="after_clip"), batch)
    assert_close(grad_BT, host_BT * gamma_BT ** batch.advantages_BT.sign())
    # In a geometric mean it is the geometric mean of γ.
    mean_B1 = torch.stack([gamma_BT[i, :n].log().mean().exp() for i, n in enumerate(LENGTHS)])[:, None]
    _, host_BT, _ = run(load("gmpo"), batch)
    _, grad_BT, _ = run(load("rspo", form="after_clip"), batch)
    assert_close(grad_BT, host_BT * mean_B1 ** batch.advantages_BT.sign())


def test_rspo_over_layers_as_a_product_and_with_tokens_dropped() -> None:
    batch = ragged()
    gamma_BT = (-batch.get("router_log_ratio_LBTK").abs().mean(3).sum(0)).exp()
    dropped_BT = gamma_BT < 0.5
    assert (dropped_BT & batch.mask_BT.bool()).any()
    numbers = {"layers": "product", "gamma_min": 1e-6, "form": "after_clip"}
    _, grad_BT, _ = run(load("rspo_grpo", **numbers, drop_below=0.5), batch)
    _, kept_BT, _ = run(load("rspo_grpo", **numbers), batch)
    assert_close(grad_BT, kept_BT.masked_fill(dropped_BT, 0.0))


def test_opsm_drops_bad_responses_that_the_policy_has_left() -> None:
    def rows(log_ratio: float) -> Batch:
        old_BT = torch.full((2, 3), -1.0).double()
        return Batch(
            logprobs_BT=old_BT + log_ratio,
            old_logprobs_BT=old_BT,
            rollout_logprobs_BT=old_BT,
            mask_BT=torch.ones(2, 3),
            advantages_BT=torch.tensor([[1.0], [-1.0]]).expand(2, 3).double(),
        )

    unclipped = {"max_divergence": 0.3}
    _, near_BT, _ = run(load("opsm", **unclipped), rows(-0.2))
    _, far_BT, output = run(load("opsm", **unclipped), rows(-0.4))
    assert (near_BT[0] != 0).all()
    assert (far_BT[0] != 0).all()
    assert (far_BT[1] == 0).all()
    assert output.metrics["clipped_low_BT"].tolist() == [[False] * 3, [True] * 3]


def test_trm_without_logits_uses_the_papers_estimates_and_can_bound_the_mean() -> None:
    batch = ragged()
    log_BT = batch.logprobs_BT - batch.get("rollout_logprobs_BT")
    largest_B = ((log_BT**2 / 2) * batch.mask_BT).amax(-1)
    mean_B = ((log_BT.expm1() - log_BT) * batch.mask_BT).sum(-1) / batch.mask_BT.sum(-1)
    alive_B = torch.tensor(ADVANTAGES) != 0
    for numbers, masked_B in (
        ({"max_kl": 0.2, "mean_kl": None}, largest_B > 0.2),
        ({"max_kl": None, "mean_kl": 0.1}, mean_B > 0.1),
        ({"max_kl": 0.2, "mean_kl": 0.1}, (largest_B > 0.2) | (mean_B > 0.1)),
    ):
        _, grad_BT, _ = run(load("trm", top_k=None, **numbers), batch)
        assert masked_B[alive_B].any()
        assert not masked_B[alive_B].all()
        assert torch.equal((grad_BT != 0).any(-1)[alive_B], ~masked_B[alive_B])


def test_gepos_coefficient_is_not_one_at_the_old_policy() -> None:
    batch = ragged(0.0)
    _, grad_BT, _ = run(load("gepo", clip_low=0.999, clip_high=1e9), batch)
    likelihood = [math.exp(batch.get("rollout_logprobs_BT")[i, :n].mean().item()) for i, n in enumerate(LENGTHS)]
    for group in ([0, 1, 2], [3, 4, 5]):
        expected = sum(likelihood[i] ** 2 for i in group) / sum(likelihood[i] for i in group)
        for i in group:
            coefficient = likelihood[i] / expected
            assert coefficient != pytest.approx(1, abs=0.01)
            slope = -coefficient * ADVANTAGES[i] / LENGTHS[i] / RESPONSES
            assert grad_BT[i, 0].item() == pytest.approx(slope)


@pytest.mark.parametrize("a_token", [-1.0, -19.0, -21.0, -45.0, -100.0, -1000.0])
def test_gepo_is_what_it_is_at_any_likelihood(a_token: float) -> None:
    """In fp32 q² underflows below a log-probability of −44 a token; E is compared with exponentials in float64."""
    rows = torch.tensor([[0.0, -0.5], [-1.0, 0.3], [0.2, 0.2], [-0.4, -0.1]])
    means = (a_token + rows).double().mean(-1)
    batch = Batch(
        logprobs_BT=(a_token + rows + 0.25).requires_grad_(),
        rollout_logprobs_BT=a_token + rows,
        mask_BT=torch.ones(4, 2),
        advantages_BT=torch.tensor([1.0, -1.0, 0.5, 2.0])[:, None].expand(4, 2),
        groups_B=torch.tensor([7, 7, 2, 2]),
    )
    output = load("gepo", clip_low=0.999, clip_high=1e9)(batch)
    (gradient_BT,) = torch.autograd.grad(output.loss, batch.logprobs_BT)
    assert gradient_BT.isfinite().all()
    for i, group in ((0, (0, 1)), (1, (0, 1)), (2, (2, 3)), (3, (2, 3))):
        likelihood = (means - (0.0 if a_token > -300 else a_token)).exp()  # float64 ends at −745
        expected = likelihood[list(group)].square().sum() / likelihood[list(group)].sum()
        coefficient = likelihood[i] * math.exp(0.25) / expected
        slope = -coefficient * batch.advantages_BT[i, 0] / 2 / 4
        assert gradient_BT[i, 0].item() == pytest.approx(slope.item(), rel=1e-4 * max(1, -a_token / 100))


def test_gepo_of_likely_responses_has_the_bits_that_the_plain_formula_has() -> None:
    plain = ragged()
    single = {name: plain.get(name).float() for name in ("logprobs_BT", "rollout_logprobs_BT", "advantages_BT")}
    batch, loss = replace(plain, **single), GEPO()
    likelihood_B = ops.masked_mean_T(batch.get("rollout_logprobs_BT"), batch.mask_BT).exp()
    _, group_B = batch.get("groups_B").unique(return_inverse=True)
    sums_2G = torch.zeros(2, 2).index_add_(1, group_B, torch.stack([likelihood_B, likelihood_B.square()]))
    expected_B1 = (sums_2G[1] / sums_2G[0])[group_B][:, None]
    log_BT = ops.log_ratio(batch.logprobs_BT, expected_B1.log()) * batch.mask_BT
    advantages_B1 = ops.masked_mean_T(batch.advantages_BT, batch.mask_BT)[:, None]
    surrogate = loss.clipped(ops.ratio(log_BT, batch.mask_BT, "sequence"), advantages_B1)
    assert torch.equal(loss(batch).loss, -loss.aggregate(surrogate.values_BT, batch))


def test_a_product_or_prefix_at_its_bound_keeps_the_gradient_of_its_tokens_and_a_token_ratio_does_not() -> None:
    """Every token of a product beyond the bound has the weight e^20; a token ratio beyond it has no gradient."""
    mask_BT = torch.ones(1, 3)
    log_BT = torch.tensor([[15.0, 14.0, -1.0]]).requires_grad_()
    for unit, weights in (("product", [math.exp(20.0)] * 3),):
        value_BT = ops.ratio(log_BT, mask_BT, unit)
        (gradient_BT,) = torch.autograd.grad(value_BT.sum(), log_BT)
        assert value_BT.tolist()[0] == pytest.approx(weights, rel=1e-5)
        assert gradient_BT.tolist()[0] == pytest.approx(weights, rel=1e-5)
    logprobs_BT = torch.tensor([[25.0, 1.0]]).requires_grad_()
    token_BT = ops.ratio(ops.log_ratio(logprobs_BT, torch.zeros(1, 2)), torch.ones(1, 2), "token")
    (gradient_BT,) = torch.autograd.grad(token_BT.sum(), logprobs_BT)
    assert gradient_BT.tolist()[0] == pytest.approx([0.0, math.e])


def test_minpro_is_cispo_on_responses_of_one_token_and_below_it_after_a_fall() -> None:
    batch = ragged()
    first = Batch(
        **{
            name: batch.get(name)[:, :1]
            for name in ("logprobs_BT", "old_logprobs_BT", "rollout_logprobs_BT", "mask_BT", "advantages_BT")
        }
    )
    same(load("minpro"), load("cispo"), first)


def test_a_masked_token_inside_a_response_is_no_ratio_of_one_to_minpro() -> None:
    """Weights 1.1 and 1.1 · 0.9 of the two tokens, wherever masked ones stand."""
    old, ratios = torch.tensor([[-1.0, -2.0]]), torch.tensor([[1.1, 0.9]])
    expected = -(1.1 * (-1 + math.log(1.1)) + 1.1 * 0.9 * (-2 + math.log(0.9))) / 2
    assert expected == pytest.approx(1.539733, abs=1e-6)
    for mask in ([1, 1], [1, 0, 1], [0, 1, 0, 0, 1], [1, 1, 0]):
        mask_BT = torch.tensor([mask])
        old_BT, ratio_BT = (torch.zeros(mask_BT.shape).masked_scatter(mask_BT.bool(), each) for each in (old, ratios))
        batch = Batch(
            logprobs_BT=old_BT + torch.where(mask_BT.bool(), ratio_BT.log(), -3.0),
            old_logprobs_BT=old_BT,
            mask_BT=mask_BT,
            advantages_BT=torch.ones(mask_BT.shape),
        )
        assert load("minpro")(batch).loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shift", [0.0, -30.0])
def test_a_response_without_tokens_has_no_likelihood_to_gepo(shift: float) -> None:
    """Two responses of one group; an empty one in their group and a group of empty ones change nothing."""
    mask_BT = torch.tensor([[1, 1], [1, 0], [0, 0], [0, 0]])
    logprobs_BT = shift + torch.tensor([[-1.2, -1.0], [-2.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    whole = Batch(
        logprobs_BT=logprobs_BT.clone().requires_grad_(),
        rollout_logprobs_BT=logprobs_BT,
        mask_BT=mask_BT,
        advantages_BT=torch.ones(4, 2),
        groups_B=torch.tensor([5, 5, 5, 8]),
    )
    likelihood = [math.exp(-1.1), math.exp(-2.0)]
    expected = sum(q * q for q in likelihood) / sum(likelihood)
    output = load("gepo", clip_low=0.999, clip_high=1e9)(whole)
    assert output.loss.item() == pytest.approx(-sum(likelihood) / expected / 2, rel=1e-5)
    (gradient_BT,) = torch.autograd.grad(output.loss, whole.logprobs_BT)
    slopes = [-q / expected / 2 for q in likelihood]
    assert gradient_BT.flatten().tolist() == pytest.approx([slopes[0] / 2] * 2 + [slopes[1]] + [0.0] * 5, rel=1e-5)


def test_topr_never_weighs_a_good_response_and_a_bad_one_no_more_than_in_full() -> None:
    batch = ragged(1.5)
    _, grad_BT, _ = run(load("topr"), batch)
    _, plain_BT, _ = run(load("reinforce"), batch)
    good_B = torch.tensor(ADVANTAGES) > 0
    assert_close(grad_BT[good_B], plain_BT[good_B])
    assert (grad_BT[~good_B].abs() <= plain_BT[~good_B].abs() + 1e-15).all()


def test_r2vpos_multiplier_follows_the_excess_of_the_variance_and_never_falls_below_zero() -> None:
    batch = ragged()
    loss = load("r2vpo", multiplier_step=2.0)
    r_N = (batch.logprobs_BT - batch.get("old_logprobs_BT")).exp()[batch.mask_BT.bool()]
    excess = ((r_N - 1) ** 2).mean().item() - 0.04
    output = loss(replace(batch, state=loss.initial_state()))
    assert output.state["multiplier"].item() == pytest.approx(1 + 2 * excess)
    assert output.metrics["loss_number"].item() == 1
    calm = loss(replace(ragged(0.0), state={"multiplier": torch.tensor(0.05).double()}))
    assert calm.state["multiplier"].item() == 0


def test_fspo_clips_on_a_band_that_grows_with_the_root_of_the_length() -> None:
    for length in (1, 4, 16):
        edge = 0.03 * math.sqrt(length)
        for inside, total in ((True, edge * 0.999), (False, edge * 1.001)):
            zero_BT = torch.zeros(1, length).double()
            batch = Batch(
                logprobs_BT=zero_BT + total / length,
                old_logprobs_BT=zero_BT,
                mask_BT=torch.ones(1, length),
                advantages_BT=zero_BT + 2.0,
            )
            loss, grad_BT, _ = run(load("fspo"), batch)
            assert loss == pytest.approx(-2 * math.exp(min(total, edge)))
            assert_close(grad_BT, torch.full_like(zero_BT, -2 * math.exp(total) if inside else 0.0))


# --- advantages --------------------------------------------------------------------------------------

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.7, 0.7, 0.7, 0.7]])
TOKEN_COUNTS = torch.tensor([[1, 2, 3, 4], [5, 1, 1, 1]])


def test_advantages_that_subtract_the_groups_mean() -> None:
    mean_PG = GroupMean()(REWARDS, TOKEN_COUNTS)
    assert mean_PG.tolist() == [[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0]]
    left_out_PG = LeaveOneOut()(REWARDS, TOKEN_COUNTS)
    assert_close(left_out_PG[0], torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3]))  # 1 − (0 + 0 + 1)/3
    assert_close(left_out_PG, mean_PG * 4 / 3)
    assert_close(GroupMeanStd()(REWARDS, TOKEN_COUNTS)[0] * REWARDS[0].std(), mean_PG[0], rtol=1e-5, atol=1e-5)
    assert_close(GroupMeanBatchStd(epsilon=0.5)(REWARDS, TOKEN_COUNTS), mean_PG / (REWARDS.std() + 0.5))


def test_leave_one_out_with_the_others_deviation() -> None:
    advantages_PG = LeaveOneOutStd(epsilon=1e-6)(REWARDS, TOKEN_COUNTS)
    others = torch.tensor([0.0, 0.0, 1.0])  # of the first response
    assert_close(advantages_PG[0, 0], (1 - others.mean()) / (others.std() + 1e-6))
    others = torch.tensor([1.0, 0.0, 1.0])
    assert_close(advantages_PG[0, 1], (0 - others.mean()) / (others.std() + 1e-6))
    assert_close(advantages_PG[1], torch.zeros(4), atol=1e-6, rtol=0)
    # The others agree: not divided.
    assert LeaveOneOutStd()(torch.tensor([[1.0, 0.0, 0.0]]), torch.ones(1, 3))[0, 0] == 1.0


def test_whitening_counts_a_response_once_for_each_of_its_tokens() -> None:
    for subtract in (False, True):
        values_PG = GroupMean()(REWARDS, TOKEN_COUNTS) if subtract else REWARDS
        every = torch.cat(
            [torch.full((n,), x) for x, n in zip(values_PG.flatten(), TOKEN_COUNTS.flatten().tolist(), strict=True)]
        )
        expected_PG = (values_PG - every.mean()) / (every.var() + 1e-8).sqrt()
        assert_close(BatchWhitened(subtract_group_mean=subtract)(REWARDS, TOKEN_COUNTS), expected_PG)
        # NeMo-RL: the population variance, and a least variance in place of an added one.
        expected_PG = (values_PG - every.mean()) / every.var(correction=0).sqrt()
        assert_close(BatchWhitenedPopulation(subtract_group_mean=subtract)(REWARDS, TOKEN_COUNTS), expected_PG)
        expected_PG = (values_PG - every.mean()) / 3.0
        floored = BatchWhitenedPopulation(subtract_group_mean=subtract, epsilon=9.0)
        assert_close(floored(REWARDS, TOKEN_COUNTS), expected_PG)


@pytest.mark.parametrize("cls", [BatchWhitened, BatchWhitenedPopulation])
@pytest.mark.parametrize("subtract", [False, True])
def test_whitened_equal_rewards_are_exactly_zero(cls: type[BatchWhitened], subtract: bool) -> None:
    """In fp32 the mean of equal rewards misses them by a rounding error at some of these sizes."""
    for prompts in range(1, 40):
        lengths_PG = torch.randint(1, 9, (prompts, 8), generator=torch.Generator().manual_seed(prompts))
        for reward in (0.7, 0.1, 1.0):
            rewards_PG = torch.full((prompts, 8), reward)
            assert not cls(subtract_group_mean=subtract)(rewards_PG, lengths_PG).any()


def test_a_reward_of_plus_or_minus_one_has_no_baseline() -> None:
    assert PlusMinus()(torch.tensor([[1.0, 1.0, 0.0]]), torch.ones(1, 3)).tolist() == [[1.0, 1.0, -1.0]]


@pytest.mark.parametrize(
    "cls", [GroupMeanStd, GroupMeanBatchStd, LeaveOneOutStd, BatchWhitened, BatchWhitenedPopulation]
)
@pytest.mark.parametrize("epsilon", [0.0, -1e-6, math.nan])
def test_an_epsilon_that_protects_nothing_is_refused(cls: Any, epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon"):
        cls(epsilon=epsilon)


def test_every_correction_of_the_configs_is_one_of_those_tested() -> None:
    for path in (ROOT / "conf" / "correction").glob("*.yaml"):
        made = build(yaml.safe_load(path.read_text()))
        assert type(made) in {type(each) for each in CORRECTIONS} | {Uncorrected}


# --- edges, and what earlier tests could not tell apart ---------------------------------------------------------------


def one(advantage: float, old: float = -3.0, **ratios: float) -> Batch:
    """A batch of one token with log π_old = ``old``; its ratio to the old policy is ``r``, to the sampler ``u``."""
    one_BT = torch.ones(1, 1).double()
    r, u = ratios.get("r", 1.0), ratios.get("u", ratios.get("r", 1.0))
    return Batch(
        logprobs_BT=(old + math.log(r)) * one_BT,
        old_logprobs_BT=old * one_BT,
        rollout_logprobs_BT=(old + math.log(r) - math.log(u)) * one_BT,
        mask_BT=one_BT,
        advantages_BT=advantage * one_BT,
    )


def slope(loss: PolicyLoss, batch: Batch) -> float:
    return -run(loss, batch)[1].item()


def test_the_caps_of_minirl_and_aspo_bind() -> None:
    assert slope(load("minirl"), one(2.0, r=1.0, u=8.0)) == pytest.approx(5 * 2)
    assert slope(load("minirl", ratio_cap=None), one(2.0, r=1.0, u=8.0)) == pytest.approx(8 * 2)
    assert slope(load("aspo"), one(-2.0, r=4.0)) == pytest.approx(3 * -2)
    assert slope(load("aspo"), one(2.0, r=0.25)) == pytest.approx(3 * 2)
    assert slope(load("aspo", ratio_cap=None), one(2.0, r=0.25)) == pytest.approx(4 * 2)


# (algorithm, its numbers, the edge, the sign of the advantage that is stopped beyond it, the policy it is a ratio to)
EDGES: list[tuple[str, dict[str, Any], float, int, str]] = [
    ("grpo", {}, 1.2, 1, "r"),
    ("grpo", {}, 0.8, -1, "r"),
    ("dapo", {}, 1.28, 1, "r"),
    ("gspo", {"clip_low": 0.25, "clip_high": 0.5}, 1.5, 1, "r"),
    ("luspo", {"clip_low": 0.25, "clip_high": 0.5}, 0.75, -1, "r"),
    ("gmpo", {}, math.exp(0.4), 1, "r"),
    ("gmpo", {}, math.exp(-0.4), -1, "r"),
    ("minirl", {}, 1.27, 1, "r"),
    ("minirl", {}, 0.8, -1, "r"),
    ("aspo", {}, 1.2, 1, "r"),
    ("aspo", {}, 0.8, -1, "r"),
    ("fspo", {}, math.exp(0.03), 1, "r"),
    ("fspo", {}, math.exp(-0.03), -1, "r"),
    ("opsm", {}, math.exp(-0.5), -1, "u"),
    ("dppo", {"max_divergence": 0.02}, 1 / (1 - 0.02 * math.exp(3)), 1, "u"),  # π_θ = e⁻³, μ = e⁻³/u
    ("dppo", {"max_divergence": 0.02}, 1 / (1 + 0.02 * math.exp(3)), -1, "u"),
    ("m2po", {}, math.exp(0.2), 1, "r"),
    ("m2po", {}, math.exp(-0.2), -1, "r"),
    ("trm", {"top_k": None, "max_kl": 0.02}, math.exp(0.2), 1, "u"),
    ("trm", {"top_k": None, "max_kl": 0.02}, math.exp(-0.2), 1, "u"),
]


@pytest.mark.parametrize(("name", "numbers", "edge", "sign", "unit"), EDGES)
def test_a_token_loses_its_gradient_just_beyond_the_edge_and_not_before_it(
    name: str, numbers: dict[str, Any], edge: float, sign: int, unit: str
) -> None:
    outward = 1e-6 if edge > 1 else -1e-6
    for beyond, move in ((False, edge * (1 - outward)), (True, edge * (1 + outward))):
        # At its own anchor a ratio is compared; the other one stays where nothing is clipped.
        ratios = {"r": move, "u": move} if unit == "r" else {"r": 1.0, "u": move}
        found = slope(load(name, **numbers), one(2.0 * sign, **ratios))
        assert (found == 0) == beyond, (name, move)
        if name not in ("trm",):  # which masks both signs
            assert slope(load(name, **numbers), one(-2.0 * sign, **ratios)) != 0


def test_a_capped_weight_is_the_cap_beyond_it() -> None:
    for name, cap in (("cispo", 1.2), ("minpro", 1.2)):
        assert slope(load(name), one(2.0, r=cap * 0.999)) == pytest.approx(2 * cap * 0.999)
        assert slope(load(name), one(2.0, r=cap * 1.001)) == pytest.approx(2 * cap)
    assert slope(load("topr"), one(-2.0, r=0.9)) == pytest.approx(-2 * 0.9)
    assert slope(load("topr"), one(-2.0, r=1.1)) == pytest.approx(-2)
    assert slope(load("cispo", clip_low=10.0), one(2.0, r=0.01)) == pytest.approx(2 * 0.01)


def test_the_geometric_mean_of_rejection_is_not_the_product() -> None:
    band = GeometricRejection(ratio_low=0.9, ratio_high=1.4)
    close(weights(band, [[1.3, 1.3], [1.5, 1.5]]), [[1.0, 1.0], [0.0, 0.0]])


def test_gspo_takes_the_mean_of_an_advantage_that_differs_within_a_response() -> None:
    batch = ragged(1e-5)
    uneven_BT = batch.advantages_BT + torch.linspace(-1, 1, 5).double()
    mean_B1 = torch.stack([uneven_BT[i, :n].mean() for i, n in enumerate(LENGTHS)])[:, None]
    same(load("gspo"), _Plain(), replace(batch, advantages_BT=uneven_BT), value=False)
    _, grad_BT, _ = run(load("gspo"), replace(batch, advantages_BT=uneven_BT))
    _, even_BT, _ = run(load("gspo"), replace(batch, advantages_BT=mean_B1.expand_as(uneven_BT)))
    assert_close(grad_BT, even_BT)


class _Plain(PolicyLoss):
    """GSPO inside its band, with the gradient from autograd through s_i and not token by token."""

    def aggregate(self, values_BT: Tensor, batch: Batch) -> Tensor:
        return values_BT.sum() / RESPONSES

    def surrogate(self, batch: Batch) -> Any:
        terms = []
        for i, n in enumerate(LENGTHS):
            log_ratio_T = (batch.logprobs_BT - batch.get("old_logprobs_BT"))[i, :n]
            terms.append(log_ratio_T.mean().exp() * batch.advantages_BT[i, :n].mean())
        return Surrogate(torch.stack(terms))


def test_rspo_on_a_host_that_is_anchored_at_the_sampler() -> None:
    batch = ragged()
    anchored = load("rspo_grpo", host={"anchor": "rollout"})
    swapped = replace(batch, old_logprobs_BT=batch.rollout_logprobs_BT)
    same(anchored, load("rspo_grpo"), replace(swapped, rollout_logprobs_BT=batch.rollout_logprobs_BT))
    assert anchored.traits.corrects_for_sampler


def test_the_top_k_divergence_of_an_old_anchor_is_of_the_old_policy() -> None:
    batch = ragged(1.5)
    loss = load("dppo", anchor="old", top_k=2)
    old = replace(
        batch,
        rollout_top_logprobs_BTK=batch.get("rollout_top_logprobs_BTK").where(
            batch.get("rollout_top_logprobs_BTK").isinf(), batch.get("old_top_logprobs_BTK")
        ),
        rollout_logprobs_BT=batch.old_logprobs_BT,
    )
    same(loss, load("dppo", top_k=2), old)
    assert not torch.allclose(run(loss, batch)[1], run(load("dppo", top_k=2), batch)[1])


def test_r2vpo_weighs_its_constraint_as_its_penalty() -> None:
    batch = ragged()
    output = objective(load("r2vpo", multiplier_step=1.0), MaskedIS(ratio_low=0.9, ratio_high=1.2))(batch)
    excess_BT = ((batch.logprobs_BT - batch.get("old_logprobs_BT")).exp() - 1) ** 2 - 0.04
    counted = (excess_BT * output.metrics["weights_BT"])[batch.mask_BT.bool()].mean()
    assert output.state["multiplier"].item() == pytest.approx(1 + counted.item())


def test_a_memory_that_could_be_split_is_refused() -> None:
    class Forgetful(type(load("reinforce"))):  # type: ignore[misc]
        def initial_state(self) -> dict[str, Tensor]:
            return {"seen": torch.zeros(())}

    with pytest.raises(ValueError, match="its traits must say so"):
        objective(Forgetful())


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("tis", {"unit": "token", "ratio_cap": 2.0}),
        ("is", {"unit": "token", "ratio_cap": None}),
        ("mis", {"unit": "token", "ratio_low": 0.0, "ratio_high": 2.0}),
        ("mis_sequence", {"unit": "product", "ratio_low": 0.0, "ratio_high": 2.0}),
        ("icepop", {"unit": "token", "ratio_low": 0.5, "ratio_high": 5.0}),
        ("geo_rs", {"ratio_low": 0.9999, "ratio_high": 1.0001, "weighted": False}),
        ("seq_mask_tis", {"ratio_low": 0.999, "ratio_high": 1.002, "weighted": True}),
        ("kpop", {"max_kl": 0.1, "weighted": False}),
        ("none", {}),
    ],
)
def test_the_numbers_of_a_correction_are_those_of_its_source(name: str, numbers: dict[str, Any]) -> None:
    config = yaml.safe_load((ROOT / "conf" / "correction" / f"{name}.yaml").read_text())
    assert {key: value for key, value in config.items() if key != "_target_"} == numbers
