"""The validity gates of the standard settings and of the audits, and the gates that claims need.

Gates of settings are measured on seeds that no claim uses (200 to 229). A claim that needs a gate which is not passed
is "not testable here".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from steadymoe.bench.score.arms import (
    GRPO,
    GSPO,
    GSPO_R2,
    NARROW,
    OTHERS,
    PAPERS,
    PAPERS_R2,
    REINFORCE,
    UNCLIPPED,
    WIDE,
)
from steadymoe.bench.score.recorded import NONE, Arm, NotRun, Recorded
from steadymoe.bench.statistics.comparisons import seeds_needed
from steadymoe.bench.statistics.estimates import DIFFERENCE, POSITIVE, Estimate, over_seeds, share
from steadymoe.bench.study import arms
from steadymoe.bench.study.experiments import TABLE, arm

Setting = Literal["learning", "stale", "mismatch", "mismatch fp8"]
State = Literal["passed", "failed", "not measured"]

_RATE = "optimizer.learning_rate"
# Learning rate → arm, over the grid of the setting *learning*.
LEARNING = {
    rate: arm(f"GRPO, lr {rate:g}", "gates_learning", "grpo", f"{_RATE}={rate}")
    for rate in TABLE["gates_learning"].values(_RATE)
}
STALE = {
    name: arm(label, "gates_stale", name)
    for name, label in (("grpo", "GRPO"), ("gspo", "GSPO"), ("grpo_unclipped", "GRPO unclipped"))
}
TWIN = arms.ON_POLICY
DENSE = arm("GRPO unclipped, dense", "gates_dense", "grpo_unclipped", "updates_per_rollout=16")
DENSE_TWIN = arm("GRPO unclipped, dense, on policy", "gates_dense", "grpo_unclipped", "updates_per_rollout=1")
EXACT = arm("GRPO, exact sampler", "gates_mismatch", "grpo", "engine=exact")
FP8 = arm("GRPO, fp8 sampler", "gates_mismatch", "grpo", "engine=fp8")
NOISY = arm("GRPO, noise on the sampler's routers", "gates_noise", "grpo", "engine.strength=1.0")
QUIET = arm("GRPO, noise 0", "gates_noise", "grpo", "engine.strength=0.0")
# The arms of the study at *stale*.
_AT_STALE = (
    *(GRPO, PAPERS, PAPERS_R2, NARROW, GSPO, GSPO_R2, WIDE, *OTHERS.values()),
    *(*arms.SHIFT.values(), arms.FREEZE, arms.BALANCED, UNCLIPPED, REINFORCE, *arms.DENSE.values()),
)

# The thresholds of the validity gates.
LEAST_GAIN = 0.15  # V1
MOST_COLLAPSES, LEAST_TWIN_GAIN = 0.1, 0.10  # V2: a share of the seeds; held-out accuracy
LEAST_FAILURES = 0.9  # V3: a share of the seeds
LEAST_COST = 0.05  # V4: held-out accuracy
LEAST_KEPT = 0.8  # V5, and the audits' gate: a share of the reward
RESOLUTION = 0.05  # V7: standard deviation of paired differences


class Need(NamedTuple):
    """A gate of a setting, or of the audits of an experiment."""

    gate: str
    setting: str

    def __str__(self) -> str:
        return f"{self.gate} ({self.setting})"


_LEARNS = Need("V1", "learning")
# The gates of docs/protocol.md, "Gates".
STRESS = (_LEARNS, *(Need(gate, "stale") for gate in ("V2", "V3", "V5", "V7")))
STRESS_AND_TWIN = (*STRESS, Need("V2 dense", "stale"))
MISMATCH = (_LEARNS, *(Need(gate, "mismatch") for gate in ("V4", "V7")))


@dataclass(frozen=True)
class Gate:
    """A gate, its number and whether it is passed."""

    need: Need
    state: State
    measured: str
    """What was measured, in words."""
    number: Estimate = NONE
    """n is the number of seeds, and 0 if nothing was measured."""
    passes: str = ""
    """The condition, in words, of a gate of a setting."""

    @property
    def reason(self) -> str:
        """The number and what it is."""
        return f"{self.number}: {self.measured}" if self.passes else self.measured


def gates(study: Recorded) -> dict[Need, Gate]:
    """Measure every validity gate of the settings; a gate without its runs is "not measured"."""
    twin = f"≤ {MOST_COLLAPSES:.0%} of the seeds collapse, and the mean gain is ≥ {LEAST_TWIN_GAIN:g}"
    cost = f"≥ {LEAST_COST:g}, with the interval above 0"
    resolution = f"standard deviation ≤ {RESOLUTION:g}, or as many seeds as the power calculation asks for"
    every: Sequence[tuple[str, Setting, str, Callable[[Recorded], tuple[Estimate, bool, str]]]] = (
        ("V1", "learning", f"the best arm gains ≥ {LEAST_GAIN:g}, at a learning rate inside the grid", _learns),
        ("V2", "stale", twin, lambda of: _twin(of, TWIN)),
        ("V2 dense", "stale", twin, lambda of: _twin(of, DENSE_TWIN)),
        ("V3", "stale", f"collapsed, or ends below its start, in ≥ {LEAST_FAILURES:.0%} of the seeds", _fails),
        ("V4", "mismatch", cost, lambda of: _costs(of, QUIET, NOISY)),
        ("V4", "mismatch fp8", cost, lambda of: _costs(of, EXACT, FP8)),
        ("V5", "stale", f"≥ {LEAST_KEPT:.0%} of the reward, GRPO and GSPO", _keeps),
        ("V7", "stale", resolution, lambda of: _resolves(of, STALE["gspo"], STALE["grpo"], Recorded.mean_reward)),
        ("V7", "mismatch", resolution, lambda of: _resolves(of, QUIET, NOISY, Recorded.held_out)),
    )
    return {(need := Need(name, setting)): _gate(study, need, *rest) for name, setting, *rest in every}  # type: ignore[arg-type]


def _gate(study: Recorded, need: Need, passes: str, measure: Callable[[Recorded], tuple[Estimate, bool, str]]) -> Gate:
    try:
        number, passed, measured = measure(study)
    except NotRun as missing:
        return Gate(need, "not measured", f"to be run: {missing}", passes=passes)
    return Gate(need, "passed" if passed else "failed", measured, number, passes)


def blocking(needs: Sequence[Need], measured: Mapping[Need, Gate]) -> list[Gate]:
    """Return the needed gates that are not passed, failed gates first. Raises KeyError for an unknown one."""
    found = [measured[need] for need in needs if measured[need].state != "passed"]
    return sorted(found, key=lambda gate: gate.state != "failed")


def audited(study: Recorded, experiment: str, k: int) -> Gate:
    """Whether audited updates keep the reward: fresh samples after ``k`` of them have ``LEAST_KEPT`` of it."""
    need = Need("reward kept", experiment)
    try:
        kept = over_seeds(study.kept(experiment, k).tolist(), bounds=POSITIVE)
    except NotRun:
        return Gate(need, "not measured", "its audits have not run")
    state: State = "passed" if kept.mean >= LEAST_KEPT else "failed"
    return Gate(need, state, f"{kept} of the reward after {k} updates, n = {kept.n}")


def kept(study: Recorded) -> dict[str, Estimate]:
    """Return V5's number for every arm of the study at *stale*, by label; n is 0 for an arm that has not run."""
    return {each.label: _kept(study, each) if study.has(each) else NONE for each in _AT_STALE}


def _gain(study: Recorded, of: Arm) -> Estimate:
    """Held-out accuracy at the end (mean of the last five evaluations) less at the start."""
    return _mean(study.held_out(of) - study.numbers(of, "eval_accuracy", "first"))


def _mean(numbers: pd.Series) -> Estimate:
    return over_seeds(numbers.dropna().tolist(), bounds=DIFFERENCE)


def _learns(study: Recorded) -> tuple[Estimate, bool, str]:
    """V1: the largest gain over the learning rates, and whether its rate is inside the grid."""
    gains = {rate: _gain(study, each) for rate, each in LEARNING.items()}
    best = max(gains, key=lambda rate: gains[rate].mean)
    number, inside = gains[best], min(gains) < best < max(gains)
    others = ", ".join(f"{LEARNING[rate].label}: {each.mean:.2f}" for rate, each in gains.items())
    where = "inside the grid" if inside else "at the end of the grid"
    passed = number.mean >= LEAST_GAIN and inside
    return number, passed, f"gain in held-out accuracy of GRPO at {best:g}, {where} ({others})"


def _twin(study: Recorded, of: Arm) -> tuple[Estimate, bool, str]:
    """V2: the gain of the control without a clip, on policy, and how many of its seeds collapse."""
    number, (fallen, n) = _gain(study, of), study.collapsed(of)
    passed = number.mean >= LEAST_TWIN_GAIN and fallen <= MOST_COLLAPSES * n
    return number, passed, f"gain in held-out accuracy of {of.label}, which collapsed in {fallen} of {n} seeds"


def _fails(study: Recorded) -> tuple[Estimate, bool, str]:
    """V3: the share of seeds in which the stale control without a clip collapses or ends below its start."""
    control = STALE["grpo_unclipped"]
    runs = study.judged(control).set_index("seed")
    below = study.final(control) < study.first(control)
    failed = runs["collapsed_step"].notna() | below.reindex(runs.index)
    number = share(int(failed.sum()), len(failed))
    fallen = int(runs["collapsed_step"].notna().sum())
    measured = (
        f"of {len(failed)} seeds of {control.label} {fallen} collapsed, {int(below.sum())} ended below their start"
    )
    return number, number.mean >= LEAST_FAILURES, measured


def _costs(study: Recorded, exact: Arm, of: Arm) -> tuple[Estimate, bool, str]:
    """V4: held-out accuracy with the exact sampler less held-out accuracy with an uncorrected other sampler."""
    number = _mean(study.held_out(exact) - study.held_out(of))
    return number, number.mean >= LEAST_COST and number.low > 0, f"held-out accuracy of {exact.label} less {of.label}"


def _keeps(study: Recorded) -> tuple[Estimate, bool, str]:
    """V5: the reward after all updates on the first rollout, over the reward before, of the worse algorithm."""
    kept = {each.label: _kept(study, each) for each in (STALE["grpo"], STALE["gspo"])}
    worse = min(kept.values(), key=lambda each: each.mean)
    both = ", ".join(f"{label} {each}" for label, each in kept.items())
    return worse, worse.mean >= LEAST_KEPT, f"reward of the second rollout over the first: {both}"


def _kept(study: Recorded, of: Arm) -> Estimate:
    steps = study.tables([of])["steps"]
    rewards = steps[steps["metric"] == "reward"].pivot_table(index="seed", columns="step", values="value")
    return over_seeds((rewards[2] / rewards[1]).dropna().tolist(), bounds=POSITIVE)


def _resolves(
    study: Recorded, of: Arm, over: Arm, outcome: Callable[[Recorded, Arm], pd.Series]
) -> tuple[Estimate, bool, str]:
    """V7: the standard deviation of paired differences, and the seeds that a difference of 0.05 takes."""
    differences = (outcome(study, of) - outcome(study, over)).dropna()
    needed = seeds_needed(differences.tolist(), RESOLUTION)
    deviation = float(differences.std())
    measured = (
        f"standard deviation of {of.label} less {over.label}, whose mean is {_mean(differences)}; a difference of "
        f"{RESOLUTION:g} takes {needed} seeds for 80 % power"
    )
    number = Estimate(deviation, np.nan, np.nan, len(differences))
    return number, deviation <= RESOLUTION or len(differences) >= needed, measured
