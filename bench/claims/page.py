"""``docs/claims.md``: the verdicts of the recorded runs, with a figure for each claim and one of all."""

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
from steadymoe.bench.report.figures import FIGURES, FORMATS, Paper, points
from steadymoe.bench.statistics.estimates import over_seeds
from steadymoe.bench.support import atomic_files, processes

_HEADLINE = Paper("outcomes", "outcomes", points.outcomes, "study", takes=("outcomes",))
_HEAD = """# What papers claim, and what the reference study can say

Made by `make figures` from `results/reference/data`; a test makes it again and compares. Questions, outcomes and
thresholds were fixed in [protocol.md](protocol.md) before the runs; the gates, and what else changed, after them
("Changes after the runs" there). `make reference` runs the study again. All of it at this scale: 0.45 M parameters and
one task.

*frozen* is GRPO at a learning rate of 0 behind an exact sampler: what doing nothing is worth. Held-out accuracy is the
mean of a run's last five evaluations, which no engine disturbs. *Collapsed*: by today's rule ([metrics.md](metrics.md),
"Collapse"), – where runs are too short for it; *falling at the end*: runs that had fallen when they ended, too late to
be judged; *recorded*: what the runs said of themselves.

*Not testable on this testbed*: the testbed has not passed every gate that the claim needs; what was seen is shown, and
answers nothing. Otherwise an outcome is *supported* where its whole interval lies where it was claimed, *contradicted*
where it lies wholly elsewhere, both at a corrected p of at most 5 %, and else *not decided*.

Effects are means over seeds with a 95 % interval (from ten seeds a BCa bootstrap), differences seed by seed, ratios
geometric means; intervals of areas under ROC curves take the runs of a seed together. Of ten numbers with two peaks BCa
held the truth in 73 to 87 % of draws, so an exact p stands beside it: of all ways to turn the signs of the seeds'
distances from the threshold, the share that is as far off. It is corrected by Holm for the outcomes of one claim, not
over claims. "Seeds for 80 % power": how many would find the effect at 5 %, if it is what it seems.
"""
# What a table of outcomes leaves out where the claim gets no answer.
_ANSWERS = ["verdict", "what would decide it"]
# The arms that README's first screen shows.
_FIRST = (FROZEN, GSPO, GRPO, *CONTROLS[:2])


class Verdicts:
    """Every claim on what is recorded below ``results``. Raises NotRun if the testbed itself has not run."""

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
        """The same, with the gates that block it; and where its outcomes disagree, that they do."""
        verdicts = {each.verdict for each in self.found[claim.number]}
        if self.blocking[claim.number]:
            return f"{self.of(claim)}: {told(self.blocking[claim.number])}"
        mixed = {"supported", "contradicted"} <= verdicts
        return f"{self.of(claim)}: in part supported, in part contradicted" if mixed else self.of(claim)

    def table(self) -> pd.DataFrame:
        """One row per outcome of a claim that was not moved: what ``_row`` makes of it."""
        return pd.DataFrame(
            [_row(claim.number, each) for claim in CLAIMS if not claim.moved for each in self.found[claim.number]]
        )

    def texts(self) -> dict[str, str]:
        """File name → text of the table."""
        rows = self.table()
        return {
            "claims.md": tables.to_markdown(rows) + "\n",
            "claims.csv": tables.to_numbers(rows).to_csv(index=False),
            "claims.tex": tables.to_latex(rows),
        }

    def page(self, figures: str) -> str:
        """``docs/claims.md``; ``figures`` is the folder of the figures, from the page's own."""
        shown = f"![{_HEADLINE.caption}]({figures}/{draw.stem(_HEADLINE, 'claims')}.png)"
        lines = [_HEAD, self.answered(), "", *self._testbed(), "## Answers", "", self.summary(), "", shown]
        for claim in CLAIMS:
            lines += ["", f"## Claim {claim.number}", "", f"{claim.statement} ({claim.source})", ""]
            lines += [*self._answer(claim), *self._seen(claim), *self._shown(claim, figures)]
            lines += [f"Runs: {', '.join(f'`experiment={name}`' for name in claim.experiments)}."]
        return "\n".join(lines) + "\n"

    def answered(self) -> str:
        """How many claims have which answer, a sentence."""
        asked = [claim for claim in CLAIMS if not claim.moved]
        counts = Counter(self.of(claim) for claim in asked)
        return f"**Of {len(asked)} claims: {'; '.join(f'{n} {answer}' for answer, n in counts.items())}.**"

    def first_screen(self) -> str:
        """The start, the policy that is left as it is, and what becomes of it under stress, as a table."""
        return tables.to_markdown(self.standings(_FIRST).drop(columns="recorded"))

    def _testbed(self) -> list[str]:
        """Where the testbed stands: its gates, every arm under stress beside the start and the frozen policy."""
        rows = pd.DataFrame([vars(gate) for gate in self.gates.values()]).rename(
            columns={"id": "gate", "what": "passes when", "state": "here", "reason": "why"}
        )
        return [
            "## The testbed",
            "",
            "Its validity is decided by controls on seeds that no claim uses. What is seen on the claims' own seeds "
            "can fail a gate, and pass none.",
            "",
            tables.to_markdown(rows),
            "",
            "Every arm of `experiment=study` under stress, beside the policy that all of them start from:",
            "",
            tables.to_markdown(self.standings((FROZEN, *CONTENDERS, *CONTROLS[:2]))),
            "",
            learning(self.study, CONTENDERS),
            "",
            self.tuned(),
            "",
        ]

    def _answer(self, claim: Claim) -> list[str]:
        """The answer of a claim and the reason for it: the gates that failed, or why no answer is asked for."""
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
        """The outcomes of a claim as a table, with verdicts where it gets an answer; and what is exploratory."""
        rows = pd.DataFrame([_row(claim.number, each) for each in self.found[claim.number]]).drop(columns="claim")
        unanswered = claim.moved or self.blocking[claim.number]
        lines = ["What was seen:", "", tables.to_markdown(rows.drop(columns=_ANSWERS if unanswered else [])), ""]
        if more := [_row(claim.number, each) for each in findings(self.study, claim.exploratory)]:
            looked_at = pd.DataFrame(more)[["outcome", "effect", "n"]]
            lines += ["Exploratory, part of no verdict:", "", tables.to_markdown(looked_at), ""]
        return lines

    def tuned(self) -> str:
        """The settings that were best on the seeds that were left out."""
        try:
            found = [best(self.study, algorithm).label for algorithm in TUNED]
        except NotRun as missing:
            return f"Nothing is tuned: {missing} has not run."
        return f"Best on the two seeds that were left out: {'; '.join(found)}."

    def summary(self, page: str = "") -> str:
        """The answer to each claim, with links into ``page``; those that were moved stand in no such table."""
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
        paper = FIGURES[claim.figure] if claim.number in self.drawn else None
        figure = [f"![{paper.caption}]({figures}/{draw.stem(paper, name(claim))}.png)", ""] if paper else []
        return [tables.to_markdown(arms), "", *figure]

    def arms(self, claim: Claim) -> pd.DataFrame:
        """``standings`` of the arms of a claim, and of the frozen policy where they begin as it does."""
        return self.standings([*self.there(claim), *([FROZEN] if claim.frozen else [])])

    def standings(self, arms: Sequence[Arm]) -> pd.DataFrame:
        """Of each arm that has run: n, collapses, start, final reward, held-out accuracy; the highest first."""
        ran = [arm for arm in {arm.label: arm for arm in arms}.values() if self.study.has(arm)]
        return pd.DataFrame([self._standing(arm) for arm in sorted(ran, key=lambda arm: -self.study.final(arm).mean())])

    def _standing(self, arm: Arm) -> dict[str, Any]:
        """A row of ``standings``; made once, however many tables an arm stands in."""
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
        """By claim the tables that its figure is drawn from, where all of its arms have run and nothing is lacking."""
        found = {}
        for claim in CLAIMS:
            if self.there(claim) == list(claim.arms):
                data = draw.data(self.study.tables(claim.arms), FIGURES[claim.figure].takes)
                if FIGURES[claim.figure].lacks(data) is None:
                    found[claim.number] = data
        return found

    def figures(self) -> list[tuple[Paper, str, dict[str, pd.DataFrame]]]:
        """Every figure that can be drawn: the paper's, what it is named by, and the tables it is drawn from."""
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
    """Write ``tables/claims.*`` and the figures below ``results``, and the page. Raises NotRun as ``Verdicts`` does.

    Figures in ``formats``, and as png, which the page shows.
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
    papers, *others = zip(*verdicts.figures(), strict=True)
    drawn_as = tuple(dict.fromkeys((*formats, "png")))
    drawn = processes.in_processes(partial(_draw, results, drawn_as), [paper.id for paper in papers], *others)
    return written + [path for files in drawn for path in files]


def _draw(results: Path, formats: Sequence[str], id: str, named: str, data: dict[str, pd.DataFrame]) -> list[Path]:
    paper = _HEADLINE if id == _HEADLINE.id else FIGURES[id]
    return draw.write(paper, paper.figure(data), results, named, formats)


def name(claim: Claim) -> str:
    """What the files of a claim begin with."""
    return f"claim{claim.number:02}"


def _row(number: int, found: Finding) -> dict[str, Any]:
    outcome, effect = found.outcome, found.seen.estimate
    what = f"{outcome.what} ({found.seen.note})" if found.seen.note else outcome.what
    row = {"claim": number, "outcome": what, "effect": effect, "n": effect.n, "claimed": outcome.claimed}
    row |= {"p (sign flips)": found.p, "p (Holm)": found.corrected, "seeds for 80 % power": found.power}
    return row | {"verdict": found.verdict, "what would decide it": found.decides}
