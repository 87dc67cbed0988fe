"""Every arm of an experiment against the best arm, seed by seed: reward, held-out prompts, and the cost of reward."""

from contextlib import suppress
from itertools import combinations

import numpy as np
import pandas as pd

from steadymoe.bench.measurement import columns
from steadymoe.bench.report import tables
from steadymoe.bench.statistics.comparisons import holm, probability_of_improvement, ranking
from steadymoe.bench.statistics.efficiency import METRICS, Reached, cost_ratio, cost_to_reward, costs, win_rate
from steadymoe.bench.statistics.estimates import INTERVAL, Estimate
from steadymoe.bench.statistics.survival import logrank, of_runs

# The cost of this reward is compared: this share of the way from the first step's to the best arm's final reward.
PART_OF_THE_GAIN = 0.9
COMPARED = ("updates", "samples", "tokens", "seconds")
CAPTION = (
    f"Every arm against the best arm (highest final reward) over their shared seeds, with {INTERVAL}; arms share the "
    "cold start of a shared seed. p: exact sign-flip test of the paired differences, Holm-corrected for all pairs of "
    "arms; p of collapse: log-rank test of the steps to a collapse by today's rule, corrected in the same way; it "
    "treats runs as independent. Better: P(arm > best) + P(equal)/2 over seeds (Clopper and Pearson's interval). "
    "Held-out wins: the share of held-out prompts that the arm answers better minus the share that the best arm "
    "answers better. The "
    "other columns are training efficiency: the cost of the arm divided by the cost of the best arm, in updates, "
    "samples, tokens and seconds (sampling, the old policy's forward, updates), until the mean reward over "
    f"{tables.LAST_STEPS} steps has made {PART_OF_THE_GAIN:.0%} of the way from the first step's reward to the best "
    "arm's final reward (left out if the best arm gained nothing). n counts the seeds in which at least one of the two "
    "arms reached that reward. Geometric mean, or, if one arm missed the reward in some seeds (censored), the median "
    "with the sign test's interval (none below six seeds). >: the median is higher by an unknown amount, <: lower."
)


def table(steps: pd.DataFrame, runs: pd.DataFrame, evaluations: pd.DataFrame) -> pd.DataFrame:
    """One row per arm except the best arm, the highest final reward first; empty for a single arm.

    ``steps``, ``runs`` and ``evaluations`` are the tables of ``archive.load`` for one experiment.
    """
    rewards = tables.final_rewards(steps)
    ranked = ranking(rewards, bounds=columns.bounds("reward"))
    if len(ranked) < 2:
        return pd.DataFrame()
    best = ranked["arm"].iloc[0]
    finals = {str(arm): each.set_index("seed")["value"] for arm, each in rewards.groupby("arm")}
    goal = target(steps, finals[best].mean())
    costs_of = {}
    if goal is not None:
        costs_of = {str(arm): spent(steps[steps["arm"] == arm], ours, goal) for arm, ours in runs.groupby("arm")}
    answers = {str(arm): each for arm, each in evaluations.groupby("arm")}
    p_collapse = _log_rank(runs, best)
    rows = []
    for row in ranked[ranked["arm"] != best].to_dict("records"):
        arm = row["arm"]
        rows.append(
            {"arm": arm, "against": best, "n": row["difference"].n, "final reward, difference": row["difference"]}
            | {"p (Holm)": row["p_corrected"], "p of collapse (Holm)": p_collapse[arm]}
            | {"better": probability_of_improvement(finals[arm], finals[best])}
            | {"held-out wins": _wins(answers.get(arm), answers.get(best))}
            | {
                f"{unit} to {goal:.3g}": cost_ratio(costs_of[arm][unit], costs_of[best][unit])
                for unit in costs_of.get(arm, ())
            }
        )
    return pd.DataFrame(rows)


def _wins(ours: pd.DataFrame | None, best: pd.DataFrame | None) -> Estimate:
    """``win_rate``; n = 0 if an arm has no evaluation, or another task and therefore other prompts."""
    if ours is not None and best is not None:
        with suppress(ValueError):
            return win_rate(ours, best)
    return Estimate(np.nan, np.nan, np.nan, 0)


def _log_rank(runs: pd.DataFrame, best: str) -> dict[str, float]:
    """Arm → p-value of the log-rank test that it collapses at the best arm's rate, corrected for all pairs of arms."""
    collapses = {str(arm): of_runs(ours) for arm, ours in runs.groupby("arm")}
    pairs = list(combinations(collapses, 2))
    corrected = holm([logrank(*collapses[one], *collapses[other]) for one, other in pairs])
    of_best = {frozenset(pair): float(p) for pair, p in zip(pairs, corrected, strict=True) if best in pair}
    return {arm: of_best[frozenset((arm, best))] for arm in collapses if arm != best}


def target(steps: pd.DataFrame, best: float) -> float | None:
    """The reward whose cost is compared, from the best arm's final reward ``best``; None if that arm gained nothing."""
    rewards = steps[steps["metric"] == "reward"]
    first = rewards.loc[rewards["step"] == rewards["step"].min(), "value"].mean()
    return float(first + PART_OF_THE_GAIN * (best - first)) if best > first else None


def spent(steps: pd.DataFrame, runs: pd.DataFrame, goal: float) -> dict[str, dict[int, Reached]]:
    """Unit of ``COMPARED`` → seed → cost until the arm reached the reward ``goal``."""
    by_unit: dict[str, dict[int, Reached]] = {unit: {} for unit in COMPARED}
    steps = steps[steps["metric"].isin(["reward", *METRICS])]
    for run in runs.to_dict("records"):
        ours = steps[steps["seed"] == run["seed"]]
        wide = ours.pivot(index="step", columns="metric", values="value").sort_index().reset_index()
        wide = wide.reindex(columns=list({*wide.columns, "tokens_sampled"}))
        wide = wide.dropna(subset="tokens_sampled")  # no step took place after a number that was not finite
        if wide.empty:
            continue
        so_far = costs(wide, int(run["updates_per_rollout"]), float(run["responses"]))
        for unit in [unit for unit in COMPARED if so_far[unit].notna().all()]:
            by_unit[unit][run["seed"]] = cost_to_reward(wide["reward"], so_far[unit], goal, tables.LAST_STEPS)
    return by_unit
