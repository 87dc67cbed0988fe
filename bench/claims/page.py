"""``docs/claims.md``: what papers claim, and what the recorded runs and gradients say, claim by claim."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.algorithms import provenance
from steadymoe.bench.claims import contrasts, doses, figures, gates_page, testbed
from steadymoe.bench.claims.arms import (
    CONTROLS,
    FROZEN,
    GRPO,
    GSPO,
    ON_POLICY,
    OTHERS,
    PAPERS,
    PAPERS_R2,
    TUNED,
    UNCLIPPED,
)
from steadymoe.bench.claims.effects import DRIFT, NoNumber, best_setting
from steadymoe.bench.claims.gates import MISMATCH, blocking, keeps, standings
from steadymoe.bench.claims.registry import CLAIMS
from steadymoe.bench.claims.standings import Standings
from steadymoe.bench.claims.study import Arm, NotRun, Study
from steadymoe.bench.claims.verdict import LEGS, Claim, Finding, Leg, Verdict, findings
from steadymoe.bench.report import draw, tables
from steadymoe.bench.report.figures import FORMATS, FigureSpec
from steadymoe.bench.support import atomic_files, processes

_OUTCOMES = FigureSpec("outcomes", "outcomes", figures.outcomes, "study", takes=("outcomes",))
_ANSWER = FigureSpec("answer", "answer", figures.answer, "study", takes=("steps", "standings"))
_DOSE = FigureSpec("dose", "dose", figures.dose, "study_routes", takes=("doses",))
_SPECS = {spec.id: spec for spec in (_OUTCOMES, _ANSWER, _DOSE)}
# A page that is named in a claim's limits, and its link from the page of claims.
_LINKED, _LINK = re.compile(r"\bdocs/((\w+)\.md)"), r"[\2](\1)"
# The units whose outcomes have a figure.
_DRAWN = ("reward", "accuracy", "usefulness")
_HEAD = """# What papers claim, and what the reference study says

`make figures` makes this page from `results/reference`; a test makes it again and compares. Questions, outcomes,
thresholds and gates were fixed in [protocol.md](protocol.md) before the runs; what changed later stands at its end.
`make reference` runs the study again. Every statement holds at this scale alone: 0.85 M parameters, one task.

A claim is asked of runs (*trajectory*) and of gradients on frozen rollouts (*mechanism*). An outcome is *supported* if
its whole 95 % interval lies on the claimed side, *contradicted* if it lies wholly elsewhere, both at a corrected p of
at most 5 %; else it is *not decided*. *Not testable here*: a gate that the claim needs is not passed. *Not run*: no
runs, or not all of a comparison. The verdict of the runs, or of the gradients, comes from its outcomes: *supported* if
all are; *contradicted* if one is and none is supported, also where others have not run; *not run* if none has run; else
*not decided*. [What a disagreement of the two means](protocol.md#outcomes).

*Mean reward* is the mean over the steps that count; the *start* is a run's first reward; *frozen* is GRPO at a
learning rate of 0. Claims 6, 8, 9 and 13 have a noisy sampler: held-out accuracy decides, sampled without the noise,
and the start in their tables is the first held-out accuracy; their rewards are sampled with the noise. *Collapsed*
counts runs by today's rule ([metrics.md](metrics.md), "Collapse"). Differences are taken seed by seed; p is exact by
sign flips (Student's for areas under a ROC curve), and corrected by Holm for all outcomes of a claim, those that have
not run too. "Seeds for 80 % power" is the number of seeds, at least six, that would find the effect at 5 %, if it has
its measured size. Letters are the protocol's: pages cite an outcome as 1 a. The target `reference` of the
[Makefile](../Makefile) has the commands of all runs.
"""
# The arms of README's first screen.
FIRST = (ON_POLICY, GSPO, PAPERS, FROZEN, UNCLIPPED)


class Verdicts:
    """The verdicts on all claims by what is recorded below ``results``. Raises NotRun without runs of the study."""

    def __init__(self, results: Path) -> None:
        self.study = Study(results)
        if not any(self.study.has(arm) for arm in (GRPO, GSPO)):
            raise NotRun(f"{GRPO.label} ({GRPO.experiment})")
        self.gates = standings(self.study)
        self.kept = {each: keeps(self.study, each, DRIFT) for each in ("study_audit", "study_audit_twin")}
        self.blocking = {claim.number: blocking(claim.needs, self.gates) for claim in CLAIMS}
        # Audits that have not run are "not run", not "not testable": of the mechanism leg only failed gates count.
        self.failed = {
            claim.number: [
                self.kept[each] for each in claim.experiments if each in self.kept and self.kept[each].state == "failed"
            ]
            for claim in CLAIMS
        }
        self.found = {
            claim.number: findings(self.study, claim.outcomes, self.blocking[claim.number], self.failed[claim.number])
            for claim in CLAIMS
        }
        self.standings = Standings(self.study)
        self.contrasts = contrasts.table(self.study)

    def of(self, claim: Claim, leg: Leg) -> Verdict | None:
        """The verdict of one leg; None for a claim without it."""
        return claim.verdict(self.found[claim.number], leg)

    def told(self, claim: Claim, leg: Leg) -> str:
        """The verdict of one leg in words, with the outcomes that it comes from; "–" for a claim without it."""
        verdict = self.of(claim, leg)
        found = [each.verdict for each in self.found[claim.number] if each.outcome.leg == leg]
        if verdict is None:
            return "–"
        counts = Counter(found)
        mixed = ", ".join(f"{n} of {len(found)} {each}" for each, n in counts.items())
        return verdict if len(counts) == 1 else f"{verdict} ({mixed})"

    def answered(self) -> str:
        """A sentence with the number of claims for each answer of each leg."""
        lines = []
        for leg, of in zip(LEGS, ("runs", "gradients"), strict=True):
            counts = Counter(verdict for claim in CLAIMS if (verdict := self.of(claim, leg)))
            told = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
            lines.append(f"of {sum(counts.values())} claims about {of}: {told}")
        return f"**{lines[0][0].upper()}{'; '.join(lines)[1:]}.**"

    def summary(self, page: str = "") -> str:
        """A table of the answers, with links into ``page``."""
        rows = [
            f"| [{claim.number}]({page}#claim-{claim.number}) | {claim.statement} | "
            f"{self.told(claim, 'trajectory')} | {self.told(claim, 'mechanism')} |"
            for claim in CLAIMS
        ]
        return "\n".join(["| | claim | runs | gradients |", "|---|---|---|---|", *rows])

    # --- tables of arms and outcomes ----------------------------------------------------------------------------

    def table(self) -> pd.DataFrame:
        """One row for each outcome."""
        return pd.DataFrame([row for claim in CLAIMS for row in _rows(claim.number, self.found[claim.number])])

    def texts(self) -> dict[str, str]:
        """The tables as text, by file name."""
        found = {"claims": self.table(), "contrasts": self.contrasts}
        made: dict[str, str] = {}
        for name, rows in found.items():
            made |= {f"{name}.md": tables.to_markdown(rows) + "\n", f"{name}.tex": tables.to_latex(rows)}
            made[f"{name}.csv"] = tables.to_numbers(rows).to_csv(index=False)
        return made

    def first_screen(self) -> str:
        """The arms of README's first screen, as a table."""
        return tables.to_markdown(self.standings.table(FIRST).drop(columns="final reward"))

    def tuned(self) -> str:
        """A sentence with each algorithm's best setting on the seeds of the tuning."""
        try:
            found = [
                f"{name.upper()} at {rate:g} and {band}"
                for name in TUNED
                for rate, band in [best_setting(self.study, name)]
            ]
        except (NotRun, NoNumber) as missing:
            return f"The tuning has not run whole; first to be run: {missing}."
        return f"Best on the seeds of the tuning: {'; '.join(found)}."

    # --- the page -----------------------------------------------------------------------------------------------

    def page(self, figures: str) -> str:
        """The text of ``docs/claims.md``; ``figures`` is the path from the page's folder to the figures."""
        lines = [_HEAD, self.answered(), "", "## Answers", "", self.summary(), ""]
        for unit in _DRAWN:
            if len(self._in(unit)):
                file = f"{figures}/{draw.stem(_OUTCOMES, f'claims_{unit}')}.png"
                lines += [f"![{_OUTCOMES.caption} In {unit}.]({file})", ""]
        lines += ["## Published contrasts", "", f"{contrasts.told(self.contrasts)} {contrasts.RULE}", ""]
        lines += [tables.to_markdown(self.contrasts), "", *self._testbed()]
        for claim in CLAIMS:
            lines += [f"## Claim {claim.number}", "", f"{claim.statement} ({claim.source})", "", *self._answer(claim)]
            lines += [*self._seen(claim), *self._shown(claim, figures)]
            lines += [f"Runs: {', '.join(f'`experiment={name}`' for name in claim.experiments)}.", ""]
        return "\n".join(lines).rstrip() + "\n"

    def _testbed(self) -> list[str]:
        """The section on the testbed: the gates that are not passed, and every arm of ``study`` beside its controls."""
        needed = {need for claim in CLAIMS for need in claim.needs}
        states = [self.gates[need] for need in self.gates if need in needed] + list(self.kept.values())
        open_gates = [f"- {gate.need} {gate.state}: {gate.seen}." for gate in states if gate.state != "passed"]
        passed = sum(gate.state == "passed" for gate in states)
        rivals = (GRPO, GSPO, *OTHERS.values(), PAPERS, PAPERS_R2)
        return [
            "## The testbed",
            "",
            f"Claims need {len(states)} gates: {len(states) - len(self.kept)} of the [settings](gates.md) and "
            f"{len(self.kept)} of the audits, in which the reward of fresh samples has to stay. {passed} are passed.",
            "",
            *([*open_gates, ""] if open_gates else []),
            "The arms of the study at *stale* beside the controls. *On policy* is on the gates' seeds.",
            "",
            tables.to_markdown(self.standings.table((*rivals, *CONTROLS, ON_POLICY))),
            "",
            self.tuned(),
            "",
            "How near the settings come to real models; these gates block nothing ([gates](gates.md#realism)):",
            "",
            tables.to_markdown(gates_page.realism(testbed.realism(self.study)).drop(columns=["what", "source"])),
            "",
        ]

    def _answer(self, claim: Claim) -> list[str]:
        """The answers of a claim's legs, the gates that block them, and its limits."""
        told = {leg: self.told(claim, leg) for leg in LEGS if self.of(claim, leg)}
        answers = "; ".join(f"{leg}: {words}" for leg, words in told.items())
        gates = [*self.blocking[claim.number], *self.failed[claim.number]]
        reasons = [f"- {gate.need} {gate.state}: {gate.seen}." for gate in gates]
        rebuilt = sorted({arm.algorithm for arm in claim.arms if provenance(arm.algorithm) == "reconstruction"})
        rests = [f"It rests on reconstructions, whose equations were not seen: {', '.join(rebuilt)}.", ""]
        return [
            f"**{answers[0].upper()}{answers[1:]}.**",
            "",
            *([*reasons, ""] if reasons else []),
            *(rests if rebuilt else []),
            f"Limits: {_LINKED.sub(_LINK, claim.limits)}",
            "",
        ]

    def _seen(self, claim: Claim) -> list[str]:
        """The outcomes of a claim as a table, then exploratory outcomes and numbers over dials."""
        rows = pd.DataFrame(_rows(claim.number, self.found[claim.number])).drop(columns="claim")
        lines = [tables.to_markdown(rows), ""]
        more = [each for each in findings(self.study, claim.exploratory) if each.seen.estimate.n]
        if more:
            looked_at = pd.DataFrame(_rows(claim.number, more))[["outcome", "effect", "n"]]
            lines += ["Exploratory, part of no verdict:", "", tables.to_markdown(looked_at), ""]
        if len(found := doses.table(self.study, claim.doses)):
            lines += ["Over the dials, part of no verdict:", "", tables.to_markdown(doses.shown(found)), ""]
        return lines

    def _shown(self, claim: Claim, figures: str) -> list[str]:
        """The arms of a claim with their controls as a table, and its figure."""
        lines = []
        if not (rows := self.arms(claim)).empty:
            lines += [tables.to_markdown(rows), ""]
        if claim.number in self.drawn:
            spec = _SPECS[claim.figure]
            lines += [f"![{spec.caption}]({figures}/{draw.stem(spec, name(claim))}.png)", ""]
        return lines

    def arms(self, claim: Claim) -> pd.DataFrame:
        """``standings`` of the arms of a claim and its controls; empty for a claim about other numbers."""
        if claim.figure != _ANSWER.id or not self.there(claim):
            return pd.DataFrame()
        return self.standings.table([*self._all(claim), *claim.beside], _by_accuracy(claim))

    def _all(self, claim: Claim) -> list[Arm]:
        """The arms of a claim, its controls and, at *stale*, the on-policy twin."""
        at_stale = claim.figure == _ANSWER.id and not _by_accuracy(claim)
        return [*claim.arms, *claim.controls, *([ON_POLICY] if at_stale else [])]

    def there(self, claim: Claim) -> list[Arm]:
        """The arms of a claim that have run."""
        return [arm for arm in claim.arms if self.study.has(arm)]

    @cached_property
    def drawn(self) -> dict[int, dict[str, pd.DataFrame]]:
        """The tables for the figure of each claim whose arms have all run, by number."""
        found = {}
        for claim in CLAIMS:
            if claim.figure and self.there(claim) == list(claim.arms):
                spec, arms = _SPECS[claim.figure], [arm for arm in self._all(claim) if self.study.has(arm)]
                if claim.figure == _ANSWER.id:
                    beside = [arm for arm in claim.beside if self.study.has(arm)]
                    data = draw.data(self.study.tables([*arms, *beside]), spec.takes)
                    rows = _primary(self.arms(claim), _by_accuracy(claim))
                    data["standings"] = rows.assign(curve=rows["arm"].isin([arm.label for arm in arms]))
                else:
                    data = {"doses": doses.table(self.study, claim.doses)}
                if spec.lacks(data) is None:
                    found[claim.number] = data
        return found

    def _in(self, unit: str) -> pd.DataFrame:
        """The outcomes of one unit that have a number, for their figure."""
        rows = [
            {"claim": number, "outcome": each.outcome.what, "unit": unit, "side": each.outcome.side}
            | {"threshold": each.outcome.threshold, "upper": each.outcome.upper}
            | {"effect": each.seen.estimate, "verdict": each.verdict}
            for number, found in self.found.items()
            for each in found
            if each.outcome.unit == unit and each.seen.estimate.n
        ]
        return pd.DataFrame(rows)

    def figures(self) -> list[tuple[FigureSpec, str, dict[str, pd.DataFrame]]]:
        """Every figure that can be drawn: the figure, the beginning of its file name, and its tables."""
        every = [
            (_OUTCOMES, f"claims_{unit}", {"steps": pd.DataFrame(), "outcomes": rows})
            for unit in _DRAWN
            if len(rows := self._in(unit))
        ]
        by_number = {claim.number: claim for claim in CLAIMS}
        return every + [
            (_SPECS[by_number[number].figure], name(by_number[number]), data) for number, data in self.drawn.items()
        ]


def make(results: Path, page: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write ``tables/claims.*`` and the figures below ``results``, and ``page``; return the paths written.

    Figures are written in ``formats`` and as png, for the page. Raises NotRun if nothing of the study has run.
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
    if not (every := verdicts.figures()):
        return written
    specs, *others = zip(*every, strict=True)
    drawn_as = tuple(dict.fromkeys((*formats, "png")))
    drawn = processes.in_processes(partial(_draw, results, drawn_as), [spec.id for spec in specs], *others)
    return written + [path for files in drawn for path in files]


def _draw(results: Path, formats: Sequence[str], id: str, named: str, data: dict[str, pd.DataFrame]) -> list[Path]:
    spec = _SPECS[id]
    return draw.write(spec, spec.figure(data), results, named, formats)


def name(claim: Claim) -> str:
    """The beginning of a claim's file names."""
    return f"claim{claim.number:02}"


def _by_accuracy(claim: Claim) -> bool:
    """Whether held-out accuracy decides: at the setting *mismatch*."""
    return claim.needs == MISMATCH


def _primary(standings: pd.DataFrame, accuracy: bool) -> pd.DataFrame:
    """``standings`` as the figure takes it."""
    outcome, metric = ("held-out accuracy", "eval_accuracy") if accuracy else ("mean reward", "reward")
    kept = standings.rename(columns={outcome: "end"})[["arm", "start", "end"]]
    return kept.assign(outcome=outcome, metric=metric)


def _rows(number: int, found: Sequence[Finding]) -> list[dict[str, Any]]:
    """A row for each finding, with the protocol's letters: m, n, … for gradients beside runs, else a, b, …."""
    legs = [each.outcome.leg for each in found]
    starts = {leg: "m" if leg == "mechanism" and len(set(legs)) > 1 else "a" for leg in legs}
    letters = [chr(ord(starts[leg]) + legs[:place].count(leg)) for place, leg in enumerate(legs)]
    return [_row(number, letter, each) for letter, each in zip(letters, found, strict=True)]


def _row(number: int, letter: str, found: Finding) -> dict[str, Any]:
    outcome, effect = found.outcome, found.seen.estimate
    what = f"{outcome.what} ({found.seen.note})" if found.seen.note else outcome.what
    row = {"claim": number, "letter": letter, "outcome": what, "leg": outcome.leg, "effect": effect, "n": effect.n}
    row |= {"claimed": outcome.claimed, "p (sign flips)": found.p, "p (Holm)": found.corrected}
    return row | {"seeds for 80 % power": found.power, "verdict": found.verdict, "what would decide it": found.decides}
