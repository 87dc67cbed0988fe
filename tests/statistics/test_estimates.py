"""Estimates over seeds on numbers with known answers, and how often their intervals hold the truth."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from small_figures import curve_table

from steadymoe.bench.report import tables
from steadymoe.bench.statistics import comparisons, estimates
from steadymoe.bench.training import columns

NUMBERS = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=3, max_size=14)


# --- the mean over seeds -----------------------------------------------------------------------------


def test_mean_has_students_interval_from_three_to_nine_seeds() -> None:
    values = [0.1, 0.5, 0.6, 0.9]
    found = estimates.over_seeds(values)
    low, high = scipy_stats.t(3, np.mean(values), scipy_stats.sem(values)).interval(0.95)
    np.testing.assert_allclose([found.mean, found.low, found.high], [0.525, low, high])
    for n in (0, 1, 2):
        assert np.isnan(estimates.over_seeds([0.5] * n).low)
    assert str(estimates.over_seeds([0.5, 0.5, 0.5])) == "0.5"


def test_interval_from_ten_seeds_is_a_slightly_wider_scipy_bca() -> None:
    values = np.random.default_rng(2).lognormal(size=12)
    found = estimates.over_seeds(values.tolist())
    wider = 2 * scipy_stats.norm.cdf(np.sqrt(12 / 11) * scipy_stats.t(11).ppf(0.975)) - 1
    expected = scipy_stats.bootstrap(
        (np.sort(values),), np.mean, n_resamples=9999, confidence_level=wider, rng=np.random.default_rng(0)
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-11)


def test_interval_exists_where_bca_is_undefined() -> None:
    numbers = np.array([0.5] * 11 + [np.nextafter(0.5, 1)])  # leaving one out never moves the mean
    assert estimates._bootstrap_interval(numbers) == (0.5, 0.5)


@pytest.mark.parametrize("number", [0.5, 0.1, -3.7, 1e-9, 1e6])
@pytest.mark.parametrize("n", [3, 5, 10, 12])
def test_equal_seeds_have_no_interval(number: float, n: int) -> None:
    """A spread that was not seen is not known; equal up to rounding is equal."""
    rounded = [number * (1 + 1e-16)] * (n - 1) + [float(np.nextafter(number, 2 * number))]
    for values in ([number] * n, rounded):
        for found in (
            estimates.over_seeds(values),
            estimates.over_seeds(values, may_bootstrap=False),
            estimates.over_seeds(values, bounds=estimates.DIFFERENCE),
            estimates.over_seeds([abs(value) for value in values], log=True),
            comparisons.difference(pd.Series(values), pd.Series([2 * value for value in values])),
        ):
            assert np.isnan([found.low, found.high]).all()
            assert np.isfinite(found.mean)
            assert "[" not in str(found)


def test_geometric_mean_of_zeros_is_zero() -> None:
    """And not the least number whose logarithm is taken; a mean of one number above it is as before."""
    tiny = estimates.MIN_LOG
    for n in (1, 3, 7, 10):
        for value in (0.0, tiny / 3, tiny):
            found = estimates.over_seeds([value] * n, log=True)
            assert (found.mean, str(found), found.n) == (0.0, "0", n)
        found = estimates.over_seeds([0.0, *[1e-4] * n], log=True)
        assert found.mean == pytest.approx((tiny * 1e-4**n) ** (1 / (n + 1)))
    steps = curve_table({"a": [[0.0] * 3] * 2})
    assert (estimates.curves(steps, "reward", window=2, log=True)["mean"] == 0).all()


@given(NUMBERS, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_interval_ignores_seed_order_and_scales_with_the_numbers(values: list[float], random: object) -> None:
    first = estimates.over_seeds(values)
    shuffled = values.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(list(vars(estimates.over_seeds(shuffled)).values()), list(vars(first).values()))
    assert np.isnan(first.low) or first.low - 1e-9 <= first.mean <= first.high + 1e-9
    # Twice is exact in binary; adding something would round, and BCa counts resamples that tie with the estimate.
    twice = estimates.over_seeds([2 * value for value in values])
    np.testing.assert_allclose(
        [twice.mean, twice.low, twice.high], [2 * x for x in (first.mean, first.low, first.high)], rtol=1e-11
    )


# --- numbers that have ends --------------------------------------------------------------------------


def test_reward_interval_uses_the_delta_method_on_the_logit_scale() -> None:
    values = [0.6, 0.9, 0.99]  # three seeds of a run that learns: Student's t gives 0.830 [0.319, 1.34]
    found = estimates.over_seeds(values, bounds=(0.0, 1.0))
    assert found.mean == pytest.approx(np.mean(values), rel=1e-11)
    assert 0 < found.low < found.mean < found.high < 1
    error = np.std(values, ddof=1) / np.sqrt(3) / (found.mean * (1 - found.mean))
    ends = scipy_stats.logistic.cdf(
        scipy_stats.logistic.ppf(found.mean) + np.array([-1, 1]) * scipy_stats.t(2).ppf(0.975) * error
    )
    np.testing.assert_allclose([found.low, found.high], ends)
    mirrored = estimates.over_seeds([1 - value for value in values], bounds=(0.0, 1.0))
    np.testing.assert_allclose([mirrored.low, mirrored.high], [1 - found.high, 1 - found.low])
    assert estimates.over_seeds([0.5, 0.9, 1.0], bounds=(0.0, 1.0)).high < 1  # a seed at an end is a number like others
    scores = [0.5, 1.5, 2.0]  # of a user's own task, beyond the ends: Student's interval
    assert estimates.over_seeds(scores, bounds=(0.0, 1.0)) == estimates.over_seeds(scores)


def test_seeds_all_at_an_end_have_no_interval() -> None:
    for values in ([1.0] * 3, [0.0] * 5, [1.0, 1.0, 0.0], [0.0] * 9 + [1.0] * 3):
        found = estimates.over_seeds(values, bounds=(0.0, 1.0))
        assert np.isnan([found.low, found.high]).all()
        assert found.mean == pytest.approx(np.mean(values), rel=1e-11)
    assert np.isnan(estimates.over_seeds([0.5] * 3, bounds=(0.0, 1.0)).low)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=12))
@settings(max_examples=60, deadline=None)
def test_no_interval_leaves_its_range(values: list[float]) -> None:
    found = estimates.over_seeds(values, bounds=(0.0, 1.0))
    assert np.isnan(found.low) or 0 <= found.low <= found.high <= 1
    differences = [2 * value - 1 for value in values]
    found = estimates.over_seeds(differences, bounds=estimates.DIFFERENCE)
    assert np.isnan(found.low) or -1 <= found.low <= found.high <= 1


@pytest.mark.parametrize("shape", [(8, 2), (2, 1), (19, 1), (1, 4)])
@pytest.mark.parametrize("n", [3, 5, 9])
def test_reward_intervals_have_better_coverage_than_students(n: int, shape: tuple[int, int]) -> None:
    truth = shape[0] / sum(shape)
    drawn_XN = np.random.default_rng(0).beta(*shape, (4000, n))
    mean_X = drawn_XN.mean(axis=1)
    half_X = scipy_stats.t(n - 1).ppf(0.975) * drawn_XN.std(axis=1, ddof=1) / np.sqrt(n)
    ends_X2 = np.array([estimates.within(*pair, (0.0, 1.0)) for pair in zip(mean_X, half_X, strict=True)])
    covered = ((ends_X2[:, 0] <= truth) & (truth <= ends_X2[:, 1])).mean()
    students = (np.abs(mean_X - truth) <= half_X).mean()
    assert 0.92 < covered < 0.97
    assert abs(covered - 0.95) < abs(students - 0.95)


def test_declared_shares_bound_the_band_of_a_curve() -> None:
    assert columns.bounds("reward") == columns.bounds("clip_fraction") == (0.0, 1.0)
    assert columns.bounds("grad_norm") is columns.bounds("routing_share") is None
    steps = curve_table({"a": [[0.5, 1.0], [0.9, 1.0], [1.0, 1.0]]})
    found = estimates.curves(steps, "reward", bounds=(0.0, 1.0))
    assert found["high"].iloc[0] < 1
    assert np.isnan(found["high"].iloc[1])


def test_difference_intervals_stay_between_minus_1_and_1() -> None:
    arms = {"low": by_seed(0.0, 0.3, 0.1), "high": by_seed(1.0, 0.6, 0.95)}
    found = comparisons.ranking(arms).set_index("arm").loc["low", "difference"]
    assert -1 < found.low < found.mean < 0
    assert comparisons.difference(arms["low"], arms["high"]).low < -1


# --- shares ------------------------------------------------------------------------------------------


def test_share_has_the_exact_interval() -> None:
    found = estimates.share(3, 10)
    expected = scipy_stats.binomtest(3, 10).proportion_ci(method="exact")
    np.testing.assert_allclose([found.low, found.high], [expected.low, expected.high])
    assert estimates.share(0, 10).low == 0.0
    np.testing.assert_allclose(estimates.share(0, 10).high, 1 - 0.025 ** (1 / 10))
    assert estimates.share(5, 5).high == 1.0
    assert np.isnan(estimates.share(1, 2).low)
    assert estimates.share(0, 0).n == 0


# --- a curve's numbers -------------------------------------------------------------------------------


def test_fall_of_a_curve_starts_at_its_highest_mean() -> None:
    curve = pd.Series([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.6, 0.6, 0.5, 0.4, 0.4])
    assert tables.NUMBERS["last"](curve) == pytest.approx(0.5)
    assert tables.NUMBERS["fall"](curve) == pytest.approx(1.0 - 0.5)
    assert tables.NUMBERS["fall"](curve[:1]) == 0.0


# --- arms against each other -------------------------------------------------------------------------


def by_seed(*values: float, first: int = 0) -> pd.Series:
    return pd.Series(values, index=range(first, first + len(values)))


def test_a_difference_is_paired_by_seed() -> None:
    a, b = by_seed(0.9, 0.5, 0.7, 0.2), by_seed(0.4, 0.5, 0.1, first=1)[::-1]
    assert vars(comparisons.difference(a, b)) == pytest.approx(vars(estimates.over_seeds([0.1, 0.2, 0.1])))
    with pytest.raises(ValueError, match="two numbers"):
        comparisons.difference(pd.Series([1.0, 2.0], index=[0, 0]), b)


def test_the_probability_of_improvement_counts_shared_seeds() -> None:
    paired = comparisons.probability_of_improvement(by_seed(1.0, 2.0, 3.0, 4.0), by_seed(0.0, 2.0, 5.0, 0.0))
    assert (paired.mean, paired.n) == (2.5 / 4, 4)
    assert comparisons.probability_of_improvement(by_seed(1.0, 3.0, 5.0), by_seed(2.0, 2.0, 3.0, first=10)).n == 0


def test_holm_matches_the_textbook_case() -> None:
    np.testing.assert_allclose(comparisons.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(comparisons.holm([0.01, np.nan, 0.9]), [0.02, np.nan, 0.9])
    assert comparisons.holm([0.6, 0.7]).tolist() == [1, 1]
    assert comparisons.holm([]).size == 0


def test_the_ranking_compares_with_the_best_and_corrects_for_all_pairs() -> None:
    levels = {"low": [0.1, 0.2, 0.15, 0.1], "high": [0.8, 0.9, 0.7, 0.85], "middle": [0.75, 0.9, 0.72, 0.8]}
    arms = {arm: by_seed(*values) for arm, values in levels.items()}
    found = comparisons.ranking(arms).set_index("arm")
    assert found.index.tolist() == ["high", "middle", "low"]
    assert np.isnan(found.loc["high", "p_corrected"])
    pairs = [("high", "middle"), ("high", "low"), ("middle", "low")]
    paired = [float(scipy_stats.ttest_rel(arms[one], arms[other]).pvalue) for one, other in pairs]
    assert found.loc[["middle", "low"], "p_corrected"].tolist() == pytest.approx(comparisons.holm(paired)[:2])
    assert found.loc["low", "difference"].high < 0


def test_unshared_seeds_use_welchs_test_from_three_on() -> None:
    a, b = by_seed(1.0, 2.0, 4.0), by_seed(2.0, 7.0, 9.0, 3.0, first=10)
    assert comparisons.p_value(a, b) == pytest.approx(scipy_stats.ttest_ind(a, b, equal_var=False).pvalue)
    assert np.isnan(comparisons.p_value(a[:2], b))
    for same in (a, a + 1e-17, a * (1 + 1e-15)):  # rounding is no difference
        assert comparisons.p_value(a, same) == 1.0
    assert comparisons.p_value(a, a + 0.1) == 0.25, "where differences do not vary, that of sign flips"
    found = [comparisons.is_decided(p, n) for p, n in ((0.049, 5), (1e-6, 4), (0.05, 10), (np.nan, 10))]
    assert found == [True, False, False, False]


def test_unpaired_arms_that_do_not_vary_decide_nothing() -> None:
    a, b = by_seed(*[1.0] * 5), by_seed(*[0.999] * 5, first=10)
    assert np.isnan(comparisons.p_value(a, b))
    found = comparisons.difference(a, b)
    assert (found.mean, np.isnan(found.low)) == (pytest.approx(0.001), True)


def test_one_shared_seed_of_five_does_not_replace_welchs_comparison() -> None:
    a, b = by_seed(1.0, 2.0, 4.0, 3.0, 2.5), by_seed(2.0, 7.0, 9.0, 3.0, 5.0, first=4)
    expected = scipy_stats.ttest_ind(a, b, equal_var=False).pvalue
    assert comparisons.p_value(a, b) == pytest.approx(expected)
    assert comparisons.difference(a, b).n == 5


@pytest.mark.parametrize(
    ("sample", "truth", "stated"),
    [
        (lambda generator: generator.normal(size=10), 0.0, 0.93),
        (lambda generator: generator.lognormal(size=10), np.exp(0.5), 0.88),
        # Each collapses with a probability of a tenth, by twelve standard deviations of the others.
        (lambda generator: generator.normal(size=10) - 12 * (generator.random(10) < 0.1), -1.2, 0.72),
    ],
)
def test_bootstrap_of_ten_seeds_has_the_documented_coverage(
    sample: Callable[[np.random.Generator], np.ndarray], truth: float, stated: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "RESAMPLES", 499)  # for time
    generator = np.random.default_rng(0)
    found = [estimates.over_seeds(sample(generator).tolist()) for _ in range(1000)]
    covered = np.mean([each.low <= truth <= each.high for each in found])
    assert covered == pytest.approx(stated, abs=0.04)


def test_estimate_drops_rounding_noise() -> None:
    """A tie with a threshold, or half way between two printed numbers, is one on every processor."""
    below, above = (estimates.Estimate(0.04955 * (1 + sign * 1e-15), 0.0, 0.3 - sign * 1e-16, 3) for sign in (-1, 1))
    assert below == above
    assert str(below) == str(above)
    assert below.high >= 0.3


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
    found = comparisons.win_rate(a, b)
    assert found.mean == pytest.approx((0 + 0.5 - 0.25) / 3)
    assert found.n == 3
    other = comparisons.win_rate(b.sample(frac=1, random_state=0), a)
    np.testing.assert_allclose([other.mean, other.low, other.high], [-found.mean, -found.high, -found.low])
    assert comparisons.win_rate(a, a).mean == 0.0


def test_repeated_prompt_counts_once_and_other_prompts_are_not_compared() -> None:
    a, b = answers([1, 0]), answers([0, 0])
    twice = pd.concat([a, a[:1].assign(score=0.0)])  # 1 and 0: still better than 0
    assert comparisons.win_rate(twice, b).mean == 0.5
    assert comparisons.win_rate(a[:1], b).n == 0
    assert comparisons.win_rate(a.assign(seed=9), b).n == 0
