"""Seeds are the only replicates: estimates over seeds, their intervals, and n."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import t as student  # type: ignore[attr-defined]  # made at run time

# Fewer seeds than this get no interval.
LEAST_FOR_INTERVAL = 3
# Below this a variance counts as none: the square of fp32's rounding.
LEAST_LOG = 1e-14


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval; the interval is nan below three seeds."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if self.n == 0:
            return "–"
        digits = f"{self.mean:.3g}"
        return digits if np.isnan(self.low) else f"{digits} [{self.low:.3g}, {self.high:.3g}]"


def mean_over_seeds(values: Sequence[float], log: bool = False, level: float = 0.95) -> Estimate:
    """Mean and t interval of one number per seed (Student 1908); nan mean for no seeds at all.

    With ``log`` both are taken of logarithms and brought back: the geometric mean with a positive interval,
    for variances. Values below ``LEAST_LOG`` then count as that.
    """
    numbers = np.asarray(values, dtype=float)
    n = len(numbers)
    if log:
        numbers = np.log(numbers.clip(min=LEAST_LOG))
    mean = numbers.mean() if n else np.nan
    half = np.nan
    if n >= LEAST_FOR_INTERVAL:
        half = student(n - 1).ppf((1 + level) / 2) * numbers.std(ddof=1) / np.sqrt(n)
    mean, low, high = (float(np.exp(part) if log else part) for part in (mean, mean - half, mean + half))
    return Estimate(mean, low, high, n)


def curves(steps: pd.DataFrame, metric: str, window: int = 1, log: bool = False) -> pd.DataFrame:
    """Mean over seeds of one metric at every step of every arm: arm, step, mean, low, high, n.

    ``steps`` is ``collect.steps`` with a column ``arm``. Each seed's curve is first averaged over the last
    ``window`` steps. With ``log`` both averages are geometric. An arm's n falls where seeds ended early.
    """
    chosen = steps.loc[steps["metric"] == metric, ["arm", "seed", "step", "value"]].sort_values("step")
    if log:
        chosen = chosen.assign(value=np.log(chosen["value"].clip(lower=LEAST_LOG)))
    smooth = chosen.groupby(["arm", "seed"])["value"].rolling(window, min_periods=1).mean()
    smooth = smooth.reset_index(level=["arm", "seed"], drop=True)
    chosen = chosen.assign(value=np.exp(smooth) if log else smooth)
    rows = [
        {"arm": arm, "step": step, **vars(mean_over_seeds(group["value"].tolist(), log))}
        for (arm, step), group in chosen.groupby(["arm", "step"], sort=True)
    ]
    return pd.DataFrame(rows, columns=["arm", "step", "mean", "low", "high", "n"])
