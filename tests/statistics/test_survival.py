"""Survival curves and log-rank tests against textbook data and closed forms."""

import warnings

import numpy as np
import pytest
from scipy import stats as scipy_stats

from steadymoe.bench.statistics import survival

# Weeks of remission of leukaemia under 6-mercaptopurine and placebo (Freireich 1963; Klein and Moeschberger 2003,
# table 1.1): the steps a run was seen, and whether it ended by relapse.
SEEN = [6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35]
RELAPSED = [1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
TREATED = (np.array(SEEN), np.array(RELAPSED, bool))


def seen(*steps: float, lasting: tuple[float, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Runs that collapse at ``steps``, and runs that last until the steps ``lasting``."""
    return np.array([*steps, *lasting]), np.array([True] * len(steps) + [False] * len(lasting))


PLACEBO = seen(1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23)


def test_kaplan_meier_matches_the_textbook() -> None:
    curve = survival.kaplan_meier(*TREATED)
    died = curve.set_index("step").loc[[6, 7, 10, 13, 16, 22, 23]]
    by_hand = np.cumprod([18 / 21, 16 / 17, 14 / 15, 11 / 12, 10 / 11, 6 / 7, 5 / 6])
    np.testing.assert_allclose(died["survival"], by_hand)
    np.testing.assert_allclose(died["survival"], [0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], atol=5e-4)
    # R's survfit(conf.type = "log-log") at 10: 0.503 to 0.889
    np.testing.assert_allclose(died.loc[10, ["low", "high"]].astype(float), [0.503, 0.889], atol=1e-3)
    assert curve.iloc[0].tolist()[:2] == [0.0, 1.0]


def test_uncensored_survival_is_the_share_left() -> None:
    curve = survival.kaplan_meier(*seen(1, 2, 3, 4))
    assert curve["survival"].tolist() == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert curve["low"].notna().tolist() == [False, True, True, True, False]


def test_survival_without_collapses_is_1_without_interval() -> None:
    curve = survival.kaplan_meier(*seen(lasting=(100,) * 5))
    assert curve["survival"].tolist() == [1.0, 1.0]
    assert curve["low"].isna().all()
    assert survival.kaplan_meier(*seen()).empty
    assert survival.kaplan_meier(*seen(5, lasting=(9,)))["low"].isna().all()  # two runs
    with pytest.raises(IndexError, match="boolean index"):
        survival.kaplan_meier(np.array([10, 10]), np.array([True]))


def test_log_rank_matches_the_textbook() -> None:
    p = survival.logrank(*TREATED, *PLACEBO)
    assert scipy_stats.chi2(1).isf(p) == pytest.approx(16.79, abs=0.01)
    assert survival.logrank(*PLACEBO, *TREATED) == pytest.approx(p)
    assert survival.logrank(*PLACEBO, *PLACEBO) == pytest.approx(1.0)
    assert np.isnan(survival.logrank(*seen(lasting=(9,) * 3), *seen(lasting=(9,) * 3)))
    assert np.isnan(survival.logrank(*seen(3, 4), *seen(lasting=(9,) * 3)))
    with warnings.catch_warnings(action="error"):  # the first arm has ended when a run of the second collapses
        assert np.isnan(survival.logrank(*seen(lasting=(3,) * 3), *seen(5, 6, 7)))


def simulated(generator: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Exponential times to collapse of mean 100 in runs of 20 to 180 steps."""
    last, when = generator.uniform(20, 180, n), generator.exponential(100, n)
    last[0] = 180  # one run is seen to the end
    return np.minimum(last, when), when <= last


def test_band_has_nominal_coverage() -> None:
    generator = np.random.default_rng(0)
    held = []
    for _ in range(600):
        curve = survival.kaplan_meier(*simulated(generator, 15))
        row = curve[curve["step"] <= 60].iloc[-1]
        if not np.isnan(row["low"]):
            held.append(row["low"] <= np.exp(-0.6) <= row["high"])
    assert 0.92 < np.mean(held) < 0.99
