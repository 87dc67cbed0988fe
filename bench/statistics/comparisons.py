"""Comparisons of arms. Arms that share seeds are compared seed by seed: all arms share the cold start of a seed.

The numbers of an arm are a series indexed by seed, one number per seed.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats
from scipy.special import stdtr

from steadymoe.bench.statistics import estimates
from steadymoe.bench.statistics.estimates import DIFFERENCE, LEVEL, MIN_FOR_INTERVAL, Bounds, Estimate, over_seeds

# Differences that vary by less, relative to the numbers, vary by rounding.
_ROUNDING = 1e-12
# The level of every test; fewer seeds decide nothing, whatever their p.
ALPHA, MIN_TO_DECIDE = 0.05, 5
# The rule of ``is_decided``, for captions.
DECIDED = f"A difference is decided if p is below {ALPHA:g} and it has at least {MIN_TO_DECIDE} seeds."


def _paired(a: pd.Series, b: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of both arms at their shared seeds, (S,) each; none if only all seeds are enough for an interval.

    Raises ValueError if a seed occurs twice in an arm.
    """
    if a.index.has_duplicates or b.index.has_duplicates:
        raise ValueError("an arm has two numbers for one seed")
    by_seed: list[dict[Any, float]] = [each.dropna().astype(float).to_dict() for each in (a, b)]
    ours, theirs = by_seed
    shared = sorted(ours.keys() & theirs.keys())  # a join of pandas takes a millisecond, and arms make many pairs
    if len(shared) < MIN_FOR_INTERVAL <= min(len(ours), len(theirs)):
        shared = []
    return np.array([ours[seed] for seed in shared], float), np.array([theirs[seed] for seed in shared], float)


def _neither_varies(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return bool(max(np.ptp(ours), np.ptp(theirs)) <= _ROUNDING * max(np.abs(ours).max(), np.abs(theirs).max(), 1.0))


def difference(a: pd.Series, b: pd.Series, bounds: Bounds | None = None) -> Estimate:
    """Return mean of a − b over the shared seeds with the interval of ``estimates.over_seeds``.

    ``bounds`` are the ends of the difference: ``estimates.DIFFERENCE`` for numbers in [0, 1].

    Without shared seeds: mean of a less mean of b with Welch's 95 % t interval (1947); n is the size of the smaller
    arm. No interval if an arm has fewer than three numbers, or if neither varies.
    """
    ours, theirs = _paired(a, b)
    if len(ours):
        return over_seeds((ours - theirs).tolist(), bounds=bounds)
    ours, theirs = (each.dropna().to_numpy(float) for each in (a, b))
    n = min(len(ours), len(theirs))
    apart = float(ours.mean() - theirs.mean()) if n else np.nan
    if n < MIN_FOR_INTERVAL or _neither_varies(ours, theirs):
        return Estimate(apart, np.nan, np.nan, n)
    low, high = scipy_stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(LEVEL)
    return Estimate(apart, float(low), float(high), n)


def probability_of_improvement(a: pd.Series, b: pd.Series) -> Estimate:
    """Return P(a > b) + P(a = b)/2 (2108.13264, section 4.4): the share of the shared seeds in which a is higher.

    A tie counts half. With Clopper and Pearson's (conservative) interval; n = 0 without shared seeds.
    """
    ours, theirs = _paired(a, b)
    return estimates.share(float((ours > theirs).sum() + (ours == theirs).sum() / 2), len(ours))


def win_rate(a: pd.DataFrame, b: pd.DataFrame) -> Estimate:
    """Return the share of held-out prompts that a wins minus the share that b wins: mean over shared seeds.

    The result lies in [−1, 1]. ``a`` and ``b`` are ``evaluations`` tables of one step each: seed, prompt, score. A
    repeated prompt counts once, with its mean score. n = 0 if a seed's prompts differ between the arms.
    """
    scores = [frame.groupby(["seed", "prompt"])["score"].mean() for frame in (a, b)]
    balances: list[float] = []
    for seed in sorted(set(a["seed"]) & set(b["seed"])):
        ours, theirs = (score.loc[seed] for score in scores)
        if not ours.index.equals(theirs.index):
            return over_seeds([])
        balances.append(float(np.sign(ours - theirs).mean()))
    return over_seeds(balances, bounds=DIFFERENCE)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Correct p-values for the number of comparisons (Holm 1979); nan stays nan and counts as no comparison."""
    raw = np.asarray(p_values, dtype=float)
    corrected = np.full(raw.shape, np.nan)
    given = np.flatnonzero(~np.isnan(raw))
    order = given[np.argsort(raw[given], kind="stable")]
    factors = len(order) - np.arange(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(factors * raw[order]), 1.0)
    return corrected


def is_decided(corrected: float, n: int) -> bool:
    """Return whether a difference over ``n`` seeds is decided; ``corrected`` is its ``p_value`` after ``holm``.

    The one rule of reports and scores. Holm's correction is over all comparisons of the table.
    """
    return n >= MIN_TO_DECIDE and corrected < ALPHA


def p_value(a: pd.Series, b: pd.Series) -> float:
    """Return the two-sided p of equal means: the paired t test over shared seeds, or Welch's if there are none.

    Differences that do not vary have no t: the exact sign-flip test (Fisher 1935, section 21) has p = 2/2ⁿ, or 1 if
    they are 0. nan below three seeds, and for unpaired arms of which neither varies.
    """
    ours, theirs = _paired(a, b)
    if len(ours) >= MIN_FOR_INTERVAL:
        apart, nothing = ours - theirs, _ROUNDING * np.abs([ours, theirs]).max()
        if np.ptp(apart) <= nothing:
            return 2 / 2 ** len(apart) if abs(apart.mean()) > nothing else 1.0
        # scipy's ttest_rel to the bit, in a hundredth of its time: arms make many pairs.
        n, variance = len(apart), np.mean((apart - apart.mean()) ** 2) * (len(apart) / (len(apart) - 1))
        return float(2 * stdtr(n - 1, -abs(apart.mean() / np.sqrt(variance / n))))
    if min(a.count(), b.count()) < MIN_FOR_INTERVAL or len(ours):
        return np.nan
    unpaired = [each.dropna().to_numpy(float) for each in (a, b)]
    return np.nan if _neither_varies(*unpaired) else float(scipy_stats.ttest_ind(*unpaired, equal_var=False).pvalue)


def ranking(arms: Mapping[str, pd.Series]) -> pd.DataFrame:
    """Compare every arm with the arm of the highest mean; the highest mean first.

    ``arms`` has the numbers of each by its name. Returned columns: arm, ``difference`` from the best arm, with an
    interval in [−1, 1] if all numbers lie in [0, 1], p_corrected (nan for the best arm): for all pairs of arms, because
    the data chose the best arm.
    """
    order = sorted(arms, key=lambda arm: (-arms[arm].mean(), arm))
    # The best arm comes first, so its pairs do, in the order of the arms.
    corrected = holm([p_value(arms[a], arms[b]) for a, b in combinations(order, 2)])
    return pd.DataFrame(
        {
            "arm": order,
            "difference": [difference(arms[arm], arms[order[0]], DIFFERENCE) for arm in order],
            "p_corrected": [np.nan, *corrected[: len(order) - 1]],
        }
    )
