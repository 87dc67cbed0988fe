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
    ends = [end for each in levels.values() for end in (each.low, each.high, each.mean) if not np.isnan(end)]
    ticks = list(MaxNLocator(6).tick_values(min(0.0, *ends, *lines.values()), max(0.0, *ends, *lines.values())))

    def place(value: float) -> float:
        return round(float(100 * (value - ticks[0]) / (ticks[-1] - ticks[0])), 2)

    points = [
        {"name": name, "own": name == own, "text": str(each), "at": place(each.mean)}
        | ({} if np.isnan(each.low) else {"low": place(each.low), "width": place(each.high) - place(each.low)})
        for name, each in levels.items()
    ]
    return {
        "points": points,
        "lines": {name: place(value) for name, value in lines.items()},
        "ticks": {f"{tick:.3g}": place(tick) for tick in ticks},
    }
