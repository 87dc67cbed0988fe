"""The tables of ``results/reference`` are those of the data beside them, to the last digit; its figures are there."""

from pathlib import Path

import pytest

from steadymoe.bench import archive, draw, report

REFERENCE = Path(__file__).parent.parent / "results" / "reference"
TABLES, FIGURES = REFERENCE / "tables", REFERENCE / "figures"
KEPT = archive.experiments(REFERENCE)
# Recorded before data were kept: results/README.md.
WITHOUT_DATA = {"dose_router_noise", "families"}


def test_every_table_has_its_data() -> None:
    named = {path.name.split("-")[0] for folder in (TABLES, FIGURES) for path in folder.iterdir()}
    assert named == {*KEPT, *WITHOUT_DATA}


@pytest.mark.parametrize("experiment", KEPT)
def test_tables_and_figures_are_those_of_the_data(experiment: str) -> None:
    data = draw.data(archive.load(REFERENCE, experiment))
    texts = report.texts(experiment, report.shown_tables(data), data["runs"])
    for paper in report.papers(experiment):
        if paper.lacks(data) is None:
            texts |= draw.texts(paper, paper.figure(data), experiment)
            for suffix in ("png", "svg"):
                assert (FIGURES / f"{draw.stem(paper, experiment)}.{suffix}").exists()
    committed = {path.name: path.read_text() for path in TABLES.glob(f"{experiment}-*")}
    assert committed.keys() == texts.keys()
    for name, text in texts.items():
        assert committed[name] == text, name


@pytest.mark.parametrize("experiment", KEPT)
def test_the_figures_of_an_experiment_lack_nothing(experiment: str) -> None:
    data = draw.data(archive.load(REFERENCE, experiment))
    own = [paper for paper in report.papers(experiment) if paper.experiment == experiment]
    assert {paper.id: paper.lacks(data) for paper in own} == dict.fromkeys(paper.id for paper in own)
