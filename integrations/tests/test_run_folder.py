"""The record of a run that another trainer makes, without that trainer."""

from pathlib import Path

import pytest

from steadymoe.bench.runs.run_folder import known
from steadymoe.integrations.trl import run_folder

NAMES = {"trainer": "trl", "experiment": "mine", "algorithm": "grpo", "model": "micro", "task": "chain"}
NAMES |= {"correction": "off", "routing": "off", "engine": "exact"}
CONFIG = {
    "seed": 0,
    "updates": 1,
    "updates_per_rollout": 1,
    "device": "cpu",
    "engine": {},
    "minibatch_prompts": 1,
    "rollout": {"responses": 2},
    "optimizer": {"learning_rate": 1e-3},
}


def live_record(folder: Path) -> run_folder.LiveRecord:
    return run_folder.LiveRecord(folder, run_folder.facts(NAMES, "1.0", {}, CONFIG, "python train.py"))


@pytest.mark.parametrize(
    ("is_whole", "error", "status"),
    [
        (True, ValueError, "finished"),  # an error after the end changes nothing
        (True, KeyboardInterrupt, "finished"),
        (False, ValueError, "failed"),
        (False, KeyboardInterrupt, "interrupted"),
    ],
)
def test_error_before_the_end_is_recorded(
    is_whole: bool, error: type[BaseException], status: str, tmp_path: Path
) -> None:
    def train() -> None:
        with live_record(tmp_path) as live:
            live.start(0, 1)
            if is_whole:
                finite = {"reward": 0.5, "loss": 0.0, "entropy": 1.0, "grad_norm": 1.0}
                live.add_step({"steps": [{"step": 1, "tokens_sampled": 2, **finite}]})
                live.close(is_whole=True)
            raise error("in the training, or after it")

    with pytest.raises(error):
        train()
    facts = known(tmp_path)
    assert facts["status"] == status
    assert (facts["error"] is not None) == (status == "failed")


def test_run_stopped_by_its_trainer_is_interrupted(tmp_path: Path) -> None:
    with live_record(tmp_path) as live:
        live.start(0, 2)
        live.close(is_whole=False)
    assert known(tmp_path)["status"] == "interrupted"
