"""Crossings of known curves, and the number of losses whose tolerance is known."""

import numpy as np
import pytest

from steadymoe.bench.statistics.bearable import SHARE, bearable, crossings, line

RATES = np.array([1e-4, 2e-4, 4e-4, 8e-4])


def test_a_crossing_is_interpolated_in_the_logarithm_of_the_dial() -> None:
    curves = np.array([[0.8, 0.8, 0.6, 0.2]])
    assert crossings(curves, RATES, np.array([0.7])) == pytest.approx([2e-4 * np.sqrt(2)])
    assert crossings(curves, RATES, np.array([0.6])) == pytest.approx([4e-4])  # on the line is not below it


def test_a_dial_that_begins_at_0_is_interpolated_as_it_is() -> None:
    noise = np.array([0.0, 0.1, 0.2])
    assert crossings(np.array([[0.8, 0.6, 0.2]]), noise, np.array([0.5])) == pytest.approx([0.125])


def test_a_curve_below_the_line_bears_nothing_and_one_above_it_more_than_the_grid() -> None:
    curves = np.array([[0.3, 0.3, 0.3, 0.3], [0.9, 0.9, 0.9, 0.9]])
    nothing, all_of_it = crossings(curves, RATES, np.array([0.5, 0.5]))
    assert np.isnan(nothing)
    assert np.isinf(all_of_it)


def test_the_last_crossing_counts() -> None:
    rates = np.array([1.0, 2.0, 4.0, 8.0])
    assert crossings(np.array([[0.9, 0.1, 0.9, 0.1]]), rates, np.array([0.5])) == pytest.approx([4 * np.sqrt(2)])


def test_the_line_is_a_share_of_the_references_best_gain() -> None:
    assert line(np.array([[0.5, 0.8, 0.2]]), np.array([0.4])) == pytest.approx([0.4 + SHARE * 0.4])


def shifted(octaves: float, seeds: int, noise: float = 0.02) -> np.ndarray:
    """A level that holds at 0.8 and falls by 0.3 an octave from 2e-4 · 2^octaves on, (D, S)."""
    generator = np.random.default_rng(int(100 * octaves))
    curve = 0.8 - 0.3 * np.clip(np.log2(RATES / 2e-4) - octaves, 0, None)
    return curve[:, None] + noise * generator.standard_normal((len(RATES), seeds))


def test_a_loss_that_bears_twice_the_rate_has_the_number_2() -> None:
    start = np.full(8, 0.4)
    made = bearable(shifted(1.0, 8), shifted(0.0, 8), start, RATES, np.random.default_rng(0))
    assert made.ratio == pytest.approx(2, rel=0.15)
    assert 1.5 < made.low < 2 < made.high < 2.7
    assert made.n == 8
    again = bearable(shifted(1.0, 8), shifted(0.0, 8), start, RATES, np.random.default_rng(0))
    assert again == made


def test_the_reference_bears_once_what_it_bears_and_few_seeds_have_no_interval() -> None:
    ours = shifted(0.0, 3)
    made = bearable(ours, ours, np.full(3, 0.4), RATES, np.random.default_rng(0))
    assert (made.ratio, str(made)) == (1, "1.00")
    assert np.isnan(made.low)


def test_a_loss_that_hardly_moves_scores_nothing() -> None:
    still = np.full((4, 6), 0.41)
    made = bearable(still, shifted(0.0, 6), np.full(6, 0.4), RATES, np.random.default_rng(0))
    assert str(made) == "–"


def test_a_loss_that_never_leaves_the_line_says_so() -> None:
    above = np.full((4, 6), 0.85)
    made = bearable(above, shifted(0.0, 6), np.full(6, 0.4), RATES, np.random.default_rng(0))
    assert str(made) == "> grid"


def test_where_the_reference_never_leaves_its_line_no_multiple_is_known() -> None:
    start, above = np.full(6, 0.4), np.full((4, 6), 0.85)
    falls, stays = (bearable(each, above, start, RATES, np.random.default_rng(0)) for each in (shifted(0.0, 6), above))
    assert (str(falls), str(stays)) == ("reference > grid", "> grid")
    assert np.isnan(falls.ratio)
    assert (falls.low, falls.high) == (0, np.inf)


def test_a_draw_without_a_crossing_of_the_reference_widens_the_interval_on_both_sides() -> None:
    """The reference stays on its line in some draws of seeds, where its last value is at the line."""
    reference = np.full((4, 6), 0.8)
    reference[-1] = [0.65, 0.65, 0.65, 0.75, 0.75, 0.75]
    made = bearable(shifted(0.0, 6), reference, np.full(6, 0.4), RATES, np.random.default_rng(0))
    assert made.low == 0
    assert np.isinf(made.high)


def test_intervals_cover_the_number() -> None:
    """Of 60 made-up experiments of eight seeds some 95 % have the number without noise in their interval."""
    generator, start = np.random.default_rng(7), np.full(8, 0.4)
    exact = [shifted(octaves, 8, noise=0.0) for octaves in (0.5, 0.0)]
    truth = bearable(exact[0], exact[1], start, RATES, generator).ratio
    found = [
        bearable(*(each + 0.03 * generator.standard_normal((4, 8)) for each in exact), start, RATES, generator)
        for _ in range(60)
    ]
    assert truth == pytest.approx(2 ** (1 / 1.5 - 1 / 3))  # on this grid the curve of the better loss is interpolated
    assert sum(each.low <= truth <= each.high for each in found) >= 48  # eight seeds: percentiles are narrow


def test_what_has_no_crossing_is_refused() -> None:
    with pytest.raises(ValueError, match="a dial with one value"):
        bearable(np.ones((1, 5)), np.ones((1, 5)), np.zeros(5), np.array([1e-4]), np.random.default_rng(0))
    with pytest.raises(ValueError, match="the reference gains nothing"):
        bearable(np.ones((4, 5)), np.full((4, 5), 0.3), np.full(5, 0.4), RATES, np.random.default_rng(0))
