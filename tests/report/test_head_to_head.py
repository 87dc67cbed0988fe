"""Every arm against the best one, on curves whose answers are known."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from steadymoe.bench.report import tables, write
from steadymoe.bench.statistics.comparisons import seeds_needed
from steadymoe.bench.statistics.survival import logrank

SEEDS = range(4)


def steps_of(arm: str, seed: int, reward: list[float], tokens: float, ended: int | None = None) -> pd.DataFrame:
    """Rows of one run; after step ``ended`` it is lost, as ``archive.steps`` tells it."""
    rows = []
    for step, value in enumerate(reward, start=1):
        lost = ended is not None and step > ended
        metrics = {"reward": 0.0 if lost else value}
        if not lost:
            metrics |= {"prompts_sampled": 4.0, "tokens_sampled": tokens, "rollout_seconds": 1.0}
            metrics |= {"old_policy_seconds": 0.5, "update_seconds": 0.5}
        rows += [{"arm": arm, "seed": seed, "step": step, "metric": k, "value": v} for k, v in metrics.items()]
    return pd.DataFrame(rows)


def runs_of(*arms: str) -> pd.DataFrame:
    shared = {"updates_per_rollout": 2, "responses": 8, "steps": 40, "judged_until": 40}
    rows = [{"arm": arm, "seed": seed, "collapsed_step": np.nan} | shared for arm in arms for seed in SEEDS]
    return pd.DataFrame(rows)


def rising(steps: int, of: int = 40) -> list[float]:
    """From 0 to 0.8 in as many steps, then level."""
    return [0.8 * min(1.0, (step - 1) / (steps - 1)) for step in range(1, of + 1)]


def evaluations(wins: dict[str, list[float]]) -> pd.DataFrame:
    rows = [
        {"arm": arm, "seed": seed, "prompt": str(index), "score": score}
        for arm, scores in wins.items()
        for seed in SEEDS
        for index, score in enumerate(scores)
    ]
    return pd.DataFrame(rows, columns=["arm", "seed", "prompt", "score"])


def compared(slow: list[float], ended: int | None = None) -> pd.Series:
    parts = [steps_of("fast", seed, [value + 0.01 * seed for value in rising(11)], 10.0) for seed in SEEDS]
    parts += [steps_of("slow", seed, [value + 0.01 * seed - 0.001 for value in slow], 20.0, ended) for seed in SEEDS]
    answers = evaluations({"fast": [1, 1, 0, 1], "slow": [1, 0, 0, 0]})
    made = tables.head_to_head(pd.concat(parts), runs_of("fast", "slow"), answers)
    assert made["arm"].tolist() == ["slow"]
    assert made["against"].tolist() == ["fast"]
    return made.iloc[0]


def cost(row: pd.Series, unit: str) -> Any:
    (found,) = [cell for name, cell in row.items() if str(name).startswith(f"{unit} to ")]
    return found


def test_differences_wins_and_costs_match_the_curves() -> None:
    row = compared(rising(21))
    assert row["final reward, difference"].mean == pytest.approx(-0.001)
    assert row["p (Holm)"] == 2 / 2**4
    assert row["better"].mean == 0
    assert row["held-out wins"].mean == -0.5
    updates, tokens = cost(row, "updates"), cost(row, "tokens")
    # Averaged over five steps both lag by two: about twice as long, and each step costs twice the tokens.
    assert 1.6 < updates.mean < 2.0
    assert tokens.mean == pytest.approx(2 * updates.mean)
    assert updates.bound == ""
    assert updates.n == len(SEEDS)
    # The target is nine tenths of the gain.
    name = next(str(name) for name in row.index if str(name).startswith("updates to "))
    first = np.mean([0.01 * seed - 0.0005 for seed in SEEDS])
    assert float(name.split()[-1]) == pytest.approx(first + 0.9 * (0.815 - first), abs=1e-3)


def test_detectable_difference_and_seeds_follow_from_the_spread_over_seeds() -> None:
    levels = {"fast": [0.8, 0.8, 0.8, 0.8], "slow": [0.5, 0.6, 0.7, 0.8], "calm": [0.7] * 4}
    parts = [steps_of(arm, seed, [0.1] + [by[seed]] * 39, 10.0) for arm, by in levels.items() for seed in SEEDS]
    made = tables.head_to_head(pd.concat(parts), runs_of(*levels), evaluations({})).set_index("arm")
    found, spread = made.loc["slow", "detectable"], np.std(levels["slow"], ddof=1)
    assert seeds_needed(spread, found * 1.0001) == len(SEEDS)
    assert seeds_needed(spread, found * 0.9999) == len(SEEDS) + 1
    assert made.loc["slow", "seeds for 0.05"] == seeds_needed(spread, 0.05) > len(SEEDS)
    of_calm = made.loc[["calm"], ["detectable", "seeds for 0.05"]]
    assert of_calm.isna().all(axis=None), "differences that do not vary have no known spread"
    assert f"| {seeds_needed(spread, 0.05)} " in write.to_markdown(made.reset_index())


def test_arm_that_never_reaches_the_reward_has_a_bound() -> None:
    row = compared([0.3] * 40)
    samples = cost(row, "samples")
    assert samples.bound == "at least"
    assert str(samples).startswith("> ")
    assert write.to_numbers(pd.DataFrame([row]))[[f"{name} bound" for name in row.index if "samples" in name]].size == 1


def test_diverged_run_counts_its_cost_until_it_ended() -> None:
    short, long = (cost(compared([0.3] * 40, ended), "updates") for ended in (10, None))
    assert short.mean == pytest.approx(long.mean / 4)
    assert cost(compared(rising(21), ended=0), "updates").n == 0  # it could not even be sampled


def test_log_without_tokens_is_compared_in_updates_and_seconds() -> None:
    """As of verl, whose steps have seconds and no counts."""
    parts = [steps_of("fast", seed, rising(11), 10.0) for seed in SEEDS]
    parts += [steps_of("slow", seed, rising(21), 10.0) for seed in SEEDS]
    steps = pd.concat(parts)
    steps = steps[~steps["metric"].isin(["prompts_sampled", "tokens_sampled"])]
    row = tables.head_to_head(steps, runs_of("fast", "slow"), evaluations({})).iloc[0]
    costs = {str(name).split()[0]: cell for name, cell in row.items() if " to 0." in str(name)}
    assert {unit: cost.n for unit, cost in costs.items()} == {"updates": 4, "samples": 0, "tokens": 0, "seconds": 4}
    assert 1.6 < costs["updates"].mean < 2.0
    assert costs["seconds"].mean == pytest.approx(costs["updates"].mean)


def test_collapses_are_compared_by_log_rank() -> None:
    arms = {"fast": [np.nan] * 4, "slow": [5.0, 6.0, 8.0, np.nan], "calm": [np.nan] * 4}
    runs = runs_of(*arms)
    runs["collapsed_step"] = [step for steps in arms.values() for step in steps]
    steps = pd.concat([steps_of(arm, seed, [0.5 + 0.1 * (arm == "fast")] * 40, 10.0) for arm in arms for seed in SEEDS])
    made = tables.head_to_head(steps, runs, evaluations({})).set_index("arm")["p of collapse (Holm)"]
    p = logrank(np.array([5, 6, 8, 40]), np.array([True] * 3 + [False]), np.full(4, 40), np.zeros(4, bool))
    # Two comparisons, fast and calm with slow: where nobody collapsed there is none.
    assert made["slow"] == pytest.approx(2 * p)
    assert 0 < p < 0.1
    assert np.isnan(made["calm"])


def test_cost_is_left_out_if_the_best_arm_gains_nothing() -> None:
    falling = [0.8 - 0.01 * step for step in range(40)]
    parts = [
        steps_of(arm, seed, [value - lower for value in falling], 10.0)
        for arm, lower in (("a", 0.0), ("b", 0.1))
        for seed in SEEDS
    ]
    made = tables.head_to_head(pd.concat(parts), runs_of("a", "b"), evaluations({}))
    assert not [name for name in made if " to " in str(name)]
    assert made["final reward, difference"].iloc[0].mean == pytest.approx(-0.1)


def test_arms_with_different_prompts_have_no_win_rate() -> None:
    answers = evaluations({"fast": [1.0, 0.0], "slow": [1.0, 1.0]})
    answers.loc[answers["arm"] == "slow", "prompt"] += "?"
    parts = [steps_of(arm, seed, rising(11), 10.0) for arm in ("fast", "slow") for seed in SEEDS]
    made = tables.head_to_head(pd.concat(parts), runs_of("fast", "slow"), answers)
    assert made["held-out wins"].iloc[0].n == 0
    assert "–" in write.to_markdown(made)
