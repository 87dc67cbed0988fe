"""The chart of levels that pages of scores and boards share, drawn in HTML by ``chart.html``."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from steadymoe.bench.statistics.estimates import Estimate


def chart(levels: Mapping[str, Estimate], lines: Mapping[str, float], own: str | None = None) -> dict[str, Any]:
    """Return what a page draws, with places in percent of its axis: levels as points with intervals, and lines.

    The level called ``own`` has another colour.
    """
    levels = {name: level for name, level in levels.items() if not np.isnan(level.mean)}
    ends = [end for level in levels.values() for end in (level.low, level.high, level.mean) if not np.isnan(end)]
    ticks = list(MaxNLocator(6).tick_values(min(0.0, *ends, *lines.values()), max(0.0, *ends, *lines.values())))

    def place(value: float) -> float:
        return round(float(100 * (value - ticks[0]) / (ticks[-1] - ticks[0])), 2)

    points = [
        {"name": name, "own": name == own, "text": str(level), "at": place(level.mean)}
        | ({} if np.isnan(level.low) else {"low": place(level.low), "width": place(level.high) - place(level.low)})
        for name, level in levels.items()
    ]
    return {
        "points": points,
        "lines": {name: place(value) for name, value in lines.items()},
        "ticks": {f"{tick:.3g}": place(tick) for tick in ticks},
    }
