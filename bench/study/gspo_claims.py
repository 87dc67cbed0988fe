"""The claims about GSPO and about routing, by GSPO's paper and by our own audit."""

from steadymoe.bench.score.arms import AUDITED, GRPO, GSPO, GSPO_R2, NARROW, PAPERS, PAPERS_R2, WIDE
from steadymoe.bench.study import arms, effects
from steadymoe.bench.study.arms import AUDITED_DENSE, AUDITED_R2, BEST, DENSE, DIALLED, DIALS
from steadymoe.bench.study.claim import Claim, Outcome, accuracy, gain, reward, usefulness
from steadymoe.bench.study.doses import EXPERT_CHANGE, ROUTING
from steadymoe.bench.study.gates import MISMATCH, STRESS, STRESS_AND_TWIN

# The limits that all claims at one setting share.
SMALL = "0.85 M parameters, 32 experts, responses of 5 to 9 tokens, 480 updates, one task"
AUDITS = "0.85 M parameters, 32 experts, responses of 5 to 9 tokens, 4 or 16 updates of 3e-4, one task"
NOISE = "one strength of router noise, 80 times the KL that is published of real engines"
_GRPOS = "GSPO's band was made for responses of thousands of tokens"
_ROUTES = (
    "2 to 8 layers, 8 to 128 experts, one task, eight seeds; 64 updates of 5e-5: routing's share falls as updates grow "
    "(docs/audit.md), and the share of changed experts rises"
)

CLAIMS = (
    Claim(
        1,
        "GSPO is more stable and efficient than GRPO on MoE.",
        "GSPO (2507.18071), section 5.1, figure 1",
        ("study", "study_paper", "study_narrow", "study_wide", "study_tuning", "study_best"),
        (
            reward(GSPO, PAPERS),
            reward(GSPO, PAPERS_R2),
            reward(WIDE, PAPERS),
            reward(GSPO, NARROW),
            Outcome("mean reward, GSPO less GRPO, each at its best", effects.at_best, "above", 0),
            usefulness(AUDITED["gspo"], AUDITED["grpo-paper"]),
        ),
        "answer",
        (GSPO, PAPERS, PAPERS_R2),
        f"{SMALL}; {_GRPOS}; GSPO and GRPO 0.2/0.27 collapse in no seed: their learning is compared, not their "
        "collapses; the tuning had three seeds and 7 of 12 rollouts, and at 4e-4 GSPO's two bands were 0.003 apart.",
        STRESS,
        moe_effect_at="stale",
        exploratory=(
            reward(GSPO, GRPO),
            reward(BEST["gspo, own band"], BEST["grpo"]),
            reward(BEST["gspo, own band"], BEST["gspo"]),
            gain(AUDITED["gspo"], AUDITED["grpo-paper"]),
        ),
        beside=tuple(BEST.values()),
    ),
    Claim(
        2,
        "GSPO clips two orders of magnitude more tokens than GRPO, whatever the bands.",
        "GSPO (2507.18071), section 5.2, figure 2",
        ("study_audit",),
        tuple(
            Outcome(
                f"clipped tokens, {AUDITED[ours].label} over {AUDITED[theirs].label}, after {k} updates",
                effects.clipped(AUDITED[ours], AUDITED[theirs], k),
                "above",
                30,
                unit="ratio",
                leg="mechanism",
            )
            for ours, theirs, k in (
                ("gspo", "grpo-paper", 4),
                ("gspo", "grpo-paper", 16),
                ("gspo-grpo_band", "grpo-paper", 16),
            )
        ),
        "",
        (),
        f"{AUDITS}; published are 0.15 and 0.0013. A short response has a wider sequence ratio: docs/audit.md has "
        "clipped shares over band, length and staleness.",
        controls=(),
    ),
    Claim(
        3,
        "GRPO needs routing replay on MoE, GSPO does not.",
        "GSPO (2507.18071), section 5.3, figure 3",
        ("study_paper", "study", "study_replay", "study_audit"),
        (
            reward(PAPERS_R2, PAPERS),
            reward(GSPO_R2, GSPO, "below", 0.05),
            usefulness(AUDITED_R2["grpo-paper"], AUDITED["grpo-paper"]),
            usefulness(AUDITED_R2["gspo"], AUDITED["gspo"], "below", 0.1),
        ),
        "answer",
        (PAPERS, PAPERS_R2, GSPO, GSPO_R2),
        f"{SMALL}, 4 layers: routing may be a larger part of the ratio in deep models (claim 12).",
        STRESS,
        moe_effect_at="stale",
        exploratory=(
            gain(AUDITED_R2["grpo-paper"], AUDITED["grpo-paper"]),
            gain(AUDITED_R2["gspo"], AUDITED["gspo"]),
        ),
    ),
    Claim(
        4,
        "About 10 % of the experts change with an update, more in deeper models.",
        "GSPO (2507.18071), section 5.3",
        ("study_routes",),
        (
            Outcome(
                "expert change per update, 8 layers over 2",
                effects.changed(DIALS["layers"][8], DIALS["layers"][2]),
                "above",
                1,
                unit="ratio",
            ),
        ),
        "dose",
        tuple(DIALLED.values()),
        f"{_ROUTES}; the paper does not say whether it counts experts or sets, nor at which learning rate, so that "
        "the number itself gets no verdict.",
        controls=(),
        about="of depth; the number has no verdict",
        doses=EXPERT_CHANGE,
    ),
    Claim(
        5,
        "What GSPO gains is due to the MoE.",
        "GSPO (2507.18071), sections 1 and 5.3",
        ("study", "study_twin", "study_audit", "study_audit_twin"),
        (
            Outcome(
                "mean reward, GSPO less GRPO, MoE less dense twin",
                effects.interaction((GSPO, GRPO), (DENSE["gspo"], DENSE["grpo"])),
                "above",
                0,
            ),
            Outcome(
                "usefulness, GSPO less GRPO 0.2/0.27, MoE less dense twin",
                effects.useful_interaction(
                    (AUDITED["gspo"], AUDITED["grpo-paper"]),
                    (AUDITED_DENSE["gspo"], AUDITED_DENSE["grpo-paper"]),
                ),
                "above",
                0,
                unit="usefulness",
                leg="mechanism",
            ),
        ),
        "answer",
        (GRPO, GSPO, *DENSE.values()),
        f"{SMALL}; the twin has as many active parameters and a cold start of its own, to the same accuracy.",
        STRESS_AND_TWIN,
        moe_effect_at="stale",
        exploratory=(
            reward(DENSE["gspo"], DENSE["grpo"]),
            Outcome(
                "gain, GSPO less GRPO 0.2/0.27, MoE less dense twin",
                effects.useful_interaction(
                    (AUDITED["gspo"], AUDITED["grpo-paper"]),
                    (AUDITED_DENSE["gspo"], AUDITED_DENSE["grpo-paper"]),
                    "gain",
                ),
                "above",
                0,
                unit="usefulness",
                leg="mechanism",
            ),
        ),
    ),
    Claim(
        12,
        "Most of the ratio's variance is due to routing.",
        "GSPO (2507.18071), section 5.3; MiniRL (2512.01374), section 3",
        ("study_routes",),
        (
            Outcome(
                "routing's share, mean over the six models",
                effects.routed(tuple(DIALLED.values())),
                "above",
                0.5,
                unit="share",
            ),
            *(
                Outcome(
                    f"routing's share, {arm.label} less {over.label}",
                    effects.routed((arm,), (over,)),
                    "above",
                    0,
                    unit="share",
                )
                for arm, over in (
                    (DIALS["layers"][8], DIALS["layers"][2]),
                    (DIALS["experts"][128], DIALS["experts"][8]),
                    (DIALS["margin"][0.02], DIALS["margin"][1]),
                )
            ),
        ),
        "dose",
        tuple(DIALLED.values()),
        f"{_ROUTES}; a few tokens carry the moment.",
        controls=(),
        doses=ROUTING,
    ),
    Claim(
        13,
        "GSPO tolerates the sampler's log-probabilities in place of recomputed ones.",
        "GSPO (2507.18071), section 5.4",
        ("study_mismatch",),
        (accuracy(arms.ANCHORED["gspo", "rollout"], arms.ANCHORED["gspo", "old"], -0.05),),
        "answer",
        (arms.ANCHORED["gspo", "old"], arms.ANCHORED["gspo", "rollout"]),
        f"{SMALL}; {NOISE}.",
        MISMATCH,
        controls=(arms.EXACT,),
    ),
    Claim(
        16,
        "The unit of the ratio matters, its band does not.",
        "the pilot of our audit",
        ("study", "study_paper", "study_narrow", "study_wide", "study_audit"),
        (
            reward(WIDE, PAPERS),
            reward(NARROW, PAPERS, "between", -0.05, 0.05),
            reward(GSPO, WIDE, "between", -0.05, 0.05),
            usefulness(AUDITED["gspo-grpo_band"], AUDITED["grpo-paper"]),
            usefulness(AUDITED["grpo-gspo_band"], AUDITED["grpo-paper"], "between", -0.1, 0.1),
            usefulness(AUDITED["gspo"], AUDITED["gspo-grpo_band"], "between", -0.1, 0.1),
        ),
        "answer",
        (WIDE, PAPERS, GSPO, NARROW),
        f"{SMALL}; {_GRPOS}.",
        STRESS,
        exploratory=(
            gain(AUDITED["gspo-grpo_band"], AUDITED["grpo-paper"]),
            gain(AUDITED["grpo-gspo_band"], AUDITED["grpo-paper"]),
            gain(AUDITED["gspo"], AUDITED["gspo-grpo_band"]),
        ),
    ),
)
