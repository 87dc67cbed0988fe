"""Every figure stays legible from one arm to all algorithms: no text lies over another or over a panel."""

import pytest
from legibility import faults
from small_figures import NAMES, data

from steadymoe.bench.report.figures import FIGURES, style


def drawn(name: str, count: int) -> style.DataFigure:
    """Return a figure of this many algorithms, laid out."""
    figure = FIGURES[name].figure(data(name, sorted(NAMES, key=len, reverse=True)[:count]))
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_legible(name: str, count: int) -> None:
    assert faults(drawn(name, count)) == []


@pytest.mark.check  # minutes
@pytest.mark.parametrize("count", [3, len(NAMES)])
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_all_algorithms_is_legible(name: str, count: int) -> None:
    assert faults(drawn(name, count)) == []
