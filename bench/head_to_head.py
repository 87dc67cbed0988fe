"""Every arm of an experiment against its best one, seed by seed: reward, held-out prompts, and what reward costs."""

from typing import Any

import pandas as pd

from steadymoe.bench import tables
from steadymoe.bench.comparisons import holm, probability_of_improvement, ranking
from steadymoe.bench.efficiency import Reached, cost_ratio, cost_to_reward, costs, win_rate
from steadymoe.bench.stats import INTERVAL
from steadymoe.bench.survival import logrank

# The reward whose cost is compared: this share of the way from the first step's to the best arm's final reward.
PART_OF_THE_GAIN = 0.9
COMPARED = ("updates", "samples", "tokens", "seconds")
CAPTION = (
    f"Every arm against the one with the highest final reward, over the seeds that both have, with {INTERVAL}; where a "
    "seed is shared the cold start is. p: paired t test, Holm-corrected for all pairs of arms; p of collapse: log-rank "
    "test of the steps to a collapse, Holm-corrected for all other arms. Better: P(arm > best) + P(equal)/2 over seeds "
    "(Clopper and Pearson's interval). Held-out wins: share of held-out prompts that the arm answers better less the "
    "share that the best arm does. The rest is training efficiency: how many times as many updates, samples, tokens "
    "and seconds (of sampling, the old policy's forward and updates) as the best arm the arm needs until its reward, "
    f"averaged over {tables.LAST_STEPS} steps, is {PART_OF_THE_GAIN:.0%} of the way from the first step's to the best "
    "arm's final reward; geometric mean over seeds. ≥: in some seeds the arm never got there, and all that it spent is "
    "entered; ≤: the best arm did not."
)


def table(steps: pd.DataFrame, runs: pd.DataFrame, evaluations: pd.DataFrame) -> pd.DataFrame:
    """One row per arm but the best, highest final reward first; empty where there is one arm.

    ``steps``, ``runs`` and ``evaluations`` are those of ``collect`` for the ended runs of one experiment.
    """
    ranked = ranking(tables.final_rewards(steps))
    if len(ranked) < 2:
        return pd.DataFrame()
    best = ranked["arm"].iloc[0]
    finals = {str(arm): each.set_index("seed")["value"] for arm, each in tables.final_rewards(steps).groupby("arm")}
    target = _target(steps, finals[best].mean())
    spent = {str(arm): _spent(steps[steps["arm"] == arm], ours, target) for arm, ours in runs.groupby("arm")}
    answers = {str(arm): each for arm, each in evaluations.groupby("arm")}
    p_collapse = _log_rank(runs, best)
    rows = []
    for row in ranked[ranked["arm"] != best].to_dict("records"):
        arm = row["arm"]
        wins: dict[str, Any] = (
            {"held-out wins": win_rate(answers[arm], answers[best])} if {arm, best} <= answers.keys() else {}
        )
        rows.append(
            {"arm": arm, "against": best, "final reward, difference": row["difference"]}
            | {"p (Holm)": row["p_corrected"], "p of collapse (Holm)": p_collapse[arm]}
            | {"better": probability_of_improvement(finals[arm], finals[best])}
            | wins
            | {f"{unit} to {target:.3g}": cost_ratio(spent[arm][unit], spent[best][unit]) for unit in COMPARED}
        )
    return pd.DataFrame(rows)


def _log_rank(runs: pd.DataFrame, best: str) -> dict[str, float]:
    """By arm the p-value of a log-rank test that it collapses as the best one does, corrected for as many arms."""
    collapses = {
        str(arm): (ours["steps"].tolist(), [None if pd.isna(at) else float(at) for at in ours["diverged_step"]])
        for arm, ours in runs.groupby("arm")
    }
    others = [arm for arm in collapses if arm != best]
    return dict(zip(others, holm([logrank(*collapses[arm], *collapses[best]) for arm in others]), strict=True))


def _target(steps: pd.DataFrame, best: float) -> float:
    """The reward that is to be reached."""
    rewards = steps[steps["metric"] == "reward"]
    first = rewards.loc[rewards["step"] == rewards["step"].min(), "value"].mean()
    return float(first + PART_OF_THE_GAIN * (best - first))


def _spent(steps: pd.DataFrame, runs: pd.DataFrame, target: float) -> dict[str, dict[int, Reached]]:
    """What each seed of an arm spent until it reached ``target``, by unit."""
    found: dict[str, dict[int, Reached]] = {unit: {} for unit in COMPARED}
    for run in runs.to_dict("records"):
        ours = steps[steps["seed"] == run["seed"]]
        wide = ours.pivot(index="step", columns="metric", values="value").sort_index().reset_index()
        wide = wide.dropna(subset="tokens_sampled")  # steps after a number that was not finite never took place
        if wide.empty:
            continue
        spent = costs(wide, int(run["updates_per_rollout"]), int(run["responses"]))
        for unit in COMPARED:
            found[unit][run["seed"]] = cost_to_reward(wide["reward"], spent[unit], target, tables.LAST_STEPS)
    return found
