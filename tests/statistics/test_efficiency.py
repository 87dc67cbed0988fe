"""What reward costs, and arms head to head, on runs whose answers are known."""

import numpy as np
import pandas as pd
import pytest

from steadymoe.bench.statistics import efficiency
from steadymoe.bench.statistics.efficiency import Reached


def test_costs_accumulate_without_measurements() -> None:
    steps = pd.DataFrame(
        {
            "step": [2, 1, 3],
            "prompts_sampled": [64, 32, 32],
            "tokens_sampled": [1000, 500, 600],
            "rollout_seconds": [1.0, 2.0, 3.0],
            "old_policy_seconds": [0.5, 0.5, 0.5],
            "update_seconds": [4.0, 5.0, 6.0],
            "probe_seconds": 100.0,
            "evaluation_seconds": 100.0,
        }
    )
    found = efficiency.costs(steps, updates_per_rollout=4, responses=8)
    assert tuple(found.columns) == ("updates", "samples", "tokens", "seconds")
    assert found.to_numpy().tolist() == [[4, 256, 500, 7.5], [8, 768, 1500, 13.0], [12, 1024, 2100, 22.5]]


def test_reward_is_reached_by_its_moving_average() -> None:
    reward, cost = pd.Series([0.0, 1.0, 0.0, 0.6, 0.6, 0.6]), pd.Series([10, 20, 30, 40, 50, 60])
    assert efficiency.cost_to_reward(reward, cost, 0.5, window=1) == Reached(20, True)
    assert efficiency.cost_to_reward(reward, cost, 0.5, window=2) == Reached(20, True)
    assert efficiency.cost_to_reward(reward, cost, 0.55, window=2) == Reached(50, True)
    assert efficiency.cost_to_reward(reward, cost, 0.7, window=2) == Reached(60, False)
    assert efficiency.cost_to_reward(reward[:2], cost[:2], 0.5, window=5) == Reached(20, True)


def reached(*costs: float) -> dict[int, Reached]:
    """By seed; a negative cost is that of a run that never got there."""
    return {seed: Reached(abs(cost), cost > 0) for seed, cost in enumerate(costs)}


def test_cost_ratio_is_geometric_and_inverts_when_swapped() -> None:
    a, b = reached(20, 80, 40, 10), reached(10, 20, 20, 10)
    found = efficiency.cost_ratio(a, b)
    assert found.mean == pytest.approx((2 * 4 * 2 * 1) ** 0.25)
    assert (found.bound, found.censored, found.n) == ("", 0, 4)
    other = efficiency.cost_ratio(b, a)
    np.testing.assert_allclose([other.low, other.high], [1 / found.high, 1 / found.low])
    assert efficiency.cost_ratio(a, a).mean == 1.0
    assert efficiency.cost_ratio(a, {}).n == 0
    assert np.isnan(efficiency.cost_ratio(reached(1, 2), reached(3, 4)).low)


def test_censored_costs_only_bound_the_median() -> None:
    b = reached(10, 20, 20, -100)
    # Above 10, 2 and 2: the one in the middle is 2.
    at_least = efficiency.cost_ratio(reached(-100, 40, 40, -100), b)
    assert (at_least.bound, at_least.mean) == ("", 2)
    assert (at_least.censored, at_least.n) == (1, 3)
    at_least = efficiency.cost_ratio(reached(-100, -40, 40, -100), b)
    assert str(at_least) == "> 2 (n = 3, 2 censored)"
    at_most = efficiency.cost_ratio(b, reached(-100, -40, 40, -100))
    assert (at_most.bound, at_most.mean) == ("at most", 0.5)
    both = efficiency.cost_ratio(reached(-100, 40), reached(10, -20))
    assert str(both) == "– (n = 2, 2 censored)"
    assert efficiency.cost_ratio(reached(-100), reached(-10)).n == 0
    # How long a run went on after it should have got there changes nothing that is shown.
    for spent in (100, 1000):
        found = efficiency.cost_ratio(reached(30, 40, -spent), reached(10, 10, 10))
        assert (found.bound, found.mean) == ("", 4)


@pytest.mark.parametrize("n", [6, 10, 15])
def test_median_of_censored_ratios_has_nominal_coverage(n: int) -> None:
    """Log-normal ratios of median 1.5 whose dearer run is cut off in some seeds."""
    generator, held, known = np.random.default_rng(n), [], 0
    for _ in range(500):
        a, b = 150 * generator.lognormal(0, 0.6, n), 100 * generator.lognormal(0, 0.3, n)
        cut = np.minimum(a, b) + generator.exponential(200, n)  # the cheaper one always gets there
        sides = ([Reached(min(x, c), x <= c) for x, c in zip(arm, cut, strict=True)] for arm in (a, b))
        found = efficiency.cost_ratio(*(dict(enumerate(side)) for side in sides))
        if found.censored:
            held.append(found.low <= 1.5 <= found.high)
            known += np.isfinite(found.high)
    assert len(held) > 250
    assert np.mean(held) > 0.94
    assert known > 0.02 * len(held)


def test_censored_ratio_has_the_sign_tests_interval_from_six_seeds() -> None:
    ones = reached(*([1.0] * 9))
    found = efficiency.cost_ratio(reached(2, 3, 4, 5, 6, 7, 8, 9, -9), ones)
    assert (found.low, found.mean, found.high) == (3, 6, 9)
    assert np.isnan(efficiency.cost_ratio(reached(2, 3, 4, 5, -9), ones).low)
    open_ended = efficiency.cost_ratio(reached(2, 3, 4, 5, 6, 7, -9, -9, -9), ones)
    assert (open_ended.mean, open_ended.high) == (6, np.inf)


def answers(*scores: list[float]) -> pd.DataFrame:
    rows = [
        {"seed": seed, "prompt": f"{seed}:{number}", "score": score}
        for seed, each in enumerate(scores)
        for number, score in enumerate(each)
    ]
    return pd.DataFrame(rows)


def test_win_rate_compares_the_same_prompts_and_averages_over_seeds() -> None:
    a = answers([1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0])
    b = answers([1, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1])
    found = efficiency.win_rate(a, b)
    assert found.mean == pytest.approx((0 + 0.5 - 0.25) / 3)
    assert found.n == 3
    other = efficiency.win_rate(b.sample(frac=1, random_state=0), a)
    np.testing.assert_allclose([other.mean, other.low, other.high], [-found.mean, -found.high, -found.low])
    assert efficiency.win_rate(a, a).mean == 0.0


def test_repeated_prompt_counts_once_and_other_prompts_are_refused() -> None:
    a, b = answers([1, 0]), answers([0, 0])
    twice = pd.concat([a, a[:1].assign(score=0.0)])  # 1 and 0: still better than 0
    assert efficiency.win_rate(twice, b).mean == 0.5
    with pytest.raises(ValueError, match="seed 0 differ"):
        efficiency.win_rate(a[:1], b)
    assert efficiency.win_rate(a.assign(seed=9), b).n == 0
