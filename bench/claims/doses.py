"""Dose and response: a number over the values of a dial, beside the claims about routing (4 and 12)."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from steadymoe.bench.claims import effects
from steadymoe.bench.claims.arms import BF16, DIALS
from steadymoe.bench.claims.effects import Effect
from steadymoe.bench.score.recorded import NotRun, Recorded


@dataclass(frozen=True)
class Dose:
    """One number at one value of a dial."""

    quantity: str
    dial: str
    value: float
    effect: Effect


EXPERT_CHANGE = (
    *(
        Dose("changed by an update", dial, value, effects.level(arm, "expert_change_per_update"))
        for dial, values in DIALS.items()
        for value, arm in values.items()
    ),
    *(
        Dose("differ in a bf16 sampler", "layers", value, effects.level(arm, "rollout_expert_disagreement"))
        for value, arm in BF16.items()
    ),
)
ROUTING = tuple(
    Dose("routing's share", dial, value, effects.routed((arm,)))
    for dial, values in DIALS.items()
    for value, arm in values.items()
)


def table(study: Recorded, doses: Sequence[Dose]) -> pd.DataFrame:
    """A row for each dose that has run: dial, value, quantity and number (an Estimate over seeds)."""
    rows = []
    for each in doses:
        try:
            number = each.effect(study).estimate
        except NotRun:
            continue
        rows.append({"dial": each.dial, "value": each.value, "quantity": each.quantity, "number": number})
    return pd.DataFrame(rows, columns=["dial", "value", "quantity", "number"])


def shown(rows: pd.DataFrame) -> pd.DataFrame:
    """``table`` for a page: a row for each value of a dial, a column for each quantity."""
    found = []
    for (dial, value), of in rows.groupby(["dial", "value"], sort=False):
        numbers = dict(zip(of["quantity"], of["number"], strict=True))
        cells = {quantity: numbers.get(quantity, "–") for quantity in rows["quantity"].unique()}
        found.append({"dial": dial, "value": f"{value:g}"} | cells | {"n": of["number"].iloc[0].n})
    return pd.DataFrame(found)
