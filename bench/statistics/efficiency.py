"""The cost of reward: steps, gradient updates, samples, tokens or seconds until a run reaches it; arms compared."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.stats import binom  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.statistics.estimates import DIFFERENCE, LEVEL, Estimate, over_seeds

# The stages that training needs. Probes and evaluations only measure a run, and their seconds do not count.
_SECONDS = ("rollout_seconds", "old_policy_seconds", "update_seconds")
# The metrics that ``costs`` reads.
METRICS = ("prompts_sampled", "tokens_sampled", *_SECONDS)


@dataclass(frozen=True)
class Reached:
    """The cost of a run until it first reached a reward, or its whole cost if it never did."""

    cost: float
    reached: bool


@dataclass(frozen=True)
class CostRatio(Estimate):
    """How many times as much one arm needs as another; above 1 the other is the cheaper.

    ``n`` counts the seeds in which at least one arm reached the reward. ``mean`` is over them: the geometric mean, or
    the median if a seed is censored. An end of 0 or infinity means no limit on that side.
    """

    bound: Literal["", "at least", "at most"] = ""
    """Whether the estimate is only a bound; it is one if an arm missed the reward in at least half of the seeds."""
    censored: int = 0
    """The number of seeds in which exactly one arm reached the reward."""

    def __str__(self) -> str:
        shown = {"": "", "at least": "> ", "at most": "< "}[self.bound] + super().__str__()
        shown = "–" if np.isnan(self.mean) else shown
        of = f", {self.censored} censored" if self.censored else ""
        return f"{shown} (n = {self.n}{of})"


def costs(steps: pd.DataFrame, updates_per_rollout: int, responses: float) -> pd.DataFrame:
    """Return the cumulative updates, samples, tokens and seconds of a run after every step, from its ``steps`` table.

    ``responses`` is the number of responses per prompt, nan if unknown. ``samples`` and ``tokens`` include dropped
    groups. ``seconds`` count sampling, the old policy's forward and the updates, and no measurement. A cost without its
    columns, as in a run of another trainer, is nan.
    """
    steps = steps.sort_values("step").reset_index(drop=True)
    steps = steps.reindex(columns=[*dict.fromkeys([*steps.columns, *METRICS])])
    return pd.DataFrame(
        {
            "updates": steps["step"] * updates_per_rollout,
            "samples": steps["prompts_sampled"].cumsum() * responses,
            "tokens": steps["tokens_sampled"].cumsum(),
            "seconds": steps[list(_SECONDS)].sum(axis=1, min_count=1).cumsum(),
        }
    )


def cost_to_reward(reward: pd.Series, cost: pd.Series, target: float, window: int) -> Reached:
    """Return the cost at the first step whose average reward over the last ``window`` steps is at least ``target``.

    ``reward`` and ``cost`` are in the order of the steps. A run that never reaches the target is right-censored at its
    whole cost. In a run shorter than the window the average covers the whole run.
    """
    average = reward.rolling(min(window, len(reward))).mean().to_numpy()
    there = np.flatnonzero(average >= target)
    return Reached(float(cost.iloc[there[0] if len(there) else -1]), bool(len(there)))


def cost_ratio(a: dict[Any, Reached], b: dict[Any, Reached]) -> CostRatio:
    """Return the cost of a over cost of b, seed by seed: what one needs for each unit of the other.

    Seeds in which neither arm reached the reward are left out. If both arms reached it in all other seeds, the estimate
    is the geometric mean with the interval of ``estimates.over_seeds``.

    Otherwise some seeds are censored. A run that missed the reward would have cost an unknown amount more than it
    spent, so the ratio of its seed is only bounded: from below if a missed the reward, from above if b did. The
    estimate is then the median over seeds, which needs no guess: it lies between the median of the lower bounds and the
    median of the upper bounds. If these two medians differ, the finite one is returned as a ``bound``, or nan if both
    or none are finite. The interval (``_median``, from six seeds on) holds the median of any distribution; a side that
    the data do not bound has no limit.
    """
    shared = sorted(a.keys() & b.keys())
    seeds = [seed for seed in shared if a[seed].reached or b[seed].reached]
    censored = sum(not (a[seed].reached and b[seed].reached) for seed in seeds)
    ratios = np.array([a[seed].cost / b[seed].cost for seed in seeds])
    if not censored:
        return CostRatio(**vars(over_seeds(ratios.tolist(), log=True)))
    below = np.where([b[seed].reached for seed in seeds], ratios, 0.0)
    above = np.where([a[seed].reached for seed in seeds], ratios, np.inf)
    least, most = _median(below), _median(above)
    bound: Literal["", "at least", "at most"] = ""
    mean = np.nan  # with limits on both sides, or on none
    if least.mean == most.mean:
        mean = least.mean
    elif least.mean > 0 and np.isinf(most.mean):
        bound, mean = "at least", least.mean
    elif least.mean == 0 and not np.isinf(most.mean):
        bound, mean = "at most", most.mean
    return CostRatio(mean, least.low, most.high, len(seeds), bound, censored)


def _median(numbers: np.ndarray) -> Estimate:
    """The median with the sign test's interval between two order statistics (Thompson 1936); infinities count.

    The interval holds the median of any distribution at least 95 % of the time, and needs six numbers.
    """
    ordered, n = np.sort(numbers), len(numbers)
    place = int(binom.ppf((1 - LEVEL) / 2, n, 0.5))  # at most this many numbers lie outside on either side
    low = high = np.nan
    if place >= 1:
        low, high = float(ordered[place - 1]), float(ordered[n - place])
    with np.errstate(divide="ignore"):  # an even n has two middle numbers: their geometric mean, 0 and ∞ included
        middle = float(np.exp(np.log(ordered[[(n - 1) // 2, n // 2]]).mean()))
    return Estimate(middle, low, high, n)


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
