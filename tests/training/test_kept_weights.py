"""The weights that ``checkpoint_keep`` keeps in a run's folder."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import executed, finished, interrupt, planned

from steadymoe.bench.runs import compose, execute, run_folder
from steadymoe.bench.schema import ConfigError
from steadymoe.bench.training import checkpoint


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> compose.Run:
    """A run of six steps that keeps the weights of its second step."""
    return finished(tmp_path_factory.mktemp("kept"), "checkpoint_keep=4")


def test_kept_weights_are_those_after_their_step(kept: compose.Run, tmp_path: Path) -> None:
    halted = planned(tmp_path, "checkpoint_every=2")
    interrupt(halted, 3)
    tensors, _ = checkpoint.read_tensors(halted.folder / "checkpoint.safetensors")
    weights = load_file(run_folder.weights_path(kept.folder, 2))
    start = planned(tmp_path, f"cold_start.path='{run_folder.weights_path(kept.folder, 2)}'").config
    _, model, _ = execute.at_start(start, lambda *_: None)
    assert weights
    for name, weight in weights.items():
        assert torch.equal(weight, tensors[f"model/{name}"])
        assert torch.equal(weight, model.state_dict()[name])


def test_resumed_run_has_the_kept_weights_of_an_undisturbed_one(
    kept: compose.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = planned(tmp_path / "late"), planned(tmp_path / "late", "checkpoint_keep=4")
    interrupt(asked[0], 4)
    assert executed(asked[1]) == "finished"
    assert "restarted at step 1, because the weights of step 2 were not kept" in capsys.readouterr().err
    killed, save = planned(tmp_path / "killed", "checkpoint_keep=4"), checkpoint.save_weights

    def dies_after_saving(*arguments: object) -> None:
        save(*arguments)  # type: ignore[arg-type]
        if arguments[0] == run_folder.weights_path(killed.folder, 2):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_weights", dies_after_saving)
        with pytest.raises(KeyboardInterrupt):
            executed(killed)
    assert executed(killed) == "finished"
    for run in (asked[1], killed):
        assert (
            run_folder.weights_path(run.folder, 2).read_bytes() == run_folder.weights_path(kept.folder, 2).read_bytes()
        )


def test_redo_reruns_a_run_that_lacks_the_weights_to_keep(kept: compose.Run) -> None:
    other = planned(Path(kept.config.results_dir), "checkpoint_keep=6")
    assert run_folder.stale(kept) is None
    assert run_folder.stale(other) == "the weights of step 3 were not kept"
    with pytest.raises(ConfigError, match="checkpoint_keep=14: the run has 12 updates; lower it"):
        planned(Path(kept.config.results_dir), "checkpoint_keep=14")
