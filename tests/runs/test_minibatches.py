"""Everything is counted in gradient updates: prompts and rollouts follow from the updates per rollout."""

import pytest

from steadymoe.bench.runs import compose, identity


@pytest.mark.parametrize(("per_rollout", "rollouts"), [(1, 33), (4, 9), (16, 3)])
def test_rollouts_and_prompts_follow_from_updates(per_rollout: int, rollouts: int) -> None:
    words = [f"updates_per_rollout={per_rollout}", "minibatch_prompts=3", "updates=33"]
    (made,) = compose.plan([*words, "checkpoint_keep=5"])
    assert (made.config.prompts, made.config.rollouts) == (3 * per_rollout, rollouts)
    assert made.config.in_rollouts(made.config.evaluation.every) == -(-40 // per_rollout)
    assert made.config.kept_rollout == {1: 5, 4: 2, 16: 1}[per_rollout]


def test_sweep_points_share_settings_but_not_folders() -> None:
    words = ["experiment=tolerance_staleness", "algorithm=gspo", "seed=0", "updates_per_rollout=4,8,16"]
    runs = compose.plan(words, multirun=True)
    assert [run.config.prompts for run in runs] == [32, 64, 128]
    assert [run.config.rollouts for run in runs] == [128, 64, 32]
    swept = {key for run in runs for key in run.axes}
    assert len({identity.settings_hash(run.plain, swept) for run in runs}) == 1
    assert len({run.folder for run in runs}) == len({run.config_hash for run in runs}) == 3
    other = compose.plan([*words, "minibatch_prompts=2"], multirun=True)
    assert {run.folder for run in runs}.isdisjoint(run.folder for run in other)
