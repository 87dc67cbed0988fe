"""Time to collapse. A run that did not collapse is right-censored at the last step at which it was judged.

Every function takes two arrays over runs, (R,): ``time``, the step of a run's collapse or else the step up to which it
was judged, and ``ended``, whether it collapsed. A collapse counts only after the rule's patience, so a collapse that
begins near the end of a run looks like a bad rollout. ``of_runs`` therefore censors every run at the last step at which
a collapse could still be seen, whatever happened later. (Censoring only the runs that fall at their end would be wrong:
it would treat them as if they were as safe as the others.)
"""

import warnings
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from steadymoe.bench.statistics.estimates import LEVEL, MIN_FOR_INTERVAL


def of_runs(runs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return ``time`` and ``ended`` of the runs in ``collapse.judged``, for the other functions.

    Runs too short to be judged are left out. A collapse after the last judged step (a number that was not finite) is
    left out too, because no other kind of collapse could be seen there.
    """
    long = runs[runs["judged_until"] > 0]
    last, collapsed = long["judged_until"].to_numpy(float), long["collapsed_step"].to_numpy(float)
    ended = collapsed <= last
    return np.where(ended, collapsed, last), ended


def _censored(time: np.ndarray, ended: np.ndarray) -> Any:
    return scipy_stats.CensoredData(uncensored=time[ended], right=time[~ended])


def kaplan_meier(time: np.ndarray, ended: np.ndarray) -> pd.DataFrame:
    """Return the share of runs that have not collapsed by each step (Kaplan and Meier 1958), from step 0 on.

    One row for every step at which a run collapsed or was last seen: step, survival (from the step on), low, high.
    Interval: Greenwood's variance on the scale of log(−log S) (Kalbfleisch and Prentice 1980); nan below three runs,
    and at a survival of 1 or 0.
    """
    columns = ["step", "survival", "low", "high"]
    if len(time) == 0:
        return pd.DataFrame(columns=columns)
    survival = scipy_stats.ecdf(_censored(time, ended)).sf
    low = high = np.full(len(survival.quantiles), np.nan)
    if len(time) >= MIN_FOR_INTERVAL:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # not defined at 0 and 1
            band = survival.confidence_interval(LEVEL, method="log-log")
        low, high = band.low.probabilities, band.high.probabilities
    starts, parts = (0.0, 1.0, np.nan, np.nan), (survival.quantiles, survival.probabilities, low, high)
    return pd.DataFrame({name: np.append(*pair) for name, *pair in zip(columns, starts, parts, strict=True)})


def logrank(time_a: np.ndarray, ended_a: np.ndarray, time_b: np.ndarray, ended_b: np.ndarray) -> float:
    """Return the two-sided p-value of the log-rank test (Mantel 1966) that two arms collapse at the same rate.

    nan if an arm has fewer than three runs, if no run of both arms collapsed, or if none of one arm was left whenever
    one of the other did. The test treats runs as independent; cold starts that the arms share make it conservative.
    """
    if min(len(time_a), len(time_b)) < MIN_FOR_INTERVAL or not (ended_a.any() or ended_b.any()):
        return np.nan
    with np.errstate(invalid="ignore"):  # 0 / 0
        return float(scipy_stats.logrank(_censored(time_a, ended_a), _censored(time_b, ended_b)).pvalue)
