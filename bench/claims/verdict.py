"""When a claim is supported, contradicted or not decided, and by which numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from steadymoe.bench.claims.study import NONE, Arm, NotRun, Study
from steadymoe.bench.stats import Estimate

Verdict = Literal["supported", "contradicted", "not decided"]
# When the testbed is one on which algorithms can collapse and need not (docs/protocol.md, "Controls").
LEAST_COLLAPSED, MOST_COLLAPSED = 0.9, 0.1
# More seeds than this nobody will run.
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Outcome:
    """One number, and on which side of what it was claimed to be."""

    what: str
    effect: Callable[[Study], Estimate]
    side: Literal["above", "below", "between"]
    threshold: float
    upper: float = np.nan
    """The upper end of ``between``."""
    unit: Literal["reward", "share", "ratio", "cost", "area"] = "reward"
    """Differences in reward stand in one figure; ratios and costs have the interval of their logarithm."""

    @property
    def claimed(self) -> str:
        """As a reader sees it."""
        return f"{self.side} {self.threshold:g}" + (f" and {self.upper:g}" if self.side == "between" else "")

    def verdict(self, found: Estimate) -> Verdict:
        """Whether the whole interval lies where it was claimed, wholly elsewhere, or neither."""
        if np.isnan(found.low) or np.isnan(found.high):
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
    stability: bool = True
    """Whether its verdict needs a testbed on which algorithms can collapse."""
    exploratory: tuple[Outcome, ...] = ()
    """Looked at besides, not in the protocol: shown, and part of no verdict."""

    def verdict(self, found: list[Verdict]) -> Verdict:
        """Of the whole claim, from those of its outcomes."""
        if all(each == "supported" for each in found):
            return "supported"
        return "contradicted" if "contradicted" in found and "supported" not in found else "not decided"


@dataclass(frozen=True)
class Finding:
    """An outcome, its effect, and its verdict."""

    outcome: Outcome
    effect: Estimate
    verdict: Verdict
    lacks: str = ""
    """What there is no verdict without: an arm that has not run, or a valid testbed."""

    @property
    def decides(self) -> str:
        """What would decide it, where it is not decided."""
        if self.lacks or self.verdict != "not decided":
            return self.lacks
        if np.isnan(self.effect.low):
            return "longer runs: in too few seeds is there anything to compare"
        if self.outcome.unit == "cost" and (self.effect.low == 0 or np.isinf(self.effect.high)):
            return "longer runs: in some seeds an arm never got there"
        return _seeds(self)


def _seeds(found: Finding) -> str:
    """How many seeds the interval would need to leave the threshold, if the effect is what it seems."""
    mean, low, high = found.effect.mean, found.effect.low, found.effect.high
    ends = [found.outcome.threshold] + ([found.outcome.upper] if found.outcome.side == "between" else [])
    if found.outcome.unit in ("ratio", "cost"):  # their interval is that of the logarithm
        mean, low, high, *ends = np.log([mean, low, high, *ends])
    distance = min(abs(mean - end) for end in ends)
    needed = found.effect.n * ((high - low) / 2 / distance) ** 2 if distance else np.inf
    what = "runs of the rarer kind" if found.outcome.unit == "area" else "seeds"
    if needed > _MOST_SEEDS:
        return f"no affordable number of {what}: the effect is at its threshold"
    return f"about {max(found.effect.n + 1, round(needed))} {what}, if the effect is what it seems"


def testbed(study: Study, control: Arm, contenders: Sequence[Arm]) -> tuple[bool, str]:
    """Whether algorithms can collapse on the testbed and need not, and a sentence that says so. Raises NotRun."""
    fallen, n = study.collapsed(control)
    best = min(contenders, key=lambda arm: (study.collapsed(arm)[0], -study.final(arm).mean()))
    held, of = study.collapsed(best)
    valid = fallen / n >= LEAST_COLLAPSED and held / of <= MOST_COLLAPSED
    said = "is valid by its protocol" if valid else "is not valid by its protocol, so no verdict on stability counts"
    return valid, (
        f"**The testbed {said}**: without a clip GRPO collapses in {fallen} of {n} seeds (at least 9 of 10 were asked "
        f"for), {best.label} in {held} of {of} (at most 1)."
    )


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


def findings(study: Study, outcomes: Sequence[Outcome], valid: bool) -> list[Finding]:
    """What was found of each; not decided where runs are absent, nor where the testbed is not ``valid``."""
    found = []
    for outcome in outcomes:
        try:
            effect = outcome.effect(study)
        except NotRun as missing:
            found.append(Finding(outcome, NONE, "not decided", f"to be run: {missing}"))
            continue
        verdict = outcome.verdict(effect) if valid else "not decided"
        found.append(Finding(outcome, effect, verdict, "" if valid else "a valid testbed"))
    return found
