"""The effects that decide claims: functions that take arms and return a function from the study to a number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd

from steadymoe.bench.claims.arms import RATES, TUNED
from steadymoe.bench.config import compose
from steadymoe.bench.measurement import columns
from steadymoe.bench.score.arms import DRIFT, NARROW, WIDE
from steadymoe.bench.score.recorded import Arm, Audited, Recorded
from steadymoe.bench.statistics import early_warning
from steadymoe.bench.statistics.comparisons import ratio_of_means, welch
from steadymoe.bench.statistics.estimates import DIFFERENCE, Bounds, Estimate, over_seeds, t_quantile


class NoNumber(Exception):
    """The recorded runs hold no such number; the message says why."""


@dataclass(frozen=True)
class Seen:
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

    @classmethod
    def unpaired(cls, ours: pd.Series, theirs: pd.Series) -> "Seen":
        """Return the difference in mean of two samples that share no cold starts (``comparisons.welch``)."""
        found = welch(ours, theirs)
        return cls(found.estimate, error=found.error, degrees=found.degrees)


Effect = Callable[[Recorded], Seen]


def by_seed(numbers: pd.Series, bounds: Bounds | None = None) -> Seen:
    """The mean of one number for each seed, with ``bounds`` as in ``estimates.over_seeds``; nan is left out."""
    seeds = tuple(numbers.dropna().tolist())
    return Seen(over_seeds(seeds, bounds=bounds), seeds)


def factor(above: pd.Series, below: pd.Series) -> Seen:
    """The ratio of two arms' shares: each seed's ratio, averaged geometrically over the seeds that both arms have.

    If a share is 0, the ratio of its seed is 0 or infinite. The result is then the ratio of the two means
    (``comparisons.ratio_of_means``), with a note. Raises NoNumber if the mean of ``below`` is 0.
    """
    whole = ratio_of_means(above, below)
    if np.isnan(whole.estimate.mean):
        raise NoNumber("no ratio: every share in its denominator is 0")
    if whole.zeros:
        return Seen(whole.estimate, note=f"ratio of means, a share is 0 in {whole.zeros} of {whole.estimate.n} seeds")
    ratios = (above / below).dropna()
    return Seen(over_seeds(ratios.tolist(), log=True), tuple(np.log(ratios)))


def mean_reward(arm: Arm, over: Arm) -> Effect:
    """Mean reward of one arm less another's, paired by seed."""
    return lambda study: by_seed(study.mean_reward(arm) - study.mean_reward(over), DIFFERENCE)


def held_out(arm: Arm, over: Arm) -> Effect:
    """Held-out accuracy of one arm less another's, paired by seed."""
    return lambda study: by_seed(study.held_out(arm) - study.held_out(over), DIFFERENCE)


def interaction(ours: tuple[Arm, Arm], theirs: tuple[Arm, Arm]) -> Effect:
    """The difference in mean reward of a pair of arms less that of a pair of another model, paired within each model.

    A seed of two models is two cold starts that share nothing, so the models are compared by ``comparisons.welch``.
    """

    def difference(study: Recorded, pair: tuple[Arm, Arm]) -> pd.Series:
        arm, over = pair
        return study.mean_reward(arm) - study.mean_reward(over)

    return lambda study: Seen.unpaired(difference(study, ours), difference(study, theirs))


def useful(loss: Audited, over: Audited, quantity: str = "usefulness") -> Effect:
    """Usefulness of one loss's gradient less another's, or ``gain`` of its best step, paired by checkpoint."""
    return lambda study: by_seed(_apart(study, loss, over, quantity))


def useful_interaction(
    ours: tuple[Audited, Audited], theirs: tuple[Audited, Audited], quantity: str = "usefulness"
) -> Effect:
    """The difference of a pair of losses less that of a pair on another model, as in ``interaction``."""
    return lambda study: Seen.unpaired(_apart(study, *ours, quantity), _apart(study, *theirs, quantity))


def _apart(study: Recorded, loss: Audited, over: Audited, quantity: str) -> pd.Series:
    """``quantity`` of one loss's gradient after ``DRIFT`` updates less another's, by seed."""
    return study.gradient(loss, quantity, DRIFT) - study.gradient(over, quantity, DRIFT)


def clipped(loss: Audited, over: Audited, k: int) -> Effect:
    """The share of tokens that one loss clips after ``k`` updates, divided by another loss's share."""
    return lambda study: factor(*(study.gradient(each, "clip_fraction", k) for each in (loss, over)))


def routed(arms: Sequence[Arm], less: Sequence[Arm] = ()) -> Effect:
    """Routing's share of the log-ratio, mean over ``arms``, less its mean over ``less``, by seed."""

    def mean(study: Recorded, of: Sequence[Arm]) -> pd.Series:
        shares = [study.routing_share(arm) for arm in of]
        return pd.concat(shares, axis=1).mean(axis=1, skipna=False)

    return lambda study: by_seed(mean(study, arms) - (mean(study, less) if less else 0.0))


def level(arm: Arm, metric: str) -> Effect:
    """A metric that is a share, of one arm by itself: its mean over the steps, by seed."""
    return lambda study: by_seed(study.numbers(arm, metric, "mean"), (0.0, 1.0))


def changed(arm: Arm, over: Arm) -> Effect:
    """Mean expert change per update of one arm over another's."""
    return lambda study: factor(*(study.numbers(each, "expert_change_per_update", "mean") for each in (arm, over)))


def announces(arms: Sequence[Arm], metric: str, least_lead: int = 1) -> Effect:
    """Area under the ROC curve of a metric, ``least_lead`` steps before a collapse, less the area of the reward itself.

    Interval and p are Student's with the error of ``early_warning.jackknife``: each seed is left out with the runs of
    all arms.
    """

    def effect(study: Recorded) -> Seen:
        steps, runs = study.stable_or_collapsed(arms)
        steps = steps[steps["metric"].isin((metric, "reward"))]

        def apart(runs: pd.DataFrame) -> float:
            ours, theirs = (
                early_warning.area(early_warning.extremes(steps, runs, each, least_lead, falls=columns.falls(each)))
                for each in (metric, "reward")
            )
            return ours - theirs

        seeds = runs["seed"].unique().tolist()
        whole, error = early_warning.jackknife(apart, runs, seeds)
        if np.isnan(whole):
            raise NoNumber("no area: no run collapsed, or all did")
        half = t_quantile(0.95, len(seeds) - 1) * error
        return Seen(Estimate(whole, whole - half, whole + half, len(seeds)), error=error, degrees=len(seeds) - 1)

    return effect


def area(arms: Sequence[Arm], metric: str) -> Effect:
    """Area under the ROC curve of a metric, a step before a collapse (``early_warning.auc``)."""
    return lambda study: Seen(early_warning.auc(*study.stable_or_collapsed(arms), metric, falls=columns.falls(metric)))


@cache
def _named_rate() -> float:
    """The learning rate in conf/experiment/study_best.yaml: of runs with this rate it is no axis."""
    plain, _ = compose.unchecked(["experiment=study_best"])
    return float(plain["optimizer"]["learning_rate"])


def best_setting(study: Recorded, name: str) -> tuple[float, str]:
    """An algorithm's best learning rate and band: highest mean reward over the seeds of the tuning.

    Raises NoNumber if the rate lies at an end of the grid.
    """
    means = {key: study.mean_reward(arm).mean() for key, arm in TUNED[name].items()}
    rate, band = max(means, key=lambda key: means[key])
    if rate in (RATES[0], RATES[-1]):
        raise NoNumber(f"{name} is best at a learning rate of {rate:g}, an end of the grid")
    return rate, band


def best(study: Recorded, name: str) -> Arm:
    """An algorithm's arm with ten seeds at its best setting. Raises NotRun, NoNumber."""
    rate, band = best_setting(study, name)
    other = {"grpo": NARROW, "gspo": WIDE}[name].axes if band != next(iter(TUNED[name]))[1] else {}
    rates = {} if rate == _named_rate() else {"optimizer.learning_rate": rate}
    return Arm(f"{name.upper()} {band}, lr {rate:g}", "study_best", name, {**rates, **other})


def at_best(study: Recorded) -> Seen:
    """Mean reward of GSPO less GRPO, each at its best setting."""
    return mean_reward(best(study, "gspo"), best(study, "grpo"))(study)
