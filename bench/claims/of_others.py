"""The claims by papers on other losses, corrections and routing replay."""

from steadymoe.bench.claims.arms import (
    ANCHORED,
    CONTROLS,
    GRPO,
    GSPO,
    MINIRL,
    NARROW,
    NOISE,
    OTHERS,
    SHIFT,
    SMALL,
    TIS,
    WIDE,
)
from steadymoe.bench.claims.effects import gain, warning
from steadymoe.bench.claims.gates import MISMATCH, STRESS
from steadymoe.bench.claims.verdict import Claim, Outcome, disturbed
from steadymoe.bench.measurement import columns

_ANNOUNCING = ("token_ratio_variance", "expert_change_rate", "sequence_ratio_variance")
_ANCHORS = disturbed(
    "DPPO, anchor at the sampler less at the old policy", ANCHORED["dppo", "rollout"], ANCHORED["dppo", "old"]
)
_TRUNCATION = disturbed("GRPO, with TIS less without", TIS["with"], TIS["without"])


def _roc(metric: str, lead: str = "") -> str:
    return f"area under the ROC curve, {lead}{columns.short(metric)}"


CLAIMS = (
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
        f"{SMALL}; behind a sampler in fp8, and the testbed has no control for this sampler; the rollout stays as it "
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
        f"{SMALL}; final rewards are tested, collapses are in the table; one staleness, where the paper has five; "
        "mini-batches of two prompts.",
        STRESS,
    ),
    Claim(
        8,
        "Anchoring at the old policy collapses where anchoring at the sampler does not.",
        "DPPO (2602.04879)",
        ("study_mismatch",),
        _ANCHORS[:1],
        "overview",
        (ANCHORED["dppo", "old"], ANCHORED["dppo", "rollout"]),
        f"{SMALL}; {NOISE}. No run collapsed.",
        MISMATCH,
        exploratory=_ANCHORS[1:],
    ),
    Claim(
        9,
        "Truncated importance sampling (TIS) mends a sampler that differs.",
        "TIS, against DPPO (2602.04879)",
        ("study_correction",),
        _TRUNCATION[:1],
        "overview",
        (TIS["without"], TIS["with"]),
        f"{SMALL}; {NOISE}.",
        MISMATCH,
        exploratory=_TRUNCATION[1:],
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
        f"{SMALL}; the paper's floor is not known, 0.8 is a re-implementation's; two hosts of three.",
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
)
