"""The tables of the committed audits are those of their archives, to the last digit; their figures are there."""

from pathlib import Path

import pytest

from steadymoe.bench.audit import report

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
KEPT = sorted(path.parent.name for path in (REFERENCE / "audits").glob("*/audits.parquet"))


@pytest.mark.parametrize("experiment", KEPT)
def test_tables_are_those_of_the_archive(experiment: str, tmp_path: Path) -> None:
    (tmp_path / "audits").symlink_to(REFERENCE / "audits")
    made = report.make(tmp_path, experiment, formats=[])
    assert made.files
    for path in made.files:
        assert path.read_bytes() == (REFERENCE / "tables" / path.name).read_bytes(), path.name
    stems = {path.stem for path in made.files if path.suffix == ".csv"}
    drawn = {path.stem for path in (REFERENCE / "figures").glob(f"{experiment}-*.png")}
    tables = {"ranking", "contrasts", "clips", "equivalent_bands", "clip_prediction"}
    expected = {stem for stem in stems if stem.rpartition("-")[2] not in tables}
    assert {stem for stem in drawn if "clips-" not in stem} == expected
    for stem in drawn:
        assert (REFERENCE / "figures" / f"{stem}.svg").exists()


def test_the_recorded_audits_are_there() -> None:
    assert {"audit", "audit_gentle", "audit_mid", "audit_dense", "audit_bands", "audit_noise"} <= set(KEPT)
