"""The effects that decide claims: functions that take arms and return a function from the study to a number."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from steadymoe.bench.claims.arms import GRPO, GSPO, NARROW, TUNED, WIDE
from steadymoe.bench.claims.study import Arm, Study
from steadymoe.bench.measurement import columns
from steadymoe.bench.statistics.comparisons import ratio_of_means
from steadymoe.bench.statistics.estimates import DIFFERENCE, Bounds, Estimate, over_seeds


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


Effect = Callable[[Study], Seen]


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


def best(study: Study, name: str) -> Arm:
    """An algorithm's arm with ten seeds at its best setting: highest mean final reward over the seeds of the tuning."""
    tuned = max(TUNED[name].values(), key=lambda arm: study.final(arm).mean())
    if "algorithm.loss.clip_low" in tuned.axes:
        return tuned._replace(experiment="study_bands")
    return tuned._replace(experiment="study_rates" if "optimizer.learning_rate" in tuned.axes else "study")


def gain(arm: Arm, over: Arm) -> Effect:
    """Final reward of one arm less another's, paired by seed."""
    return lambda study: by_seed(study.final(arm) - study.final(over), DIFFERENCE)


def held_out(arm: Arm, over: Arm) -> Effect:
    """Held-out accuracy of one arm less another's, paired by seed."""
    return lambda study: by_seed(study.held_out(arm) - study.held_out(over), DIFFERENCE)


def clipped(arm: Arm, over: Arm) -> Effect:
    """Mean clip fraction of one arm divided by another's."""
    return lambda study: factor(*(study.numbers(each, "clip_fraction", "mean") for each in (arm, over)))


def warning(metric: str, lead: int = 1) -> Effect:
    """Area under the ROC curve of a metric, ``lead`` steps before a collapse, for GRPO and GSPO at both bands."""
    return lambda study: Seen(study.warning_area([GRPO, GSPO, NARROW, WIDE], metric, lead))


def cost(arm: Arm, over: Arm, unit: str) -> Effect:
    """The amount of ``unit`` (``efficiency.COSTS``) that an arm needs for a reward, over the amount of another arm."""

    def effect(study: Study) -> Seen:
        ratio = study.cost_factor(arm, over, unit)
        if ratio is None:
            raise NoNumber("no cost: neither arm gains reward")
        censored = f"median, {ratio.censored} of {ratio.estimate.n} seeds censored"
        if np.isnan(ratio.estimate.mean):
            raise NoNumber(f"not known: {censored}")
        note = f"{censored}, {ratio.bound} this" if ratio.bound else censored
        return Seen(ratio.estimate, note=note if ratio.censored else "")

    return effect


def wins(arm: Arm, over: Arm) -> Effect:
    """The share of held-out prompts that an arm wins against another arm, less the share that it loses."""
    return lambda study: Seen(study.wins(arm, over))


def changed(arm: Arm) -> Effect:
    """An arm's mean expert change per update."""
    return lambda study: by_seed(change(study, arm), columns.bounds("expert_change_per_update"))


def routed(arm: Arm) -> Effect:
    """The share of the second moment of an arm's log-ratios that disappears when routes are pinned."""
    return lambda study: by_seed(study.routing_share(arm))


def fall(study: Study, arm: Arm) -> pd.Series:
    """The reward of the first step, sampled by the cold start, less the final reward, by seed."""
    return study.first(arm) - study.final(arm)


def change(study: Study, arm: Arm) -> pd.Series:
    """An arm's mean expert change per update, by seed."""
    return study.numbers(arm, "expert_change_per_update", "mean")
