"""Reinforcement works: reward rises by more than its noise over seeds, for every algorithm by itself."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from steadymoe import algorithms
from steadymoe.bench import collect, compose, record, run, stats

# One of each kind: token clip, sequence clip, dynamic sampling, capped weight, mask with a weight, divergence mask.
CORE_SIX = ("grpo", "gspo", "dapo", "cispo", "minirl", "dppo")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learning")


def rise(folder: Path) -> float:
    """Mean reward of the last five steps minus that of the first three."""
    reward = record.read_table(folder, "steps")["reward"].to_numpy()
    return float(reward[-5:].mean() - reward[:3].mean())


@pytest.mark.parametrize("algorithm", CORE_SIX)
def test_it_raises_reward_by_more_than_its_noise_over_seeds(results: Path, algorithm: str) -> None:
    words = ["experiment=every_algorithm", f"algorithm={algorithm}", "steps=24", "evaluation.every=24"]
    planned = compose.plan([*words, "task.max_operands=3", f"results_dir={results}"])
    assert [run.execute(made) for made in planned] == ["finished"] * 3
    estimate = stats.mean_over_seeds([rise(made.folder) for made in planned])
    assert estimate.n == 3
    assert estimate.low > 0


@pytest.mark.check
@pytest.mark.parametrize("algorithm", algorithms.names())
def test_it_raises_reward_in_the_recorded_runs_of_make_check(algorithm: str) -> None:
    """Reads what `make check` has just run into ``results/``."""
    runs = collect.runs(Path(__file__).parent.parent / "results", "every_algorithm")
    ours = runs[runs["algorithm"] == algorithm]
    estimate = stats.mean_over_seeds([rise(Path(folder)) for folder in ours["folder"]])
    assert estimate.n == 3
    assert estimate.low > 0


def test_the_committed_table_of_make_check_has_every_algorithm_and_each_rose() -> None:
    table = pd.read_csv(
        Path(__file__).parent.parent / "results" / "reference" / "tables" / "every_algorithm-summary.csv"
    )
    assert set(table["arm"]) == set(algorithms.names())
    assert (table["n"] == 3).all()
    assert (table["diverged"] == 0).all()
    assert table["final reward mean"].is_monotonic_decreasing


def test_without_learning_there_is_no_rise(results: Path) -> None:
    words = ["experiment=quickstart", "algorithm=grpo", "seed=0", "steps=24", "task.max_operands=3"]
    words += ["optimizer.learning_rate=0", "experiment_name=frozen", f"results_dir={results}"]
    (made,) = compose.plan(words)
    run.execute(made)
    reward = record.read_table(made.folder, "steps")["reward"].to_numpy()
    assert abs(np.mean(reward[-5:]) - np.mean(reward[:3])) < 0.1
