"""The rules by which a claim's legs are supported, contradicted, not decided, not testable here or not run."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

import numpy as np
from scipy.stats import t  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.claims.arms import CONTROLS
from steadymoe.bench.claims.doses import Dose
from steadymoe.bench.claims.effects import Effect, NoNumber, Seen
from steadymoe.bench.claims.gates import Need, Standing
from steadymoe.bench.claims.study import NONE, Arm, NotRun, Study
from steadymoe.bench.statistics.comparisons import holm, seeds_needed, sign_flip_p
from steadymoe.bench.statistics.estimates import LEAST_FOR_INTERVAL

Verdict = Literal["supported", "contradicted", "not decided", "not testable here", "not run"]
Leg = Literal["trajectory", "mechanism"]
LEGS: tuple[Leg, ...] = ("trajectory", "mechanism")
LEVEL, POWER = 0.05, 0.8
# With fewer seeds the p of a sign-flip test, at least 2/2ⁿ, cannot be 5 % or less.
_LEAST_SEEDS = 1 + ceil(-log2(LEVEL))
# A larger number of seeds is shown as "> 1000".
_MOST_SEEDS = 1000
_TO_BE_RUN = "to be run: "


@dataclass(frozen=True)
class Outcome:
    """One number, and the side of a threshold on which it was claimed to lie."""

    what: str
    effect: Effect
    side: Literal["above", "below", "between"]
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
        """The thresholds, on the scale of ``Seen.seeds``."""
        ends = [self.threshold] + ([self.upper] if self.side == "between" else [])
        return np.log(ends).tolist() if self.unit == "ratio" else ends

    def p(self, seen: Seen) -> float:
        """The exact p of a sign-flip test against the threshold (``comparisons.sign_flip_p``).

        The null hypothesis: the sign of each seed's distance from the threshold is random. For ``between`` the larger
        p of the two ends. An effect without one number for each seed has Student's p from its standard error, or nan.
        """
        if seen.seeds:
            return max(sign_flip_p([x - end for x in seen.seeds]) for end in self.ends)
        found = seen.estimate
        return max(float(2 * t.sf(abs(found.mean - end) / seen.error, seen.degrees)) for end in self.ends)

    def verdict(self, seen: Seen, p: float) -> Verdict:
        """Supported if the whole interval lies on the claimed side, contradicted if it lies wholly elsewhere.

        Both need a ``p`` of at most 5 %, corrected for the outcomes of the claim. Otherwise, and without a p, it
        is not decided.
        """
        found = seen.estimate
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

    def verdict(self, found: Sequence["Finding"], leg: Leg) -> Verdict | None:
        """The verdict of a leg from its findings; None for a claim without this leg."""
        verdicts = [each.verdict for each in found if each.outcome.leg == leg]
        if not verdicts:
            return None
        for whole in ("not testable here", "supported", "not run"):
            if all(each == whole for each in verdicts):
                return whole
        return "contradicted" if "contradicted" in verdicts and "supported" not in verdicts else "not decided"


@dataclass(frozen=True)
class Finding:
    """An outcome, its measured effect and its verdict."""

    outcome: Outcome
    seen: Seen
    p: float
    """Exact, two-sided, for this outcome alone; nan for an effect without one number for each seed."""
    corrected: float
    """``p`` corrected for all outcomes of the claim (``comparisons.holm``)."""
    verdict: Verdict
    lacks: str = ""
    """What is missing for a verdict: an arm that has not run, a number, or a passed gate."""

    @property
    def seeds(self) -> float:
        """The number of seeds with 80 % power against the threshold, if the effect has its measured size.

        nan for an effect without one number for each seed.
        """
        if len(self.seen.seeds) < LEAST_FOR_INTERVAL:
            return np.nan
        distance = min(abs(float(np.mean(self.seen.seeds)) - end) for end in self.outcome.ends)
        return max(_LEAST_SEEDS, seeds_needed(self.seen.seeds, distance, POWER, LEVEL)) if distance else np.inf

    @property
    def power(self) -> str:
        """``seeds`` as text for a table."""
        return "–" if np.isnan(self.seeds) else f"> {_MOST_SEEDS}" if self.seeds > _MOST_SEEDS else f"{self.seeds:.0f}"

    @property
    def decides(self) -> str:
        """What would decide an outcome that is not decided; empty for a decided one."""
        if self.lacks or self.verdict != "not decided":
            return self.lacks
        if np.isnan(self.seeds) or np.isnan(self.seen.estimate.low):
            return "more seeds"
        if self.seeds > _MOST_SEEDS:
            return "no affordable number of seeds: the effect is at its threshold"
        n = max(self.seen.estimate.n + 1, round(self.seeds))
        return f"about {n} seeds for 80 % power, if the effect is what it seems"


def findings(
    study: Study, outcomes: Sequence[Outcome], blocking: Sequence[Standing] = (), lost: Sequence[Standing] = ()
) -> list[Finding]:
    """The finding of each outcome: "not run" without runs, "not testable here" where a gate of its leg is not passed.

    ``blocking`` are gates of the trajectory leg that are not passed, ``lost`` of the mechanism leg. Outcomes that have
    not run, and outcomes without a p, count in Holm's correction, so that it does not change with the data.
    """
    seen, lacks = zip(*(_look(study, outcome) for outcome in outcomes), strict=True) if outcomes else ((), ())
    p_values = [outcome.p(each) for outcome, each in zip(outcomes, seen, strict=True)]
    corrected = holm([1.0 if np.isnan(p) else p for p in p_values])
    found = []
    for outcome, each, p, with_others, lack in zip(outcomes, seen, p_values, corrected, lacks, strict=True):
        with_others = np.nan if np.isnan(p) else float(with_others)
        verdict: Verdict = "not decided" if lack else outcome.verdict(each, with_others)
        if lack.startswith(_TO_BE_RUN):
            verdict = "not run"
        if gates := lost if outcome.leg == "mechanism" else blocking:
            verdict = "not testable here"
            lack = lack or f"a testbed that passes {', '.join(str(gate.need) for gate in gates)}"
        found.append(Finding(outcome, each, p, with_others, verdict, lack))
    return found


def _look(study: Study, outcome: Outcome) -> tuple[Seen, str]:
    """The size of an outcome's effect, and what is missing for it."""
    try:
        return outcome.effect(study), ""
    except NotRun as missing:
        return Seen(NONE), f"{_TO_BE_RUN}{missing}"
    except NoNumber as why:
        return Seen(NONE, note=str(why)), str(why)
