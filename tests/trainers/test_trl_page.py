"""docs/on_your_trainer.md: its script, and what it says of costs and of runs side by side.

`make check-trainers` runs this file in an environment that has TRL.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

import side_by_side

from steadymoe.bench.report import archive, report_page

pytestmark = pytest.mark.trl

ROOT = Path(__file__).parents[2]


def test_the_pages_script_trains_by_every_command_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "on_your_trainer.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert '"max_steps": 40,' in script
    (tmp_path / "train_micro.py").write_text(script.replace('"max_steps": 40,', '"max_steps": 4,'))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = [line for line in page.splitlines() if re.match(r"(python|accelerate|torchrun) .*train_micro\.py", line)]
    commands = [line for line in commands if "olmoe" not in line]  # never run
    assert len(commands) == 4
    for command in commands:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        done = subprocess.run(command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert not done.returncode, done.stderr
    runs = archive.load(tmp_path / "results", "trl_micro", foreign=True)["runs"]
    axes = ["processes=1", "processes=2", "processes=2,sharded=experts", "processes=2,sharded=fsdp2"]
    assert set(runs["axes"]) == {f"engine=transformers,{each},trainer=trl" for each in axes}
    assert set(runs["status"]) == {"finished"}
    assert set(runs["model"]) == {"micro"}


def test_the_same_frozen_rollouts_give_the_same_columns_in_three_trainers(tmp_path: Path) -> None:
    short = ("cold_start.accuracy_low=0.1", "cold_start.accuracy_high=0.9", "evaluation.prompts=16")
    side_by_side.make(tmp_path, "steps=2", "rollout.prompts=8", "updates_per_rollout=2", *short)
    found = side_by_side.apart(tmp_path).set_index(["table", "column"])
    assert found.loc["updates", "largest"]["expert_change_rate"] > 0
    assert len(found.loc["updates"]) > 15
    for run in ("one process", "sharded"):
        first = found[f"{run}, first step"].dropna()
        assert (first < 2e-4).all(), first.sort_values()
        assert (found[run] < 0.1).all(), found[run].sort_values()
        for name in ("expert_change_rate", "expert_set_change_rate", "token_any_layer_change_rate"):
            assert first["updates", name] < 1e-6, name  # equal counts; the suite divides in fp32
    report_page.make(tmp_path, formats=["svg"])
    made = {kind: (tmp_path / "tables" / f"side_by_side-{kind}.csv").read_text() for kind in ("summary", "leaderboard")}
    assert made["summary"].count("trl") >= 2
    assert "trl" not in made["leaderboard"]
