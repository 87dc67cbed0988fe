"""Seeds are the only replicates: estimates over seeds, their intervals, and n."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats
from scipy.special import expit
from scipy.stats import beta, norm  # type: ignore[attr-defined]  # made at run time
from scipy.stats import t as student  # type: ignore[attr-defined]  # made at run time

# Fewer seeds than this get no interval.
LEAST_FOR_INTERVAL = 3
# Below this many seeds there is no bootstrap: of five a nominal 95 % percentile interval covered 79 %.
LEAST_FOR_BOOTSTRAP = 10
RESAMPLES = 9999
# What a caption says of the interval of a mean.
INTERVAL = (
    "a 95 % interval (Student's t, on the logit scale for what lies in [0, 1] and for differences of it; from ten "
    "seeds a BCa bootstrap; none below three seeds, nor where every seed is at an end of its range)"
)
# The ends of what a number can be.
Bounds = tuple[float, float]
DIFFERENCE: Bounds = (-1.0, 1.0)  # of two numbers in [0, 1]
POSITIVE: Bounds = (0.0, np.inf)
# A mean of scores may be this far beyond an end, by rounding.
_ROUNDING = 1e-9
# Below this a variance counts as none: the square of fp32's rounding.
LEAST_LOG = 1e-14


@dataclass(frozen=True)
class Estimate:
    """A statistic over seeds, usually their mean, with its 95 % interval, which is nan below three seeds."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if self.n == 0:
            return "–"
        digits = f"{self.mean:.3g}"
        return digits if np.isnan(self.low) else f"{digits} [{self.low:.3g}, {self.high:.3g}]"


def mean_over_seeds(
    values: Sequence[float], log: bool = False, level: float = 0.95, bounds: Bounds | None = None
) -> Estimate:
    """Mean and t interval of one number per seed (Student 1908), at any n; nan mean for no seeds at all.

    For curves, which would take minutes to bootstrap step by step. With ``log`` and ``bounds`` as in ``over_seeds``.
    """
    numbers = np.asarray(values, dtype=float)
    n = len(numbers)
    if log:
        of_logs = mean_over_seeds(np.log(numbers.clip(min=LEAST_LOG)).tolist(), level=level)
        return _exponential(of_logs)
    bounds = _holding(numbers, bounds)
    mean = float(numbers.mean()) if n else np.nan
    half = np.nan
    if n >= LEAST_FOR_INTERVAL and not _at_ends(numbers, bounds):
        half = float(student.ppf((1 + level) / 2, n - 1) * numbers.std(ddof=1) / np.sqrt(n))
    return Estimate(mean, *within(mean, half, bounds), n)


def within(mean: float, half: float, bounds: Bounds | None = None) -> tuple[float, float]:
    """mean ± half; with ``bounds`` (a, b) the same on a scale that has no ends, brought back.

    The scale is log((x − a)/(b − x)), for a and b of 0 and 1 the logit, for −1 and 1 twice the inverse hyperbolic
    tangent; without an upper end log(x − a). ``half`` is multiplied by its slope at the mean (the delta method): the
    interval is about the mean of the numbers themselves, seeds at 0 or 1 included, and not of their logits (Korn and
    Graubard 1998, of shares in surveys). nan where the mean is at an end.
    """
    if bounds is None or half == 0 or np.isnan(half):
        return mean - half, mean + half
    a, b = bounds
    if not a < mean < b:
        return np.nan, np.nan
    if np.isinf(b):
        move = half / (mean - a)
        return float(a + (mean - a) * np.exp(-move)), float(a + (mean - a) * np.exp(move))
    place, move = np.log((mean - a) / (b - mean)), half * (1 / (mean - a) + 1 / (b - mean))
    return float(a + (b - a) * expit(place - move)), float(a + (b - a) * expit(place + move))


def _holding(numbers: np.ndarray, bounds: Bounds | None) -> Bounds | None:
    """The bounds, if the numbers keep them: a task of a user's own may have scores beyond 0 and 1."""
    if bounds is None or ((numbers < bounds[0] - _ROUNDING) | (numbers > bounds[1] + _ROUNDING)).any():
        return None
    return bounds


def _at_ends(numbers: np.ndarray, bounds: Bounds | None) -> bool:
    """Whether every number is at an end of its range: their spread says nothing then."""
    return bounds is not None and bool(np.isin(numbers, bounds).all())


def _exponential(of_logs: Estimate) -> Estimate:
    mean, low, high = (float(np.exp(part)) for part in (of_logs.mean, of_logs.low, of_logs.high))
    return Estimate(mean, low, high, of_logs.n)


def iqm(values: Any, axis: int = -1) -> Any:
    """Interquartile mean: without the lowest and the highest quarter, each rounded down (2108.13264, section 4.3)."""
    return scipy_stats.trim_mean(values, 0.25, axis=axis)


def over_seeds(
    values: Sequence[float],
    statistic: Callable[..., Any] = np.mean,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    log: bool = False,
    bounds: Bounds | None = None,
) -> Estimate:
    """Any statistic of one number per seed with the interval that its n allows; nan for no seeds at all.

    ``statistic`` takes an array and an ``axis``, as ``np.mean``, ``np.median`` and ``iqm`` do. With ``log`` it is
    taken of logarithms and brought back: the geometric mean with a positive interval, for variances. Values below
    ``LEAST_LOG`` then count as that.

    From ten seeds a BCa bootstrap (Efron 1987; ``bootstrap_interval``), the same bytes for the same numbers in any
    order; where BCa is undefined, because leaving one seed out changes nothing, the percentile one. From three to
    nine seeds Student's interval for a mean and Tukey and McLaughlin's for ``iqm``: t with h − 1 degrees of freedom
    and standard error √(SS_w / (h (h − 1))), where h values are left after trimming and SS_w is the sum of squares
    about their mean of the winsorised values (Tukey and McLaughlin 1963; Yuen 1974). Other statistics have none
    below ten, unless all seeds are alike.

    ``bounds`` are the ends of what a number can be, (0, 1) of a reward: the t intervals then stay ``within`` them, as
    the bootstrap does by itself, and there is none where every seed is at an end. Bounds that the numbers do not keep
    count as none.
    """
    numbers = np.sort(np.asarray(values, dtype=float))
    if log:
        return _exponential(over_seeds(np.log(numbers.clip(min=LEAST_LOG)).tolist(), statistic, level, resamples))
    n, bounds = len(numbers), _holding(numbers, bounds)
    point = float(statistic(numbers)) if n else np.nan
    if _at_ends(numbers, bounds):
        return Estimate(point, np.nan, np.nan, n)
    if n >= LEAST_FOR_BOOTSTRAP and np.ptp(numbers) > 0:
        return Estimate(point, *bootstrap_interval(numbers, statistic, level, resamples), n)
    half = np.nan
    if n >= LEAST_FOR_INTERVAL and np.ptp(numbers) == 0:
        half = 0.0
    elif n >= LEAST_FOR_INTERVAL and statistic in (np.mean, iqm):
        half = _half_width(numbers, n // 4 if statistic is iqm else 0, level)
    return Estimate(point, *within(point, half, bounds), n)


def _half_width(ordered: np.ndarray, trimmed: int, level: float) -> float:
    """Of Yuen's interval for a mean without ``trimmed`` values at either end; with 0 it is Student's."""
    left = len(ordered) - 2 * trimmed
    winsorised = ordered.clip(ordered[trimmed], ordered[-trimmed - 1])
    error = np.sqrt(np.square(winsorised - winsorised.mean()).sum() / (left * (left - 1)))
    return float(student.ppf((1 + level) / 2, left - 1) * error)


def bootstrap_interval(
    numbers: np.ndarray, statistic: Callable[..., Any], level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """BCa interval of ``statistic(numbers, axis)``, always from the same draws; percentile where BCa is undefined.

    Of ten normal numbers a nominal 95 % interval holds the mean 87 % of the time: a bootstrap takes the variance
    for n − 1 of n parts of what it is, and for known. Its level is raised to that of ±√(n/(n − 1)) t_{n−1} on a normal
    distribution (Hesterberg 2015, "expanded percentile interval").
    """
    n = len(numbers)
    expanded = 2 * norm.cdf(np.sqrt(n / (n - 1)) * student.ppf((1 + level) / 2, n - 1)) - 1

    def interval(method: Literal["BCa", "percentile"]) -> tuple[float, float]:
        generator = np.random.default_rng(0)
        found = scipy_stats.bootstrap(
            (numbers,), statistic, n_resamples=resamples, confidence_level=expanded, method=method, rng=generator
        ).confidence_interval
        return float(found.low), float(found.high)

    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", scipy_stats.DegenerateDataWarning)
        low, high = interval("BCa")
    return (low, high) if np.isfinite([low, high]).all() else interval("percentile")


def share(successes: float, n: int, level: float = 0.95) -> Estimate:
    """A share of n runs with Clopper and Pearson's exact interval (1934); half a success for a tie is allowed."""
    if n == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    low, high = _clopper(successes, n, level) if n >= LEAST_FOR_INTERVAL else (np.nan, np.nan)
    return Estimate(successes / n, low, high, n)


def _clopper(successes: float, n: float, level: float) -> tuple[float, float]:
    tail = (1 - level) / 2
    low = beta.ppf(tail, successes, n - successes + 1) if successes > 0 else 0.0
    high = beta.ppf(1 - tail, successes + 1, n - successes) if successes < n else 1.0
    return float(low), float(high)


def clustered_share(hits: Sequence[float], sizes: Sequence[int], level: float = 0.95) -> Estimate:
    """A share of runs that come in clusters, seeds, whose runs depend on each other; of each cluster hits and size.

    Clopper and Pearson's interval for the number of independent runs that would have the same variance (Korn and
    Graubard 1998): p(1 − p) over the variance of p between clusters, times the squared ratio of the t quantiles for so
    many runs and so many clusters; at most all runs. Where p is 0 or 1 it is the number of clusters. ``n`` is that of
    the runs; no interval below three clusters.
    """
    hits_C, sizes_C = np.asarray(hits, dtype=float), np.asarray(sizes, dtype=float)
    clusters, n = len(sizes_C), int(sizes_C.sum())
    if n == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    found = float(hits_C.sum() / n)
    if clusters < LEAST_FOR_INTERVAL:
        return Estimate(found, np.nan, np.nan, n)
    alike = float(clusters)
    residuals = hits_C - found * sizes_C
    variance = clusters / (clusters - 1) * (residuals @ residuals) / n**2
    if variance > 0:
        tail = (1 + level) / 2
        wider = (student.ppf(tail, n - 1) / student.ppf(tail, clusters - 1)) ** 2
        alike = min(float(n), found * (1 - found) / variance * wider)
    return Estimate(found, *_clopper(found * alike, alike, level), n)


def curves(
    steps: pd.DataFrame, metric: str, window: int = 1, log: bool = False, bounds: Bounds | None = None
) -> pd.DataFrame:
    """Mean over seeds of one metric at every step of every arm: arm, step, mean, low, high, n.

    ``steps`` is ``collect.steps`` with a column ``arm``. Each seed's curve is first averaged over the last
    ``window`` steps. With ``log`` both averages are geometric. ``bounds`` are the ends
    of what the metric can be, as in ``over_seeds``. An arm's n falls where seeds ended early.
    """
    chosen = steps.loc[steps["metric"] == metric, ["arm", "seed", "step", "value"]].sort_values("step")
    if log:
        chosen = chosen.assign(value=np.log(chosen["value"].clip(lower=LEAST_LOG)))
    smooth = chosen.groupby(["arm", "seed"])["value"].rolling(window, min_periods=1).mean()
    smooth = smooth.reset_index(level=["arm", "seed"], drop=True)
    chosen = chosen.assign(value=np.exp(smooth) if log else smooth)
    rows = [
        {"arm": arm, "step": step, **vars(mean_over_seeds(group["value"].tolist(), log, bounds=bounds))}
        for (arm, step), group in chosen.groupby(["arm", "step"], sort=True)
    ]
    return pd.DataFrame(rows, columns=["arm", "step", "mean", "low", "high", "n"])
