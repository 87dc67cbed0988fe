"""Where an algorithm stands: its outcome beside the outcomes of others, part by part, with paired differences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from steadymoe.bench.statistics.comparisons import sign_flip_p
from steadymoe.bench.statistics.estimates import Estimate, mean_over_seeds, over_seeds

# Below this p the anchors of a machine are another population than the recorded ones.
_OTHER_MACHINE = 0.01
# Of fewer seeds no two anchors can have such a p: 2 · 2/2⁹ is the least of nine.
_LEAST_SEEDS = 9


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

    @property
    def says(self) -> str:
        """Whether the scored algorithm is better or worse than this one, by the interval of the difference."""
        if self.apart is None:
            return "–"
        if self.apart.low > 0:
            return "yours is higher"
        return "yours is lower" if self.apart.high < 0 else "not decided"


def rows(mine: str, here: Mapping[str, pd.Series], recorded: Mapping[str, pd.Series], pooled: bool = True) -> list[Row]:
    """The rows of one part, highest first.

    ``here`` holds outcomes by seed of this machine, with the scored algorithm ``mine`` among them; ``recorded`` those
    of the standard. A recorded arm that was run here too is left out. Differences are taken seed by seed from arms of
    this machine; from recorded arms they are differences of means, and with ``pooled=False`` there are none.
    """
    ours = here[mine]
    found = [Row(mine, "here", over_seeds(ours.tolist()), None, False, np.nan)]
    for arm, numbers in here.items():
        if arm != mine:
            differences = (ours - numbers).dropna().tolist()
            found.append(
                Row(arm, "here", over_seeds(numbers.tolist()), over_seeds(differences), True, sign_flip_p(differences))
            )
    for arm, numbers in recorded.items():
        if arm not in here:
            apart, p = _unpaired(ours, numbers) if pooled else (None, np.nan)
            found.append(Row(arm, "recorded", over_seeds(numbers.tolist()), apart, False, p))
    return sorted(found, key=lambda row: -row.numbers.mean)


def _unpaired(ours: pd.Series, theirs: pd.Series) -> tuple[Estimate, float]:
    """Welch's difference of means with its interval and p; no interval below three numbers."""
    n = min(len(ours), len(theirs))
    mean = float(ours.mean() - theirs.mean())
    if n < 3:
        return Estimate(mean, np.nan, np.nan, n), np.nan
    test = stats.ttest_ind(ours, theirs, equal_var=False)
    low, high = test.confidence_interval(0.95)
    return Estimate(mean, float(low), float(high), n), float(test.pvalue)


def why_not_pooled(here: Mapping[str, pd.Series], recorded: Mapping[str, pd.Series], anchors: Sequence[str]) -> str:
    """Why recorded arms are shown beside and not compared; "" where they are compared.

    The anchors of this machine must be there at enough seeds, and must not differ from their records beyond chance: the
    same seeds differ between machines by rounding alone, which a chaotic run makes large and which has no direction.
    """
    shared = [name for name in anchors if name in here and name in recorded]
    common = {name: (here[name] - recorded[name]).dropna().tolist() for name in shared}
    if not common or min(map(len, common.values())) < _LEAST_SEEDS:
        return "too few seeds to tell this machine from the recorded one: recorded rows are shown and not compared"
    for name, apart in common.items():
        p = min(1.0, sign_flip_p(apart) * len(common))
        if p < _OTHER_MACHINE:
            return (
                f"{name} of this machine less the recorded {name} is {mean_over_seeds(apart)} (p {p:.2g}): recorded "
                "rows are shown and not compared"
            )
    return ""
