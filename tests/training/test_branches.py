"""Kept checkpoints and branches: a run that begins where another run was."""

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hydra.utils import instantiate
from pandas.testing import assert_frame_equal
from safetensors.torch import load_file
from small_runs import finished, interrupt, planned, tables

from steadymoe.bench.runs import branch, command, compose, execute, record
from steadymoe.bench.schema import ConfigError
from steadymoe.bench.training import checkpoint
from steadymoe.models import build


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> compose.Run:
    """A run of six steps that keeps the checkpoint of its second step."""
    made = finished(tmp_path_factory.mktemp("trunk"), "checkpoint_keep=2")
    return made


def branched(trunk: compose.Run, results: Path, *words: str) -> compose.Run:
    return planned(results, f"start_from='{trunk.folder}@2'", *words)


def numbers(folder: Path, table: str, after: int = 0) -> pd.DataFrame:
    """A table without timing, without evaluations' steps, of the steps behind ``after``, which count from 1 again."""
    frame = tables(folder)[table]
    frame = frame[frame["step"] > after].reset_index(drop=True)
    return frame.assign(step=frame["step"] - after)


def test_branch_with_the_same_algorithm_reproduces_its_trunk(trunk: compose.Run, tmp_path: Path) -> None:
    made = branched(trunk, tmp_path, "steps=4")
    assert execute.execute(made) == "finished"
    # Drift is measured since the start of a run, and probes fall on other steps.
    of_start = ["expert_change_since_start"]
    whole = numbers(trunk.folder, "updates", after=2)
    assert len(whole) == 8
    compared = [name for name in whole if numbers(made.folder, "updates")[name].notna().all()]
    assert {"loss", "grad_norm", "expert_change_rate", "token_ratio_variance"} <= set(compared)
    always = [name for name in compared if whole[name].notna().all() and name not in of_start]
    assert_frame_equal(numbers(made.folder, "updates")[always], whole[always], check_exact=True)
    rewards = ["reward", "tokens_sampled", "response_length"]
    assert_frame_equal(numbers(made.folder, "steps")[rewards], numbers(trunk.folder, "steps", 2)[rewards])
    facts = record.known(made.folder)
    assert facts["start_from"] == f"{trunk.folder}@2"
    assert facts["cold_start"] == {}
    assert not (tmp_path / "cold_starts").exists()


def test_branch_of_a_branch_draws_what_both_trunks_have_not(trunk: compose.Run, tmp_path: Path) -> None:
    first = branched(trunk, tmp_path / "first", "steps=1", "checkpoint_keep=1")
    assert execute.execute(first) == "finished"
    second = finished(tmp_path / "second", f"start_from='{first.folder}@1'", "steps=3")
    rewards = ["reward", "tokens_sampled", "response_length"]
    assert_frame_equal(numbers(second.folder, "steps")[rewards], numbers(trunk.folder, "steps", 3)[rewards])


def test_resumed_run_has_the_kept_checkpoint_of_an_undisturbed_one(
    trunk: compose.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = planned(tmp_path / "late"), planned(tmp_path / "late", "checkpoint_keep=2")
    interrupt(asked[0], 4)
    assert execute.execute(asked[1]) == "finished"
    assert "restarted at step 1, because the checkpoint of step 2 was not kept" in capsys.readouterr().err
    killed, save = planned(tmp_path / "killed", "checkpoint_keep=2"), checkpoint.save

    def dies_after_saving(path: Path, **state: Any) -> None:
        save(path, **state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", dies_after_saving)
        with pytest.raises(KeyboardInterrupt):
            execute.execute(killed)
    assert execute.execute(killed) == "finished"
    for run in (asked[1], killed):
        assert branch.kept(run.folder, 2).read_bytes() == branch.kept(trunk.folder, 2).read_bytes()


def test_branch_clips_by_the_norms_of_its_trunk(tmp_path: Path) -> None:
    smallest = ["optimizer.autoclip=0.0", "optimizer.max_grad_norm=1e6"]  # a first norm would not be clipped
    clipped = finished(tmp_path, "checkpoint_keep=3", *smallest, "steps=4")
    made = finished(tmp_path / "branch", f"start_from='{clipped.folder}@3'", *smallest, "steps=1")
    columns = ["loss", "grad_norm", "norm_cut"]
    assert_frame_equal(numbers(made.folder, "updates")[columns], numbers(clipped.folder, "updates", 3)[columns])


def test_branches_of_one_trunk_form_one_arm_identified_by_weights(trunk: compose.Run, tmp_path: Path) -> None:
    one = branched(trunk, tmp_path)
    copy = tmp_path / "copy" / "seed=0"
    shutil.copytree(trunk.folder, copy)
    elsewhere = planned(tmp_path, f"start_from='{copy}@2'")
    assert elsewhere.config_hash == one.config_hash  # what stands in the file counts
    assert one.axes["start_from"].endswith("seed=*@2")
    assert planned(tmp_path, f"start_from='{copy.parent}/seed=0@2'", "seed=7").axes == elsewhere.axes
    assert one.config_hash != planned(tmp_path).config_hash
    beside = branched(trunk, Path(trunk.config.results_dir))  # no folder of a machine stands in an arm's name
    assert beside.axes["start_from"] == f"{trunk.folder.relative_to(trunk.config.results_dir).parent}/seed=*@2"


def test_weight_noise_has_the_given_strength_and_seed(trunk: compose.Run, tmp_path: Path) -> None:
    made = [branched(trunk, tmp_path / str(index), "weight_noise=0.5", "steps=1") for index in range(2)]
    moved = []
    for run in made:
        assert execute.execute(run) == "finished"
        moved.append(record.read_table(run.folder, "steps")["reward"].tolist())
    assert moved[0] == moved[1]
    assert moved[0] != record.read_table(trunk.folder, "steps")["reward"].tolist()[2:3]
    model = build.build(made[0].config.model["config"], instantiate(made[0].config.task).tokenizer, 0, "cpu")
    before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    checkpoint.disturb(model, 0.5, 0)
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert 0.49 < (after - before).std().item() < 0.51
    assert planned(tmp_path, "weight_noise=1e-7").config_hash != planned(tmp_path).config_hash


def test_branch_loads_moments_by_name_across_parameter_groups(trunk: compose.Run, tmp_path: Path) -> None:
    words = ["optimizer.router_factor=3", "routing=pr2", "steps=1", "checkpoint_keep=1", "optimizer.learning_rate=0"]
    made = branched(trunk, tmp_path, *words)
    assert execute.execute(made) == "finished"
    before, after = load_file(branch.kept(trunk.folder, 2)), load_file(branch.kept(made.folder, 1))
    step = "optimizer/step/model.embed_tokens.weight"
    assert after[step] == before[step] + 2
    assert torch.equal(before["model/model.embed_tokens.weight"], after["model/model.embed_tokens.weight"])
    assert any(key.startswith("optimizer/exp_avg/predictor.") for key in after)


@pytest.mark.parametrize(
    ("start", "words", "answer"),
    [
        ("{trunk}", [], "start_from must be <folder of a run>@<step>"),
        ("/nowhere@2", [], "there is no run in /nowhere"),
        ("{trunk}@7", [], "has 6 steps, fewer than 7"),
        ("{trunk}@3", [], "no checkpoint of step 3 is kept"),
        ("{trunk}@2", ["model.config.num_experts=4"], "does not fit this model"),
        ("{trunk}@2", ["checkpoint_keep=7"], "checkpoint_keep=7: the run has only 6 steps; lower it"),
    ],
)
def test_impossible_branch_is_refused(
    trunk: compose.Run, tmp_path: Path, start: str, words: list[str], answer: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(tmp_path, f"start_from='{start.format(trunk=trunk.folder)}'", *words)
    assert answer in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_planning_a_branch_without_its_trunk_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"start_from: there is no run in {tmp_path}/none$"):
        command.main([f"start_from={tmp_path}/none@2", f"results_dir={tmp_path}/results", "--dry"])
    assert list(tmp_path.iterdir()) == []


def test_settings_in_updates_scale_with_staleness() -> None:
    words = ["evaluation.every_updates=8", "probe.every_updates=3", "rollout.minibatch_prompts=2", "total_updates=16"]
    for updates, expected in ((4, (2, 1, 4)), (1, (8, 3, 16))):
        config = compose.plan([*words, f"updates_per_rollout={updates}"])[0].config
        assert (config.evaluation.every, config.probe.every, config.steps) == expected
    with pytest.raises(ConfigError, match=r"means evaluation\.every=2, but 5 was given"):
        compose.plan([*words, "updates_per_rollout=4", "evaluation.every=5"])
