"""The kept tables of the committed audits are those of their archives."""

import re
import shutil
from pathlib import Path

import linked
import pytest
from committed import assert_same, assert_same_picture

from steadymoe.bench.audit import archive, report, tables
from steadymoe.bench.report import paper

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
KEPT = sorted(path.parent.name for path in (REFERENCE / "audits").glob("*/audits.parquet"))


@pytest.mark.parametrize(
    "experiment", [pytest.param(name, marks=[] if name == "audit" else pytest.mark.check) for name in KEPT]
)
def test_kept_tables_and_figures_match_the_archive(experiment: str, tmp_path: Path) -> None:
    shutil.copytree(REFERENCE / "audits", tmp_path / "audits")
    is_drawn = any(path.suffix == ".png" and path.name.startswith(f"{experiment}-") for path in linked.kept())
    with paper.used(paper.Paper(caption=True)):
        made = {path.name: path for path in report.write(tmp_path, experiment, formats=["png"] * is_drawn).files}
    assert made
    for kept in [path for path in linked.kept() if path.name in made]:
        if kept.suffix == ".png":
            assert_same_picture(made[kept.name], REFERENCE / kept)
        else:
            assert_same(made[kept.name].read_text(), (REFERENCE / kept).read_text(), kept.name)


def test_recorded_audits_exist() -> None:
    assert {"audit", "audit_gentle", "audit_mid", "audit_dense", "audit_bands", "audit_noise"} <= set(KEPT)


def test_gains_on_the_page_match_the_archives() -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text().replace("−", "-")
    rows = re.findall(r"^\| `(\w+)` \(\de-4\) \| (GRPO|GSPO) \| (.+) \| (.+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for experiment, band, *numbers, n in rows:
        one, other = {"GRPO": ("gspo-grpo_band", "grpo"), "GSPO": ("gspo", "grpo-gspo_band")}[band]
        contrasts = tables.contrasts(archive.load(REFERENCE, experiment).rows, other)
        contrasts = contrasts[(contrasts["loss"] == f"{one} − {other}") & (contrasts["routing"] == "free")]
        contrasts = contrasts[contrasts["k"] == 16].set_index("quantity")
        for quantity, number in zip(("usefulness", "gain"), numbers, strict=True):
            found = contrasts.loc[quantity]
            assert number == f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
            assert int(n) == found["n"]
