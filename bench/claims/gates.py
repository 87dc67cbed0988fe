"""Validity gates: conditions on the testbed, each with the state of this testbed.

Runs on seeds that no claim uses pass a gate. Runs on the claims' own seeds can fail a gate and cannot pass it. A claim
lists the gates that it needs (``Claim.needs``) and is answered if all of them are passed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from steadymoe.bench.claims.arms import FROZEN, GRPO, GSPO, SLOW, TIS, UNCLIPPED
from steadymoe.bench.claims.effects import Effect, changed, clipped, held_out, routed
from steadymoe.bench.claims.study import NotRun, Study

State = Literal["passed", "failed", "not measured"]


@dataclass(frozen=True)
class Gate:
    """One condition on a testbed."""

    id: str
    what: str
    """The condition."""
    state: State
    reason: str
    """The reason for the state, one sentence."""
    evidence: str
    """The place where the reason can be looked up."""


# The gates of a claim under stress, and the gates of a claim about a mismatch between sampler and trainer
# (docs/protocol.md, "Changes after the runs").
STRESS = ("V1", "V2", "V3", "V5", "V6", "V7")
MISMATCH = ("V1", "V4", "V6", "V7")
# The least held-out accuracy that noise in the sampler's routers must cost, for V4.
_LEAST_COST = 0.05


def gates(study: Study) -> dict[str, Gate]:
    """The gates of the reference study's testbed by their ids. Raises NotRun if the stressed arms have not run."""
    found = (*_stress(study), _mismatch(study), *_never_measured(), _dials(study))
    return {gate.id: gate for gate in sorted(found, key=lambda gate: gate.id)}


def blocking(needs: Sequence[str], gates: Mapping[str, Gate]) -> list[Gate]:
    """The needed gates that are not passed, failed gates first. Raises KeyError for an unknown id."""
    found = [gates[id] for id in needs if gates[id].state != "passed"]
    return sorted(found, key=lambda gate: gate.state != "failed")


def told(gates: Sequence[Gate]) -> str:
    """The ids of the gates that failed and of the gates that were not measured, as a phrase."""
    by_state = {state: [gate.id for gate in gates if gate.state == state] for state in ("failed", "not measured")}
    return "; ".join(f"{', '.join(ids)} {state}" for state, ids in by_state.items() if ids)


def _stress(study: Study) -> list[Gate]:
    fallen, n = study.collapsed(UNCLIPPED)
    until, last = study.judged(UNCLIPPED)[["judged_until", "steps"]].max()
    spread = (study.final(GSPO) - study.final(GRPO)).std()
    return [
        Gate(
            "V1",
            "the best algorithm gains at least 0.15 held-out accuracy where it learns, at a learning rate inside of a "
            "grid of at least four",
            "not measured",
            "two learning rates were tried, and both algorithms were best at the lower one; on the claims' own seeds "
            f"GRPO gained {_seen(study, held_out(SLOW['grpo'], FROZEN))} there",
            "`study_tuning`, `study_rates`",
        ),
        Gate(
            "V2",
            "with one update a rollout, all else alike, the control without a clip collapses in at most 1 of 10 seeds "
            "and gains at least 0.10",
            "failed",
            "with one update a rollout REINFORCE, then the same as GRPO without a clip, collapsed in both seeds tried: "
            "the collapse needs no stale data, an update sees some 112 tokens and the optimizer moves on their noise",
            "two trials after the study, which are not among the recorded runs",
        ),
        Gate(
            "V3",
            "under stress the control without a clip collapses, or ends below its start, in at least 9 of 10 seeds",
            "not measured",
            f"seen on the claims' own seeds alone, where it collapsed in {fallen} of {n}",
            "`study`",
        ),
        Gate(
            "V6",
            "runs go on for the detector's patience after the last step that counts",
            "failed",
            f"runs end with the last step that counts, so no collapse that begins after step {until} of {last} is seen",
            '[metrics.md](metrics.md), "Collapse"',
        ),
        Gate(
            "V7",
            "paired differences of the primary outcome have a standard deviation of at most 0.05, or as many seeds "
            "are run as the power calculation asks for",
            "not measured",
            f"on the claims' own seeds final rewards of GSPO less GRPO have a standard deviation of {spread:.2g}",
            "`study`",
        ),
    ]


def _seen(study: Study, effect: Effect) -> str:
    try:
        return str(effect(study).estimate)
    except NotRun as missing:
        return f"(to be run: {missing})"


def _mismatch(study: Study) -> Gate:
    """V4: noise in the sampler's routers costs GRPO held-out accuracy, at a learning rate of 2e-4."""
    what = (
        "the sampler that is exact gives at least 0.05 more held-out accuracy than the one that differs, uncorrected, "
        "with an interval above 0"
    )
    evidence = "`study_rates`, `study_correction`"
    try:
        cost = held_out(SLOW["grpo"], TIS["without"])(study).estimate
    except NotRun as missing:
        return Gate("V4", what, "not measured", f"{missing} has not run", evidence)
    seen = f"on the claims' own seeds GRPO with an exact sampler less with noisy routers gives {cost}"
    missed = cost.mean < _LEAST_COST or not cost.low > 0
    reason = f"{seen}: there is nothing to mend" if missed else f"{seen}; other seeds have to show it"
    return Gate("V4", what, "failed" if missed else "not measured", reason, evidence)


def _never_measured() -> list[Gate]:
    return [
        Gate(
            "V2 dense",
            "V2, of the dense twin",
            "not measured",
            "no run of the dense twin has one update a rollout",
            "`study_twin`",
        ),
        Gate(
            "V4 fp8",
            "V4, of a sampler in fp8",
            "not measured",
            "no run of MiniRL has an exact sampler",
            "`study_minirl`",
        ),
        Gate(
            "V5",
            "all updates on one rollout by the algorithms with a clip keep at least 80 % of the reward",
            "not measured",
            "no such run was made",
            "none",
        ),
    ]


def _dials(study: Study) -> Gate:
    """A number that was used to choose a setting answers no claim at that setting."""
    settings = ((GSPO, GRPO), (SLOW["gspo"], SLOW["grpo"]))
    clips, changes, shares = zip(
        *(
            (_seen(study, each) for each in (clipped(gspo, grpo), changed(grpo), routed(grpo)))
            for gspo, grpo in settings
        ),
        strict=True,
    )
    return Gate(
        "dials",
        "the number is asked for as dose and response, over dials that span what is published, and not at the one "
        "setting that was chosen",
        "failed",
        "the number follows the setting, and the runs hold two learning rates, and two depths on another task: "
        f"at 6e-4 GSPO clips {clips[0]} times as many tokens as GRPO, an update changes {changes[0]} of the experts, "
        f"and routing's share is {shares[0]}; at 2e-4 they are {clips[1]}, {changes[1]} and {shares[1]}",
        "`study`, `study_rates`",
    )
