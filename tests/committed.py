"""Compare a text made here with the one that was committed, perhaps from another processor: numbers are numbers."""

import math
import re

import pytest

# Processors sum and take logarithms in different order, which moves the last digits of a result.
RELATIVE, ABSOLUTE = 1e-9, 1e-15
_NUMBER = re.compile(r"(?<![\w.])([-−+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?!\w)")


def assert_same(made: str, committed: str, name: object = "") -> None:
    """Fail unless ``made`` is ``committed``: decimal numbers up to rounding, all else, whole numbers too, exactly."""
    ours, theirs = (_NUMBER.split(text) for text in (made, committed))
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other and not (place % 2 and _close(one, other)):
            line = "".join(ours[:place]).count("\n") + 1
            pytest.fail(f"{name}, line {line}: made here {one!r}, committed {other!r}")
    assert len(ours) == len(theirs), f"{name} has another length"


def _close(one: str, other: str) -> bool:
    if all(re.fullmatch(r"[-−+]?\d+", text) for text in (one, other)):
        return False
    a, b = (float(text.replace("−", "-")) for text in (one, other))
    return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
