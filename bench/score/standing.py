"""Where an algorithm stands: its outcome beside the outcomes of others, part by part, with paired differences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from steadymoe.bench.score.standard import Part
from steadymoe.bench.statistics.comparisons import holm, p_value, paired_difference, sign_flip_p
from steadymoe.bench.statistics.estimates import LEAST_FOR_INTERVAL, Estimate, over_seeds

# Below this p the anchors of a machine are another population than the recorded ones.
_OTHER_MACHINE = 0.01
# Of fewer seeds no two anchors can have such a p: 2 · 2/2⁹ is the least of nine.
_LEAST_SEEDS = 9
# Below this corrected p a difference is decided.
_LEVEL = 0.05


@dataclass(frozen=True)
class Row:
    """An algorithm in one part."""

    arm: str
    where: str
    """``here`` for runs of this machine, else ``recorded``."""
    numbers: Estimate
    apart: Estimate | None
    """The scored algorithm less this one; None for itself, and for a recorded one that is only shown beside."""
    paired: bool
    p: float
    """Exact by sign flips for paired differences, Welch's for others."""

    corrected: float
    """``p`` corrected by Holm for all rows of the part."""

    @property
    def says(self) -> str:
        """Whether the scored algorithm is better or worse than this one, by the corrected p."""
        if self.apart is None:
            return "–"
        if not self.corrected < _LEVEL:
            return "not decided"
        return "yours is higher" if self.apart.mean > 0 else "yours is lower"


def rows(
    mine: str,
    here: Mapping[str, pd.Series],
    recorded: Mapping[str, pd.Series],
    part: Part,
    pooled: bool = True,
) -> list[Row]:
    """The rows of one part, highest first.

    ``here`` holds outcomes by seed of this machine, with the scored algorithm ``mine`` among them; ``recorded`` holds
    the standard's. A recorded arm that was run here too is left out. Differences are taken seed by seed from arms of
    this machine; from recorded arms they are differences of means, and with ``pooled=False`` there are none.
    """
    ours = here[mine]
    apart: dict[str, tuple[Estimate | None, float]] = {mine: (None, np.nan)}
    for arm, numbers in here.items():
        if arm != mine:
            apart[arm] = (paired_difference(ours, numbers, bounds=part.difference_bounds), p_value(ours, numbers))
    others = {arm: numbers for arm, numbers in recorded.items() if arm not in here}
    for arm, numbers in others.items():
        apart[arm] = _unpaired(ours, numbers) if pooled else (None, np.nan)
    corrected = dict(zip(apart, holm([p for _, p in apart.values()]), strict=True))
    found = [
        Row(
            arm,
            "here" if arm in here else "recorded",
            over_seeds(numbers.dropna().tolist(), bounds=part.bounds),
            apart[arm][0],
            arm in here and arm != mine,
            apart[arm][1],
            float(corrected[arm]),
        )
        for arm, numbers in {**here, **others}.items()
    ]
    return sorted(found, key=lambda row: (bool(np.isnan(row.numbers.mean)), -row.numbers.mean))


def _unpaired(ours: pd.Series, theirs: pd.Series) -> tuple[Estimate, float]:
    """Welch's difference of means with its interval and p; no interval below three numbers."""
    ours, theirs = ours.dropna(), theirs.dropna()
    n = min(len(ours), len(theirs))
    mean = float(ours.mean() - theirs.mean())
    if n < LEAST_FOR_INTERVAL:
        return Estimate(mean, np.nan, np.nan, n), np.nan
    test = stats.ttest_ind(ours, theirs, equal_var=False)
    low, high = test.confidence_interval(0.95)
    return Estimate(mean, float(low), float(high), n), float(test.pvalue)


def agreement(
    here: Mapping[str, pd.Series], recorded: Mapping[str, pd.Series], anchors: Sequence[str]
) -> tuple[bool, str]:
    """Whether recorded arms are compared with arms of this machine, and what the anchors say, in one line.

    The anchors of this machine must be there at enough seeds, and must not differ from their records beyond chance: the
    same seeds differ between machines by rounding alone. A chaotic run makes that large, and it has no direction. A
    difference that is smaller than what the seeds can show passes; the line has its interval.
    """
    shared = [name for name in anchors if name in here and name in recorded]
    common = {name: (here[name] - recorded[name]).dropna().tolist() for name in shared}
    if not common or min(map(len, common.values())) < _LEAST_SEEDS:
        return False, "too few seeds to tell this machine from the recorded one: recorded rows are not compared"
    told = [
        f"{name} of this machine less the recorded {name} is {over_seeds(each)}, n {len(each)}"
        for name, each in common.items()
    ]
    agree = all(min(1.0, sign_flip_p(each) * len(common)) >= _OTHER_MACHINE for each in common.values())
    end = "recorded rows are compared by means" if agree else "recorded rows are shown and not compared"
    return agree, f"{'; '.join(told)}: {end}"
