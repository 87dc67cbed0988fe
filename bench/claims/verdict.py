"""When a claim is supported, contradicted or not decided, and by which numbers; and when it is not testable."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import norm  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.claims.effects import Effect, NoNumber, Seen
from steadymoe.bench.claims.gates import Gate
from steadymoe.bench.claims.study import NONE, Arm, NotRun, Study
from steadymoe.bench.statistics.comparisons import holm, seeds_needed, sign_flip_p

Verdict = Literal["supported", "contradicted", "not decided", "not testable on this testbed"]
NOT_TESTABLE: Verdict = "not testable on this testbed"
LEVEL, POWER = 0.05, 0.8
# More seeds than this nobody will run.
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Outcome:
    """One number, and on which side of what it was claimed to be."""

    what: str
    effect: Effect
    side: Literal["above", "below", "between"]
    threshold: float
    upper: float = np.nan
    """The upper end of ``between``."""
    unit: Literal["reward", "accuracy", "share", "ratio", "cost", "area"] = "reward"
    """Differences in reward stand in one figure; ratios and costs have the interval of their logarithm."""

    @property
    def claimed(self) -> str:
        """As a reader sees it."""
        return f"{self.side} {self.threshold:g}" + (f" and {self.upper:g}" if self.side == "between" else "")

    @property
    def ends(self) -> list[float]:
        """The thresholds, on the scale of ``Seen.seeds``."""
        ends = [self.threshold] + ([self.upper] if self.side == "between" else [])
        return np.log(ends).tolist() if self.unit in ("ratio", "cost") else ends

    def p(self, seen: Seen) -> float:
        """Exact p of the seeds' numbers lying about the threshold by chance, nan where there is none a seed.

        Each seed's distance from the threshold keeps its size and may turn its sign (``comparisons.sign_flip_p``). Of
        ``between`` the larger of both ends' p.
        """
        return max(sign_flip_p([x - end for x in seen.seeds]) for end in self.ends) if seen.seeds else np.nan

    def verdict(self, seen: Seen, p: float) -> Verdict:
        """Whether the whole interval lies where it was claimed, wholly elsewhere, or neither.

        Only where ``p``, which is corrected for the outcomes of a claim, is at most 5 %. Where there is none, the
        interval decides alone.
        """
        found = seen.estimate
        if np.isnan(found.low) or np.isnan(found.high) or p > LEVEL:
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
    """A statement of a paper, the outcomes that decide it, and the figure that shows its arms."""

    number: int
    statement: str
    source: str
    experiments: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    figure: str
    """An id of ``figures.FIGURES``."""
    arms: tuple[Arm, ...]
    """That the figure shows."""
    limits: str
    needs: tuple[str, ...]
    """The ids of the gates (``gates.gates``) that a testbed must pass before the claim is answered on it."""
    moved: str = ""
    """Why it is no claim about stability and gets no answer; empty for those that are."""
    frozen: bool = True
    """Whether its arms begin where the frozen arm of ``study_frozen`` stands."""
    exploratory: tuple[Outcome, ...] = ()
    """Looked at besides, not in the protocol: shown, and part of no verdict."""

    def verdict(self, found: Sequence[Verdict]) -> Verdict:
        """Of the whole claim, from those of its outcomes."""
        if NOT_TESTABLE in found:
            return NOT_TESTABLE
        if all(each == "supported" for each in found):
            return "supported"
        return "contradicted" if "contradicted" in found and "supported" not in found else "not decided"


@dataclass(frozen=True)
class Finding:
    """An outcome, what was seen of it, and its verdict."""

    outcome: Outcome
    seen: Seen
    p: float
    """Exact, two-sided, for this outcome alone; nan where there is none."""
    corrected: float
    """The same, corrected for all outcomes of the claim."""
    verdict: Verdict
    lacks: str = ""
    """What there is no verdict without: an arm that has not run, a number, or gates that the testbed passes."""

    @property
    def seeds(self) -> float:
        """How many seeds have 80 % power against the threshold, if the effect is what it seems; nan for none.

        Of areas, which are not made of one number a seed, by the width of the interval.
        """
        estimate, ends = self.seen.estimate, self.outcome.ends
        if np.isnan(estimate.low) or (self.outcome.unit == "cost"):
            return np.nan
        mean = float(np.mean(self.seen.seeds)) if self.seen.seeds else estimate.mean
        distance = min(abs(mean - end) for end in ends)
        if not distance:
            return np.inf
        if self.seen.seeds:
            return seeds_needed(self.seen.seeds, distance, POWER, LEVEL)
        spread = (estimate.high - estimate.low) / 2 / norm.ppf(1 - LEVEL / 2)
        return float(np.ceil(estimate.n * ((norm.ppf(1 - LEVEL / 2) + norm.ppf(POWER)) * spread / distance) ** 2))

    @property
    def power(self) -> str:
        """``seeds`` as a reader sees them."""
        return "–" if np.isnan(self.seeds) else f"> {_MOST_SEEDS}" if self.seeds > _MOST_SEEDS else f"{self.seeds:.0f}"

    @property
    def decides(self) -> str:
        """What would decide it, where it is not decided."""
        if self.lacks or self.verdict != "not decided":
            return self.lacks
        estimate = self.seen.estimate
        if np.isnan(estimate.low):
            return "longer runs: in too few seeds is there anything to compare"
        if self.outcome.unit == "cost":
            return "longer runs: in some seeds an arm never got there"
        if self.seeds > _MOST_SEEDS:
            return "no affordable number of seeds: the effect is at its threshold"
        return f"about {max(estimate.n + 1, round(self.seeds))} seeds for 80 % power, if the effect is what it seems"


def learning(study: Study, contenders: Sequence[Arm]) -> str:
    """Whether algorithms learn on the testbed, a sentence; looked at after the protocol. Raises NotRun."""
    learn = [arm for arm in contenders if study.final(arm).mean() > study.first(arm).mean()]
    best = max(contenders, key=lambda arm: study.final(arm).mean())
    first, final = study.first(best).mean(), study.final(best).mean()
    return (
        f"Exploratory: of {len(contenders)} algorithms {len(learn)} end above the mean reward that they began with; "
        f"the best, {best.label}, goes from {first:.2f} to {final:.2f}."
        + ("" if learn else " What tells them apart there is how much they lose.")
    )


def findings(study: Study, outcomes: Sequence[Outcome], blocking: Sequence[Gate] = ()) -> list[Finding]:
    """What was seen of each; not decided where runs are absent, not testable where gates of the claim are blocking."""
    seen: list[Seen] = []
    lacks = []
    for outcome in outcomes:
        try:
            seen.append(outcome.effect(study))
            lacks.append("")
        except (NotRun, NoNumber) as why:
            lacks.append(f"to be run: {why}" if isinstance(why, NotRun) else str(why))
            seen.append(Seen(NONE, note=lacks[-1]))
    p_values = [outcome.p(each) for outcome, each in zip(outcomes, seen, strict=True)]
    found = []
    for outcome, each, p, corrected, lack in zip(outcomes, seen, p_values, holm(p_values), lacks, strict=True):
        verdict: Verdict = "not decided" if lack else outcome.verdict(each, corrected)
        verdict = NOT_TESTABLE if blocking else verdict
        reason = lack or (f"a testbed that passes {', '.join(gate.id for gate in blocking)}" if blocking else "")
        found.append(Finding(outcome, each, p, float(corrected), verdict, reason))
    return found
