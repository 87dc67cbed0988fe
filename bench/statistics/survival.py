"""How long runs last: time to collapse, with runs that did not collapse right-censored where they were last judged.

Of every run, the step up to which it was judged and the step at which it collapsed, None or nan if it did not. A
collapse lasts for the rule's patience before it counts, so one that begins in a run's last steps cannot be told from a
bad rollout. All runs are therefore censored at the last step at which a collapse could still be seen, whatever happened
after it: ``of_runs``. To censor only those that are falling at their end would take them for as safe as the others.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats
from scipy.stats import t as student  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.statistics.estimates import LEAST_FOR_INTERVAL, Estimate


def of_runs(runs: pd.DataFrame) -> tuple[list[float], list[float | None]]:
    """What the other functions take, of ``collapse.judged`` runs: up to where each was judged, and its collapse.

    Runs too short to be judged are left out. A number that was not finite after the last judged step is left out too:
    no other collapse could be seen there.
    """
    told = runs[runs["judged_until"] > 0]
    collapsed = told["collapsed_step"].where(told["collapsed_step"] <= told["judged_until"])
    return told["judged_until"].astype(float).tolist(), [None if pd.isna(step) else float(step) for step in collapsed]


def _times(steps: Sequence[float], collapsed: Sequence[float | None]) -> tuple[np.ndarray, np.ndarray]:
    """Of every run, how long it was seen and whether it collapsed then. Raises ValueError where both contradict."""
    last, when = np.asarray(steps, dtype=float), np.asarray(collapsed, dtype=float)
    if last.shape != when.shape:
        raise ValueError("every run needs its number of steps and its collapse")
    if (when > last).any():
        raise ValueError("a run cannot collapse after its last step")
    ended = ~np.isnan(when)
    return np.where(ended, when, last), ended


def _censored(time: np.ndarray, ended: np.ndarray) -> Any:
    return scipy_stats.CensoredData(uncensored=time[ended], right=time[~ended])


def kaplan_meier(steps: Sequence[float], collapsed: Sequence[float | None], level: float = 0.95) -> pd.DataFrame:
    """The share of runs that have not collapsed by each step (Kaplan and Meier 1958), from step 0 on.

    A row for every step at which a run collapsed or was last seen: step, survival (from it on), low, high,
    at_risk (just before it), collapsed (at it). Interval at each step: Greenwood's variance on the scale of
    log(−log S) (Kalbfleisch and Prentice 1980); nan below three runs, and where survival is 1 or 0, at which it
    is not defined.
    """
    time, ended = _times(steps, collapsed)
    columns = ["step", "survival", "low", "high", "at_risk", "collapsed"]
    if len(time) == 0:
        return pd.DataFrame(columns=columns)
    survival = scipy_stats.ecdf(_censored(time, ended)).sf
    low = high = np.full(len(survival.quantiles), np.nan)
    if len(time) >= LEAST_FOR_INTERVAL:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # not defined at 0 and 1
            band = survival.confidence_interval(level, method="log-log")
        low, high = band.low.probabilities, band.high.probabilities
    rows = [(0.0, 1.0, np.nan, np.nan, len(time), 0)]
    for step, alive, lower, upper in zip(survival.quantiles, survival.probabilities, low, high, strict=True):
        rows.append((step, alive, lower, upper, int((time >= step).sum()), int(ended[time == step].sum())))
    return pd.DataFrame(rows, columns=columns)


def restricted_mean(
    steps: Sequence[float], collapsed: Sequence[float | None], horizon: float, level: float = 0.95
) -> Estimate:
    """Mean steps without a collapse out of the first ``horizon``: the area under ``kaplan_meier`` up to there.

    Variance n/(n − 1) Σ_i (∫_{t_i}^horizon S)² d_i / (n_i (n_i − d_i)) over the collapses i (Klein and
    Moeschberger 2003, section 4.5), with t of n − 1 degrees of freedom: if no run is censored before the horizon
    that is Student's interval for the mean of min(t, horizon). No interval below three runs, or where no run
    collapsed. Raises ValueError if the last run is lost from sight before the horizon.
    """
    time, ended = _times(steps, collapsed)
    n = len(time)
    if n == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    if not ended[time == time.max()].all() and time.max() < horizon:
        raise ValueError(f"no run was seen beyond step {time.max():g}: choose a horizon up to that")
    curve = kaplan_meier(steps, collapsed)
    curve = curve[curve["step"] < horizon]
    widths = np.diff(np.append(curve["step"], horizon))
    areas = curve["survival"].to_numpy() * widths
    beyond = areas[::-1].cumsum()[::-1]  # from each row's step to the horizon
    mean = float(beyond[0])
    died, at_risk = curve["collapsed"].to_numpy(), curve["at_risk"].to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):  # nobody is left: no area beyond either
        terms = np.where(died < at_risk, beyond**2 * died / (at_risk * (at_risk - died)), 0.0)
    half = np.nan
    if n >= LEAST_FOR_INTERVAL and terms.sum() > 0:
        half = float(student.ppf((1 + level) / 2, n - 1) * np.sqrt(terms.sum() * n / (n - 1)))
    # Nothing lasts less than no step or more than the horizon.
    low, high = (float(np.clip(end, 0.0, horizon)) for end in (mean - half, mean + half))
    return Estimate(mean, low, high, n)


def logrank(
    steps_a: Sequence[float],
    collapsed_a: Sequence[float | None],
    steps_b: Sequence[float],
    collapsed_b: Sequence[float | None],
) -> float:
    """Two-sided p-value of the log-rank test (Mantel 1966) that two arms collapse at the same rate.

    nan if an arm has fewer than three runs, or no run of either collapsed. It takes runs for independent: cold
    starts that arms share make it conservative.
    """
    a, b = _times(steps_a, collapsed_a), _times(steps_b, collapsed_b)
    if min(len(a[0]), len(b[0])) < LEAST_FOR_INTERVAL or not (a[1].any() or b[1].any()):
        return np.nan
    return float(scipy_stats.logrank(_censored(*a), _censored(*b)).pvalue)
