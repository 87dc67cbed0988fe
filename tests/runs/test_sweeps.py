"""Sweeps that are killed, doubled, extended or run out of disk: nothing that finished is lost, and nothing is wrong."""

import errno
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
import pytest
from fixtures import Said
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf
from small_runs import SMALL, assert_same, executed, planned, sharing_starts
from small_sweeps import SWEEP, assert_complete, at_work, holder, launched, runs_of, wait_for

from steadymoe.bench.runs import compose, execute, launch, record, run_folder, status
from steadymoe.bench.support import files
from steadymoe.bench.training import checkpoint
from steadymoe.bench.training.trainer import Trainer

# Long enough that a run whose third step is seen on disk is killed before it ends.
LONG = "updates=32"
SHORT = "updates=4"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[compose.Run]:
    """The same sweep, run by run in this process."""
    runs = runs_of(tmp_path_factory.mktemp("undisturbed"), LONG)
    assert [execute.execute(each) for each in runs] == ["finished"] * 4
    return runs


@pytest.mark.check
def test_killed_launcher_stops_its_workers_and_can_be_resumed(tmp_path: Path, undisturbed: list[compose.Run]) -> None:
    runs = runs_of(tmp_path, LONG)
    launcher = launched(tmp_path, LONG, "hydra.launcher.n_jobs=2")
    wait_for(lambda: at_work(runs, 3))
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_for(lambda: all(run_folder.read_state(each.folder).status != "running" for each in runs), 60)
    assert {run_folder.read_state(each.folder).status for each in runs} <= {"interrupted", "missing", "finished"}
    (experiment,) = (tmp_path / "runs").iterdir()
    told = "\n".join(status.lines(tmp_path))
    assert set(status.states_of(experiment)) == {each.folder for each in runs}
    left = [each for each in runs if run_folder.read_state(each.folder).status != "finished"]
    assert ("  resume all" in told) is (len(left) > 1)
    second = launched(tmp_path, LONG, "hydra.launcher.n_jobs=2")
    said, _ = second.communicate(timeout=400)
    assert second.returncode == 0, said
    assert_complete(runs, undisturbed)


@pytest.mark.check
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_sweep_continues_after_a_killed_worker(tmp_path: Path, undisturbed: list[compose.Run]) -> None:
    runs = runs_of(tmp_path, LONG)
    launcher = launched(tmp_path, LONG, "hydra.launcher.n_jobs=2")
    wait_for(lambda: at_work(runs, 3))
    os.kill(holder(at_work(runs)[0]), signal.SIGKILL)
    said, _ = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, said
    assert "a worker was killed" in said
    assert "the sweep continues" in said
    assert "4 finished" in said
    assert_complete(runs, undisturbed)


@pytest.mark.check
def test_two_launchers_on_one_folder_share_the_work(tmp_path: Path, undisturbed: list[compose.Run]) -> None:
    runs = runs_of(tmp_path, LONG)
    launchers = [launched(tmp_path, LONG, "hydra/launcher=basic") for _ in range(2)]
    said = [launcher.communicate(timeout=400)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    # Whichever comes second to a run leaves it to the other: at the end no run is missing.
    assert_complete(runs, undisturbed)


def test_status_prints_the_command_that_resumes_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said
) -> None:
    monkeypatch.setattr(launch, "launch", lambda *_: None)  # as if killed before the first run
    words = [*SWEEP, SHORT, f"results_dir={tmp_path}", "hydra/launcher=basic"]
    ran("run", *words, code=1)
    command = shlex.join(["steadymoe", "run", "-m", *(word for word in words if word != "-m")])
    assert status.lines(tmp_path)[:2] == ["small: 4 not started", f"  resume all 4: {command}"]
    again = compose.plan(shlex.split(command)[3:], multirun=True)
    executed(again[0])
    assert status.lines(tmp_path)[:2] == ["small: 1 finished, 3 not started", f"  resume all 3: {command}"]
    # The command of a single run stands below its folder alone, and takes nothing from the sweep's.
    run_folder.add_to_plan(again[1:2])
    assert status.lines(tmp_path)[1] == f"  resume all 3: {command}"
    for run in again[1:3]:
        executed(run)
    assert not any("resume" in line for line in status.lines(tmp_path))
    more = runs_of(tmp_path, SHORT, "seed=2")
    run_folder.add_to_plan(more)  # nothing is taken out of it
    assert len(run_folder.planned(tmp_path / "runs" / "small")[0]) == 6
    assert {f"    rerun: {run.command}" for run in more} <= set(status.lines(tmp_path))


def test_adding_seeds_and_algorithms_keeps_finished_runs(tmp_path: Path, ran: Said) -> None:
    def files(folder: Path) -> dict[str, tuple[bytes, int]]:
        paths = [path for path in folder.iterdir() if path.name != ".lock"]
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

    (first,) = runs_of(tmp_path, SHORT, "seed=0", "algorithm=grpo")
    executed(first)
    before = files(first.folder)
    words = [*SWEEP, SHORT, f"results_dir={tmp_path}", "algorithm=grpo,reinforce", "hydra/launcher=basic"]
    with sharing_starts(tmp_path):
        said = ran("run", *words)
    assert "1 of 4 runs have already finished" in said
    assert "4 finished" in said
    assert files(first.folder) == before


def test_retry_failed_reruns_only_failed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said) -> None:
    runs = runs_of(tmp_path, SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", lambda *_: 1 / 0)
        assert executed(runs[1]) == "failed"
    words = [*SWEEP, SHORT, f"results_dir={tmp_path}", "hydra/launcher=basic"]
    assert "skips 3 of 4 runs" in ran("run", "--retry-failed", *words)
    assert [run_folder.read_state(each.folder).status for each in runs] == ["missing", "finished", "missing", "missing"]
    assert "retry=" not in run_folder.known(runs[1].folder)["command"]
    with sharing_starts(tmp_path):
        ran("run", *words)
    assert [run_folder.read_state(each.folder).status for each in runs] == ["finished"] * 4


def test_job_loads_its_config_in_the_launchers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = compose.plan([*SMALL, "algorithm=gspo", "correction=tis", "minibatch_prompts=2", "updates=6"])
    run.save(tmp_path / "0.json")
    went: list[Path] = []
    monkeypatch.chdir(tmp_path)  # as a Ray cluster's worker may
    (tmp_path / "mine").mkdir()
    settings = {"runtime": {"cwd": str(tmp_path / "mine")}, "overrides": {"task": [str(tmp_path / "0.json")]}}
    monkeypatch.setattr(HydraConfig, "get", lambda: OmegaConf.create(settings))
    monkeypatch.setattr(hydra, "compose", lambda *_, **__: pytest.fail("composed again"))
    monkeypatch.setattr(compose, "check", lambda *_: pytest.fail("checked again"))

    def executes(loaded: compose.Run) -> str:
        assert loaded == run
        went.append(Path.cwd())
        return "finished"

    monkeypatch.setattr(launch, "execute", executes)
    assert launch._job(OmegaConf.create()) == "finished"
    assert went == [tmp_path / "mine"]


def test_recorded_command_omits_launcher_settings() -> None:
    words = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1"]
    assert compose.plan(words)[0].command == "steadymoe run seed=1"


@pytest.mark.parametrize("launcher", ["submitit_local", "submitit_slurm", "ray"])
def test_missing_launcher_package_says_how_to_install_it(
    launcher: str, monkeypatch: pytest.MonkeyPatch, refusal_of: Said
) -> None:
    missing = MissingConfigException("", missing_cfg_file=f"hydra/launcher/{launcher}", options=["basic"])

    def none(*_: object, **__: object) -> None:
        raise missing

    monkeypatch.setattr(hydra, "compose", none)
    extra = "ray" if launcher == "ray" else "slurm"
    assert f"pip install 'steadymoe[{extra}]'" in refusal_of("-m", f"hydra/launcher={launcher}", "seed=0,1")


def test_slurm_without_slurm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(compose.ConfigError, match="there is no srun here"):
        launch.refuse_absent_cluster(["hydra/launcher=submitit_slurm"])


FULL, READ_ONLY = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize(
    ("where", "error"),
    [*((where, FULL) for where in ("rows", "run.json", "checkpoint", "tables")), ("everything", READ_ONLY)],
)
def test_full_disk_loses_no_finished_rows(
    whole: compose.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: OSError
) -> None:
    """From the third step on nothing can be written, in one place or anywhere; later it can again."""
    made = planned(tmp_path)
    writes, append, steps = files.write, record.Record.append, [0]

    def refuses(path: Path, writer: Callable[[Path], object]) -> None:
        kinds = {"run.json": "run.json", "checkpoint.safetensors": "checkpoint"}
        kind = kinds.get(path.name, "tables" if path.suffix == ".parquet" else "rows")
        if steps[0] >= 3 and where in (kind, "everything"):
            raise error
        writes(path, writer)

    def counts(self: record.Record, rows: dict[str, list[record.Row]]) -> None:
        steps[0] += "steps" in rows
        if steps[0] >= 3 and where in ("rows", "everything"):
            with (self.folder / "updates.jsonl").open("a") as file:
                file.write('{"step": 3, "upd')  # torn
            raise error
        append(self, rows)

    monkeypatch.setattr(files, "write", refuses)
    monkeypatch.setattr(record.Record, "append", counts)
    assert executed(made) == "failed"
    finished = 2 if where in ("rows", "everything") else record.read_table(made.folder, "steps")["step"].max()
    rows = record.read_table(made.folder, "steps")
    assert rows["step"].tolist() == list(range(1, finished + 1))
    assert run_folder.read_state(made.folder).status in ("failed", "interrupted")
    monkeypatch.setattr(files, "write", writes)
    monkeypatch.setattr(record.Record, "append", append)
    assert checkpoint.step_of(made.folder / "checkpoint.safetensors") is not None
    assert execute.execute(made) == "finished"
    assert_same(whole.folder, made.folder)
    assert not list(made.folder.glob("*.tmp"))
