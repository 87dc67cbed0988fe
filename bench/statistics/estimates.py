"""Estimates over seeds, with intervals and n. Seeds are the only replicates."""

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats
from scipy.special import expit
from scipy.stats import beta, norm  # type: ignore[attr-defined]  # made at run time
from scipy.stats import t as student  # type: ignore[attr-defined]  # made at run time

# Of every interval.
LEVEL = 0.95
# Fewer seeds than this get no interval.
MIN_FOR_INTERVAL = 3
# Below this many seeds there is no bootstrap: with five seeds a nominal 95 % percentile interval covered 79 %.
MIN_FOR_BOOTSTRAP = 10
RESAMPLES = 9999
# The words of a caption for the interval of a mean.
INTERVAL = (
    "a nominal 95 % interval (Student's t, on the logit scale for numbers in [0, 1] and for their differences; a BCa "
    "bootstrap from ten seeds on; no interval below three seeds, or if all are equal or at an end of their range)"
)
# The lowest and the highest possible value of a number.
Bounds = tuple[float, float]
DIFFERENCE: Bounds = (-1.0, 1.0)  # of two numbers in [0, 1]
# Rounding may put a mean of scores this far beyond an end.
_ROUNDING = 1e-9
# The significant digits of an estimate: further ones are rounding, which differs between processors and decides ties.
_DIGITS = 12
# A variance up to this counts as 0: it is the square of fp32's rounding.
MIN_LOG = 1e-14
# Equal numbers may differ by this share of the largest, by rounding.
_EQUAL = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A statistic over n seeds, usually their mean, with its 95 % interval [low, high]; nan where there is none.

    Rounded to ``_DIGITS``, so that equal data give equal verdicts and tables on every processor.
    """

    mean: float
    low: float
    high: float
    n: int

    def __post_init__(self) -> None:
        for name in ("mean", "low", "high"):
            object.__setattr__(self, name, float(f"{getattr(self, name):.{_DIGITS}g}"))

    def __str__(self) -> str:
        if self.n == 0:
            return "–"
        digits = f"{self.mean:z.3g}"
        return digits if np.isnan(self.low) else f"{digits} [{self.low:z.3g}, {self.high:z.3g}]"


@functools.cache
def t_quantile(level: float, degrees: int) -> float:
    """Return half the width of Student's ``level`` interval in standard errors; cached."""
    return float(student.ppf((1 + level) / 2, degrees))


def half_of_draws(draws_N: np.ndarray, n: int) -> float:
    """Return half the width of Student's interval with the standard error of a bootstrap over n seeds.

    The spread over the draws, times √(n / (n − 1)): resampling n seeds understates their variance by that much.
    """
    return t_quantile(LEVEL, n - 1) * float(draws_N.std()) * math.sqrt(n / (n - 1))


def within(mean: float, half: float, bounds: Bounds | None = None) -> tuple[float, float]:
    """Return mean ± half; with ``bounds`` (a, b) the interval is computed on a scale without ends and mapped back.

    The scale is log((x − a)/(b − x)): the logit for (0, 1), twice the inverse hyperbolic tangent for (−1, 1).
    ``half`` is multiplied by the scale's slope at the mean (the delta method). The interval is therefore about the mean
    of the numbers themselves, seeds at 0 or 1 included, and not about the mean of their logits (Korn and Graubard 1998
    do this for shares in surveys). nan if the mean is at an end, and if ``half`` is 0, to rounding: a spread that was
    not seen is not known.
    """
    if np.isnan(half) or half <= _EQUAL * abs(mean):
        return np.nan, np.nan
    if bounds is None:
        return mean - half, mean + half
    a, b = bounds
    if not a < mean < b:
        return np.nan, np.nan
    place, move = np.log((mean - a) / (b - mean)), half * (1 / (mean - a) + 1 / (b - mean))
    return float(a + (b - a) * expit(place - move)), float(a + (b - a) * expit(place + move))


def over_seeds(
    values: Sequence[float], log: bool = False, bounds: Bounds | None = None, may_bootstrap: bool = True
) -> Estimate:
    """Return the mean of one number per seed with the interval that n allows; nan for no seeds.

    From ten seeds on: a BCa bootstrap (``_bootstrap_interval``), which gives the same bytes for the same numbers in any
    order. From three to nine seeds, and at any n unless ``may_bootstrap``: Student's interval (1908).

    With ``log`` the mean is computed on logarithms and mapped back: a geometric mean with a positive interval, for
    variances. A value below ``MIN_LOG`` then counts as ``MIN_LOG``, and the mean is 0 if all do.

    ``bounds`` are the lowest and the highest possible value, (0, 1) for a reward. t intervals then stay ``within`` the
    bounds (the bootstrap does so by itself), and there is no interval if every seed is at an end. Bounds are ignored if
    a number lies outside them. Equal numbers have no interval either.
    """
    numbers = np.sort(np.asarray(values, dtype=float))
    n = len(numbers)
    if log:
        if n and numbers[-1] <= MIN_LOG * (1 + _ROUNDING):
            return Estimate(0.0, np.nan, np.nan, n)
        logs = over_seeds(np.log(numbers.clip(min=MIN_LOG)).tolist(), may_bootstrap=may_bootstrap)
        mean, low, high = (float(np.exp(part)) for part in (logs.mean, logs.low, logs.high))
        return Estimate(mean, low, high, n)
    if bounds and ((numbers < bounds[0] - _ROUNDING) | (numbers > bounds[1] + _ROUNDING)).any():
        bounds = None  # a user's own task may have scores beyond 0 and 1
    mean = float(numbers.mean()) if n else np.nan
    at_ends = bounds is not None and np.isin(numbers, bounds).all()  # the spread of such numbers says nothing
    if n < MIN_FOR_INTERVAL or np.ptp(numbers) <= _EQUAL * np.abs(numbers).max() or at_ends:
        return Estimate(mean, np.nan, np.nan, n)
    if may_bootstrap and n >= MIN_FOR_BOOTSTRAP:
        return Estimate(mean, *_bootstrap_interval(numbers), n)
    half = t_quantile(LEVEL, n - 1) * float(numbers.std(ddof=1)) / math.sqrt(n)
    return Estimate(mean, *within(mean, half, bounds), n)


def _bootstrap_interval(numbers: np.ndarray) -> tuple[float, float]:
    """Return the BCa interval (Efron 1987) of the mean of ``numbers``, always from the same draws.

    Where BCa is undefined, because no single number changes the mean, it is the percentile interval.

    A plain 95 % bootstrap interval of ten normal numbers holds the mean 87 % of the time, for two reasons: the
    bootstrap's variance is too small by the factor (n − 1)/n, and the bootstrap treats its variance as known. The
    level is therefore raised to the normal probability of ±√(n/(n − 1)) t_{n−1} (Hesterberg 2015, "expanded percentile
    interval").
    """
    n = len(numbers)
    expanded = 2 * norm.cdf(np.sqrt(n / (n - 1)) * t_quantile(LEVEL, n - 1)) - 1

    def interval(method: Literal["BCa", "percentile"]) -> tuple[float, float]:
        generator = np.random.default_rng(0)
        ends = scipy_stats.bootstrap(
            (numbers,), np.mean, n_resamples=RESAMPLES, confidence_level=expanded, method=method, rng=generator
        ).confidence_interval
        return float(ends.low), float(ends.high)

    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", scipy_stats.DegenerateDataWarning)
        low, high = interval("BCa")
    return (low, high) if np.isfinite([low, high]).all() else interval("percentile")


def share(successes: float, n: int) -> Estimate:
    """Return ``successes`` / n with Clopper and Pearson's exact interval (1934); a tie may be half a success."""
    if n == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    if n < MIN_FOR_INTERVAL:
        return Estimate(successes / n, np.nan, np.nan, n)
    tail = (1 - LEVEL) / 2
    low = beta.ppf(tail, successes, n - successes + 1) if successes > 0 else 0.0
    high = beta.ppf(1 - tail, successes + 1, n - successes) if successes < n else 1.0
    return Estimate(successes / n, low, high, n)


def curves(
    steps: pd.DataFrame, metric: str, window: int = 1, log: bool = False, bounds: Bounds | None = None
) -> pd.DataFrame:
    """Return the mean over seeds of one metric at every step of every arm: arm, step, mean, low, high, n.

    ``steps`` is ``Results.joined["steps"]``. Each seed's curve is first averaged over the last ``window`` steps.
    With ``log`` both averages are geometric. ``bounds``: see ``over_seeds``. An arm's n falls where seeds ended early.
    """
    chosen = steps.loc[steps["metric"] == metric, ["arm", "seed", "step", "value"]].sort_values("step", kind="stable")
    if log:
        chosen = chosen.assign(value=np.log(chosen["value"].clip(lower=MIN_LOG)))
    smooth = chosen.groupby(["arm", "seed"])["value"].rolling(window, min_periods=1).mean()
    smooth = smooth.reset_index(level=["arm", "seed"], drop=True)
    chosen = chosen.assign(value=np.exp(smooth) if log else smooth)
    rows = [  # a bootstrap at every step would take minutes
        {"arm": arm, "step": step, **vars(over_seeds(group["value"].tolist(), log, bounds, may_bootstrap=False))}
        for (arm, step), group in chosen.groupby(["arm", "step"], sort=True)
    ]
    return pd.DataFrame(rows, columns=["arm", "step", "mean", "low", "high", "n"])
