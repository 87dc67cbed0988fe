"""Corrections, the KL term and the entropy bonus of an objective; mini-batches in parts; switches; the advantages."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from surrogates import run, same
from torch import Tensor
from torch.testing import assert_close

from steadymoe.algorithms import Batch, PolicyLoss, Surrogate, load, names, ops
from steadymoe.algorithms.advantages import (
    BatchWhitened,
    BatchWhitenedPopulation,
    GroupMean,
    GroupMeanBatchStd,
    GroupMeanStd,
    LeaveOneOut,
    LeaveOneOutStd,
    PlusMinus,
    PlusMinusMixed,
    Reward,
)
from steadymoe.algorithms.corrections import (
    BinaryKL,
    Correction,
    GeometricRejection,
    MaskedIS,
    TruncatedIS,
    Uncorrected,
)
from steadymoe.algorithms.flash_reinforce import BatchMean
from steadymoe.algorithms.objective import KL, Objective
from steadymoe.bench.check.batches import ADVANTAGES, LENGTHS, RESPONSES, TOKENS, part, ragged, without_tokens

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


Rhos = list[list[float]]
RHOS: Rhos = [[0.5, 2.0, 3.0], [1.5, 1.6]]


@pytest.mark.parametrize(
    ("correction", "rhos", "expected"),
    [
        (TruncatedIS(ratio_cap=2.0), RHOS, [[0.5, 2.0, 2.0], [1.5, 1.6]]),
        (TruncatedIS(ratio_cap=None), [[0.5, 2.0, 1e6]], [[0.5, 2.0, 1e6]]),
        (TruncatedIS(unit="product", ratio_cap=2.9), RHOS, [[2.9] * 3, [2.4] * 2]),
        (TruncatedIS(unit="sequence", ratio_cap=1.5), RHOS, [[3 ** (1 / 3)] * 3, [1.5] * 2]),
        (MaskedIS(ratio_high=2.2), RHOS, [[0.5, 2.0, 0.0], [1.5, 1.6]]),
        (MaskedIS(ratio_low=0.6, ratio_high=5.0), RHOS, [[0.0, 2.0, 3.0], [1.5, 1.6]]),
        (MaskedIS(unit="product", ratio_high=2.5), RHOS, [[0.0] * 3, [2.4] * 2]),
        (GeometricRejection(), [[2.0, 0.5, 1.0], [1.5, 1.2]], [[1.0] * 3, [0.0] * 2]),
        (GeometricRejection(weighted=True), [[2.0, 0.5, 1.0], [1.5, 1.2]], [[2.0, 0.5, 1.0], [0.0] * 2]),
        (GeometricRejection(ratio_low=0.9, ratio_high=1.4), [[1.3, 1.3], [1.5, 1.5]], [[1.0] * 2, [0.0] * 2]),
    ],
    ids=repr,
)
def test_correction_closed_form(correction: Correction, rhos: list[list[float]], expected: list[list[float]]) -> None:
    assert weights(correction, rhos) == [pytest.approx(row) for row in expected]


def test_kpop_needs_both_directions() -> None:
    # μ = 0.01 and π_old = 0.2: D(μ‖π) is 0.18 and D(π‖μ) 0.43.
    forward = 0.01 * math.log(0.01 / 0.2) + 0.99 * math.log(0.99 / 0.8)
    backward = 0.2 * math.log(0.2 / 0.01) + 0.8 * math.log(0.8 / 0.99)
    assert forward < 0.3 < backward
    rhos = [[20.0, 1.1]]
    assert weights(BinaryKL(max_kl=0.3), rhos, mu=0.01) == [pytest.approx([0.0, 1.0])]
    assert weights(BinaryKL(max_kl=backward * 1.001), rhos, mu=0.01) == [pytest.approx([1.0, 1.0])]
    assert weights(BinaryKL(max_kl=backward * 0.999, weighted=True), rhos, mu=0.01) == [pytest.approx([0.0, 1.1])]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=repr)
def test_correction_is_the_identity_for_equal_policies(correction: Correction) -> None:
    batch = ragged()
    batch = replace(batch, rollout_logprobs_BT=batch.old_logprobs_BT)
    weights_BT = correction.weights(batch)
    assert weights_BT is not None
    assert (weights_BT[batch.mask_BT.bool()] == 1).all()
    same(objective(load("grpo"), correction), load("grpo"), batch)


@pytest.mark.parametrize("name", [name for name in names() if not load(name).traits.corrects_for_sampler])
def test_correction_weights_tokens_after_the_hosts_clip(name: str) -> None:
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
def test_loss_with_its_ratio_to_the_sampler_refuses_a_correction(loss: PolicyLoss) -> None:
    objective(loss)
    with pytest.raises(ValueError, match="count the discrepancy twice"):
        objective(loss, TruncatedIS())


# --- KL and entropy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["grpo", "cispo", "dr_grpo", "luspo"])
def test_kl_term_closed_form(name: str, estimator: str) -> None:
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


# --- what a batch holds ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "gspo", "trm", "rspo"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_fp32(name: str, dtype: torch.dtype) -> None:
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


def test_missing_batch_field_is_named() -> None:
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
        ("advantages_BT", torch.ones(4), r"\(4, 4\).*got \(4,\)"),
        ("advantages_BT", torch.ones(4, 1), r"\(4, 4\).*got \(4, 1\)"),
        ("groups_B", torch.zeros(4, 1), r"\(4\).*got \(4, 1\)"),
        ("top_logprobs_BTK", torch.ones(4, 4), r"\(4, 4, K\).*got \(4, 4\)"),
        ("router_log_ratio_LBTK", torch.ones(4, 2, 4, 2), r"\(L, 4, 4, K\).*got \(4, 2, 4, 2\)"),
        ("mask_BT", torch.ones(4), r"\(B, T\).*got \(4,\)"),
        ("mask_BT", torch.full((4, 4), 0.5), "0 and 1"),
        ("advantages_BT", torch.ones(4, 4).long(), "int64"),
    ],
)
def test_field_of_the_wrong_shape_is_refused_with_both_shapes(name: str, wrong: Tensor, answer: str) -> None:
    right = {key: torch.zeros(4, 4) for key in ("logprobs_BT", "old_logprobs_BT", "advantages_BT")}
    made = Batch(**right, mask_BT=torch.ones(4, 4), router_log_ratio_LBTK=torch.zeros(3, 4, 4, 2))
    for dtype in (torch.bool, torch.long, torch.float64):
        replace(made, mask_BT=torch.ones(4, 4, dtype=dtype))
    with pytest.raises(ValueError, match=f"{name}.*{answer}"):
        replace(made, **{name: wrong})


# --- switches ----------------------------------------------------------------------------------------


def test_grpo_with_the_sequence_ratio_is_gspo_token() -> None:
    same(load("grpo", ratio="sequence", clip_low=3e-4, clip_high=4e-4), load("gspo_token"), ragged(0.001))


def test_ratio_units_closed_form() -> None:
    batch = ragged()
    log_BT = (batch.logprobs_BT - batch.get("old_logprobs_BT")).detach()
    for unit, of_all in (("sequence", torch.mean), ("product", torch.sum)):
        _, grad_BT, _ = run(load("grpo_unclipped", ratio=unit, aggregation="seq-mean-token-sum"), batch)
        for i, length in enumerate(LENGTHS):
            slope = -of_all(log_BT[i, :length]).exp().item() * ADVANTAGES[i] / RESPONSES
            assert grad_BT[i, :length].tolist() == pytest.approx([slope] * length)


def test_the_anchor_is_the_policy_in_the_denominator() -> None:
    batch = ragged()
    moved = replace(batch, old_logprobs_BT=batch.rollout_logprobs_BT)
    same(load("grpo", anchor="rollout"), load("grpo"), replace(moved, rollout_logprobs_BT=batch.rollout_logprobs_BT))
    assert run(load("grpo", anchor="rollout"), batch)[0] != run(load("grpo"), batch)[0]


# Field → what a loss refuses in it.
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "anchor": {"grpo": "sampler", "score_centering": "old"},
    "ratio": {"grpo": "geometric", "gspo": "token", "dis": "sequence"},
    "aggregation": {"grpo": "mean", "gmpo": "seq-mean-token-sum", "gspo_token": "constant"},
    "constant_length": {"grpo": 5, "dr_grpo": 0},
    "clip_low": {"gspo": math.nan, "dapo": 1.0, "cispo": -0.5, "minpro": -0.1, "dis": 1.0},
    "clip_high": {"grpo": -0.1, "cispo": 0.0},
    "log_clip_low": {"gmpo": -0.4},
    "log_clip_high": {"fspo": 0.0},
    "dual_clip": {"ppo_clip": 1.1, "fspo_dual_clip": 1.0},
    "ratio_cap": {"aspo": 0.5, "minirl": 1.0},
    "ratio_low": {"icepop": 1.5, "score_centering_tis": 0.5},
    "ratio_high": {"score_centering": 2.0, "score_centering_mis": 0.9},
    "reference_length": {"gspo": 0},
    "tau_neg": {"sapo": 0.0},
    "c2_neg": {"vespo": 0.0},
    "divergence": {"dppo": "js"},
    "max_divergence": {"dppo": 0.0, "opsm": -1.0},
    "max_kl": {"trm": None},
    "max_mean_kl": {"flash_reinforce": 0.0},
    "max_second_moment": {"m2po": 0.0},
    "max_variance": {"r2vpo": 0.0},
    "multiplier": {"r2vpo_fixed": 0.0},
    "form": {"rspo": "v2"},
    "gamma_min": {"rspo": 0.0},
    "weight": {"score_centering": "is"},
    "top_k": {"score_centering": 0},
    "log_ratio_penalty": {"ipo": -1.0},
    "sequence_high": {"mis_po": 0.9},
    "quantile": {"sat": 1.5},
    "host": {"opsm": load("opsm"), "sat": load("gspo"), "up_grpo": load("grpo_unclipped")},
    "least_weight": {"cppo": 0.0},
    "prefix_budget": {"cppo": 0.0},
}
# Of what is added to a loss.
IMPOSSIBLE_ADDED: list[tuple[Any, dict[str, Any]]] = [
    (TruncatedIS, {"ratio_cap": 1.0, "unit": "prefix"}),
    (MaskedIS, {"ratio_low": 1.1, "ratio_high": 0.9}),
    (GeometricRejection, {"ratio_low": -0.1}),
    (BinaryKL, {"max_kl": 0.0}),
    (KL, {"coefficient": -1.0, "estimator": "k4", "place": "advantage"}),
    (partial(objective, load("grpo")), {"entropy_bonus": -1.0}),
    (GroupMeanStd, {"epsilon": 0.0}),
    (LeaveOneOutStd, {"epsilon": math.nan}),
    (BatchWhitened, {"epsilon": -1e-6}),
]


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_impossible_field_is_refused_by_name(field: str) -> None:
    for name, wrong in IMPOSSIBLE[field].items():
        with pytest.raises(ValueError, match=field):
            load(name, **{field: wrong})


@pytest.mark.parametrize(("made", "fields"), IMPOSSIBLE_ADDED)
def test_impossible_addition_is_refused_by_name(made: Any, fields: dict[str, Any]) -> None:
    for field, wrong in fields.items():
        with pytest.raises(ValueError, match=field):
            made(**{field: wrong})


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [("gmpo", "epsilon", "log_clip_low"), ("grpo", "clip_ratio_c", "dual_clip"), ("gspo", "clip_hihg", "clip_high")],
)
def test_likely_intended_field_is_suggested(name: str, wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=f"'{wrong}'; did you mean {right}\\?"):
        load(name, **{wrong: 0.2})


# --- relations ---------------------------------------------------------------------------------------


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


def test_rspo_v1_weights_after_the_clip_by_the_advantages_sign() -> None:
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


def test_rspo_supports_products_over_layers_and_dropped_tokens() -> None:
    batch = ragged()
    gamma_BT = (-batch.get("router_log_ratio_LBTK").abs().mean(3).sum(0)).exp()
    dropped_BT = gamma_BT < 0.5
    assert (dropped_BT & batch.mask_BT.bool()).any()
    numbers = {"layers": "product", "gamma_min": 1e-6, "form": "after_clip"}
    _, grad_BT, _ = run(load("rspo_grpo", **numbers, drop_below=0.5), batch)
    _, kept_BT, _ = run(load("rspo_grpo", **numbers), batch)
    assert_close(grad_BT, kept_BT.masked_fill(dropped_BT, 0.0))


@pytest.mark.parametrize("a_token", [-1.0, -19.0, -21.0, -45.0, -100.0, -1000.0])
def test_gepo_is_accurate_at_any_likelihood(a_token: float) -> None:
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


@pytest.mark.parametrize(("ratio", "is_clipped"), [(1.04, True), (1.5, False)])
def test_response_without_advantage_moves_the_quantile_of_sat(ratio: float, is_clipped: bool) -> None:
    batch = replace(
        mismatched([[1.1], [0.95], [ratio]]), advantages_BT=torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float64)
    )
    _, grad_BT, _ = run(load("sat", quantile=0.5, host={"clip_high": 0.12}), batch)
    assert (grad_BT[0] == 0) == is_clipped


def test_cppo_without_a_budget_is_dppo() -> None:
    same(load("cppo", prefix_budget=1e9, least_weight=1.0), load("dppo"), ragged(1.5))


def test_r2vpo_multiplier_follows_excess_variance_and_stays_nonnegative() -> None:
    batch = ragged()
    loss = load("r2vpo", multiplier_step=2.0)
    r_N = (batch.logprobs_BT - batch.get("old_logprobs_BT")).exp()[batch.mask_BT.bool()]
    excess = ((r_N - 1) ** 2).mean().item() - 0.04
    output = loss(replace(batch, state=loss.initial_state()))
    assert output.state["multiplier"].item() == pytest.approx(1 + 2 * excess)
    assert output.metrics["loss_number"].item() == 1
    calm = loss(replace(ragged(0.0), state={"multiplier": torch.tensor(0.05).double()}))
    assert calm.state["multiplier"].item() == 0


@pytest.mark.parametrize("rows", [RESPONSES, 0])
@pytest.mark.parametrize("correction", [None, *CORRECTIONS], ids=str)
def test_batch_without_tokens_has_zero_loss_under_every_addition(correction: Correction | None, rows: int) -> None:
    batch = part(without_tokens(ragged()), torch.arange(rows))
    batch = replace(batch, responses=None, tokens=None)
    for estimator in ("k1", "k2", "k3"):
        added = objective(load("grpo"), correction, coefficient=0.1, estimator=estimator, entropy_bonus=0.1)
        loss, grad_BT, _ = run(added, batch)
        assert loss == 0
        assert not grad_BT.any()


@pytest.mark.parametrize("name", names(presets=True))
def test_batch_without_tokens_does_not_change_state(name: str) -> None:
    """Neither one whose tokens are masked nor one without rows; the loss is 0."""
    loss = load(name)
    for rows in (RESPONSES, 0):
        empty = part(without_tokens(ragged(top_k=loss.traits.top_k or 2)), torch.arange(rows))
        value, grad_BT, output = run(loss, replace(empty, responses=None, tokens=None))
        assert value == 0
        assert not grad_BT.any()
        ended, began = ({key: each.item() for key, each in of.items()} for of in (output.state, loss.initial_state()))
        assert ended == pytest.approx(began)


# --- advantages --------------------------------------------------------------------------------------

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.7, 0.7, 0.7, 0.7]])


def test_leave_one_out_std_does_not_divide_where_the_others_agree() -> None:
    for reward in (0.01 * n for n in range(1, 1200)):
        found = LeaveOneOutStd()(torch.tensor([[reward] * 7 + [0.0]]), torch.ones(1, 8))[0, 7]
        assert found.item() == pytest.approx(-reward)


@pytest.mark.parametrize("advantage", [BatchMean, BatchWhitened, partial(BatchWhitened, subtract_group_mean=True)])
def test_equal_rewards_of_a_rollout_have_exactly_zero_advantage(advantage: Callable[[], Any]) -> None:
    """In fp32 the mean of equal rewards misses them by a rounding error at some of these sizes."""
    for prompts in range(1, 40):
        lengths_PG = torch.randint(1, 9, (prompts, 8), generator=torch.Generator().manual_seed(prompts))
        for reward in (0.7, 0.1, 1.0):
            assert not advantage()(torch.full((prompts, 8), reward), lengths_PG).any()


def mean(numbers: list[Fraction]) -> Fraction:
    return sum((count * number for number, count in Counter(numbers).items()), Fraction(0)) / len(numbers)


def squares(numbers: list[Fraction]) -> Fraction:
    centre, counts = mean(numbers), Counter(numbers)
    return sum((count * (number - centre) ** 2 for number, count in counts.items()), Fraction(0))


def std(numbers: list[Fraction]) -> float:
    return math.sqrt(squares(numbers) / (len(numbers) - 1))


def by_the_others(i: int, group: list[Fraction]) -> float:
    others = group[:i] + group[i + 1 :]
    return float(group[i] - mean(others)) / (std(others) + 1e-6 if std(others) else 1)


def whitened(value: Fraction, tokens: list[Fraction], divisor: Callable[[list[Fraction]], float]) -> float:
    return float(value - mean(tokens)) / divisor(tokens)


def once_a_token(rollout: list[list[Fraction]], subtract: bool) -> list[Fraction]:
    """The values of two groups, whose responses have two tokens, and the first of each group three."""
    shifted = [[value - subtract * centre for value in group] for group in rollout for centre in [mean(group)]]
    return [value for group in shifted for value in [group[0], *(value for value in group for _ in range(2))]]


# Advantage → its definition in exact arithmetic, from a response's place in its group, its group and the rollout.
EXACT: dict[Any, Callable[[int, list[Fraction], list[list[Fraction]]], float]] = {
    GroupMean(): lambda i, group, _: float(group[i] - mean(group)),
    LeaveOneOut(): lambda i, group, _: float(group[i] - mean(group[:i] + group[i + 1 :])),
    GroupMeanStd(epsilon=1e-6): lambda i, group, _: float(group[i] - mean(group)) / (std(group) + 1e-6),
    LeaveOneOutStd(epsilon=1e-6): lambda i, group, _: by_the_others(i, group),
    GroupMeanBatchStd(epsilon=1e-6): lambda i, group, rollout: (
        float(group[i] - mean(group)) / (std([*rollout[0], *rollout[1]]) + 1e-6)
    ),
    BatchMean(): lambda i, group, rollout: float(group[i] - mean([*rollout[0], *rollout[1]])),
    PlusMinus(): lambda i, group, _: float(2 * group[i] - 1),
    PlusMinusMixed(): lambda i, group, _: float(2 * group[i] - 1) if len(set(group)) > 1 else 0.0,
    Reward(): lambda i, group, _: float(group[i]),
}
for subtract in (False, True):
    EXACT[BatchWhitened(subtract_group_mean=subtract, epsilon=1e-8)] = lambda i, group, rollout, of=subtract: whitened(
        group[i] - of * mean(group), once_a_token(rollout, of), lambda tokens: math.sqrt(std(tokens) ** 2 + 1e-8)
    )
    population = BatchWhitenedPopulation(subtract_group_mean=subtract, epsilon=1e-8)
    EXACT[population] = lambda i, group, rollout, of=subtract: whitened(
        group[i] - of * mean(group),
        once_a_token(rollout, of),
        lambda tokens: math.sqrt(max(squares(tokens) / len(tokens), 1e-8)),
    )


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("advantage", EXACT, ids=str)
def test_advantages_are_finite_with_one_token_or_none(advantage: Any, tokens: int) -> None:
    lengths_PG = torch.zeros(2, 4, dtype=torch.long)
    lengths_PG[0, 0] = tokens
    assert advantage(REWARDS, lengths_PG).isfinite().all()


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 32, 256])
@pytest.mark.parametrize("advantage", EXACT, ids=str)
def test_rounding_is_relative_to_the_spread_of_rewards(advantage: Any, size: int) -> None:
    """Two groups, in which all rewards are equal but one, or all are equal, far from 0 or not, in fp32."""
    if isinstance(advantage, LeaveOneOutStd) and size < 3:
        pytest.skip("needs two others")
    lengths_PG = torch.full((2, size), 2)
    lengths_PG[:, 0] = 3
    for apart, offset in itertools.product((1e-3, -1e-3, 1.0, 6.42, 35.1, 1e6), (0.0, 1e4, -1e4)):
        rewards_PG = torch.full((2, size), offset)
        rewards_PG[0, 0] += apart
        rollout = [[Fraction(reward) for reward in group] for group in rewards_PG.tolist()]
        found_PG, formula = advantage(rewards_PG, lengths_PG), EXACT[advantage]
        expected_PG = torch.empty(2, size)
        expected_PG[0, 0] = formula(0, rollout[0], rollout)
        expected_PG[0, 1:], expected_PG[1] = formula(1, rollout[0], rollout), formula(0, rollout[1], rollout)
        assert_close(found_PG, expected_PG, rtol=1e-5, atol=1e-6 * float(expected_PG.abs().max()), msg=f"{rewards_PG}")
        if type(advantage) in (GroupMean, LeaveOneOut, GroupMeanStd, LeaveOneOutStd, GroupMeanBatchStd):
            assert not found_PG[1].any()  # exactly


# --- edges -------------------------------------------------------------------------------------------


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
    ("dis", {}, 6.0, 1, "u"),
    ("dis", {}, 0.7, 1, "u"),
    ("icepop", {}, 5.0, 1, "u"),
    ("icepop", {}, 0.2, 1, "u"),
    ("ipo", {"max_divergence": 0.02}, 1 / (1 - 0.02 * math.exp(3)), 1, "u"),
    ("ipo", {"max_divergence": 0.02}, 1 / (1 + 0.02 * math.exp(3)), 1, "u"),
    ("cppo", {"max_divergence": 0.02}, 1 / (1 - 0.02 * math.exp(3)), 1, "u"),
    ("sat", {}, 1.2, 1, "u"),  # the only token is at the quantile, not beyond it
    ("up_grpo", {}, 0.8, -1, "r"),
    ("up_gspo", {}, 1 - 3e-4, -1, "r"),
    ("fspo_dual_clip", {"log_clip_high": 2.0}, 3.0, -1, "r"),
    ("minpro@xorl", {}, 1.28, 1, "r"),
    ("gspo@nemo-rl-0.6", {}, 1.2, 1, "r"),
    ("gspo@nemo-rl-0.6", {}, 0.8, -1, "r"),
    ("ipo@prime-rl-3418", {"log_ratio_penalty": 0.0}, 1 / (1 + 0.1 * math.exp(3)), 1, "u"),
]
BLIND = {"trm", "dis", "icepop", "ipo", "ipo@prime-rl-3418"}  # they mask both signs


@pytest.mark.parametrize(("name", "numbers", "edge", "sign", "unit"), EDGES)
def test_gradient_vanishes_just_beyond_the_edge(
    name: str, numbers: dict[str, Any], edge: float, sign: int, unit: str
) -> None:
    outward = 1e-6 if edge > 1 else -1e-6
    for beyond, move in ((False, edge * (1 - outward)), (True, edge * (1 + outward))):
        # At its own anchor a ratio is compared; the other one stays where nothing is clipped.
        ratios = {"r": move, "u": move} if unit == "r" else {"r": 1.0, "u": move}
        found = slope(load(name, **numbers), one(2.0 * sign, **ratios))
        assert (found == 0) == beyond, (name, move)
        if name not in BLIND:
            assert slope(load(name, **numbers), one(-2.0 * sign, **ratios)) != 0


def test_weight_beyond_the_cap_is_the_cap() -> None:
    for name, cap in (("cispo", 1.2), ("minpro", 1.2)):
        assert slope(load(name), one(2.0, r=cap * 0.999)) == pytest.approx(2 * cap * 0.999)
        assert slope(load(name), one(2.0, r=cap * 1.001)) == pytest.approx(2 * cap)
    assert slope(load("topr"), one(-2.0, r=0.9)) == pytest.approx(-2 * 0.9)
    assert slope(load("topr"), one(-2.0, r=1.1)) == pytest.approx(-2)
    assert slope(load("cispo", clip_low=10.0), one(2.0, r=0.01)) == pytest.approx(2 * 0.01)
    assert slope(load("minirl"), one(2.0, r=1.0, u=8.0)) == pytest.approx(5 * 2)
    assert slope(load("minirl", ratio_cap=None), one(2.0, r=1.0, u=8.0)) == pytest.approx(8 * 2)
    assert slope(load("aspo"), one(-2.0, r=4.0)) == pytest.approx(3 * -2)
    assert slope(load("aspo"), one(2.0, r=0.25)) == pytest.approx(3 * 2)


@pytest.mark.parametrize("name", ["gspo@nemo-rl-0.6", "minpro@xorl"])
def test_bad_token_keeps_its_gradient_without_a_dual_clip(name: str) -> None:
    assert slope(load(name), one(-2.0, r=100.0)) == pytest.approx(-200)


def test_dual_clip_removes_and_marks_the_gradient_of_a_bad_token() -> None:
    loss, grad_BT, output = run(load("ppo_clip", dual_clip=3.0), one(-1.0, r=4.0))
    assert (loss, grad_BT.item(), output.metrics["clipped_high_BT"].item()) == (3.0, 0.0, True)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.27), (3e-4, 4e-4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_marked_tokens_have_exactly_zero_gradient(dtype: torch.dtype, low: float, high: float) -> None:
    edges = torch.tensor([1 - low, 1 + high], dtype=dtype)
    around = [torch.nextafter(edges, torch.full_like(edges, to)) for to in (0, 2)]
    ratio = torch.cat([edges, *around]).repeat(2).requires_grad_()
    advantages = torch.tensor([1.0, -1.0], dtype=dtype).repeat_interleave(6)
    clipped = ops.clipped_surrogate(ratio, advantages, low, high)
    assert clipped.clipped_low_BT is not None
    assert clipped.clipped_high_BT is not None
    (gradient,) = torch.autograd.grad(clipped.values_BT.sum(), ratio)
    assert (clipped.clipped_low_BT.sum(), clipped.clipped_high_BT.sum()) == (1, 1)
    assert_close(gradient, torch.where(clipped.clipped_low_BT | clipped.clipped_high_BT, 0, advantages))


def test_gspo_averages_advantages_within_a_response() -> None:
    batch = ragged(1e-5)
    uneven_BT = batch.advantages_BT + torch.linspace(-1, 1, 5).double()
    mean_B1 = torch.stack([uneven_BT[i, :n].mean() for i, n in enumerate(LENGTHS)])[:, None]
    _, grad_BT, _ = run(load("gspo"), replace(batch, advantages_BT=uneven_BT))
    assert_close(grad_BT, run(_Plain(), replace(batch, advantages_BT=uneven_BT))[1])
    _, even_BT, _ = run(load("gspo"), replace(batch, advantages_BT=mean_B1.expand_as(uneven_BT)))
    assert_close(grad_BT, even_BT)


class _Plain(PolicyLoss):
    """GSPO inside its band, with the gradient from autograd through s_i and not token by token."""

    def aggregate(self, values_BT: Tensor, batch: Batch) -> Tensor:
        return values_BT[:, 0].sum() / RESPONSES

    def surrogate(self, batch: Batch) -> Any:
        terms = []
        for i, n in enumerate(LENGTHS):
            log_ratio_T = (batch.logprobs_BT - batch.get("old_logprobs_BT"))[i, :n]
            terms.append(log_ratio_T.mean().exp() * batch.advantages_BT[i, :n].mean())
        return Surrogate(torch.stack(terms)[:, None].expand_as(batch.mask_BT))


def test_rspo_supports_a_host_anchored_at_the_sampler() -> None:
    batch = ragged()
    anchored = load("rspo_grpo", host={"anchor": "rollout"})
    swapped = replace(batch, old_logprobs_BT=batch.rollout_logprobs_BT)
    same(anchored, load("rspo_grpo"), replace(swapped, rollout_logprobs_BT=batch.rollout_logprobs_BT))
    assert not torch.allclose(run(anchored, batch)[1], run(load("rspo_grpo"), batch)[1])
    assert anchored.traits.corrects_for_sampler


def test_top_k_divergence_with_old_anchor_uses_the_old_policy() -> None:
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


def test_r2vpo_weights_constraint_and_penalty_alike() -> None:
    batch = ragged()
    output = objective(load("r2vpo", multiplier_step=1.0), MaskedIS(ratio_low=0.9, ratio_high=1.2))(batch)
    excess_BT = ((batch.logprobs_BT - batch.get("old_logprobs_BT")).exp() - 1) ** 2 - 0.04
    counted = (excess_BT * output.metrics["weights_BT"])[batch.mask_BT.bool()].mean()
    assert output.state["multiplier"].item() == pytest.approx(1 + counted.item())


def test_state_without_the_whole_minibatch_trait_is_refused() -> None:
    class Forgetful(type(load("reinforce"))):  # type: ignore[misc]
        def initial_state(self) -> dict[str, Tensor]:
            return {"seen": torch.zeros(())}

    with pytest.raises(ValueError, match="its traits must say so"):
        objective(Forgetful())
