"""Realism of the standard settings: their arms next to the published ranges (``report.realism``).

R5, R8 and, at *long*, R9 and R10 limit claims about MoE (``moe_effect``), the others nothing.
"""

import pandas as pd

from steadymoe.bench.report.realism import OVER_DENSE, ROWS, Realism, over_dense
from steadymoe.bench.score.recorded import NONE, Arm, Recorded
from steadymoe.bench.study.arms import LONG
from steadymoe.bench.study.gates import DENSE, FP8, LEARNING, NOISY, STALE, Gate, Need, Setting, State

# The MoE effect is present at a setting if one of these gates is at least as large.
PRESENT = {"R5": 2.0, "R8": 0.5}
# At *long* both of these lie in the range of their row, too.
FUNCTION = ("R9", "R10")
# R5: the arm of a setting and its dense twin, None where no dense model has run.
_TWINS: dict[Setting, tuple[Arm, Arm | None]] = {
    "stale": (STALE["grpo_unclipped"], DENSE),
    "long": (LONG["grpo_unclipped", "slow routers"], LONG["grpo_unclipped", "dense"]),
    "learning": (LEARNING[3e-4], None),
    "mismatch": (NOISY, None),
    "mismatch fp8": (FP8, None),
}
# The arms that stand for a setting at its own learning rate, and their gates, R5 aside.
_GATES: tuple[tuple[Setting, Arm, tuple[str, ...]], ...] = (
    ("stale", STALE["grpo"], ("R1", "R2", "R4", "R6", "R7", "R8")),
    ("stale", STALE["gspo"], ("R4",)),
    ("long", LONG["grpo_unclipped", "slow routers"], ("R1", "R2", "R6", "R7", "R8", "R9", "R10")),
    ("long", LONG["grpo_unclipped", "fast routers"], ("R8", "R9", "R10")),
    ("long", LONG["gspo", "slow routers"], ("R4",)),
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
    for setting, arm, gates in _GATES:
        if not study.has(arm):
            continue
        steps = study.tables([arm])["steps"]
        case = pd.DataFrame([{"algorithm": arm.algorithm, "engine": "not exact"}])  # R3 is asked of these alone
        for row in ROWS:
            if row.gate not in gates or not row.applies(case):
                continue
            calibrated = _CALIBRATED.get((setting, row.what))
            if calibrated is None:
                measured.append(Realism(row, setting, arm.label, row.measure(steps)))
            else:
                measured.append(Realism(row, setting, "the cold start, calibrated", *study.calibrated(*calibrated)))
    for setting, (moe, dense) in _TWINS.items():
        if study.has(moe):
            pair = [study.tables([arm])["steps"] for arm in (moe, dense) if arm is not None and study.has(arm)]
            number = over_dense(*pair) if len(pair) == 2 else NONE
            measured.append(Realism(OVER_DENSE, setting, moe.label, number))
    return sorted(measured, key=lambda each: each.gate)


def moe_effect(study: Recorded, setting: str) -> Gate:
    """Whether an MoE differs from a dense model at a setting: in ratio variance (R5), or by routing's share (R8).

    At *long* routes must also carry function (R9), and routers move as fast for their size as other weights (R10). Of
    several arms of a setting the first counts.
    """
    also = FUNCTION if setting == "long" else ()
    need = Need("R5 ≥ {R5:g} or R8 ≥ {R8:g}".format(**PRESENT) + "".join(f", {gate}" for gate in also), setting)
    first: dict[str, Realism] = {}
    for each in realism(study):
        if each.setting == setting and each.gate in (*PRESENT, *also) and each.number.n:
            first.setdefault(each.gate, each)
    measured = {gate: each.number for gate, each in first.items()}
    if not PRESENT.keys() & measured.keys() or not measured.keys() >= set(also):
        return Gate(need, "not measured", "not all were recorded")
    present = any(gate in measured and measured[gate].mean >= least for gate, least in PRESENT.items())
    within = all(first[gate].row.low <= measured[gate].mean <= first[gate].row.high for gate in also)
    state: State = "passed" if present and within else "failed"
    return Gate(need, state, ", ".join(f"{gate} is {number}" for gate, number in measured.items()))
