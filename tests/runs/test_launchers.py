"""Every launcher makes the same numbers, and loses nothing with its workers: submitit's local executor, a local Ray.

``make check-launchers`` installs both. A real Slurm is not tried here.
"""

import os
import signal
from pathlib import Path

import pytest
from small_sweeps import assert_complete, at_work, holder, launched, runs_of, wait_for

from steadymoe.bench.runs import compose, run_folder

pytestmark = pytest.mark.launchers

LAUNCHERS = {
    "submitit_local": ["hydra/launcher=submitit_local"],
    "ray": ["hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"],
}


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory) -> list[compose.Run]:
    """The four runs by Hydra's basic launcher, one after the other."""
    folder = tmp_path_factory.mktemp("basic")
    launcher = launched(folder, "hydra/launcher=basic", "updates=60")
    said, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, said
    return runs_of(folder, "updates=60")


@pytest.mark.parametrize("words", LAUNCHERS.values(), ids=LAUNCHERS)
def test_numbers_match_the_basic_launcher(
    words: list[str], tmp_path: Path, basic: list[compose.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launcher = launched(Path("here"), *words, "updates=60")  # relative: workers have to find it
    said, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, said
    assert "4 finished" in said
    runs = runs_of(Path("here"), "updates=60")
    assert_complete(runs, basic)
    assert "hydra" not in (run_folder.read_run(runs[0].folder) or {})["command"]
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("words", LAUNCHERS.values(), ids=LAUNCHERS)
def test_a_killed_worker_loses_nothing(words: list[str], tmp_path: Path, basic: list[compose.Run]) -> None:
    runs = runs_of(tmp_path, "updates=60")
    launcher = launched(tmp_path, *words, "updates=60")
    wait_for(lambda: at_work(runs, 3), 120)
    os.kill(holder(at_work(runs)[0]), signal.SIGKILL)
    said, _ = launcher.communicate(timeout=240)
    if "ray" in words[0]:
        assert launcher.returncode == 0, said  # Ray begins a lost task again by itself, submitit does not
    else:
        assert launcher.returncode == 1, said
        assert "a job was lost" in said
        assert "Traceback" not in said.partition("the launcher has lost")[0]
        wait_for(lambda: not at_work(runs), 120)
        again = launched(tmp_path, *words, "updates=60")
        said, _ = again.communicate(timeout=240)
        assert again.returncode == 0, said
    assert_complete(runs, basic)


def test_submitted_jobs_outlive_their_launcher(tmp_path: Path, basic: list[compose.Run]) -> None:
    runs = runs_of(tmp_path, "updates=60")
    launcher = launched(tmp_path, *LAUNCHERS["submitit_local"], "updates=60")
    wait_for(lambda: at_work(runs, 1), 120)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 130
    wait_for(lambda: all(run_folder.read_state(each.folder).status == "finished" for each in runs), 240)
    assert_complete(runs, basic)
