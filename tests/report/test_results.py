"""What is kept of an experiment gives the report that its runs gave."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from steadymoe.bench.report import folders, report_page
from steadymoe.bench.report.results import CHECKSUMS, Results, bind
from steadymoe.bench.runs import identity
from steadymoe.bench.runs.run_folder import Damaged
from steadymoe.bench.training import columns


def test_report_of_an_archive_equals_that_of_the_runs(recorded: Path) -> None:
    made = report_page.make(recorded, formats=["svg"])  # every format is drawn from one figure
    report_page.keep(recorded, "small", recorded / "kept")
    assert not (recorded / "kept" / "runs").exists()
    again = report_page.make(recorded / "kept", formats=["svg"])
    assert [path.name for path in again.files] == [path.name for path in made.files]
    for ours, theirs in zip(made.files, again.files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes(), ours.name
    assert again.missing == made.missing


def test_archive_keeps_only_what_reports_read(recorded: Path) -> None:
    report_page.keep(recorded, None, recorded / "kept")
    kept = Results.load(recorded / "kept", "small")
    assert set(kept.steps["metric"]) <= columns.kept()
    assert "folder" not in kept.runs
    assert folders.experiments(recorded / "kept") == ["small"]
    with pytest.raises(report_page.NothingToReport, match="holds archived tables without their runs"):
        report_page.export(recorded / "kept", "small", "csv")
    with pytest.raises(report_page.NothingToReport, match="no ended runs"):
        report_page.keep(recorded, "large", recorded / "kept")


def test_archive_keeps_runs_that_are_not_here(recorded: Path) -> None:
    kept = recorded / "kept"
    for path in report_page.keep(recorded, None, kept):
        before = path.read_bytes()
        report_page.keep(recorded, None, kept)
        assert path.read_bytes() == before
    whole = Results.load(kept, "small")
    shutil.rmtree(recorded / "runs" / "small" / "gspo")
    last = sorted((recorded / "runs" / "small" / "grpo").rglob("run.json"))[-1]
    shutil.rmtree(last.parent)
    report_page.keep(recorded, None, kept)
    merged = Results.load(kept, "small")
    metrics = ("reward", "eval_accuracy")
    first, second = (each.wide(*metrics).sort_values(["arm", "seed", "step"]) for each in (whole, merged))
    pd.testing.assert_frame_equal(first.reset_index(drop=True), second.reset_index(drop=True))
    assert not Results.load(recorded, "small").runs["algorithm"].eq("gspo").any()
    (kept / "data" / "small" / "steps.parquet").write_bytes(b"")
    with pytest.raises(Damaged, match="does not match"):
        report_page.keep(recorded, None, kept)


def other_trainers(results: Path, algorithm: str = "gspo") -> None:
    """Make the runs of one algorithm another trainer's."""
    for path in (results / "runs" / "small" / algorithm).rglob("run.json"):
        facts = json.loads(path.read_text())
        axes = {"trainer": "trl", **facts["axes"]}
        facts |= {"origin": "trl 1.16.0", "axes": axes, "axes_name": identity.axes_name(axes)}
        path.write_text(json.dumps(facts))


@pytest.mark.usefixtures("no_figures")
def test_runs_of_another_trainer_are_reported_separately(recorded: Path) -> None:
    other_trainers(recorded)
    everything = Results.load(recorded, "small", foreign=True).runs
    (foreign,) = set(everything.loc[everything["origin"] != "", "arm"])
    assert foreign not in set(Results.load(recorded, "small").runs["arm"])
    report_page.make(recorded, formats=["svg"])
    assert foreign in (recorded / "tables" / "small-summary.csv").read_text()
    assert foreign not in (recorded / "tables" / "small-head_to_head.csv").read_text()
    report_page.keep(recorded, "small", kept := recorded / "kept")
    own, every = (Results.load(kept, "small", foreign=is_foreign) for is_foreign in (False, True))
    assert set(own.runs["arm"]) == {"grpo", "reinforce"}
    assert foreign in set(every.runs["arm"])
    for name, table in own.joined.items():
        assert set(table["arm"]) == {"grpo", "reinforce"}
        assert foreign in set(every.joined[name]["arm"])


@pytest.mark.usefixtures("no_figures")
def test_arms_of_a_single_other_trainer_are_ranked(recorded: Path) -> None:
    for algorithm in ("grpo", "gspo", "reinforce"):
        other_trainers(recorded, algorithm)
    assert Results.load(recorded, "small").runs.empty
    report_page.make(recorded, formats=["svg"])
    assert pd.read_csv(recorded / "tables" / "small-head_to_head.csv")["arm"].nunique() == 2


def test_an_archive_without_checksums_or_a_column_is_refused_in_one_line(recorded: Path) -> None:
    (path, *_) = report_page.keep(recorded, "small", recorded)
    shutil.rmtree(recorded / "runs")
    (path.parent / CHECKSUMS).unlink()
    with pytest.raises(Damaged, match=r"lacks checksums.json"):
        Results.load(recorded, "small")
    pd.read_parquet(path).drop(columns="origin").to_parquet(path, index=False)
    bind(path.parent)
    with pytest.raises(Damaged, match=r"runs.parquet cannot be read: .*origin"):
        Results.load(recorded, "small")


def test_arms_from_two_logs_of_one_trainer_are_ranked_together() -> None:
    origins = {"gspo": "verl gspo.jsonl", "grpo": "verl grpo.jsonl", "other": "zzz 1.0"}
    runs = pd.DataFrame({"arm": list(origins), "origin": list(origins.values())})
    none = pd.DataFrame(columns=["run"])
    assert Results(runs, none, none, none).one_trainer().runs["arm"].tolist() == ["gspo", "grpo"]
