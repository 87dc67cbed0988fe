"""What reward costs: steps, gradient updates, samples, tokens or seconds to reach it, and arms head to head."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.stats import binom  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.statistics.estimates import DIFFERENCE, Estimate, over_seeds

# Columns of ``costs``.
COSTS = ("step", "updates", "samples", "tokens", "seconds")
# Stages that a training run needs; probes and evaluations only measure it.
_SECONDS = ("rollout_seconds", "old_policy_seconds", "update_seconds")


@dataclass(frozen=True)
class Reached:
    """What a run spent until it first reached a reward, or in all if it never did."""

    cost: float
    reached: bool


@dataclass(frozen=True)
class CostRatio:
    """How many times as much one arm needs as another; above 1 the other is the cheaper."""

    estimate: Estimate
    """Over the seeds in which at least one got there, n of them: the geometric mean, or where any is censored the
    median. An end of 0 or infinity is no limit."""
    bound: Literal["", "at least", "at most"]
    """What the estimate is, where one of the two did not reach the reward in half of the seeds or more."""
    censored: int
    """Seeds in which one of the two had not reached the reward when it ended."""
    neither: int
    """Seeds in which neither had; they say nothing and are left out."""

    def __str__(self) -> str:
        shown = {"": "", "at least": "> ", "at most": "< "}[self.bound] + str(self.estimate)
        shown = "–" if np.isnan(self.estimate.mean) else shown
        of = f", {self.censored} censored" if self.censored else ""
        return f"{shown} (n = {self.estimate.n}{of})"


def costs(steps: pd.DataFrame, updates_per_rollout: int, responses: int) -> pd.DataFrame:
    """What a run has spent after every step, from its ``steps`` table: the columns ``COSTS``, cumulative.

    ``samples`` and ``tokens`` are all that was sampled, dropped groups included; ``responses`` is that of each
    prompt. ``seconds`` are those of sampling, the old policy's forward and the updates, without measuring.
    """
    steps = steps.sort_values("step").reset_index(drop=True)
    return pd.DataFrame(
        {
            "step": steps["step"],
            "updates": steps["step"] * updates_per_rollout,
            "samples": steps["prompts_sampled"].cumsum() * responses,
            "tokens": steps["tokens_sampled"].cumsum(),
            "seconds": steps[list(_SECONDS)].sum(axis=1).cumsum(),
        }
    )


def cost_to_reward(reward: pd.Series, cost: pd.Series, target: float, window: int = 5) -> Reached:
    """The cost at the first step at which reward, averaged over the last ``window`` steps, is at least ``target``.

    ``reward`` and ``cost`` are in the order of the steps. A run that never gets there is right-censored at its whole
    cost. A run shorter than the window is averaged over what it has.
    """
    average = reward.rolling(min(window, len(reward))).mean().to_numpy()
    there = np.flatnonzero(average >= target)
    return Reached(float(cost.iloc[there[0] if len(there) else -1]), bool(len(there)))


def cost_ratio(a: dict[Any, Reached], b: dict[Any, Reached], level: float = 0.95) -> CostRatio:
    """Cost of a over cost of b, seed by seed: what one needs for each unit of the other.

    Seeds in which neither reached the reward are left out. Where both did in every other: the geometric mean with the
    interval of ``stats.over_seeds``. A run that did not get there would have cost more than all that it spent, and how
    much more is not known: the ratio of its seed lies above (a did not) or below (b did not). Then the median over
    seeds, which needs no guess: it lies between the median of the lower ends and the median of the upper ends. Where
    the two are not the same number the finite one is shown as a ``bound``; nan where there is none. Its interval holds
    the median whatever the distribution (``_median``), from six seeds on; the side on which nothing is known has no
    limit.
    """
    shared = sorted(a.keys() & b.keys())
    told = [seed for seed in shared if a[seed].reached or b[seed].reached]
    censored = sum(not (a[seed].reached and b[seed].reached) for seed in told)
    neither = len(shared) - len(told)
    ratios = np.array([a[seed].cost / b[seed].cost for seed in told])
    if not censored:
        return CostRatio(over_seeds(ratios.tolist(), level=level, log=True), "", 0, neither)
    below = np.where([b[seed].reached for seed in told], ratios, 0.0)
    above = np.where([a[seed].reached for seed in told], ratios, np.inf)
    least, most = _median(below, level), _median(above, level)
    bound: Literal["", "at least", "at most"] = "" if least.mean == most.mean else "at least"
    mean = least.mean
    if bound and not np.isinf(most.mean):
        bound, mean = "at most", most.mean
    if (bound == "at most" and least.mean > 0) or mean == 0:
        bound, mean = "", np.nan  # limits on both sides, or on none
    return CostRatio(Estimate(mean, least.low, most.high, len(told)), bound, censored, neither)


def _median(numbers: np.ndarray, level: float) -> Estimate:
    """The median and its interval between two order statistics, the sign test's (Thompson 1936); infinite ones count.

    Holds the median of any distribution at least as often as it says; none below six numbers at 95 %.
    """
    ordered, n = np.sort(numbers), len(numbers)
    place = int(binom.ppf((1 - level) / 2, n, 0.5))  # so many at most lie outside on either side
    low = high = np.nan
    if place >= 1:
        low, high = float(ordered[place - 1]), float(ordered[n - place])
    with np.errstate(divide="ignore"):  # of two in the middle the geometric mean, 0 and infinity included
        middle = float(np.exp(np.log(ordered[[(n - 1) // 2, n // 2]]).mean()))
    return Estimate(middle, low, high, n)


def win_rate(a: pd.DataFrame, b: pd.DataFrame, level: float = 0.95) -> Estimate:
    """Share of held-out prompts that a answers better less the share that b does, −1 to 1: mean over shared seeds.

    ``a`` and ``b`` are ``evaluations`` tables of one step each with a column seed: seed, prompt, score. A prompt that
    stands several times counts once, with its mean score. Raises ValueError where a seed's prompts differ.
    """
    scores = [frame.groupby(["seed", "prompt"])["score"].mean() for frame in (a, b)]
    seeds = sorted(set(a["seed"]) & set(b["seed"]))
    balances = []
    for seed in seeds:
        ours, theirs = (score.loc[seed] for score in scores)
        if not ours.index.equals(theirs.index):
            raise ValueError(f"the held-out prompts of seed {seed} differ between the arms")
        balances.append(float(np.sign(ours - theirs).mean()))
    return over_seeds(balances, level=level, bounds=DIFFERENCE)
