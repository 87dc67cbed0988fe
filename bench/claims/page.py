"""``docs/claims.md``: the verdicts on the recorded runs, with a figure for each claim and one for all claims."""

import os
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.algorithms import provenance
from steadymoe.bench.claims.arms import CONTENDERS, CONTROLS, FROZEN, GRPO, GSPO, TUNED
from steadymoe.bench.claims.effects import best
from steadymoe.bench.claims.gates import blocking, gates, told
from steadymoe.bench.claims.registry import CLAIMS
from steadymoe.bench.claims.study import Arm, NotRun, Study
from steadymoe.bench.claims.verdict import Claim, Finding, Verdict, findings, learning
from steadymoe.bench.measurement import columns
from steadymoe.bench.report import draw, tables
from steadymoe.bench.report.figures import FIGURES, FORMATS, FigureSpec, points
from steadymoe.bench.statistics.estimates import over_seeds
from steadymoe.bench.support import atomic_files, processes

_HEADLINE = FigureSpec("outcomes", "outcomes", points.outcomes, "study", takes=("outcomes",))
_HEAD = """# What papers claim, and what the reference study can say

`make figures` makes this page from `results/reference/data`; a test makes it again and compares. Questions, outcomes
and thresholds were fixed in [protocol.md](protocol.md) before the runs. The gates were fixed after the runs, with the
other changes that the protocol lists under "Changes after the runs". `make reference` runs the study again. Every
statement holds at this scale alone: 0.45 M parameters and one task.

*frozen* is GRPO at a learning rate of 0 with an exact sampler: the policy stays at its cold start. *Held-out accuracy*
is the mean of a run's last five evaluations, sampled without an engine's noise. *Collapsed* counts runs by today's
rule ([metrics.md](metrics.md), "Collapse"); – stands for runs too short for the rule. *Falling at the end* counts runs
whose reward had fallen when they ended, too late to be judged. *Recorded* counts runs that recorded themselves as
collapsed.

*Not testable on this testbed*: the testbed has not passed every gate that the claim needs. The effects are shown, and
answer nothing. Otherwise an outcome is *supported* if its whole interval lies on the claimed side, and *contradicted*
if the interval lies wholly elsewhere, both at a corrected p of at most 5 %. Else it is *not decided*.

Effects are means over seeds with a 95 % interval (from ten seeds on a BCa bootstrap). Differences are taken seed by
seed; ratios are geometric means. The interval of an area under a ROC curve keeps the runs of a seed together. For ten
numbers with two peaks the BCa interval held the truth in 73 to 87 % of draws, so an exact p stands beside it: the
share, among all ways to flip the signs of the seeds' distances from the threshold, with a mean at least as far off. It
is corrected by Holm for the outcomes of one claim, not over claims. "Seeds for 80 % power" is the number of seeds that
would find the effect at 5 % with a probability of 80 %, if the effect has its measured size.
"""
# The columns that a table of outcomes lacks if the claim gets no answer.
_ANSWERS = ["verdict", "what would decide it"]
# The arms that README's first screen shows.
_FIRST = (FROZEN, GSPO, GRPO, *CONTROLS[:2])


class Verdicts:
    """The verdicts on all claims by the runs below ``results``. Raises NotRun if the stressed arms have not run."""

    def __init__(self, results: Path) -> None:
        self.study = Study(results)
        self._standings: dict[tuple[str, str], dict[str, Any]] = {}
        self.gates = gates(self.study)
        self.blocking = {claim.number: blocking(claim.needs, self.gates) for claim in CLAIMS}
        self.found = {
            claim.number: findings(self.study, claim.outcomes, self.blocking[claim.number]) for claim in CLAIMS
        }

    def of(self, claim: Claim) -> Verdict:
        """The verdict of a whole claim."""
        return claim.verdict([each.verdict for each in self.found[claim.number]])

    def told(self, claim: Claim) -> str:
        """The verdict of a whole claim with the gates that block it, or a remark if its outcomes disagree."""
        verdicts = {each.verdict for each in self.found[claim.number]}
        if self.blocking[claim.number]:
            return f"{self.of(claim)}: {told(self.blocking[claim.number])}"
        mixed = {"supported", "contradicted"} <= verdicts
        return f"{self.of(claim)}: in part supported, in part contradicted" if mixed else self.of(claim)

    def table(self) -> pd.DataFrame:
        """One row for each outcome, without the claims that get no answer."""
        return pd.DataFrame(
            [_row(claim.number, each) for claim in CLAIMS if not claim.moved for each in self.found[claim.number]]
        )

    def texts(self) -> dict[str, str]:
        """The table as text, by file name."""
        rows = self.table()
        return {
            "claims.md": tables.to_markdown(rows) + "\n",
            "claims.csv": tables.to_numbers(rows).to_csv(index=False),
            "claims.tex": tables.to_latex(rows),
        }

    def page(self, figures: str) -> str:
        """The text of ``docs/claims.md``; ``figures`` is the path from the page's folder to the figures."""
        shown = f"![{_HEADLINE.caption}]({figures}/{draw.stem(_HEADLINE, 'claims')}.png)"
        lines = [_HEAD, self.answered(), "", *self._testbed(), "## Answers", "", self.summary(), "", shown]
        for claim in CLAIMS:
            lines += ["", f"## Claim {claim.number}", "", f"{claim.statement} ({claim.source})", ""]
            lines += [*self._answer(claim), *self._seen(claim), *self._shown(claim, figures)]
            lines += [f"Runs: {', '.join(f'`experiment={name}`' for name in claim.experiments)}."]
        return "\n".join(lines) + "\n"

    def answered(self) -> str:
        """A sentence with the number of claims for each answer."""
        asked = [claim for claim in CLAIMS if not claim.moved]
        counts = Counter(self.of(claim) for claim in asked)
        return f"**Of {len(asked)} claims: {'; '.join(f'{n} {answer}' for answer, n in counts.items())}.**"

    def first_screen(self) -> str:
        """The arms of README's first screen with their start, collapses and final scores, as a table."""
        return tables.to_markdown(self.standings(_FIRST).drop(columns="recorded"))

    def _testbed(self) -> list[str]:
        """The section on the testbed: the gates, and a table of every arm under stress and of the frozen policy."""
        rows = pd.DataFrame([vars(gate) for gate in self.gates.values()]).rename(
            columns={"id": "gate", "what": "passes when", "state": "here", "reason": "why"}
        )
        return [
            "## The testbed",
            "",
            "Controls on seeds that no claim uses decide whether the testbed is valid. Runs on the claims' own seeds "
            "can fail a gate and cannot pass one.",
            "",
            tables.to_markdown(rows),
            "",
            "Every arm of `experiment=study` under stress, and the frozen policy, at which every arm starts:",
            "",
            tables.to_markdown(self.standings((FROZEN, *CONTENDERS, *CONTROLS[:2]))),
            "",
            learning(self.study, CONTENDERS),
            "",
            self.tuned(),
            "",
        ]

    def _answer(self, claim: Claim) -> list[str]:
        """The answer of a claim and its reason: the gates that failed, or why the claim gets no answer."""
        if claim.moved:
            return [f"**No answer**: {claim.moved}.", "", f"Limits: {claim.limits}", ""]
        gates = self.blocking[claim.number]
        reasons = [f"- {gate.id}: {gate.reason}." for gate in gates if gate.state == gates[0].state]
        rebuilt = sorted({arm.algorithm for arm in claim.arms if provenance(arm.algorithm) == "reconstruction"})
        rests = [f"It rests on reconstructions, whose equations were not seen: {', '.join(rebuilt)}.", ""]
        limits = [*(rests if rebuilt else []), f"Limits: {claim.limits}", ""]
        answer = self.told(claim)
        return [f"**{answer[0].upper()}{answer[1:]}.**", "", *([*reasons, ""] if reasons else []), *limits]

    def _seen(self, claim: Claim) -> list[str]:
        """The outcomes of a claim as a table, with verdicts if the claim gets an answer; then exploratory outcomes."""
        rows = pd.DataFrame([_row(claim.number, each) for each in self.found[claim.number]]).drop(columns="claim")
        unanswered = claim.moved or self.blocking[claim.number]
        lines = ["What was seen:", "", tables.to_markdown(rows.drop(columns=_ANSWERS if unanswered else [])), ""]
        if more := [_row(claim.number, each) for each in findings(self.study, claim.exploratory)]:
            looked_at = pd.DataFrame(more)[["outcome", "effect", "n"]]
            lines += ["Exploratory, part of no verdict:", "", tables.to_markdown(looked_at), ""]
        return lines

    def tuned(self) -> str:
        """A sentence with each algorithm's best setting on the seeds of the tuning."""
        try:
            found = [best(self.study, algorithm).label for algorithm in TUNED]
        except NotRun as missing:
            return f"No algorithm was tuned: {missing} has not run."
        return f"The best settings on two seeds that no claim uses: {'; '.join(found)}."

    def summary(self, page: str = "") -> str:
        """A table of the answers, with links into ``page``, without the claims that get no answer."""
        rows = [
            f"| [{claim.number}]({page}#claim-{claim.number}) | {claim.statement} | {self.told(claim)} |"
            for claim in CLAIMS
            if not claim.moved
        ]
        return "\n".join(["| | claim | answer |", "|---|---|---|", *rows])

    def _shown(self, claim: Claim, figures: str) -> list[str]:
        """The arms of a claim as a table, and its figure."""
        arms = self.arms(claim)
        if arms.empty:
            return []
        spec = FIGURES[claim.figure] if claim.number in self.drawn else None
        figure = [f"![{spec.caption}]({figures}/{draw.stem(spec, name(claim))}.png)", ""] if spec else []
        return [tables.to_markdown(arms), "", *figure]

    def arms(self, claim: Claim) -> pd.DataFrame:
        """``standings`` of the arms of a claim, and of the frozen policy if the arms begin with it."""
        return self.standings([*self.there(claim), *([FROZEN] if claim.frozen else [])])

    def standings(self, arms: Sequence[Arm]) -> pd.DataFrame:
        """A row for each arm that has run, highest final reward first: n, collapses, start, final scores."""
        ran = [arm for arm in {arm.label: arm for arm in arms}.values() if self.study.has(arm)]
        return pd.DataFrame([self._standing(arm) for arm in sorted(ran, key=lambda arm: -self.study.final(arm).mean())])

    def _standing(self, arm: Arm) -> dict[str, Any]:
        """A row of ``standings``, computed once for all tables."""
        key = (arm.label, arm.experiment)
        if key not in self._standings:
            runs, (collapsed, judged) = self.study.judged(arm), self.study.collapsed(arm)
            falling = int(runs["falling_since"].notna().sum())
            row = {"arm": arm.label, "n": len(self.study.final(arm)), "collapsed": collapsed if judged else "–"}
            row |= {"falling at the end": falling if judged else "–", "recorded": self.study.recorded(arm)}
            numbers = {"start (first reward)": self.study.first(arm), "final reward": self.study.final(arm)}
            numbers |= {"held-out accuracy": self.study.held_out(arm)}
            ends = columns.bounds("reward")
            estimates = {what: over_seeds(values.tolist(), bounds=ends) for what, values in numbers.items()}
            self._standings[key] = row | estimates
        return self._standings[key]

    def there(self, claim: Claim) -> list[Arm]:
        """The arms of a claim that have run."""
        return [arm for arm in claim.arms if self.study.has(arm)]

    @cached_property
    def drawn(self) -> dict[int, dict[str, pd.DataFrame]]:
        """The tables for the figure of each claim whose arms have all run and whose figure lacks nothing, by number."""
        found = {}
        for claim in CLAIMS:
            if self.there(claim) == list(claim.arms):
                data = draw.data(self.study.tables(claim.arms), FIGURES[claim.figure].takes)
                if FIGURES[claim.figure].lacks(data) is None:
                    found[claim.number] = data
        return found

    def figures(self) -> list[tuple[FigureSpec, str, dict[str, pd.DataFrame]]]:
        """Every figure that can be drawn: the figure, the beginning of its file name, and its tables."""
        in_reward = [
            {"claim": number, "outcome": each.outcome.what, "side": each.outcome.side}
            | {"threshold": each.outcome.threshold, "effect": each.seen.estimate, "verdict": each.verdict}
            for number, found in self.found.items()
            for each in found
            if each.outcome.unit == "reward" and each.seen.estimate.n
        ]
        every = [(_HEADLINE, "claims", {"steps": pd.DataFrame(), "outcomes": pd.DataFrame(in_reward)})]
        by_number = {claim.number: claim for claim in CLAIMS}
        claims = [(by_number[number], data) for number, data in self.drawn.items()]
        return every + [(FIGURES[claim.figure], name(claim), data) for claim, data in claims]


def make(results: Path, page: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write ``tables/claims.*`` and the figures below ``results``, and ``page``; return the paths written.

    Figures are written in ``formats`` and as png, for the page. Raises NotRun if the stressed arms have not run.
    """
    verdicts = Verdicts(results)
    figures = Path(os.path.relpath(results / "figures", page.parent)).as_posix()
    texts = {results / "tables" / file: text for file, text in verdicts.texts().items()} | {
        page: verdicts.page(figures)
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(path, partial(Path.write_text, data=text))
    written = list(texts)
    specs, *others = zip(*verdicts.figures(), strict=True)
    drawn_as = tuple(dict.fromkeys((*formats, "png")))
    drawn = processes.in_processes(partial(_draw, results, drawn_as), [spec.id for spec in specs], *others)
    return written + [path for files in drawn for path in files]


def _draw(results: Path, formats: Sequence[str], id: str, named: str, data: dict[str, pd.DataFrame]) -> list[Path]:
    spec = _HEADLINE if id == _HEADLINE.id else FIGURES[id]
    return draw.write(spec, spec.figure(data), results, named, formats)


def name(claim: Claim) -> str:
    """The beginning of a claim's file names."""
    return f"claim{claim.number:02}"


def _row(number: int, found: Finding) -> dict[str, Any]:
    outcome, effect = found.outcome, found.seen.estimate
    what = f"{outcome.what} ({found.seen.note})" if found.seen.note else outcome.what
    row = {"claim": number, "outcome": what, "effect": effect, "n": effect.n, "claimed": outcome.claimed}
    row |= {"p (sign flips)": found.p, "p (Holm)": found.corrected, "seeds for 80 % power": found.power}
    return row | {"verdict": found.verdict, "what would decide it": found.decides}
