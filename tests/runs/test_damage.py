"""What is broken on disk is named, left out of tables, and brought back by the command that ``status`` names."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import RECORDED, Said
from small_runs import SMALL, assert_same, interrupt, planned

from steadymoe.bench.report import folders, report_page
from steadymoe.bench.runs import compose, execute, record, run_folder, status
from steadymoe.bench.support import files
from steadymoe.bench.training import checkpoint
from steadymoe.bench.training.columns import TABLES


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one short run that was asked for as a user does."""
    results = tmp_path_factory.mktemp("finished")
    made = planned(results, "updates=4")
    run_folder.add_to_plan([made])
    assert execute.execute(made) == "finished"
    return results


def moved(finished: Path, to: Path) -> Path:
    """A copy of these results whose commands name the copy; the run's folder."""
    shutil.copytree(finished, to, dirs_exist_ok=True)
    for path in (to / "runs").glob("**/*.json"):
        path.write_text(path.read_text().replace(str(finished), str(to)))
    (folder,) = (path.parent for path in to.glob("runs/**/run.json"))
    return folder


def edited(**changes: object) -> Callable[[Path], object]:
    return lambda folder: files.write_json(folder / "run.json", json.loads((folder / "run.json").read_text()) | changes)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def of_another_run(folder: Path) -> None:
    shutil.copy(next(RECORDED.glob("**/steps.parquet")), folder / "steps.parquet")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no steps": (lambda folder: (folder / "steps.parquet").unlink(), "there is no steps.parquet"),
    "no layers": (lambda folder: (folder / "layers.parquet").unlink(), "there is no layers.parquet"),
    "one bit": (lambda folder: flip(folder / "updates.parquet"), "updates.parquet has changed since the run wrote it"),
    "cut": (lambda folder: os.truncate(folder / "layers.parquet", 100), "layers.parquet has changed"),
    "no checksums": (edited(tables=None), "it has no checksums of its tables"),
    "another table": (of_another_run, "steps.parquet has changed since the run wrote it"),
    "a folder": (lambda folder: [(folder / "run.json").unlink(), (folder / "run.json").mkdir()], "cannot be read"),
    "empty": (lambda folder: (folder / "run.json").write_text(""), "run.json cannot be read"),
    "garbage": (lambda folder: (folder / "run.json").write_bytes(b"\x93\xff\x00"), "run.json cannot be read"),
    "nested": (lambda folder: (folder / "run.json").write_text("[" * 100_000), "run.json cannot be read"),
    "{}": (lambda folder: (folder / "run.json").write_text("{}"), "has no valid status"),
    "[]": (lambda folder: (folder / "run.json").write_text("[]"), "must hold an object, got list"),
    "a status": (edited(status="happy"), "has no valid status"),
    "a type": (edited(config=[]), "has no valid config"),
    "an end": (edited(diverged={"step": "3"}), "has no valid diverged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_run_is_left_out_and_named_with_its_command(damage: str, finished: Path, tmp_path: Path) -> None:
    folder = moved(finished, tmp_path)
    inflict, why = DAMAGES[damage]
    inflict(folder)
    assert run_folder.read_state(folder).status == "damaged"
    assert why in str(run_folder.read_state(folder).damage)
    told = status.lines(tmp_path)
    assert told[0] == "default: 1 damaged"
    assert why in told[1]
    (made,) = compose.plan(shlex.split(told[2].partition("rerun: steadymoe run")[2]))
    assert made.folder == folder
    run_folder.state_of(made)  # as ``steadymoe run`` does before it trains
    with pytest.raises(report_page.NothingToReport, match="left out, damaged"):
        report_page.make(tmp_path)
    assert folders.read_runs(tmp_path, "default").empty


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("damage", ["no steps", "{}"])
def test_command_in_status_restores_a_damaged_run(damage: str, finished: Path, tmp_path: Path, ran: Said) -> None:
    folder = moved(finished, tmp_path)
    DAMAGES[damage][0](folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}
    words = shlex.split(status.lines(tmp_path)[2].partition("rerun: steadymoe ")[2])
    said = ran(*words)
    assert "rerunning damaged" in said
    assert "1 finished" in said
    (original,) = (path.parent for path in finished.glob("runs/**/run.json"))
    assert_same(original, folder)
    (kept,) = (tmp_path / "damaged").glob("**/1")
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert str(kept) in run_folder.known(folder)["restarted"]
    made = report_page.make(tmp_path, formats=["svg"])
    assert report_page.left_out(tmp_path) == []
    assert made.text.count("\ngrpo  ") == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}'])
def test_unreadable_plan_is_reported_and_rewritten(content: str, finished: Path, tmp_path: Path) -> None:
    moved(finished, tmp_path)
    plan = tmp_path / "runs" / "default" / "plan.json"
    plan.write_text(content)
    told = status.lines(tmp_path)
    assert told[0].startswith("default: ")
    assert "plan.json" in told[0]
    assert told[1].startswith("default: 1 finished")
    run_folder.add_to_plan([planned(tmp_path, "updates=4"), planned(tmp_path, "updates=4", "seed=1")])
    assert len(run_folder.planned(plan.parent)[0]) == 2
    assert plan.with_name("plan.json.damaged").read_text() == content
    assert status.lines(tmp_path)[0].startswith("default: 1 finished, 1 not started")


def test_a_plan_names_no_folder_outside_its_experiment(finished: Path, tmp_path: Path) -> None:
    moved(finished, tmp_path)
    files.write_json(tmp_path / "runs" / "default" / "plan.json", {"../../up": "a", "/etc": "b", "here/seed=3": "c"})
    assert list(run_folder.planned(tmp_path / "runs" / "default")[0]) == ["here/seed=3"]
    assert "1 not started" in status.lines(tmp_path)[0]


def interrupted(results: Path) -> compose.Run:
    """A run that was stopped after its third step, with a checkpoint of the second."""
    made = planned(results)
    interrupt(made, 4)
    assert checkpoint.step_of(made.folder / "checkpoint.safetensors") == 2
    return made


def test_run_that_lost_rows_or_its_checkpoint_restarts(tmp_path: Path) -> None:
    made = interrupted(tmp_path)
    tables = [path for path in made.folder.glob("*.jsonl") if path.stem in TABLES]
    rows = {path: path.read_text() for path in tables}
    steps = made.folder / "steps.jsonl"
    with record.Record(made.folder, execute._facts(made)) as folder:
        assert folder.holds(2)
        for path, content in rows.items():
            path.write_text("{garbage}\n" + content)
            assert not folder.holds(2), path.name
            path.write_text(content)
        steps.write_text(rows[steps].splitlines(keepends=True)[0])
        assert not folder.holds(2)
    assert execute.execute(made) == "finished"
    assert run_folder.known(made.folder)["restarted"] == "rows of steps before its checkpoint are lost"
    assert record.read_table(made.folder, "steps")["step"].tolist() == list(range(1, 7))


def test_truncated_checkpoint_restarts_the_run_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = interrupted(tmp_path)
    cut = made.folder / "checkpoint.safetensors"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    capsys.readouterr()
    assert execute.execute(made) == "finished"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "restarted at step 1, because its checkpoint is damaged" in said
    assert run_folder.known(made.folder)["restarted"] == "its checkpoint is damaged"
    assert record.read_table(made.folder, "steps")["step"].tolist() == list(range(1, 7))


def test_a_cold_start_with_a_flipped_bit_is_trained_again(finished: Path, tmp_path: Path) -> None:
    folder = moved(finished, tmp_path)
    (weights,) = (tmp_path / "cold_starts").glob("*.safetensors")
    before = weights.read_bytes()
    flip(weights)
    made = planned(tmp_path, "updates=4", "experiment_name=again")
    assert execute.execute(made) == "finished"
    assert weights.read_bytes() == before
    assert "damaged" in run_folder.known(made.folder)["cold_start"]["rebuilt"]
    assert_same(folder, made.folder)
    weights.unlink()
    assert execute.execute(planned(tmp_path, "updates=4", "experiment_name=third")) == "finished"
    assert weights.read_bytes() == before


def test_a_kept_checkpoint_with_a_flipped_bit_is_not_used(tmp_path: Path) -> None:
    path = interrupted(tmp_path).folder / "checkpoint.safetensors"
    tensors, metadata = checkpoint.read_tensors(path)
    checkpoint.write_tensors(tmp_path / "again.safetensors", tensors, metadata)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    flip(path)
    with pytest.raises(checkpoint.DamagedTensors, match="its tensors are not those that were saved"):
        checkpoint.read_tensors(path)
    assert checkpoint.step_of(path) is None


def refuses(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_status_of_an_unlockable_folder_comes_from_its_run_json(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = moved(finished, tmp_path)
    edited(status="running")(folder)
    assert run_folder.read_state(folder).status == "interrupted"
    monkeypatch.setattr(run_folder.FileLock, "acquire", refuses)
    assert run_folder.read_state(folder).status == "running"


def test_run_json_without_permission_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "read_json", refuses)  # root may read anything
    assert "Permission denied" in str(run_folder.read_state(tmp_path).damage)


def test_retry_failed_skips_damaged_runs(finished: Path, tmp_path: Path, refused: Said) -> None:
    (moved(finished, tmp_path) / "steps.parquet").unlink()
    refused("run", "--retry-failed", *SMALL, "updates=4", f"results_dir={tmp_path}")
