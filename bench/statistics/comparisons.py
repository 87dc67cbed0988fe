"""Comparisons of arms. Arms that share seeds are compared seed by seed: all arms share the cold start of a seed.

The numbers of an arm are a series indexed by seed, one number per seed.
"""

from bisect import bisect_left
from collections.abc import Sequence
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

# Up to this many differences ``sign_flip_p`` tries every pattern of signs (half a million); beyond it draws patterns.
MAX_ENUMERATED = 20
SIGNS_DRAWN = 99_999
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


def paired_difference(a: pd.Series, b: pd.Series, bounds: Bounds | None = None) -> Estimate:
    """Return the mean of a − b over the shared seeds, with the interval of ``estimates.over_seeds``.

    ``bounds`` are the ends of the difference: ``estimates.DIFFERENCE`` for numbers in [0, 1].
    """
    ours, theirs = _paired(a, b)
    return over_seeds((ours - theirs).tolist(), bounds=bounds)


def welch_difference(a: pd.Series, b: pd.Series) -> Estimate:
    """Return mean of a less mean of b with Welch's 95 % t interval (1947), for arms that are not paired.

    n is the size of the smaller arm. No interval if an arm has fewer than three numbers, or if neither varies.
    """
    ours, theirs = (each.dropna().to_numpy(float) for each in (a, b))
    n = min(len(ours), len(theirs))
    apart = float(ours.mean() - theirs.mean()) if n else np.nan
    if n < MIN_FOR_INTERVAL or _neither_varies(ours, theirs):
        return Estimate(apart, np.nan, np.nan, n)
    low, high = scipy_stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(LEVEL)
    return Estimate(apart, float(low), float(high), n)


def difference(a: pd.Series, b: pd.Series, bounds: Bounds | None = None) -> Estimate:
    """Return the ``paired_difference`` over shared seeds, or the ``welch_difference`` if there are none."""
    return paired_difference(a, b, bounds) if len(_paired(a, b)[0]) else welch_difference(a, b)


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
    """Return Mann and Whitney's U/(mn) of two independent samples, (m,) and (n,): the area under a ROC curve.

    Interval: ``newcombe``. The 95 % interval held the truth in 94 to 95 % of draws of five normal numbers against
    five, and in 89 to 97 % of three against three. The estimate's ``n`` is the size of the smaller sample.
    """
    m, n = len(a), len(b)
    if not m or not n:
        return Estimate(np.nan, np.nan, np.nan, 0)
    area = float((a[:, None] > b).mean() + (a[:, None] == b).mean() / 2)
    return Estimate(area, *newcombe(area, m, n), min(m, n))


def newcombe(area: float, m: int, n: int) -> tuple[float, float]:
    """Return the interval of an area θ̂ from the sample sizes m and n; nan if one of them is below three.

    The ends are the θ with |θ̂ − θ| = z √V(θ) and Hanley and McNeil's variance
    V(θ) = θ(1 − θ)(1 + (N − 1)((1 − θ)/(2 − θ) + θ/(1 + θ)))/(mn), N = (m + n)/2 (Newcombe 2006, part 2, method 5).
    The interval has a width even at θ̂ = 0 and 1.
    """
    if min(m, n) < MIN_FOR_INTERVAL:
        return np.nan, np.nan
    z = norm.ppf((1 + LEVEL) / 2)

    def beyond(theta: float) -> float:
        spread = (1 - theta) / (2 - theta) + theta / (1 + theta)
        return abs(area - theta) - z * np.sqrt(theta * (1 - theta) * (1 + ((m + n) / 2 - 1) * spread) / (m * n))

    # V is 0 at θ = 0 and 1, so these two θ are never the wanted solution.
    low = brentq(beyond, 0.0, min(area, 1 - 1e-12)) if area > 0 else 0.0
    high = brentq(beyond, max(area, 1e-12), 1.0) if area < 1 else 1.0
    return float(low), float(high)


def win_rate(a: pd.DataFrame, b: pd.DataFrame) -> Estimate:
    """Return the share of held-out prompts that a wins minus the share that b wins: mean over shared seeds.

    The result lies in [−1, 1]. ``a`` and ``b`` are ``evaluations`` tables of one step each: seed, prompt, score. A
    repeated prompt counts once, with its mean score. Raises ValueError if a seed's prompts differ between the arms.
    """
    scores = [frame.groupby(["seed", "prompt"])["score"].mean() for frame in (a, b)]
    seeds = sorted(set(a["seed"]) & set(b["seed"]))
    balances = []
    for seed in seeds:
        ours, theirs = (score.loc[seed] for score in scores)
        if not ours.index.equals(theirs.index):
            raise ValueError(f"the held-out prompts of seed {seed} differ between the arms")
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


def sign_flip_p(differences: Sequence[float]) -> float:
    """Test whether each difference is as likely as its negative; two-sided p (Fisher 1935, section 21).

    p is the share of all 2ⁿ patterns of signs whose mean lies at least as far from 0 as the observed mean. The test is
    exact for any distribution that is symmetric about 0, bimodal ones too. The smallest p of n differences is 2/2ⁿ:
    0.25 of three, 0.002 of ten. Above ``MAX_ENUMERATED`` differences p is the share among ``SIGNS_DRAWN`` random
    patterns (always the same) and the observed pattern (Phipson and Smyth 2010). nan without differences.
    """
    numbers = np.sort(np.abs(np.asarray(differences, dtype=float)))
    n = len(numbers)
    if n == 0 or np.isnan(numbers).any():
        return np.nan
    # Sums of the same numbers in another order differ by rounding and must still count as equal.
    observed = abs(float(np.sum(differences))) - 1e-12 * float(numbers.sum())
    if n <= MAX_ENUMERATED:
        sums = numbers[:1]  # the other half of all patterns is their mirror image
        for number in numbers[1:]:
            sums = np.concatenate([sums + number, sums - number])
        return float((np.abs(sums) >= observed).mean())
    generator, beyond = np.random.default_rng(0), 0
    for drawn in np.array_split(np.arange(SIGNS_DRAWN), max(1, SIGNS_DRAWN * n // 2_000_000)):
        beyond += int((np.abs(generator.choice([-1.0, 1.0], (len(drawn), n)) @ numbers) >= observed).sum())
    return (1 + beyond) / (1 + SIGNS_DRAWN)


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

    Differences that do not vary have no t; their p is ``sign_flip_p``. nan below three seeds, and for unpaired arms of
    which neither varies.
    """
    ours, theirs = _paired(a, b)
    if len(ours) >= MIN_FOR_INTERVAL:
        apart, nothing = ours - theirs, _ROUNDING * np.abs([ours, theirs]).max()
        if np.ptp(apart) <= nothing:
            return sign_flip_p([apart.mean() if abs(apart.mean()) > nothing else 0.0] * len(apart))
        # scipy's ttest_rel to the bit, in a hundredth of its time: arms make many pairs.
        n, variance = len(apart), np.mean((apart - apart.mean()) ** 2) * (len(apart) / (len(apart) - 1))
        return float(2 * stdtr(n - 1, -abs(apart.mean() / np.sqrt(variance / n))))
    if min(a.count(), b.count()) < MIN_FOR_INTERVAL or len(ours):
        return np.nan
    unpaired = [each.dropna().to_numpy(float) for each in (a, b)]
    return np.nan if _neither_varies(*unpaired) else float(scipy_stats.ttest_ind(*unpaired, equal_var=False).pvalue)


def ranking(numbers: pd.DataFrame, bounds: Bounds | None = None) -> pd.DataFrame:
    """Compare every arm with the arm of the highest mean; the highest mean first.

    ``numbers`` has the columns arm, seed, value. ``bounds`` are the ends of a value, (0, 1) or None; with (0, 1) the
    intervals of paired differences stay in [−1, 1]. Returned columns: arm, estimate, against, ``difference`` (arm −
    against), p, p_corrected. p-values are corrected for all pairs of arms, because the data
    chose the best arm.
    """
    arms = {str(arm): group.set_index("seed")["value"] for arm, group in numbers.groupby("arm")}
    order = sorted(arms, key=lambda arm: (-arms[arm].mean(), arm))
    pairs = list(combinations(order, 2))
    p_values = [p_value(arms[a], arms[b]) for a, b in pairs]
    # The best arm comes first, so its pairs do, in the order of the arms.
    columns = {"p": [np.nan, *p_values], "p_corrected": [np.nan, *holm(p_values)]}
    return pd.DataFrame(
        {
            "arm": order,
            "estimate": [over_seeds(arms[arm].tolist(), bounds=bounds) for arm in order],
            "against": order[:1] * len(order),
            "difference": [difference(arms[arm], arms[order[0]], bounds and DIFFERENCE) for arm in order],
            **{name: values[: len(order)] for name, values in columns.items()},
        }
    )
