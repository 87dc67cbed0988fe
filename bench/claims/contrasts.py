"""Twelve contrasts that papers published, beside the study's: a summary by sign, which chose no setting."""

from collections import Counter
from dataclasses import dataclass

import pandas as pd

from steadymoe.bench.claims import arms, effects
from steadymoe.bench.claims.arms import ANCHORED, DENSE, GRPO, GSPO, MINIRL, OTHERS, STALENESS
from steadymoe.bench.claims.effects import Effect, NoNumber, Seen
from steadymoe.bench.claims.study import Arm, NotRun, Study


@dataclass(frozen=True)
class Contrast:
    """A difference whose sign is published."""

    number: int
    published: str
    source: str
    here: str
    """What stands for it in the study."""
    effects: tuple[Effect, ...]
    """Differences that are published as positive."""

    def answer(self, study: Study) -> tuple[list[Seen], str]:
        """The differences, and right, wrong, open or not run: the whole interval lies above 0, below 0, or neither."""
        try:
            seen = [effect(study) for effect in self.effects]
        except (NotRun, NoNumber):
            return [], "not run"
        if all(each.estimate.low > 0 for each in seen):
            return seen, "right"
        return seen, "wrong" if all(each.estimate.high < 0 for each in seen) else "open"


def _fall(arm: Arm) -> Effect:
    """The reward of the first step less the final reward."""
    return lambda study: effects.by_seed(study.first(arm) - study.final(arm))


CONTRASTS = (
    Contrast(
        1,
        "with stale data a clip is better than none",
        "MiniRL",
        "GRPO less GRPO unclipped, mean reward",
        (effects.mean_reward(GRPO, arms.UNCLIPPED),),
    ),
    Contrast(
        2,
        "more updates a rollout hurt",
        "VESPO, MiniRL",
        "GSPO at 4 updates less at 64, mean reward",
        (effects.mean_reward(STALENESS[4]["gspo"], STALENESS[64]["gspo"]),),
    ),
    Contrast(
        3,
        "GSPO is better than GRPO at 8 updates",
        "R3, VESPO",
        "GSPO less GRPO at 16 updates, mean reward",
        (effects.mean_reward(GSPO, GRPO),),
    ),
    Contrast(
        4,
        "GSPO is no better than GRPO at 32 updates and more",
        "VESPO",
        "GRPO less GSPO at 64 updates, mean reward",
        (effects.mean_reward(STALENESS[64]["grpo"], STALENESS[64]["gspo"]),),
    ),
    Contrast(
        5,
        "VESPO is better than GSPO",
        "VESPO",
        "VESPO less GSPO at 16 updates, mean reward",
        (effects.mean_reward(OTHERS["vespo"], GSPO),),
    ),
    Contrast(
        6,
        "VESPO is better than SAPO",
        "VESPO",
        "VESPO less SAPO at 16 updates, mean reward",
        (effects.mean_reward(OTHERS["vespo"], OTHERS["sapo"]),),
    ),
    Contrast(
        7,
        "SAPO is worse than GSPO at 8 updates and more",
        "VESPO",
        "GSPO less SAPO at 16 updates, mean reward",
        (effects.mean_reward(GSPO, OTHERS["sapo"]),),
    ),
    Contrast(
        8,
        "with stale data CISPO collapses (asked here: falls)",
        "VESPO",
        "CISPO, first less final reward",
        (_fall(OTHERS["cispo"]),),
    ),
    Contrast(
        9,
        "replay lifts GRPO",
        "GSPO, figure 3; R3",
        "GRPO 0.2/0.27, R2 less free, mean reward",
        (effects.mean_reward(arms.PAPERS_R2, arms.PAPERS),),
    ),
    Contrast(
        10,
        "R2 is better than R3 at few updates, R3 better than R2 at many",
        "MiniRL",
        "MiniRL, R2 less R3 at 4 updates, and R3 less R2 at 16, held-out accuracy",
        (
            effects.held_out(MINIRL["r2", 4], MINIRL["r3", 4]),
            effects.held_out(MINIRL["r3", 16], MINIRL["r2", 16]),
        ),
    ),
    Contrast(
        11,
        "an anchor at the sampler is better than at the old policy",
        "DPPO",
        "DPPO, anchor at the sampler less at the old policy, held-out accuracy",
        (effects.held_out(ANCHORED["dppo", "rollout"], ANCHORED["dppo", "old"]),),
    ),
    Contrast(
        12,
        "GSPO gains more on MoE than on a dense model",
        "VESPO",
        "GSPO less GRPO, MoE less dense twin, mean reward",
        (effects.interaction((GSPO, GRPO), (DENSE["gspo"], DENSE["grpo"])),),
    ),
)

RULE = (
    "They chose no setting. *Right*: the whole 95 % interval has the published sign; *wrong*: the opposite sign; "
    "*open*: it holds 0. Intervals are not corrected for the number of contrasts."
)


def table(study: Study) -> pd.DataFrame:
    """The published contrasts beside the study's."""
    rows = []
    for each in CONTRASTS:
        seen, said = each.answer(study)
        rows.append(
            {"": each.number, "published": f"{each.published} ({each.source})", "here": each.here}
            | {"difference": "; ".join(str(one.estimate) for one in seen) or "–"}
            | {"n": "; ".join(str(one.estimate.n) for one in seen) or "–", "sign": said}
        )
    return pd.DataFrame(rows)


def told(rows: pd.DataFrame) -> str:
    """A sentence with the number of contrasts of ``table`` whose sign is right, wrong or open, or that have not run."""
    return f"Of {len(rows)}: " + ", ".join(f"{n} {each}" for each, n in Counter(rows["sign"]).items()) + "."
