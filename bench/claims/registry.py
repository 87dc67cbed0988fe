"""What papers claim of algorithms on MoE models, which numbers would support it, and which gates a testbed must pass.

These are the tables of docs/protocol.md as code: outcomes and thresholds were fixed there before the runs, gates after.
"""

from steadymoe.bench.claims.arms import (
    ANCHORED,
    CONTROLS,
    DENSE,
    DEPTH,
    GRPO,
    GSPO,
    MINIRL,
    NARROW,
    OTHERS,
    R2,
    SHIFT,
    SLOW,
    TIS,
    WIDE,
)
from steadymoe.bench.claims.effects import (
    best,
    by_seed,
    change,
    changed,
    clipped,
    cost,
    factor,
    fall,
    gain,
    held_out,
    routed,
    warning,
    wins,
)
from steadymoe.bench.claims.gates import MISMATCH, STRESS
from steadymoe.bench.claims.study import Arm
from steadymoe.bench.claims.verdict import Claim, Outcome
from steadymoe.bench.measurement import columns

_ANNOUNCING = ("token_ratio_variance", "expert_change_rate", "sequence_ratio_variance")
_NOISE = "one strength of router noise, at a third of the study's learning rate, without a control of its own"
_AUTHORS = (
    "GSPO's authors ran GRPO with a band of 0.2/0.27 and with routing replay (2507.18071, section 5), here it has 0.2 "
    "and no replay"
)
_SMALL = "0.45 M parameters, responses of 4 to 10 tokens, 40 steps, one task"


def _roc(metric: str, lead: str = "") -> str:
    return f"area under the ROC curve, {lead}{columns.short(metric)}"


def _disturbed(of: str, arm: Arm, over: Arm, threshold: float = 0.0) -> tuple[Outcome, Outcome]:
    """Held-out accuracy, which decides, and the reward that a noisy sampler earned, which was to decide before."""
    return (
        Outcome(f"held-out accuracy of {of}", held_out(arm, over), "above", threshold, unit="accuracy"),
        Outcome(f"final reward, sampled with noise, of {of}", gain(arm, over), "above", threshold),
    )


_ANCHOR = "anchor at the sampler less at the old policy"
_DISTURBED = {
    8: _disturbed(f"DPPO, {_ANCHOR}", ANCHORED["dppo", "rollout"], ANCHORED["dppo", "old"]),
    9: _disturbed("GRPO, with TIS less without", TIS["with"], TIS["without"]),
    13: _disturbed(f"GSPO, {_ANCHOR}", ANCHORED["gspo", "rollout"], ANCHORED["gspo", "old"], -0.05),
}
CLAIMS = (
    Claim(
        1,
        "GSPO trains more stably and efficiently than GRPO on MoE.",
        "GSPO (2507.18071), section 5.1, figure 1",
        ("study", "study_bands", "study_rates", "study_tuning"),
        (
            Outcome("final reward, GSPO less GRPO, at the papers' bands", gain(GSPO, GRPO), "above", 0),
            Outcome("final reward, GSPO less GRPO, both with GRPO's band", gain(WIDE, GRPO), "above", 0),
            Outcome("final reward, GSPO less GRPO, both with GSPO's band", gain(GSPO, NARROW), "above", 0),
            Outcome(
                "final reward, GSPO less GRPO, each at its best",
                lambda study: gain(best(study, "gspo"), best(study, "grpo"))(study),
                "above",
                0,
            ),
        ),
        "overview",
        (GRPO, GSPO, NARROW, WIDE, *CONTROLS),
        f"{_SMALL}; {_AUTHORS}; the band of GSPO's paper was made for responses of thousands of tokens; the last "
        "outcome is at the best of 4 settings, by two seeds; the learning rate of the others was chosen after GRPO had "
        "been seen to fall (docs/protocol.md). How many runs collapse depends on the detector: with a patience of 1 "
        "step in place of 10 GSPO collapses in 5 of 10 seeds and GRPO in 8.",
        STRESS,
        exploratory=(
            Outcome("final reward, GSPO less GRPO, at 2e-4", gain(SLOW["gspo"], SLOW["grpo"]), "above", 0),
            Outcome("final reward of GRPO, GSPO's band less its own", gain(NARROW, GRPO), "above", 0),
        ),
    ),
    Claim(
        2,
        "GSPO clips two orders of magnitude more tokens than GRPO, whatever the bands.",
        "GSPO (2507.18071), section 5.2, figure 2",
        ("study", "study_bands"),
        tuple(
            Outcome(f"clip fraction, GSPO over GRPO, {bands}", clipped(ours, theirs), "above", 30, unit="ratio")
            for bands, ours, theirs in (
                ("at the papers' bands", GSPO, GRPO),
                ("both with GRPO's band", WIDE, GRPO),
                ("both with GSPO's band", GSPO, NARROW),
            )
        ),
        "fig02",
        (GRPO, GSPO, NARROW, WIDE),
        f"{_SMALL}; {_AUTHORS}; published are 0.15 and 0.0013. A short response has a wider sequence ratio, "
        "and log-ratios here are larger than at 30 B, so GRPO's band of 0.2 is met more often. Means over all steps, "
        "those after a collapse too.",
        ("dials",),
        exploratory=(
            Outcome(
                "clip fraction, GSPO over GRPO, at the papers' bands, at 2e-4",
                clipped(SLOW["gspo"], SLOW["grpo"]),
                "above",
                30,
                unit="ratio",
            ),
        ),
    ),
    Claim(
        3,
        "GRPO needs routing replay on MoE, GSPO does not.",
        "GSPO (2507.18071), section 5.3, figure 3",
        ("study", "study_replay"),
        (
            Outcome("final reward of GRPO, with R2 less without", gain(R2["grpo"], GRPO), "above", 0),
            Outcome("final reward of GSPO, with R2 less without", gain(R2["gspo"], GSPO), "below", 0.05),
        ),
        "fig03",
        (GRPO, R2["grpo"], GSPO, R2["gspo"], *CONTROLS[:2]),  # frozen is GRPO by algorithm and routing
        f"{_SMALL}, 4 layers and 8 experts: routing is a smaller part of the ratio than in deep models (claim 12).",
        STRESS,
    ),
    Claim(
        4,
        "About 10 % of the experts change with an update, more in deeper models.",
        "GSPO (2507.18071), section 5.3",
        ("study", "study_depth"),
        (
            Outcome("GRPO's expert change per update, share", changed(GRPO), "between", 0.05, 0.2, unit="share"),
            Outcome(
                "GRPO's expert change per update, 8 layers over 2",
                lambda study: factor(change(study, DEPTH[8]), change(study, DEPTH[2])),
                "above",
                1,
                unit="ratio",
            ),
        ),
        "fig10",
        tuple(DEPTH.values()),
        "One gradient update of 16 responses; the paper does not say whether it counts experts or sets, nor at which "
        "learning rate. Depth on an easier task. The figure shows the change against the old policy.",
        ("dials",),
        frozen=False,
        exploratory=(
            Outcome(
                "GRPO's expert change per update, share, at 2e-4",
                changed(SLOW["grpo"]),
                "between",
                0.05,
                0.2,
                unit="share",
            ),
        ),
    ),
    Claim(
        5,
        "What GSPO gains is due to the MoE.",
        "GSPO (2507.18071), sections 1 and 5.3",
        ("study", "study_twin"),
        (
            Outcome(
                "final reward, GSPO less GRPO, MoE less dense twin",
                lambda study: by_seed(
                    (study.final(GSPO) - study.final(GRPO)) - (study.final(DENSE["gspo"]) - study.final(DENSE["grpo"]))
                ),
                "above",
                0,
            ),
            Outcome(
                "reward that GRPO loses from first to last steps, MoE less dense twin",
                lambda study: by_seed(fall(study, GRPO) - fall(study, DENSE["grpo"])),
                "above",
                0,
            ),
        ),
        "overview",
        (GRPO, GSPO, *CONTROLS, *DENSE.values()),
        f"{_SMALL}; the twin has as many active parameters and a cold start of its own, to the same accuracy. Both "
        "outcomes hold GRPO on the MoE.",
        (*STRESS, "V2 dense"),
        exploratory=(
            Outcome("final reward, GSPO less GRPO, dense twin", gain(DENSE["gspo"], DENSE["grpo"]), "above", 0),
        ),
    ),
    Claim(
        6,
        "R2 is best at few updates, R3 at many.",
        "MiniRL (2512.01374), section 4",
        ("study_minirl",),
        (
            Outcome(
                "final reward of MiniRL at 4 updates, R2 less R3", gain(MINIRL["r2", 4], MINIRL["r3", 4]), "above", 0
            ),
            Outcome(
                "final reward of MiniRL at 16 updates, R3 less R2",
                gain(MINIRL["r3", 16], MINIRL["r2", 16]),
                "above",
                0,
            ),
        ),
        "fig04",
        tuple(MINIRL.values()),
        f"{_SMALL}; behind a sampler in fp8, for which the testbed has no control of its own; the rollout stays as it "
        "is, so mini-batches shrink as updates grow, while the paper keeps the mini-batch.",
        tuple("V4 fp8" if gate == "V4" else gate for gate in MISMATCH),
        exploratory=tuple(
            Outcome(
                f"final reward of MiniRL at {updates} updates, {routing.upper()} less no replay",
                gain(MINIRL[routing, updates], MINIRL["off", updates]),
                "above",
                0,
            )
            for updates in (4, 16)
            for routing in ("r2", "r3")
        ),
    ),
    Claim(
        7,
        "With stale data CISPO, SAPO and GSPO collapse and VESPO does not.",
        "VESPO (2602.10693), figure 3",
        ("study",),
        tuple(
            Outcome(f"final reward at 16 updates, VESPO less {arm.label}", gain(OTHERS["vespo"], arm), "above", 0)
            for arm in (OTHERS["cispo"], OTHERS["sapo"], GSPO)
        ),
        "overview",
        (GSPO, *OTHERS.values(), *CONTROLS),
        f"{_SMALL}; final rewards are tested, collapses are in the table; one staleness, where the paper has five; "
        "mini-batches of two prompts.",
        STRESS,
    ),
    Claim(
        8,
        "Anchoring at the old policy collapses where anchoring at the sampler does not.",
        "DPPO (2602.04879)",
        ("study_mismatch",),
        _DISTURBED[8][:1],
        "overview",
        (ANCHORED["dppo", "old"], ANCHORED["dppo", "rollout"]),
        f"{_SMALL}; {_NOISE}. No run collapsed.",
        MISMATCH,
        exploratory=_DISTURBED[8][1:],
    ),
    Claim(
        9,
        "Truncated importance sampling (TIS) mends a sampler that differs.",
        "TIS, against DPPO (2602.04879)",
        ("study_correction",),
        _DISTURBED[9][:1],
        "overview",
        (TIS["without"], TIS["with"]),
        f"{_SMALL}; {_NOISE}.",
        MISMATCH,
        exploratory=_DISTURBED[9][1:],
    ),
    Claim(
        10,
        "Router-shift weighting stabilises any host.",
        "RSPO (2510.23027)",
        ("study", "study_shift"),
        (
            Outcome("final reward of GRPO, with the weight less without", gain(SHIFT["grpo"], GRPO), "above", 0),
            Outcome("final reward of GSPO, with the weight less without", gain(SHIFT["gspo"], GSPO), "above", 0),
        ),
        "overview",
        (GRPO, SHIFT["grpo"], GSPO, SHIFT["gspo"], *CONTROLS),
        f"{_SMALL}; the paper's floor is not known, 0.8 is a re-implementation's; two hosts of three.",
        STRESS,
    ),
    Claim(
        11,
        "Ratio variance and expert change announce a collapse.",
        "MiniRL (2512.01374), R3 (2510.11370), RSPO (2510.23027)",
        ("study", "study_bands"),
        tuple(Outcome(_roc(metric), warning(metric), "above", 0.5, unit="area") for metric in _ANNOUNCING),
        "fig13",
        (GRPO, GSPO, NARROW, WIDE),
        "Runs of two algorithms and two bands are pooled: what tells arms apart tells collapses apart too. A collapse "
        "is dated where the mean of five rewards has halved, so one step before it reward is already falling; the "
        "reward itself is among the exploratory areas. Runs that fell at their end, too late to be judged, are left "
        "out.",
        STRESS,
        exploratory=tuple(
            Outcome(_roc(metric, "5 steps ahead, "), warning(metric, 5), "above", 0.5, unit="area")
            for metric in _ANNOUNCING
        )
        + tuple(
            Outcome(
                f"area under the ROC curve, {lead}, the reward itself",
                warning("reward", steps),
                "above",
                0.5,
                unit="area",
            )
            for lead, steps in (("1 step ahead", 1), ("5 steps ahead", 5))
        ),
    ),
    Claim(
        12,
        "Most of the ratio's variance is due to routing.",
        "GSPO (2507.18071), section 5.3; MiniRL (2512.01374), section 3",
        ("study", "study_depth"),
        (
            Outcome(
                "share of GRPO's log-ratio second moment that goes with pinned routes",
                routed(GRPO),
                "above",
                0.5,
                unit="share",
            ),
            Outcome(
                "that share, at 8 layers less at 2",
                lambda study: by_seed(study.routing_share(DEPTH[8]) - study.routing_share(DEPTH[2])),
                "above",
                0,
                unit="share",
            ),
        ),
        "fig11",
        tuple(DEPTH.values()),
        "8 experts of which 2 are active; on samples of a rollout, after a collapse too; depth on an easier task. A "
        "few tokens carry the moment.",
        ("dials",),
        frozen=False,
        exploratory=(Outcome("that share, at 2e-4", routed(SLOW["grpo"]), "above", 0.5, unit="share"),),
    ),
    Claim(
        13,
        "GSPO tolerates the sampler's log-probabilities in place of recomputed ones.",
        "GSPO (2507.18071), section 5.4",
        ("study_mismatch",),
        _DISTURBED[13][:1],
        "overview",
        (ANCHORED["gspo", "old"], ANCHORED["gspo", "rollout"]),
        f"{_SMALL}; {_NOISE}; engines differ by other things.",
        MISMATCH,
        exploratory=_DISTURBED[13][1:],
    ),
    Claim(
        14,
        "GSPO is 23 % more efficient than GRPO and wins 4.8 % more.",
        "a published summary of GSPO; the paper has neither number",
        ("study_rates",),
        (
            Outcome(
                "tokens that GRPO needs over those that GSPO needs, at 2e-4",
                cost(SLOW["grpo"], SLOW["gspo"], "tokens"),
                "above",
                1,
                unit="cost",
            ),
            Outcome(
                "held-out prompts GSPO wins less those it loses, share, at 2e-4",
                wins(SLOW["gspo"], SLOW["grpo"]),
                "above",
                0,
                unit="share",
            ),
        ),
        "fig01",
        (SLOW["grpo"], SLOW["gspo"]),
        f"{_SMALL}; at a third of the study's learning rate. Only the direction is looked at, not the numbers.",
        (),
        moved="both numbers come from a summary, the paper has neither; they are about efficiency where nothing "
        "collapses, and no claim about stability",
        exploratory=(
            Outcome(
                "updates that GRPO needs over those that GSPO needs, at 2e-4",
                cost(SLOW["grpo"], SLOW["gspo"], "updates"),
                "above",
                1,
                unit="cost",
            ),
        ),
    ),
)
# Experiments whose arms stand beside the study's in the figures of ``steadymoe claims``: a report shows them in the
# overview alone.
COMPARED_ELSEWHERE = {name for claim in CLAIMS for name in claim.experiments}
COMPARED_ELSEWHERE |= {arm.experiment for claim in CLAIMS for arm in claim.arms}
COMPARED_ELSEWHERE -= {"study"}
