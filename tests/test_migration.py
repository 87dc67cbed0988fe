"""A results folder of an old revision, once migrated, is read, reported and left as it is."""

import importlib.util
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_cli import steadymoe

from steadymoe.bench.config import identity
from steadymoe.bench.report import report_page
from steadymoe.bench.report.figures import FIGURES
from steadymoe.bench.runs import record

ROOT = Path(__file__).parents[1]
OLD = ROOT / "tests" / "recorded" / "results-2b45fe6"
PLAN: dict[str, str] = json.loads((OLD / "results" / "runs" / "old" / "plan.json").read_text())


def facts_of(path: Path) -> dict[str, Any]:
    """Read a ``run.json``."""
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


RECORDED = {name: facts_of(path) for name in PLAN if (path := OLD / "results/runs/old" / name / "run.json").exists()}
ENDED = [name for name, facts in RECORDED.items() if facts["status"] in record.ENDED]

spec = importlib.util.spec_from_file_location("migrate", ROOT / "results" / "migrate.py")
assert spec is not None
assert spec.loader is not None
migrate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(migrate)


@pytest.fixture(autouse=True)
def in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert list(migrate.migrate(Path("results"))) == []


def contents() -> dict[Path, bytes]:
    files = (path for path in Path("results/runs").rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path: path.read_bytes() for path in files}


def rerun(monkeypatch: pytest.MonkeyPatch, name: str) -> int:
    """Rerun the recorded command, an external algorithm's with its code where Python looks."""
    if "half_clipped" in name:
        monkeypatch.syspath_prepend("mine")
    return steadymoe(monkeypatch, *shlex.split(PLAN[name])[1:])


def test_migration_changes_no_number_and_keeps_the_recorded_hash() -> None:
    before = contents()
    for name, recorded in RECORDED.items():
        folder = Path("results/runs/old") / name
        facts = facts_of(folder / "run.json")
        assert facts["recorded_hash"] == recorded["config_hash"] == migrate.old_hash(recorded["config"])
        assert facts["config_hash"] == identity.config_hash(facts["config"]) != recorded["config_hash"]
        same = recorded.keys() - {"config", "config_hash", "config_hash_without_seed", "algorithm_code"}
        assert {key: facts[key] for key in same} == {key: recorded[key] for key in same}
        for path in folder.glob("*.parquet"):
            assert path.read_bytes() == (OLD / path).read_bytes()
    assert list(migrate.migrate(Path("results"))) == []
    assert contents() == before


def test_an_archive_keeps_configs_and_is_migrated_once(tmp_path: Path) -> None:
    runs = pd.read_parquet(ROOT / "results" / "reference" / "data" / "quickstart" / "runs.parquet")
    assert (runs["config_hash"] == [identity.config_hash(json.loads(text)) for text in runs["config"]]).all()
    assert (runs["recorded_hash"] == [migrate.old_hash(json.loads(text)) for text in runs["config"]]).all()
    path = tmp_path / "data" / "quickstart" / "runs.parquet"
    path.parent.mkdir(parents=True)
    old = runs.assign(config_hash=runs["recorded_hash"], config_without_seed="", settings="")
    old.drop(columns=["config", "recorded_hash", "origin", "collapse_rule"]).to_parquet(path, index=False)
    for _ in range(2):
        assert list(migrate.migrate(tmp_path)) == []
        migrated = pd.read_parquet(path)
        columns = ["config", "config_hash", "config_without_seed", "recorded_hash", "revision", "origin"]
        pd.testing.assert_frame_equal(migrated[columns], runs[columns])


def test_the_status_of_old_runs_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert steadymoe(monkeypatch, "status") == 0
    output = capsys.readouterr().out
    assert output.startswith("old: 1 diverged, 1 failed, 6 finished, 1 interrupted, 1 missing")
    assert f"again: {next(PLAN[name] for name in PLAN if 'reinforce' in name)}" in output


def test_old_runs_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents()
    # One figure, for time.
    monkeypatch.setattr(report_page, "figures_of", lambda *_: [FIGURES["overview"]])
    assert steadymoe(monkeypatch, "report", "--experiment", "old", "--format", "svg") == 0
    output = capsys.readouterr().out
    for arm in ("grpo micro", "gspo micro", "gspo dense_micro", "half_clipped micro"):
        assert f"| {arm}" in output
    assert Path("results/report.html").exists()
    assert contents() == before


@pytest.mark.parametrize("name", [name for name in ENDED if name.endswith("seed=0")], ids=lambda name: name[:24])
def test_an_old_run_that_ended_is_left_as_it_is_by_its_command(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents()
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)  # another test may have had one of that name
    assert rerun(monkeypatch, name) == 0
    output = capsys.readouterr().out
    assert "1 of 1 runs have finished before" in output
    assert "the code of 1 of them cannot be compared (its code was not found)" in output
    assert contents() == before


def test_an_old_run_that_was_interrupted_is_brought_to_its_end_by_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = next(name for name in PLAN if "reinforce" in name)
    assert record.status(Path("results/runs/old") / name) == "interrupted"
    assert rerun(monkeypatch, name) == 0
    assert record.status(Path("results/runs/old") / name) == "finished"


def test_nothing_of_the_old_folder_names_a_place_on_the_machine_that_wrote_it() -> None:
    for path in OLD.rglob("*.json*"):
        assert not re.search(r'["= ]/\w|home/|tmp/|work/', path.read_text()), path
