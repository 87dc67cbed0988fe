"""Twelve contrasts that papers published next to the study's: a summary by sign."""

from collections import Counter
from dataclasses import dataclass, replace

import pandas as pd

from steadymoe.bench.claims import effects
from steadymoe.bench.claims.arms import ANCHORED, DENSE, MINIRL
from steadymoe.bench.claims.effects import Effect, NoNumber, Seen
from steadymoe.bench.score.arms import GRPO, GSPO, OTHERS, PAPERS, PAPERS_R2, UNCLIPPED
from steadymoe.bench.score.recorded import Arm, NotRun, Recorded
from steadymoe.bench.statistics.estimates import DIFFERENCE


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

    def answer(self, study: Recorded) -> tuple[list[Seen], str]:
        """Return the differences, and right, wrong, open or not run (``RULE``)."""
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


# The learning rates of conf/experiment/frontier_stale.yaml at which the on-policy control learns; at 1.6e-3 it falls.
_FRONTIER_RATES = (2e-4, 4e-4, 8e-4)
_STALES_RATE, _STALES_UPDATES = 8e-4, 16  # conf/experiment/stale.yaml


def _frontier(algorithm: str, rate: float, updates: int) -> Arm:
    """A cell of ``frontier_stale``: three seeds, 192 updates."""
    axes: dict[str, object] = {} if rate == _STALES_RATE else {"optimizer.learning_rate": rate}
    axes |= {} if updates == _STALES_UPDATES else {"updates_per_rollout": updates}
    return Arm(f"{algorithm}, lr {rate:g}, {updates} updates", "frontier_stale", algorithm, axes)


FRONTIER = {
    (algorithm, rate, updates): _frontier(algorithm, rate, updates)
    for algorithm in ("grpo", "gspo", "grpo_unclipped")
    for rate in _FRONTIER_RATES
    for updates in (4, 16, 32)
}


def _staler_is_worse(study: Recorded) -> Seen:
    """Mean reward at 4 updates less at 32: the mean over the cells of algorithm and learning rate, by seed."""
    cells = {(name, rate) for name, rate, _ in FRONTIER}
    found = [study.mean_reward(FRONTIER[*cell, 4]) - study.mean_reward(FRONTIER[*cell, 32]) for cell in sorted(cells)]
    positive = sum(each.mean() > 0 for each in found)
    mean = pd.concat(found, axis=1).mean(axis=1, skipna=False)
    return replace(effects.by_seed(mean, DIFFERENCE), note=f"above 0 in {positive} of {len(found)} cells")


def _no_better(rate: float) -> Effect:
    """Mean reward of GRPO less GSPO at 32 updates and one learning rate."""
    whole = effects.mean_reward(FRONTIER["grpo", rate, 32], FRONTIER["gspo", rate, 32])
    return lambda study: replace(whole(study), note=f"at {rate:g}")


CONTRASTS = (
    Contrast(
        1,
        "with stale data a clip is better than none",
        "MiniRL",
        "GRPO less GRPO unclipped, mean reward",
        (effects.mean_reward(GRPO, UNCLIPPED),),
    ),
    Contrast(
        2,
        "more updates a rollout hurt",
        "VESPO, MiniRL",
        "4 updates less 32, mean reward, mean over GRPO, GSPO and GRPO unclipped at three learning rates "
        "(`frontier_stale`)",
        (_staler_is_worse,),
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
        "GRPO less GSPO at 32 updates, mean reward, at three learning rates (`frontier_stale`)",
        tuple(_no_better(rate) for rate in _FRONTIER_RATES),
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
        (effects.mean_reward(PAPERS_R2, PAPERS),),
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
    "Contrast 1 chose a setting: gate V3 of *stale* asks that the control without a clip falls. The others chose none. "
    "*Right*: the whole 95 % interval has the published sign; *wrong*: the opposite sign; *open*: it holds 0, or "
    "several differences disagree. Intervals are not corrected for the number of contrasts."
)


def table(study: Recorded) -> pd.DataFrame:
    """The published contrasts beside the study's."""
    rows = []
    for each in CONTRASTS:
        seen, said = each.answer(study)
        rows.append(
            {"": each.number, "published": f"{each.published} ({each.source})", "here": each.here}
            | {"difference": "; ".join(_shown(one) for one in seen) or "–"}
            | {"n": "; ".join(str(one.estimate.n) for one in seen) or "–", "sign": said}
        )
    return pd.DataFrame(rows)


def _shown(seen: Seen) -> str:
    return f"{seen.estimate} ({seen.note})" if seen.note else str(seen.estimate)


def told(rows: pd.DataFrame) -> str:
    """A sentence with the number of contrasts of ``table`` whose sign is right, wrong or open, or that have not run."""
    return f"Of {len(rows)}: " + ", ".join(f"{n} {each}" for each, n in Counter(rows["sign"]).items()) + "."
