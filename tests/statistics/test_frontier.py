"""The stability frontier on grids whose area is known."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadymoe.bench.statistics.frontier import frontier

RATES = [1e-4, 1e-3, 1e-2]
UPDATES = [1, 2, 4, 8, 16]


def grid(stable_SXY: np.ndarray, xs: list[float] = RATES, ys: list[int] = UPDATES) -> pd.DataFrame:
    rows = [
        {"seed": seed, "rate": x, "updates": y, "stable": bool(stable_SXY[seed, i, j])}
        for seed in range(len(stable_SXY))
        for i, x in enumerate(xs)
        for j, y in enumerate(ys)
    ]
    return pd.DataFrame(rows)


def staircase(*heights: int) -> np.ndarray:
    """Stable at the lowest so many y of each x."""
    return np.arange(len(UPDATES)) < np.array(heights)[:, None]


def test_all_stable_is_one_and_none_is_zero() -> None:
    everything = frontier(grid(np.ones((5, 3, 5), bool)), "rate", "updates")
    assert (everything.area.mean, everything.area.n) == (1.0, 5)
    assert everything.line["y"].tolist() == pytest.approx([16, 16, 16])
    nothing = frontier(grid(np.zeros((5, 3, 5), bool)), "rate", "updates")
    assert (nothing.area.mean, nothing.area.high) == (0.0, 0.0)
    assert nothing.line["y"].tolist() == pytest.approx([1, 1, 1])


def test_a_staircase_has_the_area_of_its_trapezoids() -> None:
    found = frontier(grid(np.stack([staircase(5, 3, 1)] * 4)), "rate", "updates")
    # Between 4 and 8, and 1 and 2, the share falls from 1 to 0: one half is in the middle on the logarithmic axis.
    np.testing.assert_allclose(found.line["y"], [16, 4 * np.sqrt(2), np.sqrt(2)])
    np.testing.assert_allclose(found.area.mean, ((1 + 2.5 / 4) / 2 + (2.5 / 4 + 0.5 / 4) / 2) / 2)
    assert found.area.low == found.area.high == found.area.mean  # all seeds alike


def test_the_line_is_where_half_of_the_seeds_are_stable() -> None:
    three_of_four = np.stack([staircase(4, 4, 4)] * 3 + [staircase(3, 3, 3)])
    found = frontier(grid(three_of_four), "rate", "updates")
    # Shares 1, 1, 1, 3/4, 0: from 3/4 at 8 to 0 at 16 one half is a third of the way.
    np.testing.assert_allclose(found.line["y"], 8 * 2 ** (1 / 3))
    cell = found.shares[(found.shares["x"] == 1e-3) & (found.shares["y"] == 8)]
    assert cell[["stable", "n"]].to_numpy().tolist() == [[0.75, 4]]


def test_stability_that_returns_further_up_does_not_count() -> None:
    island = np.stack([staircase(2, 2, 2)] * 3)
    island[:, :, 4] = True
    found = frontier(grid(island), "rate", "updates")
    np.testing.assert_allclose(found.line["y"], 2 * np.sqrt(2))


def test_one_x_alone_has_a_height_and_axes_need_no_even_spacing() -> None:
    one = grid(np.stack([staircase(3)] * 3), xs=[1e-3])
    assert frontier(one, "rate", "updates").area.mean == pytest.approx(2.5 / 4)
    uneven = grid(np.stack([staircase(5, 5, 1)] * 3), xs=[1e-4, 1e-2, 1e-1])
    found = frontier(uneven, "rate", "updates").area.mean
    assert found == pytest.approx((2 * 1 + 1 * (1 + 0.5 / 4) / 2) / 3)


def test_a_grid_with_a_hole_or_an_axis_at_zero_is_refused_and_a_missing_seed_is_not() -> None:
    runs = grid(np.stack([staircase(5, 3, 1)] * 3))
    with pytest.raises(ValueError, match=r"rate=0\.001, updates=8"):
        frontier(runs[~((runs["rate"] == 1e-3) & (runs["updates"] == 8))], "rate", "updates")
    with pytest.raises(ValueError, match="above 0"):
        frontier(runs.assign(rate=0.0), "rate", "updates")
    with pytest.raises(ValueError, match="two of them"):
        frontier(runs[runs["updates"] == 1], "rate", "updates")
    with pytest.raises(ValueError, match="third axis"):
        frontier(pd.concat([runs, runs[:1]]), "rate", "updates")
    found = frontier(runs[1:], "rate", "updates")
    assert found.shares["n"].tolist() == [2, *[3] * 14]
    assert found.area.mean == frontier(runs, "rate", "updates").area.mean


def test_two_seeds_have_no_interval() -> None:
    found = frontier(grid(np.stack([staircase(5, 3, 1), staircase(4, 2, 1)])), "rate", "updates")
    assert np.isnan(found.area.low)


@given(st.integers(0, 2**32 - 1), st.integers(3, 6))
@settings(max_examples=40, deadline=None)
def test_a_run_more_that_is_stable_never_makes_the_area_smaller(seed: int, n: int) -> None:
    generator = np.random.default_rng(seed)
    stable_SXY = generator.random((n, 3, 5)) < 0.6
    before = frontier(grid(stable_SXY), "rate", "updates").area
    assert 0 <= before.mean <= 1
    assert before.low <= before.mean <= before.high
    stable_SXY[generator.integers(n), generator.integers(3), generator.integers(5)] = True
    assert frontier(grid(stable_SXY), "rate", "updates").area.mean >= before.mean - 1e-12


@pytest.mark.parametrize(
    ("n", "trials"),
    [(5, 100), pytest.param(5, 300, marks=pytest.mark.check), pytest.param(10, 120, marks=pytest.mark.check)],
)
def test_the_areas_interval_covers_nearly_as_often_as_it_says(n: int, trials: int) -> None:
    """Seeds fail at a step of y that scatters, together over x: what a shared cold start does."""
    generator = np.random.default_rng(0)

    def drawn(count: int) -> np.ndarray:
        limit_SX = (
            np.array([3.6, 2.6, 1.6]) + generator.normal(size=(count, 1)) + 0.5 * generator.normal(size=(count, 3))
        )
        return np.arange(5) < limit_SX[..., None]

    truth = frontier(grid(drawn(3000)), "rate", "updates", resamples=9).area.mean
    held = []
    for _ in range(trials):
        found = frontier(grid(drawn(n)), "rate", "updates", resamples=299).area
        held.append(found.low <= truth <= found.high)
    assert 0.88 < np.mean(held) <= 1.0
