"""Every arm against the best one, on curves whose answers are known."""

import pandas as pd
import pytest
from scipy import stats as scipy_stats
from small_figures import curve_table

from steadymoe.bench.report import tables, write

SEEDS = range(5)
FAST = [0.8 + 0.01 * seed for seed in SEEDS]


def steps_of(levels: dict[str, list[float]], first: float | None = None) -> pd.DataFrame:
    """Five steps at the level of each seed, after a first one of its own if there is one."""
    curves = {arm: [[level if first is None else first, *[level] * 5] for level in by] for arm, by in levels.items()}
    return curve_table(curves).assign(step=lambda table: table["step"] - 1)


def evaluations(answers: dict[str, list[float]]) -> pd.DataFrame:
    rows = [
        (arm, seed, str(index), score)
        for arm, scores in answers.items()
        for seed in SEEDS
        for index, score in enumerate(scores)
    ]
    return pd.DataFrame(rows, columns=["arm", "seed", "prompt", "score"])


PLAIN = steps_of({"fast": FAST, "slow": [level - 0.1 for level in FAST]})


def test_differences_and_wins_match_the_curves() -> None:
    answers = evaluations({"fast": [1, 1, 0, 1], "slow": [1, 0, 0, 0]})
    made = tables.head_to_head(PLAIN, answers)
    assert made[["arm", "against", "n"]].to_numpy().tolist() == [["slow", "fast", 5]]
    row = made.iloc[0]
    assert row["final reward, difference"].mean == pytest.approx(-0.1)
    assert row["p (Holm)"] == 2 / 2**5
    assert row["better"].mean == 0
    assert row["held-out wins"].mean == -0.5
    assert tables.head_to_head(PLAIN.query("arm == 'fast'"), answers).empty


def test_arms_with_different_prompts_have_no_win_rate() -> None:
    answers = evaluations({"fast": [1.0, 0.0], "slow": [1.0, 1.0]})
    answers.loc[answers["arm"] == "slow", "prompt"] += "?"
    made = tables.head_to_head(PLAIN, answers)
    assert made["held-out wins"].iloc[0].n == 0
    assert "–" in write.to_markdown(made)


def test_arms_that_begin_at_other_cold_starts_are_not_paired() -> None:
    """A dense twin: on each seed it begins elsewhere, and noise of the seeds does not cancel."""
    levels = {"fast": [0.5, 0.6, 0.7, 0.8, 0.9], "slow": [0.4, 0.5, 0.6, 0.7, 0.8], "dense": [0.41, 0.5, 0.6, 0.7, 0.8]}
    steps = steps_of(levels, first=0.3)
    is_dense = steps["arm"] == "dense"
    steps.loc[is_dense & (steps["step"] == 0), "value"] = 0.32
    steps["start"] = is_dense.astype(str) + " " + steps["seed"].astype(str)
    assert tables.starts_differ(steps)
    made = tables.head_to_head(steps, evaluations({})).set_index("arm")
    twin, paired = made.loc["dense", "final reward, difference"], made.loc["slow", "final reward, difference"]
    expected = scipy_stats.ttest_ind(levels["dense"], levels["fast"], equal_var=False)
    assert (twin.mean, twin.n) == (pytest.approx(-0.098), 5)
    assert [twin.low, twin.high] == pytest.approx([*expected.confidence_interval()])
    assert made.loc["dense", "gain, difference"].mean == pytest.approx(-0.118)
    assert made.loc["dense", "better"].n == 0
    assert made.loc["slow", "p (Holm)"] < 0.2 < made.loc["dense", "p (Holm)"]
    assert (paired.mean, paired.n) == (pytest.approx(-0.1), 5)
    without = tables.head_to_head(steps.drop(columns="start"), evaluations({}))
    assert "gain, difference" not in without
    assert without.set_index("arm").loc["dense", "p (Holm)"] < 0.01, "paired, as it was"
