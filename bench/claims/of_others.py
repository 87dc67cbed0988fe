"""The claims by papers on other losses, corrections and routing replay."""

from steadymoe.bench.claims import arms, effects
from steadymoe.bench.claims.arms import ANCHORED, MINIRL, SHIFT, STALENESS
from steadymoe.bench.claims.gates import MISMATCH, STRESS
from steadymoe.bench.claims.of_gspo import NOISE, SMALL
from steadymoe.bench.claims.outcomes import accuracy, gain, reward, usefulness
from steadymoe.bench.claims.verdict import Claim, Outcome
from steadymoe.bench.measurement import columns
from steadymoe.bench.score.arms import (
    AUDITED,
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
from steadymoe.bench.score.recorded import Arm

_RIVALS = (OTHERS["cispo"], OTHERS["sapo"], GSPO)
# Every arm at *stale* with a learning rate of its own above 0, whose runs may collapse.
_STALE = (
    *(GRPO, GSPO, *OTHERS.values(), UNCLIPPED, REINFORCE),
    *(PAPERS, PAPERS_R2, GSPO_R2, WIDE, NARROW),
)

_WARNINGS = ("token_ratio_variance", "expert_change_rate", "sequence_ratio_variance")


def _announces(metric: str, least_lead: int = 1, without: Arm | None = None) -> Outcome:
    """The area under a metric's ROC curve less the reward's own, over all arms at *stale* but one."""
    what = f"area under the ROC curve, {columns.short(metric)} less the reward itself"
    what += f", {least_lead} steps ahead" if least_lead > 1 else ""
    what += f", without {without.label}" if without else ""
    kept = tuple(arm for arm in _STALE if arm != without)
    return Outcome(what, effects.announces(kept, metric, least_lead), "above", 0, unit="area")


CLAIMS = (
    Claim(
        6,
        "R2 is best at few updates, R3 at many.",
        "MiniRL (2512.01374), section 4",
        ("study_minirl",),
        (accuracy(MINIRL["r2", 4], MINIRL["r3", 4]), accuracy(MINIRL["r3", 16], MINIRL["r2", 16])),
        "answer",
        tuple(MINIRL.values()),
        f"{SMALL}; {NOISE}; the noise was chosen at 4 updates.",
        MISMATCH,
        controls=(arms.EXACT,),
    ),
    Claim(
        7,
        "With stale data CISPO, SAPO and GSPO do worse than VESPO (the paper: they collapse and VESPO does not).",
        "VESPO (2602.10693), figure 3",
        ("study", "study_audit"),
        (
            *(reward(OTHERS["vespo"], arm) for arm in _RIVALS),
            *(usefulness(AUDITED["vespo"], AUDITED[arm.algorithm]) for arm in _RIVALS),
        ),
        "answer",
        (*OTHERS.values(), GSPO),
        f"{SMALL}; mean rewards decide, collapses are in the table; verdicts are about 16 updates a rollout.",
        STRESS,
        moe_effect_at="stale",
        exploratory=(
            *(reward(of["vespo"], of[name]) for of in STALENESS.values() for name in ("cispo", "sapo", "gspo")),
            *(gain(AUDITED["vespo"], AUDITED[arm.algorithm]) for arm in _RIVALS),
        ),
    ),
    Claim(
        8,
        "An anchor at the old policy does worse than an anchor at the sampler (the paper: it collapses).",
        "DPPO (2602.04879)",
        ("study_mismatch",),
        (accuracy(ANCHORED["dppo", "rollout"], ANCHORED["dppo", "old"]),),
        "answer",
        (ANCHORED["dppo", "old"], ANCHORED["dppo", "rollout"]),
        f"{SMALL}; {NOISE}; accuracies decide, collapses are in the table.",
        MISMATCH,
        controls=(arms.EXACT,),
    ),
    Claim(
        9,
        "Truncated importance sampling (TIS) mends a sampler that differs.",
        "TIS, against DPPO (2602.04879)",
        ("study_correction",),
        (accuracy(arms.TIS, arms.NOISY),),
        "answer",
        (arms.NOISY, arms.TIS),
        f"{SMALL}; {NOISE}.",
        MISMATCH,
        controls=(arms.EXACT,),
    ),
    Claim(
        10,
        "Router-shift weighting stabilises any host.",
        "RSPO (2510.23027)",
        ("study", "study_shift"),
        (reward(SHIFT["grpo"], GRPO), reward(SHIFT["gspo"], GSPO)),
        "answer",
        (GRPO, SHIFT["grpo"], GSPO, SHIFT["gspo"]),
        f"{SMALL}; the paper's floor is not known, 0.8 is a re-implementation's; two hosts of three.",
        STRESS,
        moe_effect_at="stale",
    ),
    Claim(
        11,
        "Ratio variance and expert change announce a collapse.",
        "MiniRL (2512.01374), R3 (2510.11370), RSPO (2510.23027)",
        ("study", "study_paper", "study_replay", "study_narrow", "study_wide"),
        tuple(_announces(metric) for metric in _WARNINGS),
        "",
        (),
        "asked is whether a metric beats the reward one step before a collapse, an event that is itself defined by the "
        "reward; exploratory outcomes ask it 3 and 5 steps before, with REINFORCE and without (it collapses in every "
        "seed, mostly at step 5, and so has nothing to show 5 steps before); what tells arms apart tells collapses "
        "apart too: runs of twelve arms are pooled.",
        STRESS,
        controls=(),
        exploratory=(
            *(
                _announces(metric, least_lead, without)
                for without in (None, REINFORCE)
                for least_lead in (1, 3, 5)
                for metric in _WARNINGS
                if least_lead > 1 or without
            ),
            *(
                Outcome(
                    f"area under the ROC curve, {columns.short(metric)}",
                    effects.area(_STALE, metric),
                    "above",
                    0.5,
                    unit="area",
                )
                for metric in (*_WARNINGS, "reward")
            ),
        ),
    ),
    Claim(
        15,
        "Freezing the router, or a loss that balances its load, does what replay does.",
        "issues of five trainers",
        ("study_paper", "study_router"),
        (
            reward(arms.FREEZE, PAPERS_R2, "above", -0.05),
            reward(arms.BALANCED, PAPERS_R2, "above", -0.05),
        ),
        "answer",
        (PAPERS, PAPERS_R2, arms.FREEZE, arms.BALANCED),
        f"{SMALL}; one coefficient of the load-balancing loss, 0.02; asked is whether the reward stays above R2's less "
        "0.05, and R2 itself lowered the reward (claim 3).",
        STRESS,
        moe_effect_at="stale",
    ),
)
