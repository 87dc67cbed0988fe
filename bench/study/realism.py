"""Realism gates: by which factor a number of a setting differs from what is published of real MoE models.

R5 and R8 limit claims about MoE (``moe_effect``), the others nothing.
"""

from dataclasses import dataclass

import numpy as np

from steadymoe.bench.measurement import columns
from steadymoe.bench.measurement.published import Published, beside
from steadymoe.bench.score.recorded import NONE, Arm, Recorded
from steadymoe.bench.statistics.comparisons import unpaired_ratio
from steadymoe.bench.statistics.estimates import DIFFERENCE, POSITIVE, Estimate, over_seeds
from steadymoe.bench.study.gates import DENSE, FP8, LEARNING, NOISY, STALE, Gate, Need, Setting, State

# The MoE effect is present at a setting if one of these gates is at least as large.
PRESENT = {"R5": 2.0, "R8": 0.5}
# The arm that stands for a setting, at its own learning rate.
_OF_SETTING: dict[Setting, Arm] = {
    "stale": STALE["grpo"],
    "learning": LEARNING[3e-4],  # conf/experiment/learning.yaml
    "mismatch": NOISY,
    "mismatch fp8": FP8,
}
_KL, _ROUTERS = "KL of sampler from trainer (k3, nats)", "routers whose set differs"
_TOKENS = "tokens with a changed route in any layer"
_CHANGED = "experts changed per update"
# A gate's id, setting and arm, what it is, the column of updates or steps, and the key and case of the published range.
_REALISM: tuple[tuple[str, Setting, Arm, str, str, str, str], ...] = (
    ("R1", "stale", STALE["grpo"], _CHANGED, "expert_change_per_update", "expert_change", "per update"),
    ("R2", "stale", STALE["grpo"], _TOKENS, "token_any_layer_change_rate", "token_change", ""),
    ("R3", "mismatch", NOISY, _KL, "rollout_kl_k3", "kl_k3", "fp8"),
    ("R3", "mismatch", NOISY, _ROUTERS, "rollout_set_disagreement", "set_disagreement", "fp8"),
    ("R3", "mismatch fp8", FP8, _KL, "rollout_kl_k3", "kl_k3", "fp8"),
    ("R4", "stale", STALE["grpo"], "clipped tokens", "clip_fraction", "clip_share", "GRPO"),
    ("R4", "stale", STALE["gspo"], "clipped tokens", "clip_fraction", "clip_share", "GSPO"),
    ("R7", "stale", STALE["grpo"], "response length (tokens)", "response_length", "response_length", ""),
    *(
        ("R8", setting, arm, "routing's share of the log-ratio", "routing_share", "routing_share", "")
        for setting, arm in _OF_SETTING.items()
    ),
)
# Readings of the archived calibration of *stale*, for what archives of runs do not keep: id, setting, what it is, and
# the key and case of both the reading and the published range. All settings have the same cold start.
_CALIBRATED: tuple[tuple[str, Setting, str, str, str], ...] = (
    ("R3", "mismatch fp8", _ROUTERS, "set_disagreement", "fp8"),
    ("R6", "stale", "margin over spread of the router logits", "margin_over_spread", ""),
)
# R5: the arm of a setting and its dense twin, None where no dense model has run.
_TWINS: dict[Setting, tuple[Arm, Arm | None]] = {
    "stale": (STALE["grpo_unclipped"], DENSE),
    "learning": (_OF_SETTING["learning"], None),
    "mismatch": (_OF_SETTING["mismatch"], None),
    "mismatch fp8": (_OF_SETTING["mismatch fp8"], None),
}


@dataclass(frozen=True)
class Realism:
    """A realism gate of one setting: our number next to the range published for real models."""

    gate: str
    setting: Setting
    what: str
    arm: str
    number: Estimate
    """n is 0 if nothing recorded it."""
    published: Published | None
    unit: str = "seeds"
    """What n counts."""

    @property
    def factor(self) -> float:
        """The number over the nearer end of the published range; 1 inside the range, nan without a range."""
        return np.nan if self.published is None else self.published.factor(self.number.mean)


def realism(study: Recorded) -> list[Realism]:
    """Return the realism gates of every arm that has run, in the order of their ids."""
    found = [
        Realism(gate, setting, what, arm.label, _level(study, arm, column), beside(key, of))
        for gate, setting, arm, what, column, key, of in _REALISM
        if study.has(arm)
    ]
    for gate, setting, what, key, of in _CALIBRATED:
        if study.has(_OF_SETTING[setting]):
            number, unit = study.calibrated(key, of)
            found.append(Realism(gate, setting, what, "the cold start, calibrated", number, beside(key, of), unit))
    published = beside("ratio_variance_over_dense", "")
    found += [
        Realism(
            "R5", setting, "token-ratio variance, MoE over dense", arm.label, _over_dense(study, arm, twin), published
        )
        for setting, (arm, twin) in _TWINS.items()
        if study.has(arm)
    ]
    return sorted(found, key=lambda each: each.gate)


def _level(study: Recorded, arm: Arm, column: str) -> Estimate:
    """A column's mean over the steps; n is 0 if the archive lacks the column."""
    if column == "routing_share":
        return over_seeds(study.routing_share(arm).dropna().tolist(), bounds=DIFFERENCE)
    if column == "response_length":
        return over_seeds(study.response_length(arm).tolist(), bounds=POSITIVE)
    return over_seeds(study.numbers(arm, column, "mean").tolist(), bounds=columns.bounds(column))


def _over_dense(study: Recorded, arm: Arm, twin: Arm | None) -> Estimate:
    """The token-ratio variance of an arm over its dense twin's, median over steps; they share no cold start."""
    if twin is None or not study.has(twin):
        return NONE
    above, below = (study.numbers(each, "token_ratio_variance", "median") for each in (arm, twin))
    return unpaired_ratio(above, below)


def moe_effect(study: Recorded, setting: str) -> Gate:
    """Whether an MoE differs from a dense model at a setting: in ratio variance (R5), or by routing's share (R8)."""
    need = Need("R5 ≥ {R5:g} or R8 ≥ {R8:g}".format(**PRESENT), setting)
    rows = [each for each in realism(study) if each.setting == setting and each.gate in PRESENT]
    measured = {each.gate: each.number for each in rows if each.number.n}
    if not measured:
        return Gate(need, "not measured", "neither was recorded")
    state: State = "passed" if any(number.mean >= PRESENT[gate] for gate, number in measured.items()) else "failed"
    return Gate(need, state, ", ".join(f"{gate} is {number}" for gate, number in measured.items()))
