"""The claims and the published contrasts of ``claims.yaml``, with the effects that its rows name."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from steadymoe.bench.measurement import columns
from steadymoe.bench.study import effects
from steadymoe.bench.study.arms import ARMS, BF16, CENTERING, DIALLED, DIALS, LOSSES, MAY_COLLAPSE
from steadymoe.bench.study.effects import OF_RUNS, Effect
from steadymoe.bench.study.gates import LONG, MISMATCH, STRESS, STRESS_AND_TWIN, UNSTRESSED
from steadymoe.bench.study.rules import Claim, Contrast, Dose, Outcome, Side

_TABLE: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_suffix(".yaml")), resolve=True)
_NEEDS = {
    **{"": (), "stress": STRESS, "stress and dense twin": STRESS_AND_TWIN},
    **{"learning": UNSTRESSED, "mismatch": MISMATCH, "long": LONG},
}
_SIDES: tuple[Side, ...] = ("above", "below", "between")
# Effect → the unit of its outcomes and the leg that they belong to; rewards and runs unless it is named here.
_UNITS: dict[str, Any] = {
    "held-out accuracy": ("accuracy", "trajectory"),
    "held-out accuracy beside the dense twin": ("accuracy", "trajectory"),
    "usefulness": ("usefulness", "mechanism"),
    "gain": ("usefulness", "mechanism"),
    "clipped tokens": ("ratio", "mechanism"),
    "expert change per update": ("ratio", "trajectory"),
    "routing's share": ("share", "trajectory"),
    "area": ("area", "trajectory"),
    "area less the reward's": ("area", "trajectory"),
}


def effect(row: Mapping[str, Any]) -> tuple[str, Effect]:
    """Return what a row of ``claims.yaml`` measures, in words, and its effect.

    Raises KeyError for the label of no arm or loss.
    """
    (name, of), *_ = row.items()
    labels = [of] if isinstance(of, str) else of
    if name in (*OF_RUNS, "usefulness", "gain"):
        known: Mapping[str, Any] = ARMS if name in OF_RUNS else LOSSES
        first, over, *twins = (known[label] for label in labels)
        what = f"{name}, {first.label} less {over.label}"
        if twins:
            return f"{what}, MoE less dense twin", effects.interaction(name, (first, over), (twins[0], twins[1]))
        return what, effects.paired(name, first, over)
    if name == "held-out accuracy beside the dense twin":
        moe, dense = (ARMS[label] for label in labels)
        return f"{name}, {moe.label} less {dense.label}", effects.beside_twin(moe, dense)
    if name == "clipped tokens":
        loss, other, k = LOSSES[labels[0]], LOSSES[labels[1]], row["updates"]
        return f"{name}, {loss.label} over {other.label}, after {k} updates", effects.clipped(loss, other, k)
    if name == "expert change per update":
        return f"{name}, {labels[0]} over {labels[1]}", effects.changed(ARMS[labels[0]], ARMS[labels[1]])
    if name == "routing's share" and len(labels) == 1:
        return f"{name}, {labels[0]}", effects.routed(tuple(DIALLED.values()))
    if name == "routing's share":
        return f"{name}, {labels[0]} less {labels[1]}", effects.routed((ARMS[labels[0]],), (ARMS[labels[1]],))
    if name == "area":
        return f"area under the ROC curve, {columns.short(of)}", effects.area(MAY_COLLAPSE, of)
    if name == "area less the reward's":
        ahead, without = row.get("ahead", 1), row.get("without", "")
        what = f"area under the ROC curve, {columns.short(of)} less the reward itself"
        what += (f", {ahead} steps ahead" if ahead > 1 else "") + (f", without {without}" if without else "")
        return what, effects.announces([arm for arm in MAY_COLLAPSE if arm.label != without], of, ahead)
    if name == "mean reward at its best":
        what = f"mean reward, {labels[0]} less {labels[1]}, each at its best"
        return what, effects.at_best(*(label.lower() for label in labels))
    if name == "fall":
        return f"{name} of {of}", effects.fall(ARMS[of])
    return name, {"staler is worse": effects.staler_is_worse}[name]


def _outcome(row: Mapping[str, Any]) -> Outcome:
    what, measure = effect(row)
    side: Side = next((side for side in _SIDES if side in row), "above")
    bound = row.get(side, 0)
    threshold, upper = bound if side == "between" else (bound, float("nan"))
    unit, leg = _UNITS.get(next(iter(row)), ("reward", "trajectory"))
    return Outcome(what, measure, side, threshold, upper, unit, leg)


def _annotated(row: Mapping[str, Any]) -> Effect:
    """The effect of a contrast's row, with the row's note."""
    _, measure = effect(row)
    return (lambda study: replace(measure(study), note=row["note"])) if "note" in row else measure


_AT_DIALS = [(dial, value, arm) for dial, values in DIALS.items() for value, arm in values.items()]
_DOSES: dict[str, list[tuple[Any, ...]]] = {
    "changed by an update": [(*at, effects.level(arm, "expert_change_per_update")) for *at, arm in _AT_DIALS],
    "differ in a bf16 sampler": [
        ("layers", value, effects.level(arm, "rollout_expert_disagreement")) for value, arm in BF16.items()
    ],
    "routing's share": [(*at, effects.routed((arm,))) for *at, arm in _AT_DIALS],
}
for (_loss, _strength, _updates), _arm in sorted(CENTERING.items(), key=lambda item: (-item[0][2], item[0][1])):
    _DOSES.setdefault(_loss, []).append((f"noise, {_updates} updates", _strength, effects.held_out(_arm)))


def _claim(number: int, row: dict[str, Any]) -> Claim:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    fields |= {key: tuple(_outcome(each) for each in row.get(key, ())) for key in ("outcomes", "exploratory")}
    fields |= {key: tuple(ARMS[label] for label in row.get(key, ())) for key in ("arms", "beside")}
    fields["doses"] = tuple(Dose(quantity, *dose) for quantity in row.get("doses", ()) for dose in _DOSES[quantity])
    return Claim(**fields | {"number": number, "needs": _NEEDS[row.get("needs", "")]})


CLAIMS = tuple(_claim(number, row) for number, row in _TABLE["claims"].items())
# Numbered from 1.
CONTRASTS = tuple(
    Contrast(row["published"], row["here"], tuple(map(_annotated, row["effects"]))) for row in _TABLE["contrasts"]
)
