"""Every measured number on examples made by hand: ratio columns, routing drift, load, seeds.

Shapes: L layers, B responses, T response positions, F positions fed, K experts a token.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from steadymoe.algorithms import Batch, LossOutput
from steadymoe.bench.support import seeding
from steadymoe.bench.training import columns, routing_drift, token_metrics
from steadymoe.bench.training.probes import attribution
from steadymoe.models.selection import NO_ROUTE

NONE = [NO_ROUTE, NO_ROUTE]


# --- ratio columns -----------------------------------------------------------------------------------


def batch(log_ratios: list[list[float]]) -> Batch:
    """Rows of different lengths; nan on padding."""
    width = max(map(len, log_ratios))
    padded_BT = torch.tensor([row + [math.nan] * (width - len(row)) for row in log_ratios])
    mask_BT = (~padded_BT.isnan()).long()
    old_BT = torch.where(mask_BT.bool(), -2.0, math.nan)
    return Batch(
        logprobs_BT=(old_BT + padded_BT).requires_grad_(),
        old_logprobs_BT=old_BT,
        rollout_logprobs_BT=old_BT,
        mask_BT=mask_BT,
        advantages_BT=torch.ones_like(old_BT),
    )


def of_update(log_ratios: list[list[float]], **marks: list[list[bool]]) -> tuple[dict[str, float], dict[str, Tensor]]:
    output = LossOutput(torch.tensor(0.0), {name: torch.tensor(rows) for name, rows in marks.items()})
    columns, histograms = token_metrics.of_update(batch(log_ratios), output)
    assert not any(column.requires_grad for column in columns.values())
    return token_metrics.to_floats(columns), histograms


def test_ratio_columns_closed_form() -> None:
    columns, _ = of_update([[math.log(2), math.log(0.5)], [math.log(4)]])
    mean = (2 + 0.5 + 4) / 3
    assert columns == pytest.approx(
        {
            "token_ratio_mean": mean,
            "token_ratio_max": 4,
            "token_ratio_variance": ((2 - mean) ** 2 + (0.5 - mean) ** 2 + (4 - mean) ** 2) / 3,
            "sequence_ratio_variance": ((1 - 2.5) ** 2 + (4 - 2.5) ** 2) / 2,  # geometric means 1 and 4
            "ess": 6.5**2 / (3 * (4 + 0.25 + 16)),
        },
        rel=1e-5,
    )


def test_clip_fractions_are_shares_of_response_tokens_without_padding() -> None:
    columns, _ = of_update(
        [[0.0, 0.0, 0.0], [0.0]],
        clipped_low_BT=[[True, False, False], [True, True, True]],
        clipped_high_BT=[[False, True, False], [False, True, True]],
    )
    assert columns["clip_fraction_low"] == 2 / 4
    assert columns["clip_fraction_high"] == 1 / 4
    assert columns["clip_fraction"] == 3 / 4


def test_the_histogram_counts_every_response_token_in_its_bin() -> None:
    # Bin 0 is open below -1, bin 41 above 1; bin i in between ends at -1 + 0.05 i.
    log_ratios = [[-5.0, -0.975, -0.025, 0.025], [0.975, 5.0, 0.024]]
    expected = torch.zeros(42, dtype=torch.long)
    for place, tokens in {0: 1, 1: 1, 20: 1, 21: 2, 40: 1, 41: 1}.items():
        expected[place] = tokens
    assert torch.equal(of_update(log_ratios)[1]["token_ratio_histogram"], expected)
    assert of_update([[-5.0]])[1]["token_ratio_histogram"].tolist() == [1] + [0] * 41


def test_log_ratio_variance_of_a_response_is_around_its_own_mean() -> None:
    # Var_i: 0 (equal ratios, whatever their size), 0.01 = ((0.1)² + (0.1)²)/2 around 0.5, 4 around 0.
    log_ratios = [[3.0, 3.0, 3.0], [0.4, 0.6], [2.0, -2.0]]
    counts = of_update(log_ratios)[1]["sequence_log_ratio_variance_histogram"]
    assert len(counts) == 34
    assert counts.sum() == 3
    assert [counts[0], counts[-1]] == [1, 1]
    (place,) = [place for place in range(1, 33) if counts[place]]
    assert columns.VARIANCE_EDGES[place - 1] <= 0.01001
    assert columns.VARIANCE_EDGES[place] >= 0.00999


def test_mismatch_closed_form() -> None:
    mask_BT = torch.tensor([[1, 1], [1, 0]])
    rollout_BT = torch.tensor([[-1.0, -2.0], [-3.0, math.nan]])
    delta_BT = torch.tensor([[0.1, -0.7], [0.2, math.nan]])
    columns = token_metrics.to_floats(token_metrics.of_mismatch(rollout_BT, rollout_BT + delta_BT, mask_BT))
    deltas = [0.1, -0.7, 0.2]
    assert columns == pytest.approx(
        {
            "rollout_kl_k1": -sum(deltas) / 3,
            "rollout_kl_k3": sum(math.exp(d) - 1 - d for d in deltas) / 3,
            "rollout_chi2_token": sum(math.exp(2 * d) for d in deltas) / 3 - 1,
            "rollout_chi2_sequence": (math.exp(2 * (0.1 - 0.7)) + math.exp(2 * 0.2)) / 2 - 1,
            "rollout_ess": sum(map(math.exp, deltas)) ** 2 / (3 * sum(math.exp(2 * d) for d in deltas)),
            "rollout_ratio_mean": sum(map(math.exp, deltas)) / 3,
            "rollout_outside_share": 1.0,  # e^0.1, e^-0.7 and e^0.2
            "rollout_extreme_share": 1 / 3,  # e^0.7 alone is above 2
            "rollout_logprob_gap_max": 0.7,
            "rollout_probability_correlation": float(
                np.corrcoef(np.exp([-1, -2, -3]), np.exp([-0.9, -2.7, -2.8]))[0, 1]
            ),
        },
        rel=1e-4,
    )


def test_equal_policies_have_exactly_zero_mismatch() -> None:
    logprobs_BT = torch.tensor([[-1.3, -0.2]])
    columns = token_metrics.to_floats(token_metrics.of_mismatch(logprobs_BT, logprobs_BT, torch.ones(1, 2)))
    assert columns.pop("rollout_ess") == columns.pop("rollout_ratio_mean") == 1
    assert columns.pop("rollout_probability_correlation") == pytest.approx(1)
    assert set(columns.values()) == {0.0}
    for ratio, is_outside in ((0.899, 1), (0.901, 0), (1.099, 0), (1.101, 1)):
        columns = token_metrics.of_mismatch(logprobs_BT, logprobs_BT + math.log(ratio), torch.ones(1, 2))
        assert columns["rollout_outside_share"] == is_outside


def test_correction_columns_are_means_over_response_tokens() -> None:
    assert token_metrics.mean(torch.tensor([[1.0, 2.0], [6.0, math.nan]]), torch.tensor([[1, 1], [1, 0]])) == 3
    weights_BT = torch.tensor([[0.0, 3.0], [1.5, 99.0]])  # the last is padding
    made = batch([[0.1, 0.2], [0.3]])
    columns, _ = token_metrics.of_update(made, LossOutput(torch.tensor(0.0), {"weights_BT": weights_BT}))
    assert columns["correction_weight"].item() == pytest.approx(1.5)
    assert columns["correction_rejected"].item() == pytest.approx(1 / 3)


def test_reward_columns_closed_form() -> None:
    scores_PG = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    rewards_KG = torch.tensor([[1.0, 0.5], [0.0, 0.0]])  # a penalty gives a signal, another one takes it away
    for used in (scores_PG, rewards_KG):
        columns = token_metrics.of_rewards(scores_PG, used)
        assert columns == {"reward": 0.5, "groups_without_signal": 0.5, "prompts_sampled": 4}
    assert token_metrics.of_rewards(scores_PG[:2], rewards_KG[:1])["groups_without_signal"] == 0


def test_a_response_without_tokens_has_no_weight() -> None:
    rows = [[0.4, 0.4], [0.2, 0.2]]
    (plain, counts), (padded, padded_counts) = of_update(rows), of_update([*rows, []])
    assert plain["sequence_ratio_variance"] == pytest.approx(0.018282, rel=1e-4)
    assert padded == plain
    for name in counts:
        assert torch.equal(counts[name], padded_counts[name])
    mask_BT = torch.tensor([[1, 1], [1, 1], [0, 0]])
    rollout_BT = torch.tensor([[-2.0, -1.0], [-3.0, -1.5], [-2.0, -2.0]])
    delta_BT = torch.tensor([[0.4, 0.4], [0.2, 0.2], [9.0, 9.0]])
    of = token_metrics.of_mismatch
    whole = token_metrics.to_floats(of(rollout_BT, rollout_BT + delta_BT, mask_BT))
    assert whole["rollout_chi2_sequence"] == pytest.approx((math.exp(1.6) + math.exp(0.8)) / 2 - 1)
    assert whole == token_metrics.to_floats(of(rollout_BT[:2], (rollout_BT + delta_BT)[:2], mask_BT[:2]))


def test_step_averages_its_updates_but_keeps_extremes() -> None:
    rows = [{"step": 3, "update": u, "token_ratio_max": m, "ess": e} for u, m, e in ((1, 5.0, 0.9), (2, 2.0, 0.5))]
    assert token_metrics.of_step(rows) == pytest.approx({"token_ratio_max": 5.0, "ess": 0.7})
    rows = [
        {"router_shift_min": 0.9, "log_ratio_moment_free": 1e-6, "log_ratio_moment_pinned": 0.0, "routing_share": 1.0},
        {"router_shift_min": 0.7, "log_ratio_moment_free": 1.0, "log_ratio_moment_pinned": 0.5, "routing_share": 0.5},
        {"router_shift_min": 0.8, "log_ratio_moment_changed": 4.0},
    ]
    step = token_metrics.of_step(rows)
    assert step["router_shift_min"] == 0.7
    assert step["log_ratio_moment_changed"] == 4.0
    assert step["routing_share"] == pytest.approx(0.5, abs=1e-5)


# --- routing drift -----------------------------------------------------------------------------------

# One response of two tokens and one of one (T = 2), after prompts of two (F = 3: the last token is not fed).
MASK_BT = torch.tensor([[1, 1], [1, 0]])
OLD_LBFK = torch.tensor([[[[0, 1], [0, 1], [2, 3]], [[0, 1], [2, 3], NONE]]] * 2)


def test_drift_closed_form_per_layer_and_in_any_layer() -> None:
    new_LBFK = OLD_LBFK.clone()
    new_LBFK[0, 0, 1] = torch.tensor([0, 3])  # layer 0, first token of row 0: one of two experts
    new_LBFK[1, 0, 1] = torch.tensor([3, 2])  # layer 1, the same token: both
    new_LBFK[1, 1, 1] = torch.tensor([3, 0])  # layer 1, the token of row 1: one, listed elsewhere
    change = routing_drift.change(OLD_LBFK, new_LBFK, MASK_BT)
    assert_close(change.expert_L, torch.tensor([1 / 6, 3 / 6]))
    assert_close(change.set_L, torch.tensor([1 / 3, 2 / 3]))
    assert_close(change.any_layer, torch.tensor(2 / 3))
    assert_close(change.expert, torch.tensor(2 / 6))
    assert_close(change.set, torch.tensor(1 / 2))


def _falling(routes_LBFK: Tensor, experts: int) -> Tensor:
    """Log-probabilities (L, B, T, E) of routers that give each route's experts −1, −2, … in its order, others −9."""
    routes_LBTK = routes_LBFK[:, :, -MASK_BT.shape[1] :].clamp(min=0)
    scores_K = -torch.arange(1.0, routes_LBTK.shape[-1] + 1)
    blank_LBTE = torch.full((*routes_LBTK.shape[:-1], experts), -9.0)
    return blank_LBTE.scatter(-1, routes_LBTK, scores_K.expand(routes_LBTK.shape))


def test_strongest_experts_and_changed_slots_closed_form() -> None:
    new_LBFK = OLD_LBFK.clone()
    new_LBFK[0, 0, 1] = torch.tensor([0, 3])  # one slot, the first expert stays
    new_LBFK[1, 0, 1] = torch.tensor([3, 2])  # both
    new_LBFK[1, 1, 1] = torch.tensor([3, 2])  # none, in another order
    change = routing_drift.change(OLD_LBFK, new_LBFK, MASK_BT)
    # Where the expert that is named first is the strongest.
    old_LBTE, new_LBTE = (_falling(routes_LBFK, experts=4) for routes_LBFK in (OLD_LBFK, new_LBFK))
    assert_close(routing_drift.top1_change(OLD_LBFK, new_LBFK, old_LBTE, new_LBTE, MASK_BT), torch.tensor([0, 2 / 3]))
    # Where the routers' scores are what they were, whatever the order in which the same experts are named.
    same_L = routing_drift.top1_change(OLD_LBFK, OLD_LBFK.flip(-1), old_LBTE, old_LBTE, MASK_BT)
    assert_close(same_L, torch.zeros(2))
    # Another strongest expert among the same experts in the same order is a change.
    swapped_L = routing_drift.top1_change(OLD_LBFK, OLD_LBFK, old_LBTE, _falling(OLD_LBFK.flip(-1), experts=4), MASK_BT)
    assert_close(swapped_L, torch.ones(2))
    # An expert that was not chosen counts nothing, however strong: a group or a bias kept it out.
    left_out_LBTE = new_LBTE.clone()
    left_out_LBTE[0, 0, 0, 1] = 0.0  # the first token of row 0 was routed to experts 0 and 3
    kept_L = routing_drift.top1_change(OLD_LBFK, new_LBFK, old_LBTE, left_out_LBTE, MASK_BT)
    assert_close(kept_L, torch.tensor([0, 2 / 3]))
    assert change.slots_C.tolist() == [4, 1, 1]
    assert routing_drift.any_layer(OLD_LBFK, new_LBFK, MASK_BT).tolist() == [True, False, False]


def test_router_shift_and_kl_closed_form() -> None:
    """One layer, one token: from (½, ¼, ⅛, ⅛) to a quarter each; experts 0 and 1 were chosen."""
    old_LBTE = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()[None, None, None]
    new_LBTE = torch.full((1, 1, 1, 4), 0.25).log()
    shift = routing_drift.shift(old_LBTE, new_LBTE, torch.tensor([[[[0, 1]]]]), torch.ones(1, 1))
    log2 = math.log(2)
    assert_close(shift.kl_L, torch.tensor([0.5 * log2 - 2 * 0.125 * log2]))
    assert_close(shift.gamma_N, torch.tensor([math.exp(-log2 / 2)]))


def test_margin_and_confidence_closed_form() -> None:
    logprobs_LBTE = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()[None, None, None]
    decision = routing_drift.decision(logprobs_LBTE, torch.tensor([[[[0, 1]]]]), torch.ones(1, 1))
    assert_close(decision.margin_L, torch.tensor([math.log(0.25 / 0.15)]))
    assert_close(decision.confidence_L, torch.tensor([0.75]))
    biased = routing_drift.decision(logprobs_LBTE, torch.tensor([[[[0, 3]]]]), torch.ones(1, 1))
    assert_close(biased.margin_L, torch.tensor([math.log(0.1 / 0.25)]))


def test_attribution_closed_form() -> None:
    free_N, pinned_N = torch.tensor([0.3, -0.1, 0.2, 0.0]), torch.tensor([0.1, -0.1, 0.4, 0.0])
    columns = attribution(free_N, pinned_N, torch.tensor([True, False, True, False]))
    assert columns["log_ratio_moment_free"] == pytest.approx((0.09 + 0.01 + 0.04) / 4)
    assert columns["log_ratio_moment_pinned"] == pytest.approx((0.01 + 0.01 + 0.16) / 4)
    assert columns["log_ratio_moment_routing"] == pytest.approx((0.04 + 0.04) / 4)
    assert columns["log_ratio_covariance_routing"] == pytest.approx((0.1 * 0.2 - 0.4 * 0.2) / 4)
    assert columns["routing_share"] == pytest.approx(1 - 0.18 / 0.14)  # negative: pinning makes it larger
    assert columns["log_ratio_moment_changed"] == pytest.approx((0.09 + 0.04) / 2)
    assert columns["log_ratio_moment_unchanged"] == pytest.approx(0.01 / 2)
    whole = columns["log_ratio_moment_pinned"] + 2 * columns["log_ratio_covariance_routing"]
    assert columns["log_ratio_moment_free"] == pytest.approx(whole + columns["log_ratio_moment_routing"])
    still = attribution(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert "routing_share" not in still
    assert "log_ratio_moment_changed" not in still


def test_drift_reads_only_positions_that_precede_response_tokens() -> None:
    new_LBFK = OLD_LBFK.clone()
    new_LBFK[:, :, 0] = 3  # within the prompt
    new_LBFK[:, 1, 2] = 3  # what predicts padding
    assert routing_drift.change(OLD_LBFK, new_LBFK, MASK_BT).any_layer == 0
    new_LBFK[:, 1, 1] = 0  # the last prompt token of row 1 predicts its only response token
    assert routing_drift.change(OLD_LBFK, new_LBFK, MASK_BT).any_layer == pytest.approx(1 / 3)


def test_drift_of_a_token_without_a_route_raises() -> None:
    lost_LBFK = OLD_LBFK.clone()
    lost_LBFK[1, 1, 1] = NO_ROUTE
    for old_LBFK, new_LBFK in ((OLD_LBFK, lost_LBFK), (lost_LBFK, OLD_LBFK)):
        with pytest.raises(ValueError, match="no recorded route"):
            routing_drift.change(old_LBFK, new_LBFK, MASK_BT)


@pytest.mark.parametrize("other_LBFK", [OLD_LBFK[:1], OLD_LBFK[:, :, 1:], OLD_LBFK[..., :1]])
def test_drift_between_recordings_of_different_shapes_raises(other_LBFK: Tensor) -> None:
    with pytest.raises(ValueError, match="different shapes"):
        routing_drift.change(OLD_LBFK, other_LBFK, MASK_BT)


def test_load_even_uneven_and_on_one_expert() -> None:
    mask_BT = torch.ones(1, 4)
    even, half, one = [[0], [1], [2], [3]], [[0], [0], [1], [1]], [[2]] * 4
    load = routing_drift.load(torch.tensor([[even], [half], [one]]), mask_BT, experts=4)
    assert_close(load.entropy_L, torch.tensor([1.0, 0.5, 0.0]))
    assert_close(load.max_violation_L, torch.tensor([0.0, 1.0, 3.0]))


def test_load_counts_response_tokens_and_unused_experts() -> None:
    load = routing_drift.load(OLD_LBFK, MASK_BT, experts=8)  # [0, 1], [2, 3], [2, 3]
    shares = [1 / 6, 1 / 6, 2 / 6, 2 / 6]
    entropy = -sum(share * math.log(share) for share in shares) / math.log(8)
    assert_close(load.entropy_L, torch.full((2,), entropy))
    assert_close(load.max_violation_L, torch.full((2,), 2 / 6 * 8 - 1))
    assert_close(load.dead_L, torch.full((2,), 0.5))


# --- seeds -------------------------------------------------------------------------------------------


def test_seed_stage_and_step_determine_the_draws() -> None:
    places = [(0, "rollout", 1), (1, "rollout", 1), (0, "evaluation", 1), (0, "rollout", 2), (1, "1x", 1), (11, "x", 1)]

    def drawn() -> list[float]:
        of_torch = [torch.rand((), generator=seeding.torch_generator(*each), dtype=torch.float64) for each in places]
        return [*map(float, of_torch), *(seeding.numpy_generator(*each).random() for each in places)]

    first = drawn()
    torch.rand(3)
    np.random.default_rng(0).random(3)
    assert drawn() == first
    assert len(set(first)) == 2 * len(places)


def test_derived_seeds_are_unique_and_below_2_to_63() -> None:
    seeds = {seeding.derive(seed, stage, step) for seed in range(10) for stage in "abc" for step in range(100)}
    assert len(seeds) == 3000
    assert 0 <= min(seeds) <= max(seeds) < 2**63
