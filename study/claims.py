"""What a claim is, the rules by which its outcomes and gates give a verdict, and the claims of ``claims.yaml``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from omegaconf import OmegaConf
from scipy.stats import t  # type: ignore[attr-defined]  # defined at run time

from steadymoe.bench.statistics.comparisons import detectable, holm, sign_flip_p
from steadymoe.bench.statistics.estimates import MIN_FOR_INTERVAL
from steadymoe.bench.training import columns
from study import arms, effects
from study.arms import ARMS, CONTROLS, LOSSES, MAY_COLLAPSE
from study.effects import RUN_METRICS, Effect, Measurement, NoNumber
from study.gates import NEEDS, Gate, Need
from study.recorded import NONE, Arm, NotRun, Recorded

Verdict = Literal["supported", "contradicted", "not decided", "not testable here", "not run"]
Side = Literal["above", "below", "between"]
LegVerdict = Verdict | Literal["mixed", "under stress only"]
Leg = Literal["trajectory", "mechanism"]
Unit = Literal["reward", "accuracy", "usefulness", "share", "ratio", "area"]
LEGS: tuple[Leg, ...] = ("trajectory", "mechanism")
LEVEL = 0.05
_TO_BE_RUN = "to be run: "


@dataclass(frozen=True)
class Outcome:
    """One number, and the side of a threshold on which it was claimed to lie."""

    what: str
    effect: Effect
    side: Side = "above"
    threshold: float = 0.0
    upper: float = np.nan
    """The upper end of ``between``."""
    unit: Unit = "reward"
    """Outcomes of one unit stand together in a figure; ratios have the interval of their logarithm."""
    leg: Leg = "trajectory"
    """Whether it is measured on runs, or on audited rollouts."""

    @property
    def claimed(self) -> str:
        """The claimed side, for a table."""
        return f"{self.side} {self.threshold:g}" + (f" and {self.upper:g}" if self.side == "between" else "")

    def p(self, measured: Measurement) -> float:
        """Return the exact p of a sign-flip test against the threshold (``comparisons.sign_flip_p``).

        The null hypothesis: the sign of each seed's distance from the threshold is random. For ``between`` the larger
        p of the two ends. An effect without one number for each seed has Student's p from its standard error, or nan.
        """
        ends = [self.threshold] + ([self.upper] if self.side == "between" else [])
        if measured.seeds:
            ends = np.log(ends).tolist() if self.unit == "ratio" else ends
            return max(sign_flip_p([x - end for x in measured.seeds]) for end in ends)
        mean = measured.estimate.mean
        return max(float(2 * t.sf(abs(mean - end) / measured.error, measured.degrees)) for end in ends)

    def detectable(self, measured: Measurement, level: float) -> float:
        """Return the distance from a threshold that a t test at ``level`` finds with 80 % power; for a ratio a factor.

        It is about the spread of the seeds and not about the measured effect. nan without a standard error, or with so
        few seeds that no sign-flip p reaches ``level``.
        """
        n, error, degrees = len(measured.seeds), measured.error, measured.degrees
        if n:
            reached = n >= MIN_FOR_INTERVAL and 2 ** (1 - n) <= level
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
        # Twelve decimals: a tie with a threshold must not be broken by rounding.
        low, high = round(measured.estimate.low, 12), round(measured.estimate.high, 12)
        if np.isnan(low) or np.isnan(high) or not p <= LEVEL:
            return "not decided"
        least = -np.inf if self.side == "below" else self.threshold
        most = {"above": np.inf, "below": self.threshold, "between": self.upper}[self.side]
        if high < least or low > most:
            return "contradicted"
        is_inside = (low > least or self.side == "below") and (high < most or self.side == "above")
        return "supported" if is_inside else "not decided"


class Dose(NamedTuple):
    """One number at one value of a dial."""

    quantity: str
    dial: str
    value: float
    effect: Effect


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper claims, how the study tests it, and the limits of the verdict."""

    number: int
    statement: str
    source: str
    experiments: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    limits: str
    arms: tuple[Arm, ...] = ()
    """The arms in the figure and in the table."""
    needs: tuple[Need, ...] = ()
    """The gates that the trajectory leg needs."""
    about_moe: bool = False
    """Whether it is about MoE: the MoE effect should be present at its setting (``moe_effect``)."""
    exploratory: tuple[Outcome, ...] = ()
    """Outcomes that the protocol does not list; they are shown and are part of no verdict."""
    about: str = ""
    """The part of the statement that the outcomes test, where it is not the whole."""
    beside: tuple[Arm, ...] = ()
    """Further arms in the table, without a curve."""
    doses: tuple[Dose, ...] = ()
    """Numbers over the values of dials, in a table and in the figure."""
    tuning: str = ""
    """The experiment that tuned its arms, in a table and a figure of its own."""

    @property
    def figure(self) -> str:
        """``dose`` (numbers over dials), ``answer`` (arms next to their controls), or empty: no figure."""
        return "dose" if self.doses else "answer" if self.arms else ""

    @property
    def setting(self) -> str:
        """The setting at which it was run."""
        return self.needs[-1].setting if self.needs else "stale"

    @property
    def by_accuracy(self) -> bool:
        """Whether held-out accuracy decides, and not mean reward."""
        return any(outcome.unit == "accuracy" for outcome in self.outcomes)

    @property
    def with_controls(self) -> tuple[Arm, ...]:
        """The arms, their controls and, at *stale*, the on-policy twin."""
        controls: dict[str, tuple[Arm, ...]] = {
            "stale": (*CONTROLS, arms.ON_POLICY),
            "long": (arms.LONG_ON_POLICY["slow routers"], arms.LONG_ON_POLICY["dense"]),
            "longer": (arms.LONGER["on policy"], arms.LONGER["dense"]),
        }
        return (*self.arms, *controls.get(self.setting, (arms.EXACT,)))


@dataclass(frozen=True)
class OutcomeFinding:
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
) -> list[OutcomeFinding]:
    """Return the finding of each outcome: "not run" without runs, "not testable here" where its leg lacks a gate.

    ``blocking`` are gates of the trajectory leg that are not passed, ``lost`` of the mechanism leg. Outcomes that have
    not run, and outcomes without a p, count in Holm's correction, so that it does not change with the data.
    """
    measured = [_measure(study, outcome) for outcome in outcomes]
    p_values = [outcome.p(number) for outcome, (number, _) in zip(outcomes, measured, strict=True)]
    corrected = holm([1.0 if np.isnan(p) else p for p in p_values])
    rows, strictest = [], LEVEL / max(1, len(outcomes))
    for outcome, (number, lack), p, of_all in zip(outcomes, measured, p_values, corrected, strict=True):
        with_others = np.nan if np.isnan(p) else float(of_all)
        verdict: Verdict = "not decided" if lack else outcome.verdict(number, with_others)
        if lack.startswith(_TO_BE_RUN):
            verdict = "not run"
        if gates := lost if outcome.leg == "mechanism" else blocking:
            verdict = "not testable here"
            lack = lack or f"a testbed that passes {', '.join(str(gate.need) for gate in gates)}"
        rows.append(
            OutcomeFinding(outcome, number, p, with_others, verdict, outcome.detectable(number, strictest), lack)
        )
    return rows


def _measure(study: Recorded, outcome: Outcome) -> tuple[Measurement, str]:
    """Return the size of an outcome's effect, and what is missing for it."""
    try:
        return outcome.effect(study), ""
    except NotRun as missing:
        return Measurement(NONE), f"{_TO_BE_RUN}{missing}"
    except NoNumber as why:
        return Measurement(NONE, note=str(why)), str(why)


def leg_verdict(findings: Sequence[OutcomeFinding], leg: Leg, moe_effect: Gate | None = None) -> LegVerdict | None:
    """Return the verdict of one leg of a claim from its findings; None for a claim without this leg.

    ``moe_effect`` says whether the MoE effect is present where a claim about MoE was run. If it is not, its runs are an
    answer "under stress only", whatever their outcomes.
    """
    verdicts = {finding.verdict for finding in findings if finding.outcome.leg == leg}
    if not verdicts:
        return None
    if verdicts in ({"not testable here"}, {"not run"}):
        return verdicts.pop()
    if leg == "trajectory" and moe_effect is not None and moe_effect.state != "passed":
        return "under stress only"
    if {"supported", "contradicted"} <= verdicts:
        return "mixed"
    if "contradicted" in verdicts:
        return "contradicted"
    return "supported" if verdicts == {"supported"} else "not decided"


class Contrast(NamedTuple):
    """A difference whose sign is published."""

    published: str
    """What is published, and by whom."""
    here: str
    """What stands for it in the study."""
    effects: tuple[Effect, ...]
    """Differences that are published as positive."""
    tuned: tuple[Effect, ...] = ()
    """The same of losses at their best rates, added after ``effects`` had been seen."""

    def sign(self, study: Recorded, tuned: bool = False) -> tuple[list[Measurement], str]:
        """Return the differences, and right, wrong, open or not run (study/claims.md, "Published contrasts")."""
        effects = self.tuned if tuned else self.effects
        if not effects:
            return [], ""
        try:
            measured = [effect(study) for effect in effects]
        except (NotRun, NoNumber):
            return [], "not run"
        if all(each.estimate.low > 0 for each in measured):
            return measured, "right"
        return measured, "wrong" if all(each.estimate.high < 0 for each in measured) else "open"


# --- the rows of claims.yaml -----------------------------------------------------------------------------------------

_TABLE: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_suffix(".yaml")), resolve=True)
# Effect → the unit of its outcomes and the leg that they belong to; rewards and runs unless it is named here.
_UNITS: dict[str, Any] = {
    "held-out accuracy": ("accuracy", "trajectory"),
    "late accuracy": ("accuracy", "trajectory"),
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

    Raises KeyError for an unknown effect, and for the label of no arm or loss.
    """
    (name, of), *_ = row.items()
    labels = [of] if isinstance(of, str) else of
    less, over = (f"{name}, {word.join(labels[:2])}" for word in (" less ", " over "))
    if name in (*RUN_METRICS, "usefulness", "gain"):
        known: Mapping[str, Any] = ARMS if name in RUN_METRICS else LOSSES
        first, second, *twins = (known[label] for label in labels)
        if twins:
            ours = (first, second)
            return f"{less}, MoE less dense twin", partial(effects.interaction, of=name, ours=ours, theirs=twins)
        return less, partial(effects.paired, of=name, arm=first, over=second)
    match name:
        case "held-out accuracy beside the dense twin":
            return less, partial(effects.beside_twin, moe=ARMS[labels[0]], dense=ARMS[labels[1]])
        case "clipped tokens":
            loss, other, k = LOSSES[labels[0]], LOSSES[labels[1]], row["updates"]
            return f"{over}, after {k} updates", partial(effects.clipped, loss=loss, over=other, k=k)
        case "expert change per update":
            return over, partial(effects.changed, arm=ARMS[labels[0]], over=ARMS[labels[1]])
        case "routing's share" if len(labels) == 1:
            return f"{name}, {of}", partial(effects.routed, arms=tuple(arms.DIALLED.values()))
        case "routing's share":
            return less, partial(effects.routed, arms=(ARMS[labels[0]],), over=(ARMS[labels[1]],))
        case "area":
            what = f"area under the ROC curve, {columns.short(of)}"
            return what, partial(effects.area, arms=MAY_COLLAPSE, metric=of)
        case "area less the reward's":
            ahead, without = row.get("ahead", 1), row.get("without", "")
            what = f"area under the ROC curve, {columns.short(of)} less the reward itself"
            what += (f", {ahead} steps ahead" if ahead > 1 else "") + (f", without {without}" if without else "")
            chosen = [arm for arm in MAY_COLLAPSE if arm.label != without]
            return what, partial(effects.announces, arms=chosen, metric=of, least_lead=ahead)
        case "mean reward at its best":
            what = f"mean reward, {labels[0]} less {labels[1]}, each at its best"
            return what, partial(effects.at_best, name=labels[0].lower(), over=labels[1].lower())
        case "fall":
            return f"{name} of {of}", partial(effects.fall, arm=ARMS[of])
        case "staler is worse":
            return name, effects.staler_is_worse
    raise KeyError(name)


def _outcome(row: Mapping[str, Any]) -> Outcome:
    what, measure = effect(row)
    sides: tuple[Side, ...] = ("above", "below", "between")
    side: Side = next((side for side in sides if side in row), "above")
    bound = row.get(side, 0)
    threshold, upper = bound if side == "between" else (bound, float("nan"))
    unit, leg = _UNITS.get(next(iter(row)), ("reward", "trajectory"))
    return Outcome(what, measure, side, threshold, upper, unit, leg)


def _annotated(row: Mapping[str, Any]) -> Effect:
    """Return the effect of a contrast's row, with the row's note."""
    _, measure = effect(row)
    return (lambda study: replace(measure(study), note=row["note"])) if "note" in row else measure


_AT_DIALS = [(dial, value, arm) for dial, values in arms.DIALS.items() for value, arm in values.items()]
# Quantity → dial, value and effect of each of its doses.
_DOSES: dict[str, list[tuple[Any, ...]]] = {
    "changed by an update": [
        (*at, partial(effects.level, arm=arm, metric="expert_change_per_update")) for *at, arm in _AT_DIALS
    ],
    "differ in a bf16 sampler": [
        ("layers", value, partial(effects.level, arm=arm, metric="rollout_expert_disagreement"))
        for value, arm in arms.BF16.items()
    ],
    "routing's share": [(*at, partial(effects.routed, arms=(arm,))) for *at, arm in _AT_DIALS],
}
for (_loss, _strength, _updates), _arm in sorted(arms.CENTERING.items(), key=lambda item: (-item[0][2], item[0][1])):
    _DOSES.setdefault(_loss, []).append(
        (f"noise, {_updates} update{'s' * (_updates > 1)}", _strength, partial(effects.held_out, arm=_arm))
    )


def _claim(number: int, row: dict[str, Any]) -> Claim:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    fields |= {key: tuple(_outcome(each) for each in row.get(key, ())) for key in ("outcomes", "exploratory")}
    fields |= {key: tuple(ARMS[label] for label in row.get(key, ())) for key in ("arms", "beside")}
    fields["doses"] = tuple(Dose(quantity, *dose) for quantity in row.get("doses", ()) for dose in _DOSES[quantity])
    return Claim(**fields | {"number": number, "needs": NEEDS[row.get("needs", "")]})


CLAIMS = tuple(_claim(number, row) for number, row in _TABLE["claims"].items())
# Numbered from 1.
CONTRASTS = tuple(
    Contrast(row["published"], row["here"], *(tuple(map(_annotated, row.get(of, ()))) for of in ("effects", "tuned")))
    for row in _TABLE["contrasts"]
)
