"""Effects that outcomes of claims are about: each takes arms, and gives what computes an estimate from the study."""

from collections.abc import Callable

import pandas as pd

from steadymoe.bench.claims.arms import GRPO, GSPO, NARROW, TUNED, WIDE
from steadymoe.bench.claims.study import Arm, Study, factor
from steadymoe.bench.stats import Estimate, over_seeds


def best(study: Study, name: str) -> Arm:
    """The arm at ten seeds whose setting has the highest mean final reward over the seeds that were left out."""
    tuned = max(TUNED[name].values(), key=lambda arm: study.final(arm).mean())
    if "algorithm.loss.clip_low" in tuned.axes:
        return tuned._replace(experiment="study_bands")
    return tuned._replace(experiment="study_rates" if "optimizer.learning_rate" in tuned.axes else "study")


def gain(arm: Arm, over: Arm) -> Callable[[Study], Estimate]:
    """Final reward of one arm less another's, paired by seed."""
    return lambda study: study.gain(arm, over)


def clipped(arm: Arm, over: Arm) -> Callable[[Study], Estimate]:
    """Mean clip fraction of one arm over another's, as a factor."""
    return lambda study: factor(*(study.numbers(each, "clip_fraction", "mean") for each in (arm, over)))


def warning(metric: str, lead: int = 1) -> Callable[[Study], Estimate]:
    """Area under the ROC curve of a metric, ``lead`` steps before a collapse, for GRPO and GSPO at both bands."""
    return lambda study: study.warning_area([GRPO, GSPO, NARROW, WIDE], metric, lead)


def changed(arm: Arm) -> Callable[[Study], Estimate]:
    """An arm's mean expert change per update."""
    return lambda study: over_seeds(change(study, arm).tolist())


def routed(arm: Arm) -> Callable[[Study], Estimate]:
    """The share of an arm's log-ratio second moment that goes with pinned routes."""
    return lambda study: over_seeds(study.routing_share(arm).tolist())


def fall(study: Study, arm: Arm) -> pd.Series:
    """What an arm loses from its first step's reward, which is the cold start's, to its final one, by seed."""
    return study.first(arm) - study.final(arm)


def change(study: Study, arm: Arm) -> pd.Series:
    """An arm's mean expert change per update, by seed."""
    return study.numbers(arm, "expert_change_per_update", "mean")


def mean_difference(ours: pd.Series, theirs: pd.Series) -> Estimate:
    """Of numbers by seed, also where a seed is not the same cold start."""
    return over_seeds((ours - theirs).dropna().tolist())
