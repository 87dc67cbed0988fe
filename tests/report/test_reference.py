"""The kept tables of ``results/reference`` match the data next to them, and every figure there has what it needs."""

import re
from dataclasses import replace
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest
from committed import assert_same

from steadymoe.bench.report import claims, folders, paper, report_page, write
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
    kept = {path.stem.partition("-")[0] for path in (REFERENCE / "tables").iterdir()}
    assert kept - set(KEPT) == {"claims", "families"}, "families were recorded before data were kept: results/log.md"


def test_kept_verdicts_and_those_of_the_findings_follow_from_the_archives(tmp_path: Path) -> None:
    results = REFERENCE.parent
    claims.write(results / "claims.yaml", REFERENCE, [], tmp_path)
    made = (tmp_path / "tables" / "claims-verdicts.md").read_text()
    assert_same(made, (REFERENCE / "tables" / "claims-verdicts.md").read_text(), "claims-verdicts.md")
    verdicts, findings = _rows(made), _rows((results / "README.md").read_text().partition("<!-- begin claims -->")[2])
    columns = [verdicts[0].index(name) for name in findings[0][1:]]
    for number, (row, shown) in enumerate(zip(verdicts[2:], findings[2:], strict=True), start=1):
        assert_same(
            " | ".join([str(number), *(row[column] for column in columns)]), " | ".join(shown), f"claim {number}"
        )


def _rows(text: str) -> list[list[str]]:
    """Return the cells of the first table of a page."""
    lines = takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: line[:1] != "|", text.splitlines()))
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
