"""What papers claim of algorithms on MoE models, and which numbers of which runs would support it.

This is the table of docs/protocol.md as code: outcomes and thresholds were fixed there before the runs.
"""

from collections.abc import Callable

import pandas as pd

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
    TUNED,
    UNCLIPPED,
    WIDE,
)
from steadymoe.bench.claims.study import Arm, Study
from steadymoe.bench.claims.verdict import Claim, Outcome
from steadymoe.bench.stats import Estimate, over_seeds


def _best(study: Study, name: str) -> Arm:
    """The arm at ten seeds whose setting has the highest mean final reward over the seeds that were left out."""
    tuned = max(TUNED[name].values(), key=lambda arm: study.final(arm).mean())
    if "algorithm.loss.clip_low" in tuned.axes:
        return tuned._replace(experiment="study_bands")
    return tuned._replace(experiment="study_rates" if "optimizer.learning_rate" in tuned.axes else "study")


def _gain(arm: Arm, over: Arm) -> Callable[[Study], Estimate]:
    return lambda study: study.gain(arm, over)


def _clipped(arm: Arm, over: Arm) -> Callable[[Study], Estimate]:
    return lambda study: study.factor(*(study.numbers(each, "clip_fraction", "mean") for each in (arm, over)))


def _warning(metric: str) -> Callable[[Study], Estimate]:
    return lambda study: study.warning_area([GRPO, GSPO, NARROW, WIDE], metric)


def _twice(study: Study, ours: tuple[Arm, Arm], theirs: tuple[Arm, Arm]) -> Estimate:
    """Difference of differences of final rewards: of one pair of arms less that of another."""
    differences = [study.final(arm) - study.final(over) for arm, over in (ours, theirs)]
    return over_seeds((differences[0] - differences[1]).dropna().tolist())


def _fall(study: Study, arm: Arm) -> pd.Series:
    return study.first(arm) - study.final(arm)


def _change(arm: Arm, study: Study) -> pd.Series:
    return study.numbers(arm, "expert_change_per_update", "mean")


_SMALL = "0.45 M parameters, responses of 4 to 10 tokens, 40 steps, one task"
CLAIMS = (
    Claim(
        1,
        "GSPO trains more stably and efficiently than GRPO on MoE.",
        "GSPO (2507.18071), section 5.1, figure 1",
        ("study", "study_bands", "study_rates", "study_tuning"),
        (
            Outcome("final reward, GSPO less GRPO, at the papers' bands", _gain(GSPO, GRPO), "above", 0),
            Outcome("the same, both with GRPO's band", _gain(WIDE, GRPO), "above", 0),
            Outcome("the same, both with GSPO's band", _gain(GSPO, NARROW), "above", 0),
            Outcome(
                "the same, each at its best",
                lambda study: study.gain(_best(study, "gspo"), _best(study, "grpo")),
                "above",
                0,
            ),
        ),
        "overview",
        (GRPO, GSPO, NARROW, WIDE, *CONTROLS),
        f"{_SMALL}; the band of GSPO's paper was made for responses of thousands of tokens; the last outcome is at the "
        "best of 6 settings, by two seeds.",
    ),
    Claim(
        2,
        "GSPO clips two orders of magnitude more tokens than GRPO, whatever the bands.",
        "GSPO (2507.18071), section 5.2, figure 2",
        ("study", "study_bands"),
        (
            Outcome("clip fraction, GSPO over GRPO, at the papers' bands", _clipped(GSPO, GRPO), "above", 30, unit=""),
            Outcome("the same, both with GRPO's band", _clipped(WIDE, GRPO), "above", 30, unit=""),
            Outcome("the same, both with GSPO's band", _clipped(GSPO, NARROW), "above", 30, unit=""),
        ),
        "fig02",
        (GRPO, GSPO, NARROW, WIDE),
        f"{_SMALL}; a short response has a wider sequence ratio, and log-ratios here are larger than at 30 B, so "
        "GRPO's band of 0.2 is met more often.",
        stability=False,
    ),
    Claim(
        3,
        "GRPO needs routing replay on MoE, GSPO does not.",
        "GSPO (2507.18071), section 5.3, figure 3",
        ("study", "study_replay"),
        (
            Outcome("final reward, what R2 adds to GRPO", _gain(R2["grpo"], GRPO), "above", 0),
            Outcome("what R2 adds to GSPO", _gain(R2["gspo"], GSPO), "below", 0.05),
        ),
        "fig03",
        (GRPO, R2["grpo"], GSPO, R2["gspo"], *CONTROLS[:2]),  # frozen is GRPO by algorithm and routing
        f"{_SMALL}, 4 layers and 8 experts: routing is a smaller part of the ratio than in deep models (claim 12).",
    ),
    Claim(
        4,
        "About 10 % of the experts change with an update, more in deeper models.",
        "GSPO (2507.18071), section 5.3",
        ("study", "study_depth"),
        (
            Outcome(
                "GRPO's expert change per update, share",
                lambda study: over_seeds(_change(GRPO, study).tolist()),
                "between",
                0.05,
                0.2,
                unit="",
            ),
            Outcome(
                "the same at 8 layers over that at 2",
                lambda study: study.factor(_change(DEPTH[8], study), _change(DEPTH[2], study)),
                "above",
                1,
                unit="",
            ),
        ),
        "fig10",
        tuple(DEPTH.values()),
        "One gradient update of 16 responses; the paper does not say whether it counts experts or sets, nor at which "
        "learning rate; depth on an easier task.",
        stability=False,
    ),
    Claim(
        5,
        "What GSPO gains is due to the MoE.",
        "GSPO (2507.18071), sections 1 and 5.3",
        ("study", "study_twin"),
        (
            Outcome(
                "final reward, GSPO less GRPO, MoE less dense twin",
                lambda study: _twice(study, (GSPO, GRPO), (DENSE["gspo"], DENSE["grpo"])),
                "above",
                0,
            ),
            Outcome(
                "what GRPO loses from first step to last, MoE less dense",
                lambda study: over_seeds((_fall(study, GRPO) - _fall(study, DENSE["grpo"])).dropna().tolist()),
                "above",
                0,
            ),
        ),
        "overview",
        (GRPO, GSPO, UNCLIPPED, *DENSE.values()),
        f"{_SMALL}; the twin has as many active parameters and its own cold start, to the same accuracy.",
    ),
    Claim(
        6,
        "R2 is best at few updates, R3 at many.",
        "MiniRL (2512.01374), section 4",
        ("study_minirl",),
        (
            Outcome("final reward, R2 less R3, at 4 updates", _gain(MINIRL["r2", 4], MINIRL["r3", 4]), "above", 0),
            Outcome("R3 less R2, at 16 updates", _gain(MINIRL["r3", 16], MINIRL["r2", 16]), "above", 0),
        ),
        "fig04",
        tuple(MINIRL.values()),
        f"{_SMALL}; the rollout stays as it is, so mini-batches shrink as updates grow, while the "
        "paper keeps the mini-batch.",
    ),
    Claim(
        7,
        "With stale data CISPO, SAPO and GSPO collapse and VESPO does not.",
        "VESPO (2602.10693), figure 3",
        ("study",),
        tuple(
            Outcome(f"final reward at 16 updates, VESPO less {arm.label}", _gain(OTHERS["vespo"], arm), "above", 0)
            for arm in (OTHERS["cispo"], OTHERS["sapo"], GSPO)
        ),
        "overview",
        (GSPO, *OTHERS.values(), *CONTROLS),
        f"{_SMALL}; one staleness, where the paper has five; the rollout stays as it is, so mini-batches are small.",
    ),
    Claim(
        8,
        "Anchoring at the old policy collapses where anchoring at the sampler does not.",
        "DPPO (2602.04879)",
        ("study_mismatch",),
        (
            Outcome(
                "final reward of DPPO, anchor at the sampler less at the old policy",
                _gain(ANCHORED["dppo", "rollout"], ANCHORED["dppo", "old"]),
                "above",
                0,
            ),
        ),
        "overview",
        (ANCHORED["dppo", "old"], ANCHORED["dppo", "rollout"], *CONTROLS),
        f"{_SMALL}; one strength of router noise. Controls are without noise.",
    ),
    Claim(
        9,
        "Truncated importance sampling (TIS) mends a sampler that differs.",
        "TIS, against DPPO (2602.04879)",
        ("study_correction",),
        (Outcome("final reward of GRPO, with TIS less without", _gain(TIS["with"], TIS["without"]), "above", 0),),
        "overview",
        (TIS["without"], TIS["with"], *CONTROLS),
        f"{_SMALL}; one strength of router noise. Controls are without noise.",
    ),
    Claim(
        10,
        "Router-shift weighting stabilises any host.",
        "RSPO (2510.23027)",
        ("study", "study_shift"),
        (
            Outcome("final reward of GRPO, with the weight less without", _gain(SHIFT["grpo"], GRPO), "above", 0),
            Outcome("of GSPO, likewise", _gain(SHIFT["gspo"], GSPO), "above", 0),
        ),
        "overview",
        (GRPO, SHIFT["grpo"], GSPO, SHIFT["gspo"], *CONTROLS),
        f"{_SMALL}; the paper's floor is not known, 0.8 is a re-implementation's; two hosts of three.",
    ),
    Claim(
        11,
        "Ratio variance and expert change announce a collapse.",
        "MiniRL (2512.01374), R3 (2510.11370), RSPO (2510.23027)",
        ("study", "study_bands"),
        tuple(
            Outcome(f"area under the ROC curve, {shown}", _warning(metric), "above", 0.5, unit="")
            for metric, shown in (
                ("token_ratio_variance", "token-ratio variance"),
                ("expert_change_rate", "expert change"),
                ("sequence_ratio_variance", "sequence-ratio variance"),
            )
        ),
        "fig13",
        (GRPO, GSPO, NARROW, WIDE),
        "Runs of two algorithms and two bands are pooled: what tells arms apart tells collapses "
        "apart too, so a large area is not yet a warning within one setting; n is the smaller of collapsed and stable "
        "runs.",
    ),
    Claim(
        12,
        "Most of the ratio's variance is due to routing.",
        "GSPO (2507.18071), section 5.3; MiniRL (2512.01374), section 3",
        ("study", "study_depth"),
        (
            Outcome(
                "share of GRPO's log-ratio second moment that goes with pinned routes",
                lambda study: over_seeds(study.routing_share(GRPO).tolist()),
                "above",
                0.5,
                unit="",
            ),
            Outcome(
                "the same at 8 layers less at 2",
                lambda study: over_seeds(
                    (study.routing_share(DEPTH[8]) - study.routing_share(DEPTH[2])).dropna().tolist()
                ),
                "above",
                0,
                unit="",
            ),
        ),
        "fig11",
        tuple(DEPTH.values()),
        "8 experts of which 2 are active; on samples of a rollout; depth on an easier task. A few tokens carry the "
        "moment.",
        stability=False,
    ),
    Claim(
        13,
        "GSPO tolerates the sampler's log-probabilities in place of recomputed ones.",
        "GSPO (2507.18071), section 5.4",
        ("study_mismatch",),
        (
            Outcome(
                "final reward of GSPO, anchor at the sampler less at the old policy",
                _gain(ANCHORED["gspo", "rollout"], ANCHORED["gspo", "old"]),
                "above",
                -0.05,
            ),
        ),
        "overview",
        (ANCHORED["gspo", "old"], ANCHORED["gspo", "rollout"], *CONTROLS),
        f"{_SMALL}; router noise is not what engines differ by. Controls are without noise.",
    ),
    Claim(
        14,
        "GSPO is 23 % more efficient than GRPO and wins 4.8 % more.",
        "a published summary of GSPO; the paper has neither number",
        ("study_rates",),
        (
            Outcome(
                "tokens that GRPO needs over those that GSPO needs, at 2e-4",
                lambda study: study.cost_factor(SLOW["grpo"], SLOW["gspo"], "tokens"),
                "above",
                1,
                unit="",
            ),
            Outcome(
                "held-out prompts GSPO wins less those it loses, share",
                lambda study: study.wins(SLOW["gspo"], SLOW["grpo"]),
                "above",
                0,
                unit="",
            ),
        ),
        "fig01",
        (SLOW["grpo"], SLOW["gspo"], *CONTROLS),
        f"{_SMALL}; at half of the study's learning rate. Controls are at the study's.",
        stability=False,
    ),
)
# The experiments that hold only a part of what a claim compares.
COMPARED_ELSEWHERE = {name for claim in CLAIMS for name in claim.experiments} - {"study"}
