"""Crossings of known curves, and the number of losses whose tolerance is known."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadymoe.bench.statistics.tolerance import SHARE, Tolerance, best_value, crossings, of_curves, threshold

RATES = np.array([1e-4, 2e-4, 4e-4, 8e-4])


def test_crossing_is_interpolated_in_the_logarithm_of_the_dial() -> None:
    curves = np.array([[0.8, 0.8, 0.6, 0.2]])
    assert crossings(curves, RATES, np.array([0.7])) == pytest.approx([2e-4 * np.sqrt(2)])
    assert crossings(curves, RATES, np.array([0.6])) == pytest.approx([4e-4])  # at the threshold is not below it
    noise = np.array([0.0, 0.1, 0.2])  # a dial that begins at 0 is interpolated as it is
    assert crossings(np.array([[0.8, 0.6, 0.2]]), noise, np.array([0.5])) == pytest.approx([0.125])
    nothing, all_of_it = crossings(np.array([[0.3] * 4, [0.9] * 4]), RATES, np.array([0.5, 0.5]))
    assert np.isnan(nothing)
    assert np.isinf(all_of_it)


@pytest.mark.parametrize(
    ("curve", "crossing"),
    [([0.9, 0.1, 0.8, 0.1], np.sqrt(2)), ([0.1, 0.9, 0.1, 0.8], 2 * np.sqrt(2)), ([0.9, 0.1, 0.1, 0.8], np.sqrt(2))],
)
def test_first_crossing_beyond_the_best_value_counts(curve: list[float], crossing: float) -> None:
    rates = np.array([1.0, 2.0, 4.0, 8.0])
    assert crossings(np.array([curve]), rates, np.array([0.5])) == pytest.approx([crossing])


@pytest.mark.parametrize(("best", "end"), [(0, "lowest"), (1, ""), (3, "highest")])
def test_best_value_has_the_highest_mean_and_says_whether_it_is_an_end(best: int, end: str) -> None:
    levels = np.full((4, 3), 0.5) + 0.3 * (np.arange(4) == best)[:, None]
    levels[2] = [0.0, 0.0, 1.0]  # the highest run
    shuffled = np.random.default_rng(0).permutation(12)
    dial, numbers = pd.Series(np.repeat(RATES, 3)[shuffled]), pd.Series(levels.ravel()[shuffled])
    assert best_value(dial, numbers) == (RATES[best], end)


def of(levels: np.ndarray, dial: np.ndarray = RATES) -> pd.DataFrame:
    return pd.DataFrame(levels, index=dial)


def test_threshold_is_a_share_of_the_references_gain() -> None:
    start, means = np.array([0.4]), np.array([[0.5, 0.8, 0.2, 0.1]])
    assert threshold(start, means) == pytest.approx([0.4 + SHARE * 0.4])


def shifted(octaves: float, seeds: int, noise: float = 0.02) -> np.ndarray:
    """A level that holds at 0.8 and falls by 0.3 an octave from 2e-4 · 2^octaves on, (D, S)."""
    generator = np.random.default_rng(int(100 * octaves))
    curve = 0.8 - 0.3 * np.clip(np.log2(RATES / 2e-4) - octaves, 0, None)
    return curve[:, None] + noise * generator.standard_normal((len(RATES), seeds))


def number(ours: np.ndarray, reference: np.ndarray, start: float = 0.4) -> Tolerance:
    made = of_curves(of(ours), of(reference), np.full(ours.shape[1], start))
    assert made is not None
    return made


def test_loss_that_tolerates_twice_the_rate_has_ratio_2() -> None:
    made = number(shifted(1.0, 8), shifted(0.0, 8))
    assert made.ratio == pytest.approx(2, rel=0.15)
    assert 1.5 < made.low < 2 < made.high < 2.7
    assert made.low * made.high == pytest.approx(made.ratio**2)  # symmetric in the logarithm
    assert made.n == 8
    assert made.p < 0.001
    assert str(number(shifted(1.0, 8), shifted(0.0, 8))) == str(made)


def test_curves_may_have_their_own_grids() -> None:
    """A loss that ran at fewer rates has the same number, and one that ran at more does not move the threshold."""
    ours, reference = shifted(1.0, 8), shifted(0.0, 8)
    fewer = of_curves(of(ours[1:], RATES[1:]), of(reference), np.full(8, 0.4))
    assert fewer is not None
    assert fewer.ratio == pytest.approx(number(ours, reference).ratio)


def test_reference_has_ratio_1_and_few_seeds_have_no_interval() -> None:
    ours = shifted(0.0, 3)
    made = number(ours, ours)
    assert (made.ratio, str(made)) == (1, "1.00")
    assert np.isnan(made.low)
    assert number(shifted(0.0, 6), shifted(0.0, 6)).p == 1


def test_loss_that_never_falls_below_the_threshold_has_a_lower_bound() -> None:
    made = number(np.full((4, 6), 0.85), shifted(0.0, 6))
    assert np.isinf(made.crossing)
    assert made.ratio == pytest.approx(8e-4 / number(shifted(0.0, 6), shifted(0.0, 6)).crossing)
    assert str(made) == f"> {made.ratio:.2f}"
    assert np.isinf(made.high)
    assert made.p < 0.01
    assert str(number(np.full((4, 6), 0.41), shifted(0.0, 6))) == "–", "one that hardly moves scores nothing"


def test_ratio_is_unknown_if_the_reference_never_falls_below_its_threshold() -> None:
    above = np.full((4, 6), 0.85)
    for each in (shifted(0.0, 6), above):
        made = number(each, above)
        assert str(made) == "reference > grid"
        assert np.isnan([made.ratio, made.low, made.p]).all()


def test_draws_without_a_reference_crossing_widen_both_ends() -> None:
    """The reference stays at its threshold in some draws of seeds, where its last value is there."""
    reference = np.full((4, 6), 0.8)
    reference[-1] = [0.5, 0.5, 0.5, 0.69, 0.69, 0.69]
    made = number(shifted(0.0, 6), reference)
    assert made.low == 0
    assert np.isinf(made.high)
    assert made.p > 0.05


# A dial that begins at 0: 0, 1, 2. The threshold is 0.5.
FROM_0, THEIRS = np.array([0.0, 1.0, 2.0]), np.repeat([[0.75], [0.75], [0.25]], 5, axis=1)


def from_0(levels_DS: list[list[float]]) -> Tolerance:
    made = of_curves(of(np.array(levels_DS), FROM_0), of(THEIRS, FROM_0), np.full(5, 0.25))
    assert made is not None
    return made


def test_draws_that_reach_the_threshold_only_at_0_are_unknown() -> None:
    levels = [[0.5, 0.5, 0.5, 0.5, 1.0], [0.375, 0.375, 0.375, 0.375, 1.0], [0.0] * 5]
    made = from_0(levels)
    assert made.ratio == pytest.approx(2 / 3)
    assert made.p > 0.5, "a third of the draws leave out the last seed"
    assert made.low == 0
    nothing = from_0([[0.5] * 5, [0.375] * 5, [0.0] * 5])
    assert (nothing.crossing, str(nothing)) == (0, "–")
    assert np.isnan([nothing.ratio, nothing.p]).all()


@pytest.mark.filterwarnings("error")
@given(
    levels=st.lists(
        st.lists(st.sampled_from(np.linspace(0, 1, 9).tolist()), min_size=5, max_size=5), min_size=3, max_size=3
    ),
    place=st.tuples(st.integers(0, 2), st.integers(0, 4)),
    step=st.sampled_from([-1e-6, 1e-6]),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_step_of_a_millionth_decides_nothing(levels: list[list[float]], place: tuple[int, int], step: float) -> None:
    moved = [
        [each + step * ((dial, seed) == place) for seed, each in enumerate(row)] for dial, row in enumerate(levels)
    ]
    before, after = from_0(levels), from_0(moved)
    assert not (before.p > 0.5 and after.p < 0.05)
    assert not (after.p > 0.5 and before.p < 0.05)


@pytest.mark.parametrize("seeds", [5, 8])
def test_intervals_have_nominal_coverage(seeds: int) -> None:
    """Of 200 made-up experiments some 95 % have the number without noise in their interval, and few reject it."""
    generator = np.random.default_rng(7)

    def noisy(curve: np.ndarray) -> np.ndarray:
        return curve + 0.03 * generator.standard_normal((4, seeds))

    ours, reference = (shifted(octaves, seeds, noise=0.0) for octaves in (0.5, 0.0))
    truth = number(ours, reference).ratio
    assert truth == pytest.approx(2**0.5, rel=0.01)
    found = [number(noisy(ours), noisy(reference)) for _ in range(200)]
    covered = sum(each.low <= truth <= each.high for each in found)
    assert covered >= 180
    null = [number(noisy(reference), noisy(reference)).p for _ in range(200)]
    assert np.mean(np.array(null) < 0.05) <= 0.1


def test_dial_without_a_crossing_has_no_tolerance() -> None:
    assert of_curves(of(np.ones((1, 5)), RATES[:1]), of(np.ones((4, 5))), np.zeros(5)) is None
    assert of_curves(of(np.ones((4, 5))), of(np.full((4, 5), 0.3)), np.full(5, 0.4)) is None
