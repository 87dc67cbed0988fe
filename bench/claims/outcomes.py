"""The kinds of outcomes of the study, each made from the arms or losses that it compares."""

from math import nan
from typing import Literal

from steadymoe.bench.claims import effects
from steadymoe.bench.claims.verdict import Outcome
from steadymoe.bench.score.recorded import Arm, Audited

Side = Literal["above", "below", "between"]


def reward(arm: Arm, over: Arm, side: Side = "above", threshold: float = 0.0, upper: float = nan) -> Outcome:
    """Mean reward of ``arm`` less ``over``."""
    what = f"mean reward, {arm.label} less {over.label}"
    return Outcome(what, effects.mean_reward(arm, over), side, threshold, upper)


def accuracy(arm: Arm, over: Arm, threshold: float = 0.0) -> Outcome:
    """Held-out accuracy of ``arm`` less ``over``, claimed to lie above a threshold."""
    what = f"held-out accuracy, {arm.label} less {over.label}"
    return Outcome(what, effects.held_out(arm, over), "above", threshold, unit="accuracy")


def usefulness(
    loss: Audited, over: Audited, side: Side = "above", threshold: float = 0.0, upper: float = nan
) -> Outcome:
    """Usefulness of the gradient of ``loss`` less ``over``, on audited rollouts."""
    what = f"usefulness, {loss.label} less {over.label}"
    return Outcome(what, effects.useful(loss, over), side, threshold, upper, "usefulness", "mechanism")


def gain(loss: Audited, over: Audited) -> Outcome:
    """Gain of the best step along the gradient of ``loss`` less ``over``, on the rollouts of ``usefulness``."""
    what = f"gain of the best step, {loss.label} less {over.label}"
    return Outcome(what, effects.useful(loss, over, "gain"), "above", 0, unit="usefulness", leg="mechanism")
