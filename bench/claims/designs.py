"""What a seed buys: the spread of paired differences by the design of a comparison, and the floor that chaos sets.

Two runs that begin with weights 1e-7 apart end apart: this spread, the floor of chaos, stays between any two arms that
are compared as whole runs. Branches of one trunk share what came before them.
"""

from dataclasses import dataclass

import numpy as np

from steadymoe.bench.claims.study import Arm, NotRun, Study
from steadymoe.bench.claims.testbed import RESOLUTION, STALE, primary
from steadymoe.bench.statistics.comparisons import seeds_needed
from steadymoe.bench.statistics.estimates import DIFFERENCE, LEAST_FOR_INTERVAL, Estimate, over_seeds

# conf/experiment/gates_branches.yaml
_TRUNK = {"start_from": "runs/gates_trunk/grpo/flat/sort/seed=*@10"}
DISTURBED = Arm("GRPO, weights disturbed by 1e-7", "gates_chaos", "grpo")
BRANCHES = {
    name: Arm(f"{shown}, branch", "gates_branches", name, _TRUNK)
    for name, shown in (("grpo", "GRPO"), ("gspo", "GSPO"))
}
ARMS = (DISTURBED, *BRANCHES.values())
_COMPARED = (
    ("whole runs", STALE["gspo"], STALE["grpo"]),
    ("branches of one trunk", BRANCHES["gspo"], BRANCHES["grpo"]),
    ("floor of chaos", DISTURBED, STALE["grpo"]),
)
_OUTCOMES = {"mean reward": primary, "held-out accuracy": Study.held_out}


@dataclass(frozen=True)
class Design:
    """One way to compare two arms, by one outcome."""

    name: str
    compared: str
    outcome: str
    difference: Estimate
    deviation: float
    """The standard deviation of the differences, seed by seed."""
    seeds: int
    """How many seeds find a difference of ``testbed.RESOLUTION`` with 80 % power."""


def designs(study: Study) -> list[Design]:
    """The designs whose arms have ended at three common seeds or more."""
    found = []
    for name, arm, over in _COMPARED:
        for outcome, number in _OUTCOMES.items():
            try:
                apart = (number(study, arm) - number(study, over)).dropna()
            except NotRun:
                continue
            if len(apart) < LEAST_FOR_INTERVAL:
                continue
            difference = over_seeds(apart.tolist(), bounds=DIFFERENCE)
            deviation = float(np.std(apart, ddof=1))
            needed = seeds_needed(apart.tolist(), RESOLUTION)
            found.append(Design(name, f"{arm.label} less {over.label}", outcome, difference, deviation, needed))
    return found
