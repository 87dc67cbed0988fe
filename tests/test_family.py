"""Every algorithm against its equation, written once more as loops over scalars, and against its relatives."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from steadymoe.algorithms import Batch, LossOutput, load, names
from steadymoe.algorithms.advantages import GroupMean, GroupMeanStd, LeaveOneOut

LENGTHS = (5, 1, 3, 4, 2, 5)
# One response's advantage; both signs, and one response without signal.
ADVANTAGES = (0.7, -1.2, 1.5, -0.4, 0.0, -2.0)


def ragged(scale: float = 0.4, seed: int = 0) -> Batch:
    """Six responses, log-ratios to the old policy and to the sampler of about ``scale``, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mask_BT = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    old_BT = normal() - 2
    return Batch(
        logprobs_BT=(old_BT + scale * normal()).requires_grad_(),
        old_logprobs_BT=old_BT,
        rollout_logprobs_BT=old_BT + 0.3 * scale * normal(),
        mask_BT=mask_BT,
        advantages_BT=torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None] * mask_BT,
    )


def run(loss: Callable[[Batch], LossOutput], batch: Batch) -> tuple[float, Tensor, LossOutput]:
    """The loss, its gradient with respect to every token's log-probability, and what it reports."""
    leaf_BT = batch.logprobs_BT.detach().clone().requires_grad_()
    output = loss(replace(batch, logprobs_BT=leaf_BT))
    output.loss.backward()
    assert leaf_BT.grad is not None
    return output.loss.item(), leaf_BT.grad, output


# --- the equations, as loops -------------------------------------------------------------------------
# Each gives the objective of one response and ∂J/∂log π of its tokens, before the aggregation's weights,
# from r (to the old policy), u (to the sampler), the log-probabilities p and the advantage a.


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, 1 - low), 1 + high)


def ppo(r: list[float], a: float, low: float, high: float, dual: float = math.inf) -> tuple[list[float], list[float]]:
    values, slopes = [], []
    for x in r:
        value, slope = min(x * a, clip(x, low, high) * a), x * a
        if (a > 0 and x > 1 + high) or (a < 0 and x < 1 - low):
            slope = 0.0
        if a < 0 and x > dual:
            value, slope = dual * a, 0.0
        values.append(value)
        slopes.append(slope)
    return values, slopes


def cispo(r: list[float], a: float, p: list[float]) -> tuple[list[float], list[float]]:
    weights = [min(max(x, 0.0), 1.2) for x in r]
    return [w * a * q for w, q in zip(weights, p, strict=True)], [w * a for w in weights]


def gspo_token(r: list[float], a: float) -> tuple[list[float], list[float]]:
    s = math.prod(r) ** (1 / len(r))
    values, slopes = ppo([s], a, 3e-4, 4e-4)
    return values * len(r), slopes * len(r)


def sapo(r: list[float], a: float) -> tuple[list[float], list[float]]:
    tau = 1.0 if a > 0 else 1.05
    values = [4 / tau / (1 + math.exp(-tau * (x - 1))) * a for x in r]
    return values, [x / math.cosh(tau * (x - 1) / 2) ** 2 * a for x in r]


def minirl(r: list[float], u: list[float], a: float, p: list[float], cap: float) -> tuple[list[float], list[float]]:
    masked = [(a > 0 and x > 1.27) or (a < 0 and x < 0.8) for x in r]
    weights = [0.0 if gone else min(x, cap) for gone, x in zip(masked, u, strict=True)]
    return [w * a * q for w, q in zip(weights, p, strict=True)], [w * a for w in weights]


def vespo(r: list[float], a: float, p: list[float]) -> tuple[list[float], list[float]]:
    c1, c2 = (2.0, 3.0) if a > 0 else (3.0, 2.0)
    w = math.prod(r)
    kernel = w**c1 * math.exp(c2 * (1 - w))
    return [kernel * a * q for q in p], [kernel * a] * len(p)


def gmpo(r: list[float], a: float) -> tuple[list[float], list[float]]:
    logs = [math.log(x) for x in r]
    kept = [min(x, 0.4) if a > 0 else max(x, -0.4) if a < 0 else x for x in logs]
    value = math.exp(sum(kept) / len(r)) * a
    return [value] * len(r), [value if x == y else 0.0 for x, y in zip(logs, kept, strict=True)]


TOKENS = sum(LENGTHS)
RESPONSES = len(LENGTHS)
# name → (the equation of one response, the weight of a token of a response of T tokens)
EQUATIONS: dict[str, tuple[Callable[..., tuple[list[float], list[float]]], Callable[[int], float]]] = {
    "reinforce": (lambda r, u, a, p: ([a * q for q in p], [a] * len(p)), lambda T: 1 / T / RESPONSES),
    "rloo": (lambda r, u, a, p: ([a * q for q in p], [a] * len(p)), lambda T: 1 / RESPONSES),
    "grpo": (lambda r, u, a, p: ppo(r, a, 0.2, 0.2), lambda T: 1 / T / RESPONSES),
    "grpo_unclipped": (lambda r, u, a, p: ppo(r, a, math.inf, math.inf), lambda T: 1 / T / RESPONSES),
    "ppo_clip": (lambda r, u, a, p: ppo(r, a, 0.2, 0.2), lambda T: 1 / TOKENS),
    "dr_grpo": (lambda r, u, a, p: ppo(r, a, 0.2, 0.2), lambda T: 1 / 10 / RESPONSES),
    "cispo": (lambda r, u, a, p: cispo(r, a, p), lambda T: 1 / TOKENS),
    "gspo": (lambda r, u, a, p: gspo_token(r, a), lambda T: 1 / T / RESPONSES),
    "gspo_token": (lambda r, u, a, p: gspo_token(r, a), lambda T: 1 / T / RESPONSES),
    "luspo": (
        lambda r, u, a, p: tuple(x * len(r) for x in ppo([math.prod(r) ** (1 / len(r))], a, 2e-3, 2.5e-3)),
        lambda T: 1 / RESPONSES,
    ),
    "gmpo": (lambda r, u, a, p: gmpo(r, a), lambda T: 1 / T / RESPONSES),
    "sapo": (lambda r, u, a, p: sapo(r, a), lambda T: 1 / T / RESPONSES),
    "minirl": (lambda r, u, a, p: minirl(r, u, a, p, 5.0), lambda T: 1 / RESPONSES),
    "vespo": (lambda r, u, a, p: vespo(r, a, p), lambda T: 1 / TOKENS),
}


def test_every_algorithm_has_its_equation_here() -> None:
    assert set(EQUATIONS) == set(names())


@pytest.mark.parametrize("scale", [0.0005, 0.02, 0.4, 1.5], ids=lambda scale: f"log-ratios of {scale}")
@pytest.mark.parametrize("name", EQUATIONS)
def test_value_and_gradient_are_those_of_the_equation(name: str, scale: float) -> None:
    equation, weight = EQUATIONS[name]
    batch = ragged(scale)
    loss, grad_BT, _ = run(load(name), batch)
    expected, expected_grad_BT = 0.0, torch.zeros_like(grad_BT)
    for i, (length, a) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        p = batch.logprobs_BT[i, :length].tolist()
        r = (batch.logprobs_BT - batch.old_logprobs_BT)[i, :length].exp().tolist()
        u = (batch.logprobs_BT - batch.rollout_logprobs_BT)[i, :length].exp().tolist()
        values, slopes = equation(r, u, a, p)
        expected -= weight(length) * sum(values)
        expected_grad_BT[i, :length] = -weight(length) * torch.tensor(slopes, dtype=torch.float64)
    assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
    torch.testing.assert_close(grad_BT, expected_grad_BT, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", EQUATIONS)
def test_tokens_marked_as_clipped_are_those_that_lost_their_gradient_or_are_capped(name: str) -> None:
    batch = ragged()
    _, grad_BT, output = run(load(name), batch)
    if "clipped_low_BT" not in output.metrics:
        assert name in ("reinforce", "rloo", "grpo_unclipped", "sapo", "vespo")
        return
    low_BT, high_BT = output.metrics["clipped_low_BT"], output.metrics["clipped_high_BT"]
    assert low_BT.shape == high_BT.shape == batch.mask_BT.shape
    assert not ((low_BT | high_BT) & ~batch.mask_BT.bool()).any()
    if name == "cispo":
        ratio_BT = (batch.logprobs_BT - batch.old_logprobs_BT).exp()
        assert torch.equal(high_BT, (ratio_BT > 1.2) & batch.mask_BT.bool())
        return
    alive_BT = batch.mask_BT.bool() & (batch.advantages_BT != 0)
    assert torch.equal((low_BT | high_BT) & alive_BT, (grad_BT == 0) & alive_BT)
    assert (low_BT | high_BT).any()


# --- relatives ---------------------------------------------------------------------------------------


def same(
    one: Callable[[Batch], LossOutput], other: Callable[[Batch], LossOutput], batch: Batch, value: bool = True
) -> None:
    loss, grad_BT, _ = run(one, batch)
    other_loss, other_grad_BT, _ = run(other, batch)
    torch.testing.assert_close(grad_BT, other_grad_BT)
    if value:
        assert loss == pytest.approx(other_loss)


def test_grpo_is_ppo_clip_on_responses_of_one_length() -> None:
    batch = ragged()
    rows = torch.tensor([0, 5])  # both of five tokens
    parts = {name: getattr(batch, name)[rows] for name in vars(batch)}
    same(load("grpo"), load("ppo_clip"), Batch(**parts))


def test_minirl_at_the_samplers_policy_without_a_cap_has_the_gradient_of_ppos_clip_with_a_token_sum() -> None:
    batch = ragged()
    batch = replace(batch, rollout_logprobs_BT=batch.old_logprobs_BT)
    same(
        load("minirl", ratio_cap=None),
        load("dr_grpo", clip_high=0.27, constant_length=1),
        batch,
        value=False,
    )


def test_gmpo_with_an_infinite_band_is_gspo_without_a_clip() -> None:
    unclipped = load("gspo_token", clip_low=0.999999, clip_high=1e9)
    same(load("gmpo", log_clip_low=math.inf, log_clip_high=math.inf), unclipped, ragged())


def test_luspo_is_gspo_times_the_length() -> None:
    batch = ragged()
    _, grad_BT, _ = run(load("luspo", clip_low=3e-4, clip_high=4e-4), batch)
    _, gspo_BT, _ = run(load("gspo"), batch)
    torch.testing.assert_close(grad_BT, gspo_BT * torch.tensor(LENGTHS)[:, None])


def test_gspo_token_differs_from_gspo_only_where_advantages_differ_within_a_response() -> None:
    batch = ragged(0.0002)
    same(load("gspo"), load("gspo_token"), batch)
    uneven_BT = batch.advantages_BT * torch.linspace(0, 2, 5, dtype=torch.float64)
    _, grad_BT, _ = run(load("gspo"), replace(batch, advantages_BT=uneven_BT))
    _, token_BT, _ = run(load("gspo_token"), replace(batch, advantages_BT=uneven_BT))
    assert not torch.allclose(grad_BT, token_BT)


def test_cispo_above_its_cap_has_gradient_cap_times_advantage_where_ppos_is_zero() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = Batch(
        logprobs_BT=-one, old_logprobs_BT=-2 * one, rollout_logprobs_BT=-2 * one, mask_BT=one, advantages_BT=3 * one
    )
    assert run(load("cispo"), batch)[1].item() == pytest.approx(-1.2 * 3)
    assert run(load("ppo_clip"), batch)[1].item() == 0


def test_vespos_kernel_is_one_at_one_and_largest_at_c1_over_c2() -> None:
    def weight(product: float, advantage: float) -> float:
        one = torch.ones(1, 1, dtype=torch.float64)
        batch = Batch(
            logprobs_BT=math.log(product) * one - 9,
            old_logprobs_BT=0 * one - 9,
            rollout_logprobs_BT=0 * one - 9,
            mask_BT=one,
            advantages_BT=advantage * one,
        )
        return -run(load("vespo"), batch)[1].item() / advantage

    for advantage, best in ((1.0, 2 / 3), (-1.0, 3 / 2)):
        assert weight(1.0, advantage) == pytest.approx(1)
        assert weight(best, advantage) > max(weight(best * 0.99, advantage), weight(best * 1.01, advantage))


def test_sapos_gradient_at_the_old_policy_is_the_advantage_and_its_value_twice_that_over_tau() -> None:
    batch = ragged(0.0)
    loss, grad_BT, _ = run(load("sapo"), batch)
    _, plain_BT, _ = run(load("reinforce"), batch)
    torch.testing.assert_close(grad_BT, plain_BT)
    taus = [1.0 if a > 0 else 1.05 for a in ADVANTAGES]
    assert loss == pytest.approx(-sum(2 * a / tau for a, tau in zip(ADVANTAGES, taus, strict=True)) / RESPONSES)


def test_a_dual_clip_bounds_the_loss_of_a_bad_token_and_takes_its_gradient() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = Batch(
        logprobs_BT=0 * one, old_logprobs_BT=-2 * one, rollout_logprobs_BT=-2 * one, mask_BT=one, advantages_BT=-one
    )
    loss, grad_BT, output = run(load("ppo_clip", dual_clip=3.0), batch)
    assert (loss, grad_BT.item(), output.metrics["clipped_high_BT"].item()) == (3.0, 0.0, True)
    assert run(load("ppo_clip"), batch)[0] == pytest.approx(math.exp(2))


@pytest.mark.parametrize("name", names())
def test_at_the_old_policy_all_have_the_gradient_of_reinforce_up_to_the_weight_of_a_token(name: str) -> None:
    batch = ragged(0.0)
    _, grad_BT, _ = run(load(name), batch)
    weights_B = torch.tensor([EQUATIONS[name][1](length) for length in LENGTHS], dtype=torch.float64)
    if name == "luspo":
        weights_B = torch.full_like(weights_B, 1 / RESPONSES)
    torch.testing.assert_close(grad_BT, -weights_B[:, None] * batch.advantages_BT)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("far", [-1000.0, -30.0, 30.0, 1000.0])
def test_a_ratio_that_ran_away_gives_finite_numbers(name: str, far: float) -> None:
    batch = ragged()
    logprobs_BT = batch.logprobs_BT.detach().clone()
    logprobs_BT[0, 0] += far
    loss, grad_BT, _ = run(load(name), replace(batch, logprobs_BT=logprobs_BT))
    assert math.isfinite(loss)
    assert grad_BT.isfinite().all()


@pytest.mark.parametrize("name", names())
def test_padding_and_order_change_nothing(name: str) -> None:
    batch = ragged()
    loss, grad_BT, _ = run(load(name), batch)
    order_B = torch.tensor([3, 0, 5, 1, 4, 2])
    padded = {}
    for field, values_BT in vars(batch).items():
        garbage = 0 if field == "mask_BT" else float("nan")
        padded[field] = torch.nn.functional.pad(values_BT.detach(), (0, 3), value=garbage)[order_B]
    other, other_BT, _ = run(load(name), Batch(**padded))
    assert other == pytest.approx(loss)
    torch.testing.assert_close(other_BT[:, :5], grad_BT[order_B])
    assert (other_BT[:, 5:] == 0).all()


@pytest.mark.parametrize(
    ("name", "numbers", "answer"),
    [
        ("ppo_clip", {"dual_clip": 1.1}, "dual_clip"),
        ("dr_grpo", {"constant_length": 0}, "constant_length"),
        ("cispo", {"clip_low": 1.5}, "clip_low"),
        ("cispo", {"clip_high": -0.1}, "clip_high"),
        ("gmpo", {"log_clip_low": -0.4}, "log_clip_low"),
        ("sapo", {"tau_neg": 0.0}, "tau_neg"),
        ("minirl", {"ratio_cap": 1.0}, "ratio_cap"),
        ("vespo", {"c2_neg": 0.0}, "c2_neg"),
        ("luspo", {"clip_low": 1.0}, "clip_low"),
        ("gspo_token", {"clip_low": -1.0}, "clip_low"),
    ],
)
def test_an_impossible_number_is_refused_by_its_name(name: str, numbers: dict[str, float], answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        load(name, **numbers)


def test_advantages_of_the_family() -> None:
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.7, 0.7, 0.7, 0.7]])
    mean_PG = GroupMean()(rewards_PG)
    assert mean_PG.tolist() == [[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0]]
    left_out_PG = LeaveOneOut()(rewards_PG)
    torch.testing.assert_close(left_out_PG[0], torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3]))  # 1 − (0 + 0 + 1)/3
    torch.testing.assert_close(left_out_PG, mean_PG * 4 / 3)
    torch.testing.assert_close(GroupMeanStd()(rewards_PG)[0] * rewards_PG[0].std(), mean_PG[0], rtol=1e-5, atol=1e-5)
