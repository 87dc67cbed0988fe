"""The kept tables of ``results/reference`` match the data next to them, and every figure there has what it needs."""

from dataclasses import replace
from pathlib import Path

import pytest
from committed import assert_same

from steadymoe.bench.report import folders, paper, report_page, write
from steadymoe.bench.report.results import Results

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
KEPT = folders.experiments(REFERENCE)


@pytest.mark.parametrize("experiment", KEPT)
def test_kept_tables_match_the_data(experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Results.load(REFERENCE, experiment)
    monkeypatch.setattr(paper, "_in_use", [paper.Paper(names=paper.published())])
    data = replace(recorded, runs=paper.rename(recorded.runs))
    for kind, (table, caption) in report_page.shown_tables(data).items():
        write.table(tmp_path, f"{experiment}-{kind}", table, caption)
    for spec in report_page.figures_of(experiment):
        if (lack := spec.lacks(data)) is not None:
            assert spec.experiment != experiment or spec.needs_own, f"its own figure {spec.id} lacks {lack}"
        elif (REFERENCE / "tables" / f"{spec.stem(experiment)}.csv").exists():
            write.figure(tmp_path, spec.stem(experiment), spec.figure(data), spec.caption, [])
    for made in (tmp_path / "tables").iterdir():
        if (kept := REFERENCE / "tables" / made.name).exists():
            assert_same(made.read_text(), kept.read_text(), made.name)


def test_every_kept_table_has_its_data() -> None:
    kept = {path.name.partition("-")[0] for path in (REFERENCE / "tables").iterdir()}
    assert kept - set(KEPT) == {"families"}, "recorded before data were kept: results/README.md"
