"""The gates of the standard settings and of the audits: validity, realism, which a claim needs; what a seed buys.

Gates of settings are measured on seeds that no claim at the same setting uses (200 to 229); only those of *long* share
the runs of claims 17 and 18. A claim that needs a gate which is not passed is "not testable here".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from steadymoe.bench.report.realism import OVER_DENSE, ROWS, Realism, over_dense
from steadymoe.bench.statistics.comparisons import seeds_needed
from steadymoe.bench.statistics.estimates import DIFFERENCE, MIN_FOR_INTERVAL, POSITIVE, Estimate, over_seeds, share
from study import arms, experiments
from study.effects import RUN_METRICS, difference
from study.recorded import NONE, Arm, NotRun, Recorded

Setting = Literal["learning", "stale", "long", "longer", "slow", "mismatch", "mismatch fp8"]
State = Literal["passed", "failed", "not measured"]

_RATE = "optimizer.learning_rate"
# Learning rate → arm, over the grid of the setting *learning*.
LEARNING = {
    rate: experiments.arm(f"GRPO, lr {rate:g}", "gates_learning", "grpo", f"{_RATE}={rate}")
    for rate in experiments.TABLE["gates_learning"].values(_RATE)
}
STALE = {
    name: experiments.arm(label, "gates_stale", name)
    for name, label in (("grpo", "GRPO"), ("gspo", "GSPO"), ("grpo_unclipped", "GRPO unclipped"))
}
TWIN = arms.ON_POLICY
DENSE = experiments.arm("GRPO unclipped, dense", "gates_dense", "grpo_unclipped", "updates_per_rollout=16")
DENSE_TWIN = experiments.arm(
    "GRPO unclipped, dense, on policy", "gates_dense", "grpo_unclipped", "updates_per_rollout=1"
)
EXACT = experiments.arm("GRPO, exact sampler", "gates_mismatch", "grpo", "engine=exact")
FP8 = experiments.arm("GRPO, fp8 sampler", "gates_mismatch", "grpo", "engine=fp8")
NOISY = experiments.arm("GRPO, noise on the sampler's routers", "gates_noise", "grpo", "engine.strength=1.0")
QUIET = experiments.arm("GRPO, noise 0", "gates_noise", "grpo", "engine.strength=0.0")
DISTURBED = experiments.arm("GRPO, weights disturbed by 1e-7", "gates_chaos", "grpo")
BRANCHES = {name: experiments.arm(f"{name.upper()}, branch", "gates_branches", name) for name in ("grpo", "gspo")}
TRUNK = experiments.arm("trunk", "gates_trunk", "grpo")
# Design of a comparison, the two arms, and what else a seed of it needs. Runs whose initial weights differ by 1e-7 end
# apart: this spread, the floor of chaos, stays between any two arms that are compared as whole runs. Branches of one
# trunk share what came before them.
_DESIGNS: tuple[tuple[str, Arm, Arm, tuple[Arm, ...]], ...] = (
    ("whole runs", STALE["gspo"], STALE["grpo"], ()),
    ("branches of one trunk", BRANCHES["gspo"], BRANCHES["grpo"], (TRUNK,)),
    ("floor of chaos", DISTURBED, STALE["grpo"], ()),
)

# Settings whose V3 is what stale data cost: the control without a clip on policy, and stale.
GRADED: Mapping[Setting, tuple[Arm, Arm]] = {
    "long": (arms.LONG_ON_POLICY["slow routers"], arms.LONG["grpo_unclipped", "slow routers"]),
    "longer": (arms.LONGER["on policy"], arms.LONGER["grpo_unclipped"]),
    "slow": (arms.SLOW["on policy"], arms.SLOW["grpo_unclipped"]),
}

# The thresholds of the validity gates.
MIN_GAIN = 0.15  # V1
MAX_COLLAPSES, MIN_TWIN_GAIN = 0.1, 0.10  # V2: a share of the seeds; held-out accuracy
MIN_FAILURES = 0.9  # V3: a share of the seeds
MIN_COST = 0.05  # V4: held-out accuracy
MIN_HARM = 0.1  # V3 where it is graded (``GRADED``): held-out accuracy
MIN_KEPT = 0.8  # V5, and the audits' gate: a share of the reward
RESOLUTION = 0.05  # V7: standard deviation of paired differences


class Need(NamedTuple):
    """A gate of a setting, or of the audits of an experiment."""

    gate: str
    setting: str

    def __str__(self) -> str:
        return f"{self.gate} ({self.setting})"


_LEARNS = Need("V1", "learning")
_STRESS = (_LEARNS, *(Need(gate, "stale") for gate in ("V2", "V3", "V5", "V7")))
# The gates of study/protocol.md, "Gates", by their name in claims.yaml. The last one is of the claim's setting.
NEEDS: Mapping[str, tuple[Need, ...]] = {
    "": (),
    "learning": (_LEARNS,),
    "stress": _STRESS,
    "stress and dense twin": (*_STRESS, Need("V2 dense", "stale")),
    "mismatch": (_LEARNS, *(Need(gate, "mismatch") for gate in ("V4", "V7"))),
    "long": (Need("V2", "long"),),
    "longer": (Need("V2", "longer"),),
}


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

    def __str__(self) -> str:
        return f"{self.need} {self.state}: {f'{self.number}: ' if self.passes else ''}{self.measured}"


# Measures a gate: its number, whether it passes, and what was measured.
_Measure = Callable[[Recorded], tuple[Estimate, bool, str]]


def gates(study: Recorded) -> dict[Need, Gate]:
    """Measure every validity gate of the settings; a gate without its runs is "not measured"."""
    twin = f"≤ {MAX_COLLAPSES:.0%} of the seeds collapse, and the mean gain is ≥ {MIN_TWIN_GAIN:g}"
    cost, harm = (f"≥ {least:g}, with the interval above 0" for least in (MIN_COST, MIN_HARM))
    resolution = f"standard deviation ≤ {RESOLUTION:g}, or as many seeds as the power calculation asks for"
    table: tuple[tuple[str, Setting, str, _Measure], ...] = (
        ("V1", "learning", f"the best arm gains ≥ {MIN_GAIN:g}, at a learning rate inside the grid", _learns),
        ("V2", "stale", twin, partial(_twin, arm=TWIN)),
        ("V2 dense", "stale", twin, partial(_twin, arm=DENSE_TWIN)),
        ("V3", "stale", f"collapsed, or ends below its start, in ≥ {MIN_FAILURES:.0%} of the seeds", _fails),
        *(("V2", setting, twin, partial(_twin, arm=on_policy)) for setting, (on_policy, _) in GRADED.items()),
        ("V2 dense", "long", twin, partial(_twin, arm=arms.LONG_ON_POLICY["dense"])),
        *(
            ("V3", setting, harm, partial(_costs, without=on_policy, arm=stale, least=MIN_HARM))
            for setting, (on_policy, stale) in GRADED.items()
        ),
        ("V4", "mismatch", cost, partial(_costs, without=QUIET, arm=NOISY)),
        ("V4", "mismatch fp8", cost, partial(_costs, without=EXACT, arm=FP8)),
        ("V5", "stale", f"≥ {MIN_KEPT:.0%} of the reward, GRPO and GSPO", _keeps),
        ("V7", "stale", resolution, partial(_resolves, of="mean reward", arm=STALE["gspo"], over=STALE["grpo"])),
        ("V7", "mismatch", resolution, partial(_resolves, of="held-out accuracy", arm=QUIET, over=NOISY)),
    )
    measured = {}
    for name, setting, passes, measure in table:
        need = Need(name, setting)
        try:
            number, passed, words = measure(study)
        except NotRun as missing:
            measured[need] = Gate(need, "not measured", f"to be run: {missing}", passes=passes)
        else:
            measured[need] = Gate(need, "passed" if passed else "failed", words, number, passes)
    return measured


def blocking(needs: Sequence[Need], measured: Mapping[Need, Gate]) -> list[Gate]:
    """Return the needed gates that are not passed, failed gates first. Raises KeyError for an unknown one."""
    not_passed = [measured[need] for need in needs if measured[need].state != "passed"]
    return sorted(not_passed, key=lambda gate: gate.state != "failed")


def audited(study: Recorded, experiment: str, k: int) -> Gate:
    """Whether audited updates keep the reward: fresh samples after ``k`` of them have ``MIN_KEPT`` of it."""
    need = Need("reward kept", experiment)
    try:
        kept = over_seeds(study.kept(experiment, k).tolist(), bounds=POSITIVE)
    except NotRun:
        return Gate(need, "not measured", "its audits have not run")
    state: State = "passed" if kept.mean >= MIN_KEPT else "failed"
    return Gate(need, state, f"{kept} of the reward after {k} updates, n = {kept.n}")


def kept(study: Recorded) -> dict[str, Estimate]:
    """Return V5's number for every arm of the study at *stale*, by label; n is 0 for an arm that has not run."""
    return {arm.label: _kept(study, arm) if study.has(arm) else NONE for arm in arms.AT_STALE}


def _kept(study: Recorded, arm: Arm) -> Estimate:
    """The reward of the second rollout over that of the first."""
    kept = study.at(arm, "reward", 2) / study.first(arm)
    return over_seeds(kept.dropna().tolist(), bounds=POSITIVE)


def _mean(differences: pd.Series) -> Estimate:
    return over_seeds(differences.dropna().tolist(), bounds=DIFFERENCE)


def _gain(study: Recorded, arm: Arm) -> Estimate:
    """Held-out accuracy less that of the cold start."""
    return _mean(study.held_out(arm) - study.numbers(arm, "eval_accuracy", "first"))


def _learns(study: Recorded) -> tuple[Estimate, bool, str]:
    """V1: the largest gain over the learning rates, and whether its rate is inside the grid."""
    gains = {rate: _gain(study, arm) for rate, arm in LEARNING.items()}
    best = max(gains, key=lambda rate: gains[rate].mean)
    number, inside = gains[best], min(gains) < best < max(gains)
    others = ", ".join(f"{LEARNING[rate].label}: {gain.mean:.2f}" for rate, gain in gains.items())
    where = "inside the grid" if inside else "at the end of the grid"
    passed = number.mean >= MIN_GAIN and inside
    return number, passed, f"gain in held-out accuracy of GRPO at {best:g}, {where} ({others})"


def _twin(study: Recorded, arm: Arm) -> tuple[Estimate, bool, str]:
    """V2: the gain of the control without a clip, on policy, and how many of its seeds collapse."""
    number, (fallen, n) = _gain(study, arm), study.collapsed(arm)
    passed = number.mean >= MIN_TWIN_GAIN and fallen <= MAX_COLLAPSES * n
    return number, passed, f"gain in held-out accuracy of {arm.label}, which collapsed in {fallen} of {n} seeds"


def _fails(study: Recorded) -> tuple[Estimate, bool, str]:
    """V3: the share of seeds in which the stale control without a clip collapses or ends below its start."""
    control = STALE["grpo_unclipped"]
    runs = study.judged(control).set_index("seed")
    collapsed, below = runs["collapsed_step"].notna(), study.final(control) < study.first(control)
    failed = collapsed | below.reindex(runs.index)
    number = share(int(failed.sum()), len(failed))
    return (
        number,
        number.mean >= MIN_FAILURES,
        f"of {len(failed)} seeds of {control.label} {collapsed.sum()} collapsed, {below.sum()} ended below their start",
    )


def _costs(study: Recorded, without: Arm, arm: Arm, least: float = MIN_COST) -> tuple[Estimate, bool, str]:
    """V4, and V3 where it is graded: held-out accuracy without a mismatch, or without stale data, less with it."""
    number = _mean(difference(study, "held-out accuracy", without, arm))
    passed = number.mean >= least and number.low > 0
    return number, passed, f"held-out accuracy of {without.label} less {arm.label}"


def _keeps(study: Recorded) -> tuple[Estimate, bool, str]:
    """V5: the reward after all updates on the first rollout, over the reward before, of the worse algorithm."""
    kept = {arm.label: _kept(study, arm) for arm in (STALE["grpo"], STALE["gspo"])}
    worse = min(kept.values(), key=lambda number: number.mean)
    both = ", ".join(f"{label} {number}" for label, number in kept.items())
    return worse, worse.mean >= MIN_KEPT, f"reward of the second rollout over the first: {both}"


def _resolves(study: Recorded, of: str, arm: Arm, over: Arm) -> tuple[Estimate, bool, str]:
    """V7: the standard deviation of paired differences, and the seeds that a difference of ``RESOLUTION`` takes."""
    differences = difference(study, of, arm, over).dropna()
    needed, deviation = seeds_needed(differences.tolist(), RESOLUTION), float(differences.std())
    number = Estimate(deviation, np.nan, np.nan, len(differences))
    return (
        number,
        deviation <= RESOLUTION or len(differences) >= needed,
        f"standard deviation of {arm.label} less {over.label}, whose mean is {_mean(differences)}; a difference of "
        f"{RESOLUTION:g} takes {needed} seeds for 80 % power",
    )


# --- realism: the arms of a setting next to the published ranges (``report.realism``) ---------------------------------
# R5, R8 and, where V3 is graded, R9 and R10 limit claims about MoE (``moe_effect``), the others nothing.

# The MoE effect is present at a setting if one of these gates is at least as large.
PRESENT = {"R5": 2.0, "R8": 0.5}
# Where V3 is graded both of these lie in the range of their row, too.
FUNCTION = ("R9", "R10")
# R5: the arm of a setting and its dense twin, None where no dense model has run.
_TWINS: dict[Setting, tuple[Arm, Arm | None]] = {
    "stale": (STALE["grpo_unclipped"], DENSE),
    "long": (arms.LONG["grpo_unclipped", "slow routers"], arms.LONG["grpo_unclipped", "dense"]),
    "longer": (arms.LONGER["grpo_unclipped"], arms.LONGER["dense"]),
    "slow": (arms.SLOW["grpo_unclipped"], arms.SLOW["dense"]),
    "learning": (LEARNING[3e-4], None),
    "mismatch": (NOISY, None),
    "mismatch fp8": (FP8, None),
}
# The arms that stand for a setting at its own learning rate, and their gates, R5 aside.
_REALISM: tuple[tuple[Setting, Arm, tuple[str, ...]], ...] = (
    ("stale", STALE["grpo"], ("R1", "R2", "R4", "R6", "R7", "R8")),
    ("stale", STALE["gspo"], ("R4",)),
    ("long", arms.LONG["grpo_unclipped", "slow routers"], ("R1", "R2", "R6", "R7", "R8", "R9", "R10")),
    ("long", arms.LONG["grpo_unclipped", "fast routers"], ("R8", "R9", "R10")),
    ("long", arms.LONG["gspo", "slow routers"], ("R4",)),
    *(
        (setting, stale, ("R1", "R2", "R6", "R7", "R8", "R9", "R10"))
        for setting, (_, stale) in GRADED.items()
        if setting != "long"
    ),
    ("longer", arms.LONGER["gspo"], ("R4",)),
    ("slow", arms.SLOW["gspo"], ("R4",)),
    ("learning", LEARNING[3e-4], ("R8",)),
    ("mismatch", NOISY, ("R3", "R8")),
    ("mismatch fp8", FP8, ("R3", "R8")),
)
# Readings of the archived calibration of *stale*, for what the archives of runs lack: (setting, quantity) → key
# and case of the reading. All settings have the same cold start.
_CALIBRATED: dict[tuple[Setting, str], tuple[str, str]] = {
    ("mismatch fp8", "routers whose set differs"): ("set_disagreement", "fp8"),
    ("stale", "margin over spread of the router logits"): ("margin_over_spread", ""),
}


def realism(study: Recorded) -> list[Realism]:
    """Return the realism gates of every arm that has run, in the order of their ids; n is 0 where none was recorded."""
    measured = []
    for setting, arm, asked in _REALISM:
        if not study.has(arm):
            continue
        steps = study.tables([arm])["steps"]
        case = pd.DataFrame([{"algorithm": arm.algorithm, "engine": "not exact"}])  # R3 is asked of these alone
        for row in ROWS:
            if row.gate not in asked or not row.applies(case):
                continue
            if calibrated := _CALIBRATED.get((setting, row.what)):
                measured.append(Realism(row, setting, "the cold start, calibrated", *study.calibrated(*calibrated)))
            else:
                measured.append(Realism(row, setting, arm.label, row.measure(steps)))
    for setting, (moe, dense) in _TWINS.items():
        if study.has(moe):
            pair = [study.tables([arm])["steps"] for arm in (moe, dense) if arm is not None and study.has(arm)]
            number = over_dense(*pair) if len(pair) == 2 else NONE
            measured.append(Realism(OVER_DENSE, setting, moe.label, number))
    return sorted(measured, key=lambda each: each.row.gate)


def moe_effect(study: Recorded, setting: str) -> Gate:
    """Whether an MoE differs from a dense model at a setting: in ratio variance (R5), or by routing's share (R8).

    Where V3 is graded, routes must also carry function (R9), and routers move as fast for their size as other weights
    (R10). Of several arms of a setting the first counts.
    """
    also = FUNCTION if setting in GRADED else ()
    need = Need("R5 ≥ {R5:g} or R8 ≥ {R8:g}".format(**PRESENT) + "".join(f", {gate}" for gate in also), setting)
    first: dict[str, Realism] = {}
    for each in realism(study):
        if each.setting == setting and each.row.gate in (*PRESENT, *also) and each.number.n:
            first.setdefault(each.row.gate, each)
    measured = {gate: each.number for gate, each in first.items()}
    if not PRESENT.keys() & measured.keys() or not measured.keys() >= set(also):
        return Gate(need, "not measured", "not all were recorded")
    present = any(gate in measured and measured[gate].mean >= least for gate, least in PRESENT.items())
    within = all(first[gate].row.low <= measured[gate].mean <= first[gate].row.high for gate in also)
    state: State = "passed" if present and within else "failed"
    return Gate(need, state, ", ".join(f"{gate} is {number}" for gate, number in measured.items()))


# --- what a seed buys ------------------------------------------------------------------------------------------------


def designs(study: Recorded) -> pd.DataFrame:
    """Return a row for each design and outcome whose arms have ended at three common seeds or more.

    The columns: design, compared, outcome, difference (an Estimate), standard deviation of the differences, n, the
    seeds that find a difference of ``RESOLUTION`` with 80 % power, and the gradient updates that their runs make.
    """
    rows = []
    for name, arm, over, further in _DESIGNS:
        for outcome in RUN_METRICS:
            try:
                differences = difference(study, outcome, arm, over).dropna()
            except NotRun:
                continue
            if len(differences) < MIN_FOR_INTERVAL:
                continue
            seeds = seeds_needed(differences.tolist(), RESOLUTION)
            rows.append(
                {"design": name, "compared": f"{arm.label} less {over.label}", "outcome": outcome}
                | {"difference": _mean(differences), "standard deviation": float(differences.std())}
                | {"n": len(differences), "seeds for 0.05": seeds}
                | {"updates": seeds * sum(_updates(study, each) for each in (arm, over, *further))}
            )
    return pd.DataFrame(rows)


def seconds_an_update(study: Recorded) -> float | None:
    """How long a gradient update takes in a run, all included, on one core; None if no run has ended.

    Runs share a machine with other work, so it is the time of the quickest arm (the median over its seeds).
    """
    paces = []
    for arm in [arm for _, *pair, further in _DESIGNS for arm in (*pair, *further)]:
        if study.has(arm):
            paces.append(float(study.tables([arm])["runs"]["wall_seconds"].median()) / _updates(study, arm))
    return min(paces, default=None)


def _updates(study: Recorded, arm: Arm) -> float:
    """The gradient updates of a run of the arm, the median over seeds."""
    steps = study.tables([arm])["steps"]
    return float(steps[steps["metric"] == "reward"].groupby("seed")["updates_per_rollout"].sum().median())
