"""The tables of ``results/reference`` are those of the data beside them, to the last digit; its figures are there."""

import re
from pathlib import Path

import pytest

from steadymoe.bench import archive, draw, report
from steadymoe.bench.claims import page, registry
from steadymoe.bench.claims.arms import CONTENDERS, GRPO, GSPO, NARROW, SLOW

REFERENCE = Path(__file__).parent.parent / "results" / "reference"
DOCS = Path(__file__).parent.parent / "docs"
TABLES, FIGURES = REFERENCE / "tables", REFERENCE / "figures"
KEPT = archive.experiments(REFERENCE)
# Recorded before data were kept: results/README.md.
WITHOUT_DATA = {"dose_router_noise", "families"}


def test_every_table_has_its_data() -> None:
    named = {path.stem.split("-")[0] for folder in (TABLES, FIGURES) for path in folder.iterdir()}
    claims = {"claims", *(page.name(claim) for claim in registry.CLAIMS)}
    assert named - claims == {*KEPT, *WITHOUT_DATA}


@pytest.mark.parametrize("experiment", KEPT)
def test_tables_and_figures_are_those_of_the_data(experiment: str) -> None:
    data = draw.data(archive.load(REFERENCE, experiment))
    texts = report.texts(experiment, report.shown_tables(data), data["runs"])
    for paper in report.papers(experiment):
        if (said := paper.lacks(data)) is None:
            texts |= draw.texts(paper, paper.figure(data), experiment)
            for suffix in ("png", "svg"):
                assert (FIGURES / f"{draw.stem(paper, experiment)}.{suffix}").exists()
        else:
            assert paper.experiment != experiment, f"its own figure {paper.id} lacks {said}"
    committed = {path.name: path.read_text() for path in TABLES.glob(f"{experiment}-*")}
    assert committed.keys() == texts.keys()
    for name, text in texts.items():
        assert committed[name] == text, name


@pytest.fixture(scope="module")
def verdicts() -> page.Verdicts:
    return page.Verdicts(REFERENCE)


def test_the_verdicts_are_those_of_the_data(verdicts: page.Verdicts) -> None:
    for name, text in verdicts.texts().items():
        assert (TABLES / name).read_text() == text, name
    committed = (DOCS / "claims.md").read_text()
    assert committed == verdicts.page("../results/reference/figures")
    for link in re.findall(r"\]\(([^)#]+)\)", committed):
        assert (DOCS / link).exists(), link
    assert len(re.findall(r"\.png\)", committed)) == 1 + len(verdicts.drawn) == 1 + len(registry.CLAIMS)


def test_the_readme_has_the_verdicts_and_the_first_rows_of_the_leaderboard(verdicts: page.Verdicts) -> None:
    readme = (DOCS.parent / "README.md").read_text()
    assert verdicts.summary("docs/claims.md") in readme
    leaderboard = (TABLES / "study-leaderboard.md").read_text().splitlines()
    assert "\n".join(leaderboard[:7]) in readme
    collapsed = {arm.label: verdicts.study.collapsed(arm)[0] for arm in (GRPO, GSPO, NARROW)}
    assert max(collapsed["GSPO"], collapsed["GRPO, band 3e-4"]) <= 1 < 5 < collapsed["GRPO"]
    stressed, slow = (
        [(verdicts.study.final(arm) - verdicts.study.first(arm)).mean() for arm in arms]
        for arms in (CONTENDERS, SLOW.values())
    )
    assert max(stressed) < 0 < min(slow)
    assert "No algorithm learns under that stress" in readme
    assert "GSPO holds where GRPO collapses in most seeds; with GSPO's band GRPO holds too" in " ".join(readme.split())
