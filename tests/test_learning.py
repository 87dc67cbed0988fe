"""Reinforcement works: reward rises by more than its noise over seeds."""

from pathlib import Path

import numpy as np
import pytest

from steadymoe.bench import compose, record, run, stats


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learning")


def rises(results: Path, algorithm: str) -> list[float]:
    """Per seed: mean reward of the last five of 24 steps minus that of the first three."""
    words = ["experiment=quickstart", f"algorithm={algorithm}", "steps=24", "task.max_operands=3"]
    found = []
    for made in compose.plan([*words, "evaluation.every=24", f"results_dir={results}"]):
        assert run.execute(made) == "finished"
        reward = record.read_table(made.folder, "steps")["reward"].to_numpy()
        found.append(float(reward[-5:].mean() - reward[:3].mean()))
    return found


def test_grpo_raises_reward_by_more_than_its_noise_over_seeds(results: Path) -> None:
    estimate = stats.mean_over_seeds(rises(results, "grpo"))
    assert estimate.n == 3
    assert estimate.low > 0


def test_without_learning_there_is_no_rise(results: Path) -> None:
    words = ["experiment=quickstart", "algorithm=grpo", "seed=0", "steps=24", "task.max_operands=3"]
    words += ["optimizer.learning_rate=0", "experiment_name=frozen", f"results_dir={results}"]
    (made,) = compose.plan(words)
    run.execute(made)
    reward = record.read_table(made.folder, "steps")["reward"].to_numpy()
    assert abs(np.mean(reward[-5:]) - np.mean(reward[:3])) < 0.1
