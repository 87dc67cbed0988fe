"""Compare the scored algorithm with others, part by part, and write the page of the score."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from steadymoe.bench.report import write
from steadymoe.bench.score.plan import Plan
from steadymoe.bench.score.recorded import NONE, Arm, Recorded
from steadymoe.bench.score.standard import ANCHORS, VERSION, Baselines, Part
from steadymoe.bench.statistics.comparisons import (
    DECIDED,
    holm,
    is_decided,
    p_value,
    paired_difference,
    sign_flip_p,
    welch,
)
from steadymoe.bench.statistics.estimates import Estimate, over_seeds
from steadymoe.bench.support.text import visible

CAPTION = (
    "Mean over seeds (checkpoints for gradients) with its 95 % interval. Differences from algorithms that ran here are "
    "paired by seed; those from recorded ones, which ran on the standard's machine, are differences of means. Tokens: "
    "sampled per run, mean over seeds. p: t test, paired or Welch's like the difference; Holm-corrected over the rows "
    f"of a part. {DECIDED} No number sums up the parts."
)
# Below this p the anchors of a machine are another population than the recorded ones.
_OTHER_MACHINE = 0.01
# With fewer seeds no two anchors can reach that p: with nine the smallest is 2 · 2/2⁹.
_MIN_SEEDS = 9


@dataclass(frozen=True)
class Comparison:
    """One part of a score."""

    part: Part
    own: str
    """The label of the scored algorithm."""
    start: float | None
    """The mean reward of its cold starts; None for a part of audits."""
    rows: pd.DataFrame
    """``compare_outcomes``; for runs also tokens: response tokens sampled by a run, the mean over seeds."""
    notes: Sequence[str]
    """Whether the anchors agree with their records, and what else a reader must know."""


def compare(part: Part, plan: Plan, recorded: Recorded, known: Baselines) -> Comparison:
    """Compare what ran here with each other and with the baselines. Raises NotRun if something has not run here."""
    arms, seeds = plan.arms(part), list(plan.seeds(part))
    here = {arm.label: part.measure(recorded, arm).loc[lambda numbers: numbers.index.isin(seeds)] for arm in arms}
    table = known.of(part)
    table = table[table["seed"].isin(seeds)]
    theirs = {str(arm): group.set_index("seed")["value"] for arm, group in table.groupby("arm", sort=False)}
    agree, note = anchors_agree(here, theirs, [ANCHORS[name] for name in plan.anchors])
    rows, notes = compare_outcomes(plan.own_label, here, theirs, part, comparable=agree), [f"{part.name}: {note}"]
    start = None
    if runs := [arm for arm in arms if isinstance(arm, Arm)]:
        start = float(recorded.first(runs[0]).mean())
        tokens = table.groupby("arm")["tokens"].mean().to_dict()
        tokens |= {arm.label: recorded.tokens(arm).reindex(seeds).mean() for arm in runs}
        rows["tokens"] = rows["algorithm"].map(tokens)
        several = machines_or_versions(recorded, runs)
        notes += [f"{part.name}: differences are between runs of several kinds: {kinds}" for kinds in several]
    return Comparison(part, plan.own_label, start, rows, notes)


def machines_or_versions(recorded: Recorded, arms: list[Arm]) -> list[str]:
    """Return the machines, and the versions of libraries, of runs that were made with more than one."""
    runs = recorded.tables(arms)["runs"]
    return ["; ".join(sorted(set(runs[key]))) for key in ("machine", "versions") if runs[key].nunique() > 1]


def compare_outcomes(
    own: str, here: Mapping[str, pd.Series], recorded: Mapping[str, pd.Series], part: Part, comparable: bool = True
) -> pd.DataFrame:
    """Compare the algorithm ``own`` with all others in one part, highest outcome first.

    ``here`` has outcomes by seed of this machine, those of ``own`` among them; ``recorded`` has the baselines. An arm
    that ran here replaces its record. Differences, own less other, from arms of this machine are paired by seed; those
    from recorded arms are differences of means, or NONE if they are not ``comparable``.

    Returned columns: algorithm, source (``here`` or ``recorded``), outcome, difference, p
    (``comparisons.p_value``), corrected (p by Holm), verdict.
    """
    rows = []
    for arm, numbers in (dict(recorded) | dict(here)).items():
        difference, p = NONE, math.nan
        if arm in here and arm != own:
            difference = paired_difference(here[own], numbers, bounds=part.difference_bounds)
            p = p_value(here[own], numbers)
        elif arm not in here and comparable:
            difference = welch(here[own], numbers).estimate
            p = p_value(here[own], numbers.add_prefix("recorded "))  # the same seed is another cold start there
        outcome = over_seeds(numbers.dropna().tolist(), bounds=part.bounds)
        rows.append((arm, "here" if arm in here else "recorded", outcome, difference, p))
    table = pd.DataFrame(rows, columns=["algorithm", "source", "outcome", "difference", "p"])
    table["corrected"] = holm(table["p"].tolist())
    table["verdict"] = [_verdict(*row) for row in zip(table["difference"], table["corrected"], strict=True)]
    means = table["outcome"].map(lambda outcome: outcome.mean)
    return table.loc[means.sort_values(ascending=False, kind="stable", na_position="last").index].reset_index(drop=True)


def _verdict(difference: Estimate, corrected: float) -> str:
    if not difference.n:
        return "–"
    if not is_decided(corrected, difference.n):
        return "not decided"
    return "yours is higher" if difference.mean > 0 else "yours is lower"


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
    if not differences or min(map(len, differences.values())) < _MIN_SEEDS:
        return False, "too few seeds to compare this machine with the recorded one: recorded rows are not compared"
    p_values = [min(1.0, sign_flip_p(numbers) * len(differences)) for numbers in differences.values()]
    agree = all(p >= _OTHER_MACHINE for p in p_values)
    lines = [f"{name} here less recorded: {over_seeds(found)}, n {len(found)}" for name, found in differences.items()]
    return agree, f"{'; '.join(lines)}: recorded rows are {'compared by means' if agree else 'shown, not compared'}"


def table(compared: Comparison) -> pd.DataFrame:
    """Return the rows of a part for people, best first."""
    rows = compared.rows
    differs = rows["difference"].map(lambda difference: difference.n > 0)
    columns: dict[str, Any] = {
        "algorithm": rows["algorithm"].map(visible),
        "run": rows["source"],
        compared.part.outcome: rows["outcome"],
        "n": rows["outcome"].map(lambda outcome: outcome.n),
    }
    if "tokens" in rows:
        columns["tokens"] = rows["tokens"].map(count)
    columns |= {
        "yours less it": rows["difference"],
        "n of both": rows["difference"].map(lambda difference: str(difference.n)).where(differs, "–"),
        "p (Holm)": rows["corrected"].map("{:.2g}".format).where(differs, "–"),
        "verdict": rows["verdict"],
    }
    return pd.DataFrame(columns)


def count(tokens: float) -> str:
    """Return a number of tokens for people."""
    return "not recorded" if math.isnan(tokens) else f"{tokens:,.0f}"


def text(parts: Sequence[Comparison]) -> str:
    """Return the tables for a terminal."""
    shown = ((compared.part, write.to_markdown(table(compared))) for compared in parts)
    return "\n".join(f"{part.name}: {part.question}\n\n{rows}\n" for part, rows in shown)


def levels(compared: Comparison) -> dict[str, Any]:
    """Return the chart of a part: the level of each algorithm, and for runs a line at the start."""
    rows = compared.rows
    points = dict(zip(rows["algorithm"].map(visible), rows["outcome"], strict=True))
    return chart(points, {} if compared.start is None else {"start": compared.start}, visible(compared.own))


def chart(levels: Mapping[str, Estimate], lines: Mapping[str, float], own: str | None = None) -> dict[str, Any]:
    """Return what ``page.html`` draws, with places in percent of its axis: levels as points with intervals, and lines.

    The level called ``own`` has another colour.
    """
    levels = {name: level for name, level in levels.items() if not np.isnan(level.mean)}
    ends = [end for level in levels.values() for end in (level.low, level.high, level.mean) if not np.isnan(end)]
    ticks = list(MaxNLocator(6).tick_values(min(0.0, *ends, *lines.values()), max(0.0, *ends, *lines.values())))

    def place(value: float) -> float:
        return round(float(100 * (value - ticks[0]) / (ticks[-1] - ticks[0])), 2)

    points = [
        {"name": name, "own": name == own, "text": str(level), "at": place(level.mean)}
        | ({} if np.isnan(level.low) else {"low": place(level.low), "width": place(level.high) - place(level.low)})
        for name, level in levels.items()
    ]
    return {
        "points": points,
        "lines": {name: place(value) for name, value in lines.items()},
        "ticks": {f"{tick:z.3g}": place(tick) for tick in ticks},
    }


def write_page(parts: Sequence[Comparison], notes: Sequence[str], command: str, folder: Path) -> list[Path]:
    """Write ``score.html`` and ``score.csv`` to ``folder``; return both."""
    numbers = [
        write.to_numbers(each.rows.assign(part=each.part.name, measure=each.part.outcome, standard=VERSION))
        for each in parts
    ]
    page = write.html(
        "score",
        "page.html",
        title=f"{visible(parts[0].own)} in {VERSION}",
        charts={f"{each.part.outcome.capitalize()}, each algorithm": levels(each) for each in parts},
        legend="Points: mean and 95 % interval; yours in orange. Dashed: reward at the start.",
        tables={f"{each.part.outcome.capitalize()}: {each.part.question}": table(each) for each in parts},
        own=visible(parts[0].own),
        notes=[visible(note) for note in notes],
        caption=CAPTION,
        command=visible(command),
        folded={},
    )
    return write.files(folder, {"score.html": page, "score.csv": pd.concat(numbers).to_csv(index=False)})
