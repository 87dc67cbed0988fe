"""What is kept of an experiment gives the report that its runs gave."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from steadymoe.bench import cli
from steadymoe.bench.measurement import columns
from steadymoe.bench.report import archive, report_page

RECORDED = Path(__file__).parents[1] / "recorded" / "results"


def small(to: Path) -> Path:
    shutil.copytree(RECORDED / "runs", to / "runs")
    return to


def test_the_report_of_what_is_kept_is_that_of_the_runs_byte_for_byte(tmp_path: Path) -> None:
    results = small(tmp_path / "results")
    made = report_page.make(results, formats=["svg"])  # every format is drawn from one figure
    report_page.keep(results, "small", tmp_path / "kept")
    assert not (tmp_path / "kept" / "runs").exists()
    again = report_page.make(tmp_path / "kept", formats=["svg"])
    assert [path.name for path in again.files] == [path.name for path in made.files]
    for ours, theirs in zip(made.files, again.files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes(), ours.name
    assert again.missing == made.missing


def test_only_what_tables_and_figures_read_is_kept(tmp_path: Path) -> None:
    report_page.keep(small(tmp_path), None, tmp_path / "kept")
    kept = archive.load(tmp_path / "kept", "small")
    assert set(kept["steps"]["metric"]) <= columns.kept()
    assert not {"folder", "numbers"} & set(kept["runs"])
    assert archive.experiments(tmp_path / "kept") == ["small"]


def test_runs_count_before_what_was_kept_of_them(tmp_path: Path) -> None:
    results = small(tmp_path)
    report_page.keep(results, "small", results)
    shutil.rmtree(next((results / "runs" / "small").glob("gspo")))
    assert set(archive.load(results, "small")["runs"]["arm"]) == {"grpo", "reinforce"}


def test_every_number_cannot_be_exported_from_what_is_kept(tmp_path: Path) -> None:
    report_page.keep(small(tmp_path), "small", tmp_path / "kept")
    with pytest.raises(report_page.NothingToReport, match="holds tables without their runs"):
        report_page.export(tmp_path / "kept", "small", "csv")
    with pytest.raises(report_page.NothingToReport, match="no ended runs"):
        report_page.keep(tmp_path, "large", tmp_path / "kept")


def test_the_command_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results, kept = small(tmp_path / "results"), tmp_path / "kept"
    words = ["steadymoe", "report", "--results", str(results), "--experiment", "small", "--keep", str(kept)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert "runs.parquet" in capsys.readouterr().out
    assert len(pd.read_parquet(kept / "data" / "small" / "runs.parquet")) == 9
