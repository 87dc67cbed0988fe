"""Committed numbers are compared as numbers, and what is not a number exactly; committed archives are whole."""

from pathlib import Path

import pytest
from committed import assert_same

from steadymoe.bench.report.results import CHECKSUMS
from steadymoe.bench.runs import record
from steadymoe.bench.support import regular_files

RESULTS = Path(__file__).parents[1] / "results"

TEXT = "arm,n,mean\ngspo,10,0.1717387\n| 0.25 [−1e-05, 3.5] | claim01 8 updates"


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("0.1717387", "0.17173870000000002", True),
        ("3.5", "3.500000000000001", True),
        ("0.1717387", "0.1717388", False),
        ("−1e-05", "1e-05", False),
        (",10,", ",11,", False),
        ("gspo", "grpo", False),
        ("claim01", "claim02", False),
        ("updates", "updates\n", False),
    ],
)
def test_comparison_allows_only_rounding(old: str, new: str, same: bool) -> None:
    if same:
        assert_same(TEXT.replace(old, new), TEXT)
    else:
        with pytest.raises((pytest.fail.Exception, AssertionError)):
            assert_same(TEXT.replace(old, new), TEXT)


def test_committed_archives_match_their_checksums() -> None:
    bound = sorted(RESULTS.glob(f"*/data/*/{CHECKSUMS}"))
    assert {path.parts[-4] for path in bound} == {"reference", "ruler", "trainers"}
    changed = [
        str(path.parent / name)
        for path in bound
        for name, checksum in regular_files.read_json(path).items()
        if record.checksum(path.parent / name) != checksum
    ]
    assert changed == []
