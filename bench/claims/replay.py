"""What R2 does within a rollout: the loss sees a quieter ratio, and the policy that is sampled moves on.

R2 forces the old policy's experts in the updates; the sampler then runs the experts that the routers choose. These
numbers are exploratory and part of no verdict.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pandas as pd

from steadymoe.bench.claims import effects
from steadymoe.bench.score.arms import GSPO, GSPO_R2, PAPERS, PAPERS_R2
from steadymoe.bench.score.recorded import NONE, Arm, Recorded
from steadymoe.bench.statistics.estimates import DIFFERENCE, POSITIVE, Bounds

# The claim that stands above the figure.
CLAIM = 3
# Free routes, and the same with R2.
PAIRS = ((PAPERS, PAPERS_R2), (GSPO, GSPO_R2))


class Quantity(NamedTuple):
    """One number for each seed of an arm."""

    name: str
    numbers: Callable[[Recorded, Arm], pd.Series]
    bounds: Bounds
    compared: Literal["", "difference", "ratio"]
    """How R2 is compared with free routes."""


def _at(metric: str, step: int) -> Callable[[Recorded, Arm], pd.Series]:
    def numbers(study: Recorded, arm: Arm) -> pd.Series:
        steps = study.tables([arm])["steps"]
        return steps[(steps["metric"] == metric) & (steps["step"] == step)].set_index("seed")["value"].sort_index()

    return numbers


def _moved(study: Recorded, arm: Arm) -> pd.Series:
    """Routers free before and after the updates of a rollout; mean over the probed rollouts."""
    return study.numbers(arm, "log_ratio_moment_free", "mean")


LEFT, START, NEXT, SEEN, MOVED = QUANTITIES = (
    Quantity("experts that left the old routes", _at("expert_change_rate", 1), (0.0, 1.0), ""),
    Quantity("reward of rollout 1", _at("reward", 1), (0.0, 1.0), ""),
    Quantity("reward of rollout 2", _at("reward", 2), (0.0, 1.0), "difference"),
    Quantity("token-ratio variance in the loss", _at("token_ratio_variance", 1), POSITIVE, "ratio"),
    Quantity("mean squared log-ratio of the sampled policy", _moved, POSITIVE, "ratio"),
)


def table(study: Recorded) -> pd.DataFrame:
    """Return a row for each quantity and arm: number, and for R2 its effect; empty unless all arms have run.

    ``effect`` is R2 less free routes or R2 over free routes, seed by seed; n is 0 where nothing is compared.
    """
    rows = []
    for free, replayed in PAIRS if all(study.has(arm) for pair in PAIRS for arm in pair) else ():
        for quantity in QUANTITIES:
            for arm in (free, replayed):
                numbers = quantity.numbers(study, arm)
                effect = NONE
                if arm is replayed and quantity.compared == "difference":
                    effect = effects.by_seed(numbers - quantity.numbers(study, free), DIFFERENCE).estimate
                elif arm is replayed and quantity.compared == "ratio":
                    effect = effects.factor(numbers, quantity.numbers(study, free)).estimate
                row = {"quantity": quantity.name, "arm": arm.label, "routing": "R2" if arm is replayed else "free"}
                number = effects.by_seed(numbers, quantity.bounds).estimate
                rows.append(row | {"algorithm": arm.algorithm, "number": number, "effect": effect})
    return pd.DataFrame(rows)


def told(rows: pd.DataFrame) -> str:
    """Return ``table`` as a paragraph."""
    found: dict[Any, Any] = {(row.quantity, row.arm): row for row in rows.itertuples()}

    def mean(quantity: Quantity, arm: Arm) -> str:
        return f"{found[quantity.name, arm.label].number.mean:.3g}"

    free, replayed = PAIRS[0]
    moved = " and ".join(f"{found[MOVED.name, arm.label].effect} times ({arm.label})" for _, arm in PAIRS)
    return (
        f"*What R2 does* (exploratory, part of no verdict). During rollout 1, {float(mean(LEFT, replayed)):.0%} of the "
        "routers' choices leave the old policy's experts, with R2 and without. R2 hides this from the loss, whose "
        f"token ratio has a variance of {mean(SEEN, replayed)} with R2 and {mean(SEEN, free)} without ({free.label}). "
        "The sampler runs the new experts, and the sampled policy moves no less: its mean squared log-ratio is "
        f"{moved} that of free routes. The clip then bounds a ratio that is not the sampled policy's. In one rollout "
        f"the reward goes from {mean(START, free)} to {mean(NEXT, replayed)} with R2 and to {mean(NEXT, free)} without."
    )
