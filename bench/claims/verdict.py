"""The rules by which a claim is supported, contradicted, not decided or not testable, and the numbers behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import norm  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.claims.effects import Effect, NoNumber, Seen, gain, held_out
from steadymoe.bench.claims.gates import Gate
from steadymoe.bench.claims.study import NONE, Arm, NotRun, Study
from steadymoe.bench.statistics.comparisons import holm, seeds_needed, sign_flip_p

Verdict = Literal["supported", "contradicted", "not decided", "not testable on this testbed"]
NOT_TESTABLE: Verdict = "not testable on this testbed"
LEVEL, POWER = 0.05, 0.8
# A larger number of seeds is shown as "> 1000".
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Outcome:
    """One number, and the side of a threshold on which it was claimed to lie."""

    what: str
    effect: Effect
    side: Literal["above", "below", "between"]
    threshold: float
    upper: float = np.nan
    """The upper end of ``between``."""
    unit: Literal["reward", "accuracy", "share", "ratio", "cost", "area"] = "reward"
    """Outcomes in reward stand together in one figure; ratios and costs have the interval of their logarithm."""

    @property
    def claimed(self) -> str:
        """The claimed side, for a table."""
        return f"{self.side} {self.threshold:g}" + (f" and {self.upper:g}" if self.side == "between" else "")

    @property
    def ends(self) -> list[float]:
        """The thresholds, on the scale of ``Seen.seeds``."""
        ends = [self.threshold] + ([self.upper] if self.side == "between" else [])
        return np.log(ends).tolist() if self.unit in ("ratio", "cost") else ends

    def p(self, seen: Seen) -> float:
        """The exact p of a sign-flip test against the threshold (``comparisons.sign_flip_p``).

        The null hypothesis: the sign of each seed's distance from the threshold is random. For ``between`` the larger
        p of the two ends; nan for an effect without one number for each seed.
        """
        return max(sign_flip_p([x - end for x in seen.seeds]) for end in self.ends) if seen.seeds else np.nan

    def verdict(self, seen: Seen, p: float) -> Verdict:
        """Supported if the whole interval lies on the claimed side, contradicted if it lies wholly elsewhere.

        Both need a ``p`` of at most 5 %, corrected for the outcomes of the claim; if ``p`` is nan, the interval decides
        alone. Otherwise the outcome is not decided.
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


def disturbed(of: str, arm: Arm, over: Arm, threshold: float = 0.0) -> tuple[Outcome, Outcome]:
    """The outcomes of a claim about a noisy sampler: held-out accuracy, and the reward sampled with the noise.

    Held-out accuracy decides. The reward is exploratory now; at first it was to decide (docs/protocol.md).
    """
    return (
        Outcome(f"held-out accuracy of {of}", held_out(arm, over), "above", threshold, unit="accuracy"),
        Outcome(f"final reward, sampled with noise, of {of}", gain(arm, over), "above", threshold),
    )


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, the outcomes that decide it, and the figure of its arms."""

    number: int
    statement: str
    source: str
    experiments: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    figure: str
    """An id of ``figures.FIGURES``."""
    arms: tuple[Arm, ...]
    """The arms in the figure."""
    limits: str
    needs: tuple[str, ...]
    """The ids of the gates (``gates.gates``) that a testbed must pass before the claim is answered on it."""
    moved: str = ""
    """For a claim that is not about stability, the reason why it gets no answer; empty for a claim about stability."""
    frozen: bool = True
    """Whether the arms begin at the policy of the frozen arm (``study_frozen``)."""
    exploratory: tuple[Outcome, ...] = ()
    """Outcomes that the protocol does not list; they are shown and are part of no verdict."""

    def verdict(self, found: Sequence[Verdict]) -> Verdict:
        """The verdict of the whole claim, from the verdicts of its outcomes."""
        if NOT_TESTABLE in found:
            return NOT_TESTABLE
        if all(each == "supported" for each in found):
            return "supported"
        return "contradicted" if "contradicted" in found and "supported" not in found else "not decided"


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
    """What is missing for a verdict: an arm that has not run, a number, or a testbed that passes the gates."""

    @property
    def seeds(self) -> float:
        """The number of seeds with 80 % power against the threshold, if the effect has its measured size.

        An area has no number for each seed; the width of its interval is used. nan for a cost, and for an estimate
        without an interval.
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
        """``seeds`` as text for a table."""
        return "–" if np.isnan(self.seeds) else f"> {_MOST_SEEDS}" if self.seeds > _MOST_SEEDS else f"{self.seeds:.0f}"

    @property
    def decides(self) -> str:
        """What would decide an outcome that is not decided; empty for a decided one."""
        if self.lacks or self.verdict != "not decided":
            return self.lacks
        estimate = self.seen.estimate
        if np.isnan(estimate.low):
            return "longer runs: too few seeds have a number to compare"
        if self.outcome.unit == "cost":
            return "longer runs: in some seeds an arm never reached the reward"
        if self.seeds > _MOST_SEEDS:
            return "no affordable number of seeds: the effect is at its threshold"
        return f"about {max(estimate.n + 1, round(self.seeds))} seeds for 80 % power, if the effect is what it seems"


def learning(study: Study, contenders: Sequence[Arm]) -> str:
    """A sentence on whether algorithms learn on the testbed; not in the protocol. Raises NotRun for a missing arm."""
    learn = [arm for arm in contenders if study.final(arm).mean() > study.first(arm).mean()]
    best = max(contenders, key=lambda arm: study.final(arm).mean())
    first, final = study.first(best).mean(), study.final(best).mean()
    return (
        f"Exploratory: of {len(contenders)} algorithms {len(learn)} end above the mean reward that they began with; "
        f"the best, {best.label}, goes from {first:.2f} to {final:.2f}."
        + ("" if learn else " What tells them apart there is how much they lose.")
    )


def findings(study: Study, outcomes: Sequence[Outcome], blocking: Sequence[Gate] = ()) -> list[Finding]:
    """The finding of each outcome: not decided if runs are missing, not testable if ``blocking`` holds a gate."""
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
