"""Fixed mini-batches: prompts and steps that follow from the updates per rollout."""

from pathlib import Path

import pytest

from steadymoe.bench.runs import compose, identity
from steadymoe.bench.schema import ConfigError


def only(tmp_path: Path, *words: str) -> compose.Run:
    (made,) = compose.plan([*words, f"results_dir={tmp_path}"])
    return made


@pytest.mark.parametrize("updates", [1, 4, 16])
def test_prompts_grow_with_updates_at_a_fixed_mini_batch(updates: int, tmp_path: Path) -> None:
    made = only(tmp_path, f"updates_per_rollout={updates}", "rollout.minibatch_prompts=3", "total_updates=33")
    assert made.config.rollout.prompts == 3 * updates
    assert made.config.steps == {1: 33, 4: 9, 16: 3}[updates]  # rounded up
    assert {"rollout.prompts", "steps"}.isdisjoint(made.axes)  # what they follow from names the run
    assert made.axes["rollout.minibatch_prompts"] == 3


def test_sweep_points_share_settings_but_not_folders(tmp_path: Path) -> None:
    words = ["experiment=staleness", "algorithm=gspo", "seed=0", f"results_dir={tmp_path}"]
    runs = compose.plan(words, multirun=True)
    assert [run.config.rollout.prompts for run in runs] == [16, 32, 64]
    assert [run.config.steps for run in runs] == [40, 20, 10]
    swept = {key for run in runs for key in run.axes}
    assert len({identity.settings_hash(run.plain, swept) for run in runs}) == 1
    assert len({run.folder for run in runs}) == len({run.config_hash for run in runs}) == 3
    other = compose.plan([*words, "rollout.minibatch_prompts=2"], multirun=True)
    assert {run.folder for run in runs}.isdisjoint(run.folder for run in other)


def test_null_minibatch_prompts_fixes_the_rollout_size(tmp_path: Path) -> None:
    words = ["experiment=staleness", "rollout.minibatch_prompts=null", "seed=0", f"results_dir={tmp_path}"]
    runs = compose.plan(words, multirun=True)
    assert {run.config.rollout.prompts for run in runs} == {32}
    assert {run.config.updates_per_rollout for run in runs} == {4, 8, 16}


def test_settings_in_updates_scale_with_staleness() -> None:
    words = ["evaluation.every_updates=8", "probe.every_updates=3", "rollout.minibatch_prompts=2", "total_updates=16"]
    for updates, expected in ((4, (2, 1, 4)), (1, (8, 3, 16))):
        config = compose.plan([*words, f"updates_per_rollout={updates}"])[0].config
        assert (config.evaluation.every, config.probe.every, config.steps) == expected
    with pytest.raises(ConfigError, match=r"means evaluation\.every=2, but 5 was given"):
        compose.plan([*words, "updates_per_rollout=4", "evaluation.every=5"])
