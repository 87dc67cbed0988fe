"""A results folder that an old revision wrote is read, reported and left as it is by every later one."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from test_cli import steadymoe

from steadymoe.bench.report import report_page
from steadymoe.bench.report.figures import FIGURES
from steadymoe.bench.runs import record

OLD = Path(__file__).parent / "recorded" / "results-2b45fe6"
PLAN: dict[str, str] = json.loads((OLD / "results" / "runs" / "old" / "plan.json").read_text())
ENDED = [name for name in PLAN if record.status(OLD / "results" / "runs" / "old" / name) in record.ENDED]


@pytest.fixture(autouse=True)
def in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def contents() -> dict[Path, bytes]:
    files = (path for path in Path("results/runs").rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path: path.read_bytes() for path in files}


def again(monkeypatch: pytest.MonkeyPatch, name: str) -> int:
    """The recorded command once more, an external algorithm's with its code where Python looks."""
    if "half_clipped" in name:
        monkeypatch.syspath_prepend("mine")
    return steadymoe(monkeypatch, *shlex.split(PLAN[name])[1:])


def test_the_status_of_every_old_run_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert steadymoe(monkeypatch, "status") == 0
    said = capsys.readouterr().out
    assert said.startswith("old: 1 diverged, 1 failed, 6 finished, 1 interrupted, 1 missing")
    assert f"again: {next(PLAN[name] for name in PLAN if 'reinforce' in name)}" in said


def test_old_runs_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents()
    # Every figure is drawn of runs that are older still by test_report.py; here one, for time.
    monkeypatch.setattr(report_page, "figures_of", lambda *_: [FIGURES["overview"]])
    assert steadymoe(monkeypatch, "report", "--experiment", "old", "--format", "svg") == 0
    said = capsys.readouterr().out
    for arm in ("grpo micro", "gspo micro", "gspo dense_micro", "half_clipped micro"):
        assert f"| {arm}" in said
    assert Path("results/report.html").exists()
    assert contents() == before


@pytest.mark.parametrize("name", [name for name in ENDED if name.endswith("seed=0")], ids=lambda name: name[:24])
def test_an_old_run_that_ended_is_left_as_it_is_by_its_command(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents()
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)  # another test may have had one of that name
    assert again(monkeypatch, name) == 0
    said = capsys.readouterr().out
    assert "1 of 1 runs have ended before" in said
    assert "1 of 1 runs with code that cannot be compared are left as they are (recorded before" in said
    assert contents() == before


def test_an_old_run_that_was_interrupted_is_brought_to_its_end_by_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = next(name for name in PLAN if "reinforce" in name)
    assert record.status(Path("results/runs/old") / name) == "interrupted"
    assert again(monkeypatch, name) == 0
    assert record.status(Path("results/runs/old") / name) == "finished"


def test_nothing_of_the_old_folder_names_a_place_on_the_machine_that_wrote_it() -> None:
    for path in OLD.rglob("*.json*"):
        assert not re.search(r'["= ]/\w|home/|tmp/|work/', path.read_text()), path
