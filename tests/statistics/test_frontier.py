"""The stability frontier on grids whose line is known."""

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


def test_line_is_at_the_top_if_all_are_stable_and_at_the_bottom_if_none() -> None:
    everything = frontier(grid(np.ones((5, 3, 5), bool)), "rate", "updates")
    assert everything.line["y"].tolist() == pytest.approx([16, 16, 16])
    nothing = frontier(grid(np.zeros((5, 3, 5), bool)), "rate", "updates")
    assert nothing.line["y"].tolist() == pytest.approx([1, 1, 1])


def test_the_line_follows_a_staircase() -> None:
    found = frontier(grid(np.stack([staircase(5, 3, 1)] * 4)), "rate", "updates")
    # Between 4 and 8, and 1 and 2, the share falls from 1 to 0: one half is in the middle on the logarithmic axis.
    np.testing.assert_allclose(found.line["y"], [16, 4 * np.sqrt(2), np.sqrt(2)])


def test_the_line_is_where_half_of_the_seeds_are_stable() -> None:
    three_of_four = np.stack([staircase(4, 4, 4)] * 3 + [staircase(3, 3, 3)])
    found = frontier(grid(three_of_four), "rate", "updates")
    # Shares 1, 1, 1, 3/4, 0: from 3/4 at 8 to 0 at 16 one half is a third of the way.
    np.testing.assert_allclose(found.line["y"], 8 * 2 ** (1 / 3))
    cell = found.shares[(found.shares["x"] == 1e-3) & (found.shares["y"] == 8)]
    assert cell[["stable", "n"]].to_numpy().tolist() == [[0.75, 4]]


def test_stable_cells_above_an_unstable_one_are_ignored() -> None:
    island = np.stack([staircase(2, 2, 2)] * 3)
    island[:, :, 4] = True
    found = frontier(grid(island), "rate", "updates")
    np.testing.assert_allclose(found.line["y"], 2 * np.sqrt(2))


def test_grid_with_a_hole_or_a_zero_is_refused_but_not_a_missing_seed() -> None:
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
    pd.testing.assert_frame_equal(found.line, frontier(runs, "rate", "updates").line)


@given(st.integers(0, 2**32 - 1), st.integers(3, 6))
@settings(max_examples=40, deadline=None)
def test_additional_stable_run_never_lowers_the_line(seed: int, n: int) -> None:
    generator = np.random.default_rng(seed)
    stable_SXY = generator.random((n, 3, 5)) < 0.6
    before = frontier(grid(stable_SXY), "rate", "updates").line["y"]
    assert before.between(1 - 1e-12, 16 + 1e-12).all()
    stable_SXY[generator.integers(n), generator.integers(3), generator.integers(5)] = True
    assert (frontier(grid(stable_SXY), "rate", "updates").line["y"] >= before - 1e-12).all()
