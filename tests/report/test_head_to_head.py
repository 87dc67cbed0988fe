"""Every arm against the best one, on curves whose answers are known."""

import pandas as pd
import pytest

from steadymoe.bench.report import tables, write

SEEDS = range(5)
FINALS = {"fast": 0.8, "slow": 0.7}


def steps_of() -> pd.DataFrame:
    rows = [
        {"arm": arm, "seed": seed, "step": step, "metric": "reward", "value": final + 0.01 * seed}
        for arm, final in FINALS.items()
        for seed in SEEDS
        for step in range(1, 6)
    ]
    return pd.DataFrame(rows)


def evaluations(answers: dict[str, list[float]]) -> pd.DataFrame:
    rows = [
        {"arm": arm, "seed": seed, "prompt": str(index), "score": score}
        for arm, scores in answers.items()
        for seed in SEEDS
        for index, score in enumerate(scores)
    ]
    return pd.DataFrame(rows, columns=["arm", "seed", "prompt", "score"])


def test_differences_and_wins_match_the_curves() -> None:
    answers = evaluations({"fast": [1, 1, 0, 1], "slow": [1, 0, 0, 0]})
    made = tables.head_to_head(steps_of(), answers)
    assert made[["arm", "against", "n"]].to_numpy().tolist() == [["slow", "fast", 5]]
    row = made.iloc[0]
    assert row["final reward, difference"].mean == pytest.approx(-0.1)
    assert row["p (Holm)"] == 2 / 2**5
    assert row["better"].mean == 0
    assert row["held-out wins"].mean == -0.5
    assert tables.head_to_head(steps_of().query("arm == 'fast'"), answers).empty


def test_arms_with_different_prompts_have_no_win_rate() -> None:
    answers = evaluations({"fast": [1.0, 0.0], "slow": [1.0, 1.0]})
    answers.loc[answers["arm"] == "slow", "prompt"] += "?"
    made = tables.head_to_head(steps_of(), answers)
    assert made["held-out wins"].iloc[0].n == 0
    assert "–" in write.to_markdown(made)
