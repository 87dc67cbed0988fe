"""Survival curves, restricted means and log-rank tests against textbook data and closed forms."""

import numpy as np
import pytest
from scipy import stats as scipy_stats

from steadymoe.bench.statistics import estimates, survival

# Weeks of remission of leukaemia under 6-mercaptopurine and placebo (Freireich 1963; Klein and Moeschberger 2003,
# table 1.1): the steps a run was seen, and whether it ended by relapse.
SEEN = [6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35]
RELAPSED = [1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
TREATED = (np.array(SEEN), np.array(RELAPSED, bool))


def seen(*steps: float, lasting: tuple[float, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Runs that collapse at ``steps``, and runs that last until the steps ``lasting``."""
    return np.array([*steps, *lasting]), np.array([True] * len(steps) + [False] * len(lasting))


PLACEBO = seen(1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23)


def test_kaplan_and_meier_on_the_textbooks_data() -> None:
    curve = survival.kaplan_meier(*TREATED)
    died = curve[curve["collapsed"] > 0].set_index("step")
    assert died["at_risk"].tolist() == [21, 17, 15, 12, 11, 7, 6]
    assert died["collapsed"].tolist() == [3, 1, 1, 1, 1, 1, 1]
    by_hand = np.cumprod([18 / 21, 16 / 17, 14 / 15, 11 / 12, 10 / 11, 6 / 7, 5 / 6])
    np.testing.assert_allclose(died["survival"], by_hand)
    np.testing.assert_allclose(died["survival"], [0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], atol=5e-4)
    # R's survfit(conf.type = "log-log") at 10: 0.503 to 0.889
    np.testing.assert_allclose(died.loc[10, ["low", "high"]].astype(float), [0.503, 0.889], atol=1e-3)
    assert curve.iloc[0].tolist()[:2] == [0.0, 1.0]


def test_without_censoring_survival_is_the_share_that_is_left() -> None:
    curve = survival.kaplan_meier(*seen(1, 2, 3, 4))
    assert curve["survival"].tolist() == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert curve["low"].notna().tolist() == [False, True, True, True, False]


def test_runs_that_all_last_survive_and_have_no_interval() -> None:
    curve = survival.kaplan_meier(*seen(lasting=(100,) * 5))
    assert curve["survival"].tolist() == [1.0, 1.0]
    assert curve["low"].isna().all()
    found = survival.restricted_mean(*seen(lasting=(100,) * 5), 100)
    assert (found.mean, found.n) == (100.0, 5)
    assert np.isnan(found.low)
    assert survival.kaplan_meier(*seen()).empty
    assert survival.restricted_mean(*seen(), 10).n == 0
    assert survival.kaplan_meier(*seen(5, lasting=(9,)))["low"].isna().all()  # two runs


def test_the_restricted_mean_on_the_textbooks_data() -> None:
    found = survival.restricted_mean(*TREATED, 35)
    assert found.mean == pytest.approx(23.287, abs=1e-3)
    error = (found.mean - found.low) / scipy_stats.t(20).ppf(0.975) / np.sqrt(21 / 20)
    assert error == pytest.approx(2.827, abs=1e-3)


def test_without_censoring_the_restricted_mean_is_the_mean_with_students_interval() -> None:
    found = survival.restricted_mean(*seen(3, 9, 4, 20, 12), 15)
    expected = estimates.mean_over_seeds([3, 9, 4, 15, 12])
    np.testing.assert_allclose([found.mean, found.low, found.high], [expected.mean, expected.low, expected.high])
    lasting = survival.restricted_mean(*seen(3, 9, 4, 12, lasting=(15,)), 15)  # censored at the horizon is the same
    np.testing.assert_allclose([lasting.mean, lasting.low, lasting.high], [found.mean, found.low, found.high])


def test_the_curve_is_not_known_beyond_the_last_run() -> None:
    with pytest.raises(ValueError, match="up to that"):
        survival.restricted_mean(*seen(10, 20, lasting=(30,)), 40)
    assert survival.restricted_mean(*seen(10, 20, 30), 40).mean == pytest.approx(20)  # it is 0 there
    with pytest.raises(IndexError, match="boolean index"):
        survival.kaplan_meier(np.array([10, 10]), np.array([True]))


def test_log_rank_on_the_textbooks_data() -> None:
    p = survival.logrank(*TREATED, *PLACEBO)
    assert scipy_stats.chi2(1).isf(p) == pytest.approx(16.79, abs=0.01)
    assert survival.logrank(*PLACEBO, *PLACEBO) == pytest.approx(1.0)
    assert np.isnan(survival.logrank(*seen(lasting=(9,) * 3), *seen(lasting=(9,) * 3)))
    assert np.isnan(survival.logrank(*seen(3, 4), *seen(lasting=(9,) * 3)))


def simulated(generator: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Exponential times to collapse of mean 100 in runs of 20 to 180 steps."""
    last, when = generator.uniform(20, 180, n), generator.exponential(100, n)
    last[0] = 180  # one run is seen to the end
    return np.minimum(last, when), when <= last


def test_the_band_and_the_restricted_mean_cover_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    horizon, held, held_mean = 60.0, [], []
    for _ in range(600):
        time, ended = simulated(generator, 15)
        found = survival.restricted_mean(time, ended, horizon)
        held_mean.append(found.low <= 100 * (1 - np.exp(-0.6)) <= found.high)
        curve = survival.kaplan_meier(time, ended)
        row = curve[curve["step"] <= horizon].iloc[-1]
        if not np.isnan(row["low"]):
            held.append(row["low"] <= np.exp(-0.6) <= row["high"])
    assert 0.92 < np.mean(held_mean) < 0.98
    assert 0.92 < np.mean(held) < 0.99


def test_log_rank_alarms_as_often_as_it_says_under_no_difference() -> None:
    generator = np.random.default_rng(1)
    p = [survival.logrank(*simulated(generator, 12), *simulated(generator, 12)) for _ in range(600)]
    assert 0.03 < np.mean(np.array(p) < 0.05) < 0.08
