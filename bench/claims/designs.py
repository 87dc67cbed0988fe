"""What a seed buys: the spread of paired differences by the design of a comparison, and the floor that chaos sets.

Two runs that begin with weights 1e-7 apart end apart: this spread, the floor of chaos, stays between any two arms that
are compared as whole runs. Branches of one trunk share what came before them.
"""

from dataclasses import dataclass

import numpy as np

from steadymoe.bench.claims.testbed import RESOLUTION, STALE
from steadymoe.bench.score.recorded import Arm, NotRun, Recorded
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
TRUNK = Arm("trunk", "gates_trunk", "grpo")
# Design, the two arms, and what else a seed of it needs.
_COMPARED: tuple[tuple[str, Arm, Arm, tuple[Arm, ...]], ...] = (
    ("whole runs", STALE["gspo"], STALE["grpo"], ()),
    ("branches of one trunk", BRANCHES["gspo"], BRANCHES["grpo"], (TRUNK,)),
    ("floor of chaos", DISTURBED, STALE["grpo"], ()),
)
_OUTCOMES = {
    "mean reward": Recorded.mean_reward,
    "final reward": Recorded.final,
    "held-out accuracy": Recorded.held_out,
}


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
    updates: float
    """How many gradient updates the runs of these seeds make."""


def designs(study: Recorded) -> list[Design]:
    """The designs whose arms have ended at three common seeds or more."""
    found = []
    for name, arm, over, further in _COMPARED:
        for outcome, number in _OUTCOMES.items():
            try:
                apart = (number(study, arm) - number(study, over)).dropna()
            except NotRun:
                continue
            if len(apart) < LEAST_FOR_INTERVAL:
                continue
            needed = seeds_needed(apart.tolist(), RESOLUTION)
            design = Design(
                name,
                f"{arm.label} less {over.label}",
                outcome,
                difference=over_seeds(apart.tolist(), bounds=DIFFERENCE),
                deviation=float(np.std(apart, ddof=1)),
                seeds=needed,
                updates=needed * sum(_updates(study, each) for each in (arm, over, *further)),
            )
            found.append(design)
    return found


def seconds_an_update(study: Recorded) -> float | None:
    """How long a gradient update takes in a run, all included, on one core; None if no run has ended.

    Runs share a machine with other work, so it is the time of the quickest arm (the median over its seeds).
    """
    paces = []
    for arm in [each for _, one, other, further in _COMPARED for each in (one, other, *further)]:
        if study.has(arm):
            wall = float(study.tables([arm])["runs"]["wall_seconds"].median())
            paces.append(wall / _updates(study, arm))
    return min(paces, default=None)


def _updates(study: Recorded, arm: Arm) -> float:
    """The gradient updates of a run of the arm, the median over seeds."""
    steps = study.tables([arm])["steps"]
    made = steps[steps["metric"] == "reward"].groupby("seed")["updates_per_rollout"].sum()
    return float(made.median())
