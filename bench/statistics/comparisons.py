"""Comparisons of arms. Arms that share seeds are compared seed by seed: all arms share the cold start of a seed.

The numbers of an arm are a series indexed by seed, one number per seed.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats
from scipy.optimize import brentq
from scipy.stats import nct, norm  # type: ignore[attr-defined]  # made at run time
from scipy.stats import t as student  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.statistics.estimates import (
    DIFFERENCE,
    LEAST_FOR_INTERVAL,
    LEAST_LOG,
    Bounds,
    Estimate,
    over_seeds,
    share,
    within,
)

# Up to this many differences ``sign_flip_p`` tries every pattern of signs (half a million); beyond it draws patterns.
MOST_ENUMERATED = 20
SIGNS_DRAWN = 99_999
# ``seeds_needed`` stops its search here.
MOST_SEEDS = 100_000


def _paired(a: pd.Series, b: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of both arms at their shared seeds, (S,) each. Raises ValueError if a seed occurs twice in an arm."""
    if a.index.has_duplicates or b.index.has_duplicates:
        raise ValueError("one number per seed: a seed stands twice")
    if not (a.index.equals(b.index) and a.index.is_monotonic_increasing):
        seeds = a.index.intersection(b.index).sort_values()
        a, b = a[seeds], b[seeds]
    ours, theirs = a.to_numpy(float), b.to_numpy(float)
    there = ~(np.isnan(ours) | np.isnan(theirs))
    return ours[there], theirs[there]


def paired_difference(a: pd.Series, b: pd.Series, level: float = 0.95, bounds: Bounds | None = None) -> Estimate:
    """Mean of a − b over the shared seeds, with the interval of ``estimates.over_seeds``; n is the number of seeds.

    ``bounds`` are the ends of the difference: ``estimates.DIFFERENCE`` for numbers in [0, 1].
    """
    ours, theirs = _paired(a, b)
    return over_seeds((ours - theirs).tolist(), level=level, bounds=bounds)


def probability_of_improvement(a: pd.Series, b: pd.Series, level: float = 0.95) -> Estimate:
    """P(a > b) + P(a = b)/2 (2108.13264, section 4.4).

    With shared seeds: the share of seeds in which a is higher, with Clopper and Pearson's (conservative) interval.
    Without shared seeds: ``superiority`` over all pairs.
    """
    ours, theirs = _paired(a, b)
    if len(ours):
        return share(float((ours > theirs).sum() + (ours == theirs).sum() / 2), len(ours), level)
    return superiority(a.dropna().to_numpy(float), b.dropna().to_numpy(float), level)


def superiority(a: np.ndarray, b: np.ndarray, level: float = 0.95) -> Estimate:
    """Mann and Whitney's U/(mn) of two independent samples, (m,) and (n,); it is also the area under a ROC curve.

    Interval: ``_newcombe``. The 95 % interval held the truth in 94 to 95 % of draws of five normal numbers against
    five, and in 89 to 97 % of three against three. The estimate's ``n`` is the size of the smaller sample.
    """
    m, n = len(a), len(b)
    if not m or not n:
        return Estimate(np.nan, np.nan, np.nan, 0)
    area = float((a[:, None] > b).mean() + (a[:, None] == b).mean() / 2)
    return Estimate(area, *_newcombe(area, m, n, level), min(m, n))


def clustered_superiority(
    a: np.ndarray, clusters_a: np.ndarray, b: np.ndarray, clusters_b: np.ndarray, level: float = 0.95
) -> Estimate:
    """``superiority`` of clustered numbers: the numbers of one cluster (a seed) depend on each other, in both samples.

    ``clusters_a`` (m,) and ``clusters_b`` (n,) name the cluster of each number. Variance: Obuchowski 1997,
    S₁₀/m + S₀₁/n + 2 S₁₁/(mn), from each cluster's sum of structural components (the component of a number is the
    share of the other sample that it beats). Interval: t on the logit scale, with one degree of freedom less than
    clusters. If the variance is 0 (an area of 0 or 1) or unknown: ``_newcombe`` with the numbers of clusters as sample
    sizes. The estimate's ``n`` is the number of clusters; no interval below three clusters.
    """
    clusters = np.union1d(clusters_a, clusters_b)
    plain = superiority(a, b, level)
    if plain.n == 0:
        return plain
    area, counts = plain.mean, (len(np.unique(clusters_a)), len(np.unique(clusters_b)))
    wins_AB = (a[:, None] > b) + (a[:, None] == b) / 2

    def summed(parts: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Each cluster's sum of components, centred on the area."""
        return np.array([(parts[of == cluster] - area).sum() for cluster in clusters])

    of_a, of_b = summed(wins_AB.mean(axis=1), clusters_a), summed(wins_AB.mean(axis=0), clusters_b)
    variance = 0.0
    if min(counts) > 1:
        shares = [
            k / (k - 1) * (part @ part) / size**2
            for k, part, size in zip(counts, (of_a, of_b), (len(a), len(b)), strict=True)
        ]
        both = len(clusters) / (len(clusters) - 1) * (of_a @ of_b) / (len(a) * len(b))
        variance = sum(shares) + 2 * both
    if len(clusters) < LEAST_FOR_INTERVAL:
        return Estimate(area, np.nan, np.nan, len(clusters))
    if variance <= 0:
        return Estimate(area, *_newcombe(area, *counts, level), len(clusters))
    half = float(student.ppf((1 + level) / 2, len(clusters) - 1) * np.sqrt(variance))
    return Estimate(area, *within(area, half, (0.0, 1.0)), len(clusters))


def _newcombe(area: float, m: int, n: int, level: float) -> tuple[float, float]:
    """Interval of an area θ̂ from the sample sizes m and n; nan if one of them is below three.

    The ends are the θ with |θ̂ − θ| = z √V(θ) and Hanley and McNeil's variance
    V(θ) = θ(1 − θ)(1 + (N − 1)((1 − θ)/(2 − θ) + θ/(1 + θ)))/(mn), N = (m + n)/2 (Newcombe 2006, part 2, method 5).
    The interval has a width even at θ̂ = 0 and 1.
    """
    if min(m, n) < LEAST_FOR_INTERVAL:
        return np.nan, np.nan
    z = norm.ppf((1 + level) / 2)

    def beyond(theta: float) -> float:
        spread = (1 - theta) / (2 - theta) + theta / (1 + theta)
        return abs(area - theta) - z * np.sqrt(theta * (1 - theta) * (1 + ((m + n) / 2 - 1) * spread) / (m * n))

    # V is 0 at θ = 0 and 1, so these two θ are never the wanted solution.
    low = brentq(beyond, 0.0, min(area, 1 - 1e-12)) if area > 0 else 0.0
    high = brentq(beyond, max(area, 1e-12), 1.0) if area < 1 else 1.0
    return float(low), float(high)


class MeanRatio(NamedTuple):
    """The mean of one arm divided by the mean of another arm."""

    estimate: Estimate
    """The ratio of means; nan if the divisor is 0."""
    zeros: int
    """The number of seeds with a 0 in either arm. Such a seed has no ratio of its own, but counts in both means."""


def ratio_of_means(above: pd.Series, below: pd.Series, level: float = 0.95) -> MeanRatio:
    """Mean of ``above`` divided by mean of ``below``, over the shared seeds; numbers are at least 0.

    A number of 0 (a clip that was never reached) would make the ratio of one seed 0 or infinite, and a geometric mean
    of ratios too; the ratio of means stays finite. Interval: ± t_{n−1} on the logarithm; its standard error is the
    standard error of the mean of a/ā − b/b̄ (the delta method, seeds paired). No interval below three seeds or if a
    mean is 0. Raises ValueError for numbers below 0.
    """
    ours, theirs = _paired(above, below)
    n, zeros = len(ours), int(((ours == 0) | (theirs == 0)).sum())
    if (ours < 0).any() or (theirs < 0).any():
        raise ValueError("a ratio of means needs numbers of at least 0")
    if n == 0 or theirs.mean() == 0:
        return MeanRatio(Estimate(np.nan, np.nan, np.nan, n), zeros)
    ratio = float(ours.mean() / theirs.mean())
    if n < LEAST_FOR_INTERVAL or ratio == 0:
        return MeanRatio(Estimate(ratio, np.nan, np.nan, n), zeros)
    error = (ours / ours.mean() - theirs / theirs.mean()).std(ddof=1) / np.sqrt(n)
    factor = float(np.exp(student.ppf((1 + level) / 2, n - 1) * error))
    return MeanRatio(Estimate(ratio, ratio / factor, ratio * factor, n), zeros)


def unpaired_difference(a: pd.Series, b: pd.Series, level: float = 0.95) -> Estimate:
    """Return the mean of a less the mean of b with Welch's interval (1947), for arms that share no cold starts.

    nan is left out. The estimate's ``n`` is the size of the smaller arm; no interval below three seeds in an arm.
    """
    ours, theirs = a.dropna().to_numpy(float), b.dropna().to_numpy(float)
    n = min(len(ours), len(theirs))
    if not n:
        return Estimate(np.nan, np.nan, np.nan, 0)
    difference = float(ours.mean() - theirs.mean())
    if n < LEAST_FOR_INTERVAL:
        return Estimate(difference, np.nan, np.nan, n)
    interval = scipy_stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(level)
    return Estimate(difference, float(interval.low), float(interval.high), n)


def unpaired_ratio(above: pd.Series, below: pd.Series, level: float = 0.95) -> Estimate:
    """Return the ratio of two arms' geometric means, with the interval of ``unpaired_difference`` on the logarithms.

    A number below ``LEAST_LOG`` counts as ``LEAST_LOG``.
    """
    logs = unpaired_difference(np.log(above.clip(lower=LEAST_LOG)), np.log(below.clip(lower=LEAST_LOG)), level)
    mean, low, high = (float(np.exp(each)) for each in (logs.mean, logs.low, logs.high))
    return Estimate(mean, low, high, logs.n)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """p-values corrected for the number of comparisons (Holm 1979); nan stays nan and counts as no comparison."""
    raw = np.asarray(p_values, dtype=float)
    corrected = np.full(raw.shape, np.nan)
    given = np.flatnonzero(~np.isnan(raw))
    order = given[np.argsort(raw[given], kind="stable")]
    factors = len(order) - np.arange(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(factors * raw[order]), 1.0)
    return corrected


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the hypothesis that each difference is as likely as its negative (Fisher 1935, section 21).

    p is the share of all 2ⁿ patterns of signs whose mean lies at least as far from 0 as the observed mean. The test is
    exact for any distribution that is symmetric about 0, bimodal ones too. The smallest p of n differences is 2/2ⁿ:
    0.25 of three, 0.002 of ten. Above ``MOST_ENUMERATED`` differences p is the share among ``SIGNS_DRAWN`` random
    patterns (always the same) and the observed pattern (Phipson and Smyth 2010). nan without differences.
    """
    numbers = np.sort(np.abs(np.asarray(differences, dtype=float)))
    n = len(numbers)
    if n == 0 or np.isnan(numbers).any():
        return np.nan
    # Sums of the same numbers in another order differ by rounding and must still count as equal.
    observed = abs(float(np.sum(differences))) - 1e-12 * float(numbers.sum())
    if n <= MOST_ENUMERATED:
        sums = numbers[:1]  # the other half of all patterns is their mirror image
        for number in numbers[1:]:
            sums = np.concatenate([sums + number, sums - number])
        return float((np.abs(sums) >= observed).mean())
    generator, beyond = np.random.default_rng(0), 0
    for drawn in np.array_split(np.arange(SIGNS_DRAWN), max(1, SIGNS_DRAWN * n // 2_000_000)):
        beyond += int((np.abs(generator.choice([-1.0, 1.0], (len(drawn), n)) @ numbers) >= observed).sum())
    return (1 + beyond) / (1 + SIGNS_DRAWN)


def _power(n: int, deviation: float, effect: float, level: float = 0.05) -> float:
    """The probability that a two-sided paired t test of n seeds finds the mean difference ``effect`` (noncentral t).

    ``deviation`` is the standard deviation of the differences, above 0. A finding with the wrong sign does not count:
    it is rarer than 1e-4 if the power is a half or more.
    """
    bound = student.ppf(1 - level / 2, n - 1)
    away = abs(effect) / deviation * np.sqrt(n)
    if away > bound + 10:  # scipy's series fails there
        return 1.0
    return float(nct.sf(bound, n - 1, away))


def seeds_needed(differences: Sequence[float], effect: float, power: float = 0.8, level: float = 0.05) -> int:
    """The fewest seeds, at least three, with which a paired t test finds ``effect`` with probability ``power``.

    ``differences`` come from seeds that have run; their standard deviation is taken for the true one. An answer of
    ``MOST_SEEDS`` means that many seeds or more; an effect of 0 has this answer too. Raises ValueError for fewer than
    three differences.
    """
    if len(differences) < LEAST_FOR_INTERVAL:
        raise ValueError(f"the spread of {len(differences)} differences is not known: run at least three seeds")
    deviation = float(np.std(np.asarray(differences, dtype=float), ddof=1))

    def enough(n: int) -> bool:
        return effect != 0 and (deviation == 0 or _power(n, deviation, effect, level) >= power)

    if not enough(MOST_SEEDS):
        return MOST_SEEDS
    low, high = LEAST_FOR_INTERVAL - 1, MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def p_value(a: pd.Series, b: pd.Series) -> float:
    """Two-sided p of equal means: ``sign_flip_p`` over the shared seeds, or Welch's t test if the arms share no seed.

    nan below three seeds.
    """
    ours, theirs = _paired(a, b)
    if len(ours) >= LEAST_FOR_INTERVAL:
        return sign_flip_p((ours - theirs).tolist())
    if min(a.count(), b.count()) < LEAST_FOR_INTERVAL or len(ours):
        return np.nan
    return float(scipy_stats.ttest_ind(a.dropna(), b.dropna(), equal_var=False).pvalue)


def ranking(numbers: pd.DataFrame, reference: str | None = None, bounds: Bounds | None = None) -> pd.DataFrame:
    """Every arm against the arm with the highest mean, or against ``reference``; the highest mean first.

    ``numbers`` has the columns arm, seed, value. ``bounds`` are the ends of a value, (0, 1) or None; with (0, 1) the
    intervals of the differences stay in [−1, 1]. Returned columns: arm, estimate, against, difference (arm − against,
    an ``Estimate`` over shared seeds), p, p_corrected. p-values against the best arm are corrected for all pairs of
    arms, because the data chose the best arm; p-values against ``reference`` are corrected for one pair per arm.
    Raises ValueError if there is no arm ``reference``.
    """
    arms = {str(arm): group.set_index("seed")["value"] for arm, group in numbers.groupby("arm")}
    order = sorted(arms, key=lambda arm: (-arms[arm].mean(), arm))
    if reference is not None and reference not in arms:
        raise ValueError(f"there is no arm {reference!r}; choose from {', '.join(order)}")
    against = order[0] if reference is None else reference
    pairs = list(combinations(order, 2)) if reference is None else [(against, arm) for arm in order if arm != against]
    p_values = [p_value(arms[a], arms[b]) for a, b in pairs]
    of_pair = {
        frozenset(pair): both for pair, both in zip(pairs, zip(p_values, holm(p_values), strict=True), strict=True)
    }
    rows, of_difference = [], None if bounds is None else DIFFERENCE
    for arm in order:
        p, corrected = of_pair.get(frozenset((arm, against)), (np.nan, np.nan)) if arm != against else (np.nan, np.nan)
        row = {"arm": arm, "estimate": over_seeds(arms[arm].tolist(), bounds=bounds), "against": against}
        difference = paired_difference(arms[arm], arms[against], bounds=of_difference)
        row |= {"difference": difference, "p": p, "p_corrected": corrected}
        rows.append(row)
    return pd.DataFrame(rows, columns=["arm", "estimate", "against", "difference", "p", "p_corrected"])
