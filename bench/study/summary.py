"""What the study found, in plain sentences: where GSPO leads, what replay does, and what each number can carry.

The numbers are computed from the recorded runs and audits. None of them decides a verdict.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pandas as pd

from steadymoe.bench.score.arms import DRIFT, GRPO, GSPO, GSPO_R2, PAPERS, PAPERS_R2, WIDE
from steadymoe.bench.score.recorded import Arm, Audited, Recorded
from steadymoe.bench.statistics.comparisons import unpaired_ratio
from steadymoe.bench.statistics.estimates import DIFFERENCE, Estimate
from steadymoe.bench.study import arms, effects
from steadymoe.bench.study.arms import BEST, DIALLED, FRONTIER
from steadymoe.bench.study.gates import NOISY
from steadymoe.bench.study.realism import realism

# Outcomes in mean reward, by the protocol's letters, as the two arms that are compared.
_IN_MEAN_REWARD: dict[str, tuple[Arm, Arm]] = {
    "1 a": (GSPO, PAPERS),
    "1 e": (BEST["gspo"], BEST["grpo"]),
    "3 a": (PAPERS_R2, PAPERS),
    "3 b": (GSPO_R2, GSPO),
    "10 a": (arms.SHIFT["grpo"], GRPO),
    "10 b": (arms.SHIFT["gspo"], GSPO),
    "15 a": (arms.FREEZE, PAPERS_R2),
    "15 b": (arms.BALANCED, PAPERS_R2),
    "16 c": (GSPO, WIDE),
}
# The rollouts that the tuning compared: the steps that count of 192 updates.
_TUNED_OVER = 7


def speed_and_level(study: Recorded) -> pd.DataFrame:
    """Return the differences of ``_IN_MEAN_REWARD`` in mean reward, final reward and held-out accuracy."""
    return pd.DataFrame(
        [
            {
                "outcome": letter,
                "compared": f"{arm.label} less {over.label}",
                "mean reward": effects.mean_reward(arm, over)(study).estimate,
                "final reward": effects.by_seed(study.final(arm) - study.final(over), DIFFERENCE).estimate,
                "held-out accuracy": effects.held_out(arm, over)(study).estimate,
            }
            for letter, (arm, over) in _IN_MEAN_REWARD.items()
        ]
    )


def undecided_in_level(rows: pd.DataFrame, ends: Mapping[str, float] = MappingProxyType({"16 c": 0.05})) -> list[str]:
    """Return the outcomes of ``speed_and_level`` that mean reward decides, and neither final reward nor accuracy does.

    Intervals are compared with 0, or with the bound of an outcome in ``ends``, which claims a difference within it.
    """
    bounds = rows["outcome"].map(lambda outcome: ends.get(outcome, 0.0))
    columns = ["mean reward", "final reward", "held-out accuracy"]
    is_open = rows[columns].apply(
        lambda column: [each.low <= bound <= each.high for each, bound in zip(column, bounds, strict=True)]
    )
    chosen = ~is_open["mean reward"] & is_open["final reward"] & is_open["held-out accuracy"]
    return rows.loc[chosen, "outcome"].tolist()


def bullets(study: Recorded) -> list[str]:
    """Return what was found as lines of Markdown. Raises NotRun if something of it was not recorded."""
    lead = {(rate, updates): _lead(study, rate, updates) for _, rate, updates in FRONTIER}
    ahead = [cell for cell, each in lead.items() if each.low > 0]
    others = [each.mean for cell, each in lead.items() if cell not in ahead]
    slower = effects.mean_reward(BEST["grpo"], GSPO)(study).estimate
    wide, own = BEST["gspo"], BEST["gspo, own band"]
    early = _first_rollouts(study, wide) - _first_rollouts(study, own)
    tie, chosen = (effects.mean_reward(arm, BEST["grpo"])(study).estimate for arm in (own, wide))
    band = effects.held_out(GSPO, WIDE)(study).estimate
    moe, dense = (Audited("", name, "all") for name in ("study_audit", "study_audit_twin"))
    ratio = unpaired_ratio(*(study.gradient(each, "token_ratio_variance", DRIFT) for each in (moe, dense)))
    share = effects.by_seed(study.gradient(moe, "routing_share", DRIFT)).estimate
    small = effects.routed(tuple(DIALLED.values()))(study).estimate
    stale = effects.by_seed(study.routing_share(GRPO)).estimate
    kl, length = study.numbers(NOISY, "rollout_kl_k3", "mean").mean(), study.response_length(NOISY).mean()
    (factor,) = (each.factor for each in realism(study) if each.arm == NOISY.label and each.what.startswith("KL"))
    level = undecided_in_level(speed_and_level(study))
    return [
        "**GSPO's lead needs a high rate and stale data.** Over three learning rates and 4, 16 or 32 updates a rollout "
        f"(`frontier_stale`, n = 3, steps that count), GSPO is ahead of GRPO in {len(ahead)} of {len(lead)} cells: "
        f"{_cells(lead, ahead)}. In the others its mean reward differs by {min(others):+.3f} to {max(others):+.3f}. A "
        "fourth rate, 1.6e-3, is left out: there even the on-policy control falls.",
        f"**A lower rate beats GSPO's lead.** On the same stale data GRPO at 2e-4 is {slower} above GSPO at 8e-4 "
        "(`study_best` and `study`, n = 10).",
        "**Tuned, GRPO is slightly ahead.** Each at its best rate, GSPO with its own band less GRPO is "
        f"{tie}. The {chosen} of outcome 1 e comes from choosing GSPO's band over rollouts 1 to {_TUNED_OVER}, where "
        "the wide band learns faster on the study's seeds too "
        f"({effects.by_seed(early, DIFFERENCE).estimate}) and falls behind later. VESPO, CISPO and SAPO were never "
        "tuned: they ran at 8e-4 with their papers' numbers.",
        "**Replay blinds the clip.** R2 quiets the ratio that the loss sees, not the policy that is sampled "
        "([claim 3](#claim-3) has the figure).",
        f"**Routing's share falls as updates grow**: {small} of the log-ratio's second moment at 5e-5 "
        f"(`study_routes`), {share} after sixteen updates of 3e-4 (`study_audit`) and {stale} at *stale*, 8e-4 "
        f"(`study`). After those of 3e-4 the token ratio's variance is {ratio} times the dense twin's. So claims about "
        "MoE should be asked at 3e-4 or below.",
        "**R3 undoes injected noise.** It is ahead of R2 at 4 and at 16 updates, but the noise sits on the sampler's "
        "routers, which is exactly what R3 removes. The claim's other half, R2 ahead at few updates, is contradicted.",
        f"**The sampler's noise is large per token and small per response.** {kl:.2f} nats a token is {factor:.0f} "
        f"times the published divergence, but a response of {length:.0f} tokens has {kl * length:.1f} nats, and one of "
        "4,000 to 10,000 tokens at the published 1.5e-3 to 2.5e-3 has 6 to 25.",
        "**Bands.** The band of a token ratio hardly matters for the gradient (16 n). For GSPO it matters in "
        f"training: its own band is {band} above 0.2/0.27 in held-out accuracy.",
        "**Mean reward measures speed.** An arm that is ahead in mean reward learns faster; it need not end higher. "
        f"Mean reward decides outcomes {', '.join(level)}; in final reward and held-out accuracy their intervals "
        "contain 0 (16 c: its bound of 0.05). 15 a and 15 b stay above their threshold of −0.05.",
    ]


def _lead(study: Recorded, rate: float, updates: int) -> Estimate:
    return effects.mean_reward(FRONTIER["gspo", rate, updates], FRONTIER["grpo", rate, updates])(study).estimate


def _cells(lead: dict[tuple[float, int], Estimate], cells: Sequence[tuple[float, int]]) -> str:
    return " and ".join(f"{lead[cell]} at {cell[0]:.0e} and {cell[1]} updates".replace("e-0", "e-") for cell in cells)


def _first_rollouts(study: Recorded, arm: Arm) -> pd.Series:
    """Mean reward by seed over the rollouts that the tuning compared."""
    steps = study.tables([arm])["steps"]
    counted = steps[(steps["metric"] == "reward") & (steps["step"] <= _TUNED_OVER)]
    return counted.groupby("seed")["value"].mean()
