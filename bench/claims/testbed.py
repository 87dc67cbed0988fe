"""The gates of the standard settings, measured on seeds that no claim uses (200 to 229).

A validity gate is passed, failed or not measured. A realism gate says by which factor a number differs from what is
published of real MoE models; R5 and R8 limit claims about MoE (``gates.moe_effect``), the others nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from steadymoe.bench.claims import arms
from steadymoe.bench.measurement import columns
from steadymoe.bench.measurement.published import Published, beside
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
from steadymoe.bench.statistics.comparisons import seeds_needed, unpaired_ratio
from steadymoe.bench.statistics.estimates import DIFFERENCE, POSITIVE, Estimate, over_seeds, share

Setting = Literal["learning", "stale", "mismatch", "mismatch fp8"]
State = Literal["passed", "failed", "not measured"]

# The learning rates over which the setting *learning* is tuned: conf/experiment/gates_learning.yaml.
RATES = (1.5e-4, 3e-4, 4.5e-4, 6e-4)
_UNNAMED = 4.5e-4  # the rate that conf/experiment/gates_learning.yaml sets itself
_SHOWN = {"grpo": "GRPO", "gspo": "GSPO", "grpo_unclipped": "GRPO unclipped"}

LEARNING = {
    (name, rate): Arm(
        f"{_SHOWN[name]}, lr {rate:g}",
        "gates_learning",
        name,
        {} if rate == _UNNAMED else {"optimizer.learning_rate": rate},
    )
    for name in ("grpo", "gspo")
    for rate in RATES
}
STALE = {name: Arm(shown, "gates_stale", name) for name, shown in _SHOWN.items()}
TWIN = Arm("GRPO unclipped, on policy", "gates_twin", "grpo_unclipped")
DENSE = Arm("GRPO unclipped, dense", "gates_dense", "grpo_unclipped")
DENSE_TWIN = Arm("GRPO unclipped, dense, on policy", "gates_dense", "grpo_unclipped", {"updates_per_rollout": 1})
EXACT = Arm("GRPO, exact sampler", "gates_mismatch", "grpo")
FP8 = Arm("GRPO, fp8 sampler", "gates_mismatch", "grpo", {"engine": "fp8"})
NOISY = Arm("GRPO, noise on the sampler's routers", "gates_noise", "grpo", {"engine": "router_noise"})
QUIET = Arm("GRPO, noise 0", "gates_noise", "grpo", {**NOISY.axes, "engine.strength": 0.0})
ARMS = (*LEARNING.values(), *STALE.values(), TWIN, DENSE, DENSE_TWIN, EXACT, FP8, QUIET, NOISY)

# The thresholds of the validity gates.
LEAST_GAIN = 0.15  # V1
MOST_COLLAPSES, LEAST_TWIN_GAIN = 0.1, 0.10  # V2: a share of the seeds; held-out accuracy
LEAST_FAILURES = 0.9  # V3: a share of the seeds
LEAST_COST = 0.05  # V4: held-out accuracy
LEAST_KEPT = 0.8  # V5: a share of the reward
RESOLUTION = 0.05  # V7: standard deviation of paired differences


@dataclass(frozen=True)
class Result:
    """A validity gate of one setting with its number."""

    gate: str
    setting: Setting
    passes: str
    """The condition, in words."""
    number: Estimate
    """What was measured; n is the number of seeds, and 0 if nothing was."""
    state: State
    seen: str
    """One sentence on what was measured."""


def results(study: Recorded) -> list[Result]:
    """Every validity gate, in the order of its id and setting; a gate without its runs is "not measured"."""
    gates: Sequence[tuple[str, Setting, str, Callable[[Recorded], tuple[Estimate, bool, str]]]] = (
        ("V1", "learning", f"the best arm gains ≥ {LEAST_GAIN:g}, at a learning rate inside the grid", _learns),
        ("V2", "stale", _twin_condition(), lambda of: _twin(of, TWIN)),
        ("V2 dense", "stale", _twin_condition(), lambda of: _twin(of, DENSE_TWIN)),
        ("V3", "stale", f"collapsed, or ends below its start, in ≥ {LEAST_FAILURES:.0%} of the seeds", _fails),
        ("V4", "mismatch", _cost_condition(), lambda of: _costs(of, QUIET, NOISY)),
        ("V4", "mismatch fp8", _cost_condition(), lambda of: _costs(of, EXACT, FP8)),
        ("V5", "stale", f"≥ {LEAST_KEPT:.0%} of the reward, GRPO and GSPO", _keeps),
        ("V7", "stale", _resolution(), lambda of: _resolves(of, STALE["gspo"], STALE["grpo"], Recorded.mean_reward)),
        ("V7", "mismatch", _resolution(), lambda of: _resolves(of, QUIET, NOISY, Recorded.held_out)),
    )
    return [_result(study, *gate) for gate in gates]


def _result(
    study: Recorded,
    gate: str,
    setting: Setting,
    passes: str,
    measure: Callable[[Recorded], tuple[Estimate, bool, str]],
) -> Result:
    try:
        number, passed, seen = measure(study)
    except NotRun as missing:
        return Result(gate, setting, passes, NONE, "not measured", f"to be run: {missing}")
    return Result(gate, setting, passes, number, "passed" if passed else "failed", seen)


def gain(study: Recorded, arm: Arm) -> pd.Series:
    """Held-out accuracy at the end (mean of the last five evaluations) less the accuracy of the start, by seed."""
    return study.held_out(arm) - study.numbers(arm, "eval_accuracy", "first")


def _mean(numbers: pd.Series) -> Estimate:
    return over_seeds(numbers.dropna().tolist(), bounds=DIFFERENCE)


def _learns(study: Recorded) -> tuple[Estimate, bool, str]:
    """V1: the largest gain over the algorithms and learning rates, and whether the rate is inside the grid."""
    gains = {key: _mean(gain(study, arm)) for key, arm in LEARNING.items() if study.has(arm)}
    for name in {name for name, _ in gains}:
        missing = [LEARNING[name, rate] for rate in RATES if (name, rate) not in gains]
        if missing:
            raise NotRun(f"{missing[0].label} ({missing[0].experiment})")
    if not gains:
        raise NotRun("gates_learning")
    name, rate = max(gains, key=lambda key: gains[key].mean)
    number, inside = gains[name, rate], RATES[0] < rate < RATES[-1]
    others = ", ".join(f"{LEARNING[key].label}: {each.mean:.2f}" for key, each in gains.items())
    where = "inside the grid" if inside else "at the end of the grid"
    return (
        number,
        number.mean >= LEAST_GAIN and inside,
        f"gain in held-out accuracy of {_SHOWN[name]} at {rate:g}, {where} ({others})",
    )


def _twin_condition() -> str:
    return f"≤ {MOST_COLLAPSES:.0%} of the seeds collapse, and the mean gain is ≥ {LEAST_TWIN_GAIN:g}"


def _twin(study: Recorded, arm: Arm) -> tuple[Estimate, bool, str]:
    """V2: the control without a clip, on policy: its gain, and how many of its seeds collapse."""
    number, (fallen, n) = _mean(gain(study, arm)), study.collapsed(arm)
    passed = number.mean >= LEAST_TWIN_GAIN and fallen <= MOST_COLLAPSES * n
    return number, passed, f"gain in held-out accuracy of {arm.label}, which collapsed in {fallen} of {n} seeds"


def _fails(study: Recorded) -> tuple[Estimate, bool, str]:
    """V3: the share of seeds in which the stale control without a clip collapses or ends below its start."""
    arm = STALE["grpo_unclipped"]
    runs = study.judged(arm).set_index("seed")
    below = study.final(arm) < study.first(arm)
    failed = runs["collapsed_step"].notna() | below.reindex(runs.index)
    number = share(int(failed.sum()), len(failed))
    fallen = int(runs["collapsed_step"].notna().sum())
    seen = f"of {len(failed)} seeds of {arm.label} {fallen} collapsed, {int(below.sum())} ended below their start"
    return number, number.mean >= LEAST_FAILURES, seen


def _cost_condition() -> str:
    return f"≥ {LEAST_COST:g}, with the interval above 0"


def _costs(study: Recorded, exact: Arm, arm: Arm) -> tuple[Estimate, bool, str]:
    """V4: held-out accuracy with the exact sampler less held-out accuracy with an uncorrected other sampler."""
    number = _mean(study.held_out(exact) - study.held_out(arm))
    return number, number.mean >= LEAST_COST and number.low > 0, f"held-out accuracy of {exact.label} less {arm.label}"


def _keeps(study: Recorded) -> tuple[Estimate, bool, str]:
    """V5: the reward after all updates on the first rollout, over the reward before, of the worse algorithm."""
    kept = {name: _kept(study, STALE[name]) for name in ("grpo", "gspo")}
    worse = min(kept, key=lambda name: kept[name].mean)
    told = ", ".join(f"{_SHOWN[name]} {each}" for name, each in kept.items())
    return kept[worse], kept[worse].mean >= LEAST_KEPT, f"reward of the second rollout over the first: {told}"


def _kept(study: Recorded, arm: Arm) -> Estimate:
    steps = study.tables([arm])["steps"]
    rewards = steps[steps["metric"] == "reward"].pivot_table(index="seed", columns="step", values="value")
    return over_seeds((rewards[2] / rewards[1]).dropna().tolist(), bounds=POSITIVE)


def kept(study: Recorded) -> dict[str, Estimate]:
    """Return V5's number for every arm of the study at *stale*, by label; n is 0 for an arm that has not run."""
    return {arm.label: _kept(study, arm) if study.has(arm) else NONE for arm in _AT_STALE}


def _resolution() -> str:
    return f"standard deviation ≤ {RESOLUTION:g}, or as many seeds as the power calculation asks for"


def _resolves(
    study: Recorded, arm: Arm, over: Arm, outcome: Callable[[Recorded, Arm], pd.Series]
) -> tuple[Estimate, bool, str]:
    """V7: the standard deviation of paired differences, and the seeds that a difference of 0.05 takes."""
    differences = (outcome(study, arm) - outcome(study, over)).dropna()
    needed = seeds_needed(differences.tolist(), RESOLUTION)
    deviation = float(differences.std())
    seen = (
        f"standard deviation of {arm.label} less {over.label}, whose mean is {_mean(differences)}; a difference of "
        f"{RESOLUTION:g} takes {needed} seeds for 80 % power"
    )
    number = Estimate(deviation, np.nan, np.nan, len(differences))
    return number, deviation <= RESOLUTION or len(differences) >= needed, seen


# The arms of the study at *stale*.
_AT_STALE = (
    *(GRPO, PAPERS, PAPERS_R2, NARROW, GSPO, GSPO_R2, WIDE, *OTHERS.values()),
    *(*arms.SHIFT.values(), arms.FREEZE, arms.BALANCED, UNCLIPPED, REINFORCE, *arms.DENSE.values()),
)
# The arm that stands for a setting, at its own learning rate.
_OF_SETTING: dict[Setting, Arm] = {
    "stale": STALE["grpo"],
    "learning": LEARNING["grpo", 3e-4],  # conf/experiment/learning.yaml
    "mismatch": NOISY,
    "mismatch fp8": FP8,
}
# A realism gate: its id, setting and arm, what it is, the column of updates or steps, and the key and case of the
# published range.
_REALISM: tuple[tuple[str, Setting, Arm, str, str, str, str], ...] = (
    (
        "R1",
        "stale",
        STALE["grpo"],
        "experts changed per update",
        "expert_change_per_update",
        "expert_change",
        "per update",
    ),
    (
        "R2",
        "stale",
        STALE["grpo"],
        "tokens with a changed route in any layer",
        "token_any_layer_change_rate",
        "token_change",
        "",
    ),
    ("R3", "mismatch", NOISY, "KL of sampler from trainer (k3, nats)", "rollout_kl_k3", "kl_k3", "fp8"),
    ("R3", "mismatch", NOISY, "routers whose set differs", "rollout_set_disagreement", "set_disagreement", "fp8"),
    ("R3", "mismatch fp8", FP8, "KL of sampler from trainer (k3, nats)", "rollout_kl_k3", "kl_k3", "fp8"),
    ("R4", "stale", STALE["grpo"], "clipped tokens", "clip_fraction", "clip_share", "GRPO"),
    ("R4", "stale", STALE["gspo"], "clipped tokens", "clip_fraction", "clip_share", "GSPO"),
    ("R7", "stale", STALE["grpo"], "response length (tokens)", "response_length", "response_length", ""),
    *(
        ("R8", setting, arm, "routing's share of the log-ratio", "routing_share", "routing_share", "")
        for setting, arm in _OF_SETTING.items()
    ),
)
# Readings of `steadymoe calibrate experiment=stale`, for what archives of runs do not keep: id, setting, what it is,
# and the key and case of both the reading and the published range. All settings have the same cold start.
_CALIBRATED: tuple[tuple[str, Setting, str, str, str], ...] = (
    ("R3", "mismatch fp8", "routers whose set differs", "set_disagreement", "fp8"),
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
        return _mean(study.routing_share(arm))
    if column == "response_length":
        return over_seeds(study.response_length(arm).tolist(), bounds=POSITIVE)
    return over_seeds(study.numbers(arm, column, "mean").tolist(), bounds=columns.bounds(column))


def _over_dense(study: Recorded, arm: Arm, twin: Arm | None) -> Estimate:
    """The token-ratio variance of an arm over its dense twin's, median over steps; they share no cold start."""
    if twin is None or not study.has(twin):
        return NONE
    above, below = (study.numbers(each, "token_ratio_variance", "median") for each in (arm, twin))
    return unpaired_ratio(above, below)
