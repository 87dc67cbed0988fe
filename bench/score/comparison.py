"""Compare the scored algorithm with others, part by part: outcomes, differences, corrected p."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from steadymoe.bench.score import baselines
from steadymoe.bench.score.baselines import Baselines
from steadymoe.bench.score.plan import Plan
from steadymoe.bench.score.recorded import NONE, Arm, Recorded
from steadymoe.bench.score.standard import ANCHORS, Part
from steadymoe.bench.statistics.comparisons import holm, p_value, paired_difference, sign_flip_p, welch
from steadymoe.bench.statistics.estimates import Estimate, over_seeds

# Below this p the anchors of a machine are another population than the recorded ones.
_OTHER_MACHINE = 0.01
# With fewer seeds no two anchors can reach that p: with nine the smallest is 2 · 2/2⁹.
_LEAST_SEEDS = 9
# Below this corrected p a difference is decided.
_LEVEL = 0.05


@dataclass(frozen=True)
class Row:
    """An algorithm in one part."""

    algorithm: str
    source: str
    """``here`` if it ran on this machine, else ``recorded``."""
    outcome: Estimate
    difference: Estimate
    """The scored algorithm less this one; NONE for itself, and for a recorded one that cannot be compared."""
    p: float
    """By sign flips for a paired difference, Welch's for another."""
    corrected: float
    """``p`` corrected by Holm for all rows of the part."""

    @property
    def verdict(self) -> str:
        """Whether the scored algorithm is better or worse than this one."""
        if not self.difference.n:
            return "–"
        if not self.corrected < _LEVEL:
            return "not decided"
        return "yours is higher" if self.difference.mean > 0 else "yours is lower"


@dataclass(frozen=True)
class Comparison:
    """One part of a score."""

    part: Part
    rows: Sequence[Row]
    own: str
    """The label of the scored algorithm."""
    start: float | None
    """The mean reward of its cold starts; None for a part of audits."""
    tokens: Mapping[str, float]
    """Arm → response tokens sampled by a run, the mean over seeds; nan where they are not recorded;
    empty for a part of audits."""
    notes: Sequence[str]
    """Whether the anchors agree with their records, and what else a reader must know."""


def compare(part: Part, plan: Plan, recorded: Recorded, known: Baselines) -> Comparison:
    """Compare what ran here with each other and with the baselines. Raises NotRun if something has not run here."""
    arms, seeds = plan.arms(part), plan.seeds(part)

    def of_seeds(numbers: pd.Series) -> pd.Series:
        return numbers[numbers.index.isin(seeds)]

    here = {arm.label: of_seeds(part.measure(recorded, arm)) for arm in arms}
    table = known.of(part)
    table = table[table["seed"].isin(seeds)]
    theirs = {str(arm): group.set_index("seed")["value"] for arm, group in table.groupby("arm", sort=False)}
    agree, note = anchors_agree(here, theirs, [ANCHORS[name] for name in plan.anchors])
    found = rows(plan.own_label, here, theirs, part, comparable=agree)
    runs = [arm for arm in arms if isinstance(arm, Arm)]
    start = float(recorded.first(runs[0]).mean()) if runs else None
    means = table.groupby("arm")["tokens"].mean()
    tokens = {str(arm): float(mean) for arm, mean in means.items()} if runs else {}
    tokens |= {arm.label: float(of_seeds(baselines.tokens(recorded, arm)).mean()) for arm in runs}
    notes = [f"{part.name}: {note}"]
    notes += [f"{part.name}: differences are between runs of several kinds: {kinds}" for kinds in kinds(recorded, runs)]
    return Comparison(part, found, plan.own_label, start, tokens, notes)


def kinds(recorded: Recorded, arms: list[Arm]) -> list[str]:
    """Return the machines, and the versions of libraries, of runs that were made with more than one."""
    runs = recorded.tables(arms)["runs"] if arms else pd.DataFrame({"machine": [], "versions": []})
    return ["; ".join(sorted(set(runs[key]))) for key in ("machine", "versions") if runs[key].nunique() > 1]


def rows(
    own: str, here: Mapping[str, pd.Series], recorded: Mapping[str, pd.Series], part: Part, comparable: bool = True
) -> list[Row]:
    """Return the rows of one part, highest outcome first.

    ``here`` holds outcomes by seed of this machine, the scored algorithm ``own`` among them; ``recorded`` holds the
    baselines. An arm that ran here replaces its record. Differences from arms of this machine are paired by seed;
    those from recorded arms are differences of means, or NONE if they are not ``comparable``.
    """
    ours = here[own]
    others = {arm: numbers for arm, numbers in recorded.items() if arm not in here}
    differences = {own: (NONE, math.nan)}
    for arm, numbers in here.items():
        if arm != own:
            paired = paired_difference(ours, numbers, bounds=part.difference_bounds)
            differences[arm] = (paired, p_value(ours, numbers))
    for arm, numbers in others.items():
        unpaired = numbers.add_prefix("recorded ")  # of another machine: the same seed is another cold start
        differences[arm] = (welch(ours, numbers).estimate, p_value(ours, unpaired)) if comparable else (NONE, math.nan)
    corrected = dict(zip(differences, holm([p for _, p in differences.values()]), strict=True))
    found = [
        Row(
            arm,
            "here" if arm in here else "recorded",
            over_seeds(numbers.dropna().tolist(), bounds=part.bounds),
            *differences[arm],
            float(corrected[arm]),
        )
        for arm, numbers in {**here, **others}.items()
    ]
    return sorted(found, key=lambda row: (math.isnan(row.outcome.mean), -row.outcome.mean))


def anchors_agree(
    here: Mapping[str, pd.Series], recorded: Mapping[str, pd.Series], anchors: Iterable[str]
) -> tuple[bool, str]:
    """Return whether recorded arms can be compared with arms of this machine, and why, in one line.

    The anchors must have run here at enough seeds and must not differ from their records beyond chance. The same seeds
    differ between machines by rounding alone; a chaotic run makes that large, but it has no direction. A difference
    smaller than what the seeds can show passes; the line has its interval.
    """
    differences = {
        name: (here[name] - recorded[name]).dropna().tolist() for name in anchors if name in here and name in recorded
    }
    if not differences or min(map(len, differences.values())) < _LEAST_SEEDS:
        return False, "too few seeds to compare this machine with the recorded one: recorded rows are not compared"
    agree = all(min(1.0, sign_flip_p(each) * len(differences)) >= _OTHER_MACHINE for each in differences.values())
    lines = [f"{name} here less recorded: {over_seeds(each)}, n {len(each)}" for name, each in differences.items()]
    return agree, f"{'; '.join(lines)}: recorded rows are {'compared by means' if agree else 'shown, not compared'}"
