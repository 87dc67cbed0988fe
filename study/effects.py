"""The effects that decide claims: functions that measure arms or losses of the recorded study."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from steadymoe.bench.statistics.comparisons import ratio_of_means, welch
from steadymoe.bench.statistics.estimates import DIFFERENCE, Bounds, Estimate, over_seeds, t_quantile
from study import early_warning
from study.arms import DRIFT, FRONTIER, RATES, TUNED
from study.experiments import TABLE
from study.recorded import Arm, Audited, Recorded

# Outcome of runs → the method of ``Recorded`` with one number for each seed.
RUN_METRICS = {
    **{"mean reward": "mean_reward", "final reward": "final"},
    **{"held-out accuracy": "held_out", "late accuracy": "late_accuracy"},
}


class NoNumber(Exception):
    """The recorded runs hold no such number; the message says why."""


@dataclass(frozen=True)
class Measurement:
    """The measured size of an effect."""

    estimate: Estimate
    seeds: tuple[float, ...] = ()
    """One number for each seed, for a ratio its logarithm; empty for an effect without one number for each seed."""
    note: str = ""
    """A remark that the reader of the estimate needs."""
    error: float = np.nan
    """The standard error, for an effect without one number for each seed."""
    degrees: float = np.nan
    """The degrees of freedom of ``error``."""

    def __str__(self) -> str:
        return f"{self.estimate} ({self.note})" if self.note else str(self.estimate)


# A function of this module with its arms or losses.
Effect = Callable[[Recorded], Measurement]


def by_seed(numbers: pd.Series, bounds: Bounds | None = None) -> Measurement:
    """Return the mean of one number for each seed, with ``bounds`` as in ``estimates.over_seeds``; nan is left out."""
    seeds = tuple(numbers.dropna().tolist())
    return Measurement(over_seeds(seeds, bounds=bounds), seeds)


def factor(above: pd.Series, below: pd.Series) -> Measurement:
    """Return the ratio of two arms' shares: each seed's ratio, averaged geometrically over the seeds of both arms.

    If a share is 0, the ratio of its seed is 0 or infinite. The result is then the ratio of the two means
    (``comparisons.ratio_of_means``), with a note. Raises NoNumber if the mean of ``below`` is 0.
    """
    whole = ratio_of_means(above, below)
    if np.isnan(whole.estimate.mean):
        raise NoNumber("no ratio: every share in its denominator is 0")
    if whole.zeros:
        note = f"ratio of means, a share is 0 in {whole.zeros} of {whole.estimate.n} seeds"
        return Measurement(whole.estimate, note=note)
    ratios = (above / below).dropna()
    return Measurement(over_seeds(ratios.tolist(), log=True), tuple(np.log(ratios)))


def difference(study: Recorded, of: str, arm: Arm | Audited, over: Arm | Audited) -> pd.Series:
    """Return one number of an arm less another's, by seed: of ``RUN_METRICS``, or of gradients after ``DRIFT``."""

    def numbers(one: Arm | Audited) -> pd.Series:
        if isinstance(one, Audited):
            return study.gradient(one, of, DRIFT)
        series: pd.Series = getattr(study, RUN_METRICS[of])(one)
        return series

    return numbers(arm) - numbers(over)


def paired(study: Recorded, of: str, arm: Arm | Audited, over: Arm | Audited) -> Measurement:
    """Return ``difference``, paired by seed or, for gradients, by checkpoint."""
    return by_seed(difference(study, of, arm, over), DIFFERENCE if of in RUN_METRICS else None)


def interaction(
    study: Recorded, of: str, ours: Sequence[Arm | Audited], theirs: Sequence[Arm | Audited]
) -> Measurement:
    """Return the difference of a pair of arms or losses less that of a pair of another model, paired within each model.

    A seed of two models is two cold starts that share nothing, so the models are compared by ``comparisons.welch``.
    """
    return _unpaired(difference(study, of, *ours), difference(study, of, *theirs))


def beside_twin(study: Recorded, moe: Arm, dense: Arm) -> Measurement:
    """Return held-out accuracy of an MoE less its dense twin's, which shares no cold start (``comparisons.welch``)."""
    return _unpaired(study.held_out(moe), study.held_out(dense))


def _unpaired(ours: pd.Series, theirs: pd.Series) -> Measurement:
    whole = welch(ours, theirs)
    return Measurement(whole.estimate, error=whole.error, degrees=whole.degrees)


def clipped(study: Recorded, loss: Audited, over: Audited, k: int) -> Measurement:
    """Return the share of tokens that one loss clips after ``k`` updates, divided by another loss's share."""
    return factor(*(study.gradient(one, "clip_fraction", k) for one in (loss, over)))


def changed(study: Recorded, arm: Arm, over: Arm) -> Measurement:
    """Return the mean expert change per update of one arm over another's."""
    return factor(*(study.numbers(one, "expert_change_per_update", "mean") for one in (arm, over)))


def routed(study: Recorded, arms: Sequence[Arm], over: Sequence[Arm] = ()) -> Measurement:
    """Return routing's share of the log-ratio, mean over ``arms``, less its mean over ``over``, by seed."""

    def mean(arms: Sequence[Arm]) -> pd.Series:
        return pd.concat([study.routing_share(arm) for arm in arms], axis=1).mean(axis=1, skipna=False)

    return by_seed(mean(arms) - (mean(over) if over else 0.0))


def level(study: Recorded, arm: Arm, metric: str) -> Measurement:
    """Return a metric that is a share, of one arm by itself: its mean over the steps, by seed."""
    return by_seed(study.numbers(arm, metric, "mean"), (0.0, 1.0))


def held_out(study: Recorded, arm: Arm) -> Measurement:
    """Return held-out accuracy of one arm by itself, by seed."""
    return by_seed(study.held_out(arm), (0.0, 1.0))


def announces(study: Recorded, arms: Sequence[Arm], metric: str, least_lead: int = 1) -> Measurement:
    """Return a metric's area under the ROC curve, ``least_lead`` steps before a collapse, less the reward's own.

    Interval and p are Student's with the error of ``early_warning.jackknife``: each seed is left out with the runs of
    all arms.
    """
    steps, runs = study.stable_or_collapsed(arms)
    ours, reward = (
        early_warning.of_seeds(steps, runs, name, least_lead, falls=name == "reward") for name in (metric, "reward")
    )

    def lead(some: pd.DataFrame) -> float:
        return early_warning.area(ours(some)) - early_warning.area(reward(some))

    seeds = runs["seed"].unique().tolist()
    whole, error = early_warning.jackknife(lead, runs, seeds)
    if np.isnan(whole):
        raise NoNumber("no area: no run collapsed, or all did")
    half = t_quantile(0.95, len(seeds) - 1) * error
    return Measurement(Estimate(whole, whole - half, whole + half, len(seeds)), error=error, degrees=len(seeds) - 1)


def area(study: Recorded, arms: Sequence[Arm], metric: str) -> Measurement:
    """Return the area under the ROC curve of a metric, a step before a collapse (``early_warning.auc``)."""
    return Measurement(early_warning.auc(*study.stable_or_collapsed(arms), metric, falls=metric == "reward"))


def best_setting(study: Recorded, name: str) -> tuple[float, str]:
    """Return an algorithm's best learning rate and band: highest mean reward over the seeds of the tuning.

    Raises NoNumber if the rate lies at an end of the grid.
    """
    means = {key: study.mean_reward(arm).mean() for key, arm in TUNED[name].items()}
    rate, band = max(means, key=lambda key: means[key])
    if rate in (RATES[0], RATES[-1]):
        raise NoNumber(f"{name} is best at a learning rate of {rate:g}, an end of the grid")
    return rate, band


def best(study: Recorded, name: str) -> Arm:
    """Return an algorithm's arm with ten seeds at its best setting. Raises NotRun, NoNumber."""
    rate, band = best_setting(study, name)
    axes = TABLE["study_best"].axes({"algorithm": name, **TUNED[name][rate, band].axes})
    return Arm(f"{name.upper()} {band}, lr {rate:g}", "study_best", name, axes)


def at_best(study: Recorded, name: str, over: str) -> Measurement:
    """Return the mean reward of an algorithm less another's, each at its best setting."""
    return paired(study, "mean reward", best(study, name), best(study, over))


def fall(study: Recorded, arm: Arm) -> Measurement:
    """Return the reward of an arm's first step less its final reward."""
    return by_seed(study.first(arm) - study.final(arm))


def staler_is_worse(study: Recorded) -> Measurement:
    """Return the mean reward at 4 updates less at 32: mean over the frontier's algorithms and rates, by seed."""
    cells = sorted({(name, rate) for name, rate, _ in FRONTIER})
    leads = [difference(study, "mean reward", FRONTIER[*cell, 4], FRONTIER[*cell, 32]) for cell in cells]
    positive = sum(lead.mean() > 0 for lead in leads)
    mean = pd.concat(leads, axis=1).mean(axis=1, skipna=False)
    return replace(by_seed(mean, DIFFERENCE), note=f"above 0 in {positive} of {len(leads)} cells")
