"""Early warning on runs whose crossings are known."""

import numpy as np
import pandas as pd
import pytest

from steadymoe.bench.statistics import early_warning


def made(
    curves: dict[int, list[float]], collapsed: dict[int, float], metric: str = "kl"
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Curves by seed, and the steps at which some collapse, as the tables of ``collect``."""
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
def test_only_what_comes_early_enough_warns(lead: int, expected: list[float]) -> None:
    found = early_warning.extremes(*made(CURVES, {0: 5, 1: 5}), "kl", lead)
    assert found.sort_values("seed")["extreme"].tolist() == expected


def test_a_run_that_collapses_at_once_cannot_warn_and_one_without_the_metric_says_nothing() -> None:
    steps, runs = made(CURVES, {0: 1, 1: 5})
    found = early_warning.extremes(steps[steps["seed"] != 3], runs, "kl").set_index("seed")["extreme"]
    assert found[0] == -np.inf
    assert 3 not in found


def test_the_roc_and_its_area_by_hand() -> None:
    worst = early_warning.extremes(*made(CURVES, {0: 5, 1: 5}), "kl", 2)  # collapsing 2 and 5, stable 1 and 3
    roc = early_warning.roc(worst)
    assert roc["threshold"].tolist() == [5, 3, 2, 1, -np.inf]
    assert roc["false_alarms"].tolist() == [0, 0, 0.5, 0.5, 1]
    assert roc["caught"].tolist() == [0, 0.5, 0.5, 1, 1]
    area = np.trapezoid(roc["caught"], roc["false_alarms"])
    assert early_warning.auc(worst).mean == pytest.approx(area) == pytest.approx(0.75)
    assert early_warning.roc(worst[worst["collapsed"].isna()]).empty
    assert early_warning.auc(worst[worst["collapsed"].isna()]).n == 0


def test_an_alarm_has_a_threshold_a_rate_and_a_lead() -> None:
    steps, runs = made(CURVES, {0: 5, 1: 5})
    strict = early_warning.alarm(steps, runs, "kl", false_alarm_rate=0.1)
    assert strict is not None
    assert strict.threshold == 3  # above it is no stable run
    assert (strict.false_alarms.mean, strict.false_alarms.n) == (0, 2)
    assert (strict.caught.mean, strict.caught.n) == (1.0, 2)
    assert (strict.lead.mean, strict.lead.n) == (2.0, 2)  # crossed at 4 and at 2, collapsed at 5
    loose = early_warning.alarm(steps, runs, "kl", false_alarm_rate=0.5)
    assert loose is not None
    assert (loose.threshold, loose.false_alarms.mean) == (1, 0.5)
    assert early_warning.alarm(steps, runs.assign(collapsed=np.nan), "kl") is None


def test_a_falling_metric_warns_by_its_fall() -> None:
    turned = {seed: [-value for value in curve] for seed, curve in CURVES.items()}
    falling = early_warning.alarm(*made(turned, {0: 5, 1: 5}, "entropy"), "entropy", falls=True)
    assert falling is not None
    assert (falling.threshold, falling.caught.mean, falling.lead.mean) == (-3, 1.0, 2.0)


@pytest.mark.parametrize(("rate", "n", "allowed"), [(0.1, 30, 3), (0.29, 100, 29), (0.1, 9, 0), (1.0, 5, 5)])
def test_a_share_of_the_stable_runs_may_cross(rate: float, n: int, allowed: int) -> None:
    curves = {seed: [float(seed)] * 6 for seed in range(n)} | {n: [n - 0.5 - allowed] * 6}
    found = early_warning.alarm(*made(curves, {n: 5}), "kl", false_alarm_rate=rate)
    assert found is not None
    assert (found.false_alarms.mean, found.caught.mean) == (allowed / n, 1.0)
    assert found.threshold == (n - 1 - allowed if allowed < n else -np.inf)


def test_a_metric_that_knows_nothing_has_an_area_of_one_half_and_an_interval_that_says_so() -> None:
    generator = np.random.default_rng(0)
    areas = []
    for _ in range(60):
        curves = {seed: generator.normal(size=12).tolist() for seed in range(16)}
        areas.append(early_warning.auc(early_warning.extremes(*made(curves, dict.fromkeys(range(8), 11.0)), "kl")))
    np.testing.assert_allclose(np.mean([area.mean for area in areas]), 0.5, atol=0.06)
    assert np.mean([area.low <= 0.5 <= area.high for area in areas]) > 0.87
