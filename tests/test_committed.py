"""Committed numbers are compared as numbers, and what is not a number exactly."""

import pytest
from committed import assert_same

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
def test_numbers_may_differ_by_rounding_and_nothing_else(old: str, new: str, same: bool) -> None:
    if same:
        assert_same(TEXT.replace(old, new), TEXT)
    else:
        with pytest.raises((pytest.fail.Exception, AssertionError)):
            assert_same(TEXT.replace(old, new), TEXT)
