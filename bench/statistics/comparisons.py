"""Comparisons of arms. Arms that share seeds are compared seed by seed: all arms share the cold start of a seed.

The numbers of an arm are a series indexed by seed, one number per seed.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats
from scipy.optimize import brentq
from scipy.special import stdtr
from scipy.stats import nct, norm  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.statistics import estimates
from steadymoe.bench.statistics.estimates import DIFFERENCE, LEVEL, MIN_FOR_INTERVAL, Bounds, Estimate, over_seeds

# Differences that vary by less, relative to the numbers, vary by rounding.
_ROUNDING = 1e-12
# ``seeds_needed`` stops its search here.
MAX_SEEDS = 100_000
# The probability with which ``detectable`` and ``seeds_needed`` find a difference, and the level of every test.
POWER, ALPHA = 0.8, 0.05
# Fewer seeds decide nothing, whatever their p.
MIN_TO_DECIDE = 5
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
    """Return P(a > b) + P(a = b)/2 (2108.13264, section 4.4).

    With shared seeds: the share of seeds in which a is higher, with Clopper and Pearson's (conservative) interval.
    Without shared seeds: ``superiority`` over all pairs.
    """
    ours, theirs = _paired(a, b)
    if len(ours):
        return estimates.share(float((ours > theirs).sum() + (ours == theirs).sum() / 2), len(ours))
    return superiority(a.dropna().to_numpy(float), b.dropna().to_numpy(float))


def superiority(a: np.ndarray, b: np.ndarray) -> Estimate:
    """Return Mann and Whitney's U/(mn) of two independent samples, (m,) and (n,): the area θ̂ under a ROC curve.

    The ends of the interval are the θ with |θ̂ − θ| = z √V(θ) and Hanley and McNeil's variance
    V(θ) = θ(1 − θ)(1 + (N − 1)((1 − θ)/(2 − θ) + θ/(1 + θ)))/(mn), N = (m + n)/2 (Newcombe 2006, part 2, method 5).
    It has a width even at θ̂ = 0 and 1; there is none if a sample has fewer than three numbers. The 95 % interval held
    the truth in 94 to 95 % of draws of five normal numbers against five, and in 89 to 97 % of three against three. The
    estimate's ``n`` is the size of the smaller sample.
    """
    m, n = len(a), len(b)
    if not m or not n:
        return Estimate(np.nan, np.nan, np.nan, 0)
    area = float((a[:, None] > b).mean() + (a[:, None] == b).mean() / 2)
    if min(m, n) < MIN_FOR_INTERVAL:
        return Estimate(area, np.nan, np.nan, min(m, n))
    z = norm.ppf((1 + LEVEL) / 2)

    def beyond(theta: float) -> float:
        spread = (1 - theta) / (2 - theta) + theta / (1 + theta)
        return abs(area - theta) - z * np.sqrt(theta * (1 - theta) * (1 + ((m + n) / 2 - 1) * spread) / (m * n))

    # V is 0 at θ = 0 and 1, so these two θ are never the wanted solution.
    low = brentq(beyond, 0.0, min(area, 1 - 1e-12)) if area > 0 else 0.0
    high = brentq(beyond, max(area, 1e-12), 1.0) if area < 1 else 1.0
    return Estimate(area, float(low), float(high), min(m, n))


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


def deviation(a: pd.Series, b: pd.Series) -> float:
    """Return the standard deviation of a − b over the shared seeds; nan below three, or if they vary by rounding."""
    ours, theirs = _paired(a, b)
    apart = ours - theirs
    if len(apart) < MIN_FOR_INTERVAL or np.ptp(apart) <= _ROUNDING * np.abs([ours, theirs]).max():
        return np.nan
    return float(apart.std(ddof=1))


def _power(away: float, n: int) -> float:
    """The probability that a paired t test of n seeds finds a mean ``away`` standard errors off (noncentral t).

    A finding with the wrong sign does not count: it is rarer than 1e-4 if the power is a half or more.
    """
    bound = estimates.t_quantile(1 - ALPHA, n - 1)
    if away > bound + 10:  # scipy's series fails there
        return 1.0
    return float(nct.sf(bound, n - 1, away))


def detectable(deviation: float, n: int) -> float:
    """Return the difference that a paired t test of n seeds finds with probability ``POWER``; nan if it is not known.

    ``deviation`` is that of the differences of seeds that have run, and is taken for the true one.
    """
    if np.isnan(deviation):
        return np.nan
    away = brentq(lambda away: _power(away, n) - POWER, 0.0, estimates.t_quantile(1 - ALPHA, n - 1) + 11)
    return deviation / np.sqrt(n) * float(away)


def seeds_needed(deviation: float, effect: float) -> float:
    """Return the fewest seeds, at least three, with which ``effect`` is ``detectable``; nan if they are not known.

    ``MAX_SEEDS`` means that many or more.
    """
    if np.isnan(deviation):
        return np.nan
    away = effect / deviation
    return bisect_left(range(MAX_SEEDS), True, lo=MIN_FOR_INTERVAL, key=lambda n: _power(away * np.sqrt(n), n) >= POWER)


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
