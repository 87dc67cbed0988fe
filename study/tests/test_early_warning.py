"""Early warning on runs whose crossings are known."""

import numpy as np
import pandas as pd
import pytest

from steadymoe.bench.statistics.comparisons import superiority
from steadymoe.bench.statistics.estimates import t_quantile, within
from study import early_warning


def made(
    curves: dict[int, list[float]], collapsed: dict[int, float], metric: str = "kl"
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Curves by seed, and the steps at which some collapse, as the tables of ``archive``."""
    rows = [
        {"arm": "a", "seed": seed, "step": step, "metric": metric, "value": value}
        for seed, curve in curves.items()
        for step, value in enumerate(curve, start=1)
    ]
    runs = pd.DataFrame({"arm": "a", "seed": list(curves)})
    return pd.DataFrame(rows), runs.assign(collapsed=runs["seed"].map(collapsed).astype(float))


CURVES = {
    0: [0, 1, 2, 9, 9, 9],  # collapses at 5: 2 before step 4, 9 at it
    1: [0, 5, 0, 0, 9, 9],  # collapses at 5: 5 at step 2
    2: [1, 1, 1, 1, 8, 8],  # stable: 1 within the horizon of step 4
    3: [0, 3, 0, 0, 0, 0],  # stable
}


@pytest.mark.parametrize(("lead", "expected"), [(1, [9, 5, 1, 3]), (2, [2, 5, 1, 3]), (4, [0, 0, 1, 0])])
def test_only_early_values_count_as_warnings(lead: int, expected: list[float]) -> None:
    found = early_warning.extremes(*made(CURVES, {0: 5, 1: 5}), "kl", lead)
    assert found.sort_values("seed")["extreme"].tolist() == expected


def test_immediate_collapse_or_missing_metric_gives_no_warning() -> None:
    steps, runs = made(CURVES, {0: 1, 1: 5})
    found = early_warning.extremes(steps[steps["seed"] != 3], runs, "kl").set_index("seed")["extreme"]
    assert found[0] == -np.inf
    assert 3 not in found


def test_area_matches_a_hand_computation() -> None:
    found = made(CURVES, {0: 5, 1: 5})
    worst = early_warning.extremes(*found, "kl", 2)  # collapsing 2 and 5, stable 1 and 3
    assert early_warning.area(worst) == pytest.approx(0.75)  # of the four pairs three are in order
    assert early_warning.auc(*found, "kl").mean == early_warning.area(early_warning.extremes(*found, "kl")) == 1
    assert np.isnan(early_warning.area(worst[worst["collapsed"].isna()]))
    assert early_warning.auc(*made(CURVES, {}), "kl").n == 0


def test_falling_metric_warns_by_its_fall() -> None:
    turned = {seed: [-value for value in curve] for seed, curve in CURVES.items()}
    fallen = early_warning.extremes(*made(turned, {0: 5, 1: 5}, "reward"), "reward", falls=True)
    risen = early_warning.extremes(*made(CURVES, {0: 5, 1: 5}), "kl")
    pd.testing.assert_frame_equal(fallen, risen)


def two_arms(n: int = 4) -> tuple[pd.DataFrame, pd.DataFrame]:
    """In each seed a run at 1 that collapses, and a stable one that jumps from 0 to 2 at step 10.

    Seed 0 collapses at step 20 and so sets the horizon of the stable runs; the other seeds collapse at step 5.
    """
    steps, runs = [], []
    for seed in range(n):
        runs += [("falls", seed, 5.0 if seed else 20.0), ("stays", seed, np.nan)]
        for step in range(1, 25):
            steps += [("falls", seed, step, "kl", 1.0), ("stays", seed, step, "kl", 2.0 if step >= 10 else 0.0)]
            steps += [(arm, seed, step, "reward", 0.5) for arm in ("falls", "stays")]
    names = ["arm", "seed", "step", "metric", "value"]
    return pd.DataFrame(steps, columns=names), pd.DataFrame(runs, columns=["arm", "seed", "collapsed"])


def test_jackknife_recomputes_the_horizon_without_the_left_out_seed() -> None:
    # Of all seeds the area is 0; without seed 0 the horizon ends before the jump, and it is 1. By hand:
    # √(3/4 · (0.75² + 3 · 0.25²)) = 0.75. With the horizon kept at 19 it would be 0.
    steps, runs = two_arms()
    found = early_warning.jackknife(
        lambda kept: early_warning.area(early_warning.extremes(steps, kept, "kl")), runs, range(4)
    )
    assert found == pytest.approx((0, 0.75))


def test_area_error_matches_delong_and_ignores_copies_of_a_run() -> None:
    a, b = np.array([0.3, 0.9, 0.7, 0.8, 0.6]), np.array([0.5, 0.1, 0.4, 0.65])
    wins = (a[:, None] > b).astype(float)
    # Without one of m runs a component moves the area by (V - area)/(m - 1): DeLong's variances (1988) over m - 1.
    variances = np.var(wins.mean(axis=1), ddof=1) / 4 + np.var(wins.mean(axis=0), ddof=1) / 3
    for copies in (1, 3):
        runs = pd.DataFrame({"seed": np.arange(9), "extreme": [*a, *b], "collapsed": [5.0] * 5 + [np.nan] * 4})
        whole, error = early_warning.jackknife(early_warning.area, pd.concat([runs] * copies), range(9))
        assert whole == pytest.approx(wins.mean())
        assert error == pytest.approx(np.sqrt(8 / 9 * variances))
    curves = {seed: [value] * 6 for seed, value in enumerate([*a, *b])}
    found, slope = early_warning.auc(*made(curves, dict.fromkeys(range(5), 6.0)), "kl"), whole * (1 - whole)
    width = np.log(found.high / (1 - found.high)) - np.log(found.low / (1 - found.low))
    assert width / 2 * slope == pytest.approx(2.306 * error, rel=1e-3)  # t with 8 degrees of freedom
    sure = early_warning.auc(*made(curves | {s: [9.0] * 6 for s in range(5)}, dict.fromkeys(range(5), 6.0)), "kl")
    assert 0 < sure.low < sure.mean == sure.high == 1


def test_area_has_nominal_coverage_with_correlated_runs_of_a_seed() -> None:
    """Four arms on ten seeds; a seed's level is in all of its runs, and moves the metric in both kinds."""
    generator, held, naive = np.random.default_rng(5), [], []
    for _ in range(300):
        seeds = np.tile(np.arange(10), 4)
        gone = generator.random(40) < generator.random(10)[seeds]
        values = generator.normal(size=10)[seeds] * 2 + generator.normal(size=40)
        if not 0 < gone.sum() < 40:
            continue
        runs = pd.DataFrame({"seed": seeds, "extreme": values, "collapsed": np.where(gone, 5.0, np.nan)})
        area, error = early_warning.jackknife(early_warning.area, runs, range(10))
        low, high = within(area, t_quantile(0.95, 9) * error, (0.0, 1.0))
        plain = superiority(values[gone], values[~gone])
        held.append(low <= 0.5 <= high)
        naive.append(plain.low <= 0.5 <= plain.high)
    assert np.mean(held) > 0.9
    assert np.mean(held) > np.mean(naive) + 0.03
