"""The kept tables of the committed audits are those of their archives, to the last digit."""

import re
from pathlib import Path

import linked
import pytest

from steadymoe.bench.audit import archive, report, tables

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
KEPT = sorted(path.parent.name for path in (REFERENCE / "audits").glob("*/audits.parquet"))


@pytest.mark.parametrize("experiment", KEPT)
def test_kept_tables_are_those_of_the_archive(experiment: str, tmp_path: Path) -> None:
    (tmp_path / "audits").symlink_to(REFERENCE / "audits")
    made = {path.name: path for path in report.make(tmp_path, experiment, formats=[]).files}
    kept = {path.name for path in linked.kept() if path.parent.name == "tables"}
    assert made
    for name in made.keys() & kept:
        assert made[name].read_bytes() == (REFERENCE / "tables" / name).read_bytes(), name


def test_the_recorded_audits_are_there() -> None:
    assert {"audit", "audit_gentle", "audit_mid", "audit_dense", "audit_bands", "audit_noise"} <= set(KEPT)


def test_the_gains_on_the_page_are_those_of_the_archives() -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text().replace("−", "-")
    told = re.findall(r"^\| `(\w+)` \(\de-4\) \| (GRPO|GSPO) \| (.+) \| (.+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(told) == 6
    for experiment, band, *numbers, n in told:
        pair = {"GRPO": ("gspo-grpo_band", "grpo"), "GSPO": ("gspo", "grpo-gspo_band")}[band]
        rows = archive.load(REFERENCE, experiment).rows
        for quantity, number in zip(("usefulness", "gain"), numbers, strict=True):
            _, found = tables.contrast(rows, *pair, quantity, k=16, routing="free")
            assert (number, int(n)) == (f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]", found.n)
