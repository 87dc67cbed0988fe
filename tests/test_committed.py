"""Committed archives are whole."""

from pathlib import Path

from steadymoe.bench.report.results import CHECKSUMS
from steadymoe.bench.runs import run_folder
from steadymoe.bench.support import files

RESULTS = Path(__file__).parents[1] / "results"


def test_committed_archives_match_their_checksums() -> None:
    bound = sorted(RESULTS.glob(f"*/data/*/{CHECKSUMS}"))
    assert {path.parts[-4] for path in bound} == {"reference", "ruler", "trainers"}
    changed = [
        str(path.parent / name)
        for path in bound
        for name, checksum in files.read_json(path).items()
        if run_folder.checksum(path.parent / name) != checksum
    ]
    assert changed == []
