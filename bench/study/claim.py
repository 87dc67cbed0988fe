"""A claim, the outcomes that decide it, and the rules by which they do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import t  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.score.arms import CONTROLS
from steadymoe.bench.score.recorded import NONE, Arm, Audited, NotRun, Recorded
from steadymoe.bench.statistics.comparisons import detectable, holm, sign_flip_p
from steadymoe.bench.statistics.estimates import LEAST_FOR_INTERVAL
from steadymoe.bench.study import effects
from steadymoe.bench.study.doses import Dose
from steadymoe.bench.study.effects import Effect, Measurement, NoNumber
from steadymoe.bench.study.gates import Gate, Need

Verdict = Literal["supported", "contradicted", "not decided", "not testable here", "not run"]
Side = Literal["above", "below", "between"]
LegVerdict = Verdict | Literal["mixed", "under stress only"]
Leg = Literal["trajectory", "mechanism"]
LEGS: tuple[Leg, ...] = ("trajectory", "mechanism")
LEVEL = 0.05
_TO_BE_RUN = "to be run: "


@dataclass(frozen=True)
class Outcome:
    """One number, and the side of a threshold on which it was claimed to lie."""

    what: str
    effect: Effect
    side: Side
    threshold: float
    upper: float = np.nan
    """The upper end of ``between``."""
    unit: Literal["reward", "accuracy", "usefulness", "share", "ratio", "area"] = "reward"
    """Outcomes of one unit stand together in a figure; ratios have the interval of their logarithm."""
    leg: Leg = "trajectory"
    """Whether it is measured on runs, or on audited rollouts."""

    @property
    def claimed(self) -> str:
        """The claimed side, for a table."""
        return f"{self.side} {self.threshold:g}" + (f" and {self.upper:g}" if self.side == "between" else "")

    @property
    def ends(self) -> list[float]:
        """The thresholds, on the scale of ``Measurement.seeds``."""
        ends = [self.threshold] + ([self.upper] if self.side == "between" else [])
        return np.log(ends).tolist() if self.unit == "ratio" else ends

    def p(self, measured: Measurement) -> float:
        """The exact p of a sign-flip test against the threshold (``comparisons.sign_flip_p``).

        The null hypothesis: the sign of each seed's distance from the threshold is random. For ``between`` the larger
        p of the two ends. An effect without one number for each seed has Student's p from its standard error, or nan.
        """
        if measured.seeds:
            return max(sign_flip_p([x - end for x in measured.seeds]) for end in self.ends)
        found = measured.estimate
        return max(float(2 * t.sf(abs(found.mean - end) / measured.error, measured.degrees)) for end in self.ends)

    def detectable(self, measured: Measurement, level: float) -> float:
        """Return the distance from a threshold that a t test at ``level`` finds with 80 % power; for a ratio a factor.

        It is about the spread of the seeds and not about the measured effect. nan without a standard error, or with so
        few seeds that no sign-flip p reaches ``level``.
        """
        n, error, degrees = len(measured.seeds), measured.error, measured.degrees
        if n:
            reached = n >= LEAST_FOR_INTERVAL and 2 ** (1 - n) <= level
            error, degrees = float(np.std(measured.seeds, ddof=1) / np.sqrt(n)) if reached else np.nan, n - 1
        if np.isnan(error):
            return np.nan
        distance = detectable(error, degrees, level=level)
        return float(np.exp(distance)) if self.unit == "ratio" else distance

    def verdict(self, measured: Measurement, p: float) -> Verdict:
        """Supported if the whole interval lies on the claimed side, contradicted if it lies wholly elsewhere.

        Both need a ``p`` of at most 5 %, corrected for the outcomes of the claim. Otherwise, and without a p, it
        is not decided.
        """
        found = measured.estimate
        if np.isnan(found.low) or np.isnan(found.high) or not p <= LEVEL:
            return "not decided"
        low, high = self.threshold, self.upper if self.side == "between" else self.threshold
        above, below = found.low > low, found.high < high
        supported = {"above": above, "below": below, "between": above and below}[self.side]
        contradicted = {
            "above": found.high < low,
            "below": found.low > high,
            "between": found.high < low or found.low > high,
        }[self.side]
        return "supported" if supported else "contradicted" if contradicted else "not decided"


def reward(arm: Arm, over: Arm, side: Side = "above", threshold: float = 0.0, upper: float = np.nan) -> Outcome:
    """Mean reward of ``arm`` less ``over``."""
    what = f"mean reward, {arm.label} less {over.label}"
    return Outcome(what, effects.mean_reward(arm, over), side, threshold, upper)


def accuracy(arm: Arm, over: Arm, threshold: float = 0.0) -> Outcome:
    """Held-out accuracy of ``arm`` less ``over``, claimed to lie above a threshold."""
    what = f"held-out accuracy, {arm.label} less {over.label}"
    return Outcome(what, effects.held_out(arm, over), "above", threshold, unit="accuracy")


def usefulness(
    loss: Audited, over: Audited, side: Side = "above", threshold: float = 0.0, upper: float = np.nan
) -> Outcome:
    """Usefulness of the gradient of ``loss`` less ``over``, on audited rollouts."""
    what = f"usefulness, {loss.label} less {over.label}"
    return Outcome(what, effects.useful(loss, over), side, threshold, upper, "usefulness", "mechanism")


def gain(loss: Audited, over: Audited) -> Outcome:
    """Gain of the best step along the gradient of ``loss`` less ``over``, on the rollouts of ``usefulness``."""
    what = f"gain, {loss.label} less {over.label}"
    return Outcome(what, effects.useful(loss, over, "gain"), "above", 0, unit="usefulness", leg="mechanism")


@dataclass(frozen=True)
class Claim:
    """What a paper claims, how the study asks, and what the answer is worth."""

    number: int
    statement: str
    source: str
    experiments: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    figure: str
    """``answer`` (arms beside their controls), ``dose`` (numbers over dials), or empty: no figure."""
    arms: tuple[Arm, ...]
    """The arms in the figure and in the table."""
    limits: str
    needs: tuple[Need, ...] = ()
    """The gates that the trajectory leg needs."""
    moe_effect_at: str = ""
    """For a claim about MoE, the setting of its runs: the MoE effect should be present there (``gates.moe_effect``)."""
    controls: tuple[Arm, ...] = CONTROLS
    """The controls that stand beside the arms."""
    exploratory: tuple[Outcome, ...] = ()
    """Outcomes that the protocol does not list; they are shown and are part of no verdict."""
    about: str = ""
    """The part of the statement that the outcomes ask, where it is not the whole."""
    beside: tuple[Arm, ...] = ()
    """Further arms in the table, without a curve."""
    doses: tuple[Dose, ...] = ()
    """Numbers over the values of dials, in a table and in the figure ``dose``."""

    def verdict(self, found: Sequence["Finding"], leg: Leg, effect: Gate | None = None) -> LegVerdict | None:
        """The verdict of a leg from its findings; None for a claim without this leg.

        ``effect`` says whether the MoE effect is present where a claim about MoE was run. If it is not, its runs are an
        answer "under stress only", whatever their outcomes.
        """
        verdicts = {each.verdict for each in found if each.outcome.leg == leg}
        if not verdicts:
            return None
        if verdicts in ({"not testable here"}, {"not run"}):
            return verdicts.pop()
        if leg == "trajectory" and effect is not None and effect.state != "passed":
            return "under stress only"
        if {"supported", "contradicted"} <= verdicts:
            return "mixed"
        if "contradicted" in verdicts:
            return "contradicted"
        return "supported" if verdicts == {"supported"} else "not decided"


@dataclass(frozen=True)
class Finding:
    """An outcome, its measured effect and its verdict."""

    outcome: Outcome
    measured: Measurement
    p: float
    """Exact, two-sided, for this outcome alone; nan for an effect without one number for each seed."""
    corrected: float
    """``p`` corrected for all outcomes of the claim (``comparisons.holm``)."""
    verdict: Verdict
    detectable: float = np.nan
    """``Outcome.detectable`` at 5 % divided by the number of the claim's outcomes, the strictest step of Holm."""
    lacks: str = ""
    """What is missing for a verdict: an arm that has not run, a number, or a passed gate."""

    @property
    def decides(self) -> str:
        """What would decide an outcome that is not decided; empty for a decided one."""
        return self.lacks or ("more seeds" if self.verdict == "not decided" else "")


def findings(
    study: Recorded, outcomes: Sequence[Outcome], blocking: Sequence[Gate] = (), lost: Sequence[Gate] = ()
) -> list[Finding]:
    """The finding of each outcome: "not run" without runs, "not testable here" where a gate of its leg is not passed.

    ``blocking`` are gates of the trajectory leg that are not passed, ``lost`` of the mechanism leg. Outcomes that have
    not run, and outcomes without a p, count in Holm's correction, so that it does not change with the data.
    """
    measured, lacks = zip(*(_look(study, outcome) for outcome in outcomes), strict=True) if outcomes else ((), ())
    p_values = [outcome.p(each) for outcome, each in zip(outcomes, measured, strict=True)]
    corrected = holm([1.0 if np.isnan(p) else p for p in p_values])
    found, strictest = [], LEVEL / max(1, len(outcomes))
    for outcome, each, p, with_others, lack in zip(outcomes, measured, p_values, corrected, lacks, strict=True):
        with_others = np.nan if np.isnan(p) else float(with_others)
        verdict: Verdict = "not decided" if lack else outcome.verdict(each, with_others)
        if lack.startswith(_TO_BE_RUN):
            verdict = "not run"
        if gates := lost if outcome.leg == "mechanism" else blocking:
            verdict = "not testable here"
            lack = lack or f"a testbed that passes {', '.join(str(gate.need) for gate in gates)}"
        found.append(Finding(outcome, each, p, with_others, verdict, outcome.detectable(each, strictest), lack))
    return found


def _look(study: Recorded, outcome: Outcome) -> tuple[Measurement, str]:
    """The size of an outcome's effect, and what is missing for it."""
    try:
        return outcome.effect(study), ""
    except NotRun as missing:
        return Measurement(NONE), f"{_TO_BE_RUN}{missing}"
    except NoNumber as why:
        return Measurement(NONE, note=str(why)), str(why)
