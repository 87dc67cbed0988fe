"""The verdicts on all claims, from recorded runs and gradients, with the tables and figures that show them."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.bench.claims import contrasts, doses, figures, replay
from steadymoe.bench.claims.arms import BEST, FIRST_TESTBED, ON_POLICY, TUNED
from steadymoe.bench.claims.effects import NoNumber, best_setting
from steadymoe.bench.claims.gates import MISMATCH, blocking, keeps, moe_effect, standings
from steadymoe.bench.claims.registry import CLAIMS
from steadymoe.bench.claims.standings import Standings
from steadymoe.bench.claims.verdict import LEGS, Claim, Finding, Leg, LegVerdict, findings
from steadymoe.bench.report import draw, tables
from steadymoe.bench.report.figures import FigureSpec
from steadymoe.bench.score.arms import DRIFT, FROZEN, GRPO, GSPO, PAPERS, UNCLIPPED
from steadymoe.bench.score.recorded import Arm, NotRun, Recorded

OUTCOMES = FigureSpec("outcomes", "outcomes", figures.outcomes, "study", takes=("outcomes",))
ANSWER = FigureSpec("answer", "answer", figures.answer, "study", takes=("steps", "standings"))
DOSE = FigureSpec("dose", "dose", figures.dose, "study_routes", takes=("doses",))
REPLAY = FigureSpec("replay", "replay", figures.replay, "study_replay", takes=("replay",))
SPECS = {spec.id: spec for spec in (OUTCOMES, ANSWER, DOSE, REPLAY)}
# The units whose outcomes have a figure.
DRAWN = ("reward", "accuracy", "usefulness")
# The arms of README's first screen.
FIRST = (ON_POLICY, BEST["grpo"], BEST["gspo, own band"], GSPO, PAPERS, FROZEN, UNCLIPPED)


class Verdicts:
    """The verdicts on all claims, from the runs and audits recorded below ``results``.

    Raises NotRun if neither GRPO nor GSPO of the study has run.
    """

    def __init__(self, results: Path) -> None:
        self.study = Recorded(results)
        if not any(self.study.has(arm) for arm in (GRPO, GSPO)):
            raise NotRun(f"{GRPO.label} ({GRPO.experiment})")
        self.gates = standings(self.study)
        self.kept = {each: keeps(self.study, each, DRIFT) for each in ("study_audit", "study_audit_twin")}
        self.moe_effect = {
            claim.number: moe_effect(self.study, claim.moe_effect_at) for claim in CLAIMS if claim.moe_effect_at
        }
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

    def of(self, claim: Claim, leg: Leg) -> LegVerdict | None:
        """The verdict of one leg; None for a claim without it."""
        return claim.verdict(self.found[claim.number], leg, self.moe_effect.get(claim.number))

    def told(self, claim: Claim, leg: Leg) -> str:
        """The verdict of one leg in words, with the outcomes that it comes from; "–" for a claim without it."""
        verdict = self.of(claim, leg)
        if verdict is None:
            return "–"
        counts = Counter(each.verdict for each in self.found[claim.number] if each.outcome.leg == leg)
        outcomes = ", ".join(f"{n} {each}" for each, n in counts.items())
        remarks = [*([outcomes] if set(counts) != {verdict} else []), *([claim.about] if claim.about else [])]
        return f"{verdict} ({'; '.join(remarks)})" if remarks else verdict

    def answered(self) -> str:
        """A sentence with the number of claims for each answer of each leg."""
        lines = []
        for leg, of in zip(LEGS, ("runs", "gradients"), strict=True):
            counts = Counter(verdict for claim in CLAIMS if (verdict := self.of(claim, leg)))
            told = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
            lines.append(f"of {sum(counts.values())} claims about {of}: {told}")
        return f"**{lines[0][0].upper()}{'; '.join(lines)[1:]}.**"

    # --- tables of arms and outcomes ----------------------------------------------------------------------------

    def table(self) -> pd.DataFrame:
        """One row for each outcome."""
        return pd.DataFrame([row for claim in CLAIMS for row in rows(claim.number, self.found[claim.number])])

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

    def arms(self, claim: Claim) -> pd.DataFrame:
        """``standings`` of the arms of a claim and its controls; empty for a claim about other numbers."""
        if claim.figure != ANSWER.id or not self.there(claim):
            return pd.DataFrame()
        return self.standings.table([*self._all(claim), *claim.beside], _by_accuracy(claim))

    def _all(self, claim: Claim) -> list[Arm]:
        """The arms of a claim, its controls and, at *stale*, the on-policy twin."""
        at_stale = claim.figure == ANSWER.id and not _by_accuracy(claim)
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
                spec, arms = SPECS[claim.figure], [arm for arm in self._all(claim) if self.study.has(arm)]
                if claim.figure == ANSWER.id:
                    beside = [arm for arm in claim.beside if self.study.has(arm)]
                    data = draw.data(self.study.tables([*arms, *beside]), spec.takes)
                    rows = _primary(self.arms(claim), _by_accuracy(claim))
                    data["standings"] = rows.assign(curve=rows["arm"].isin([arm.label for arm in arms]))
                else:
                    data = {"doses": doses.table(self.study, claim.doses)}
                if spec.lacks(data) is None:
                    found[claim.number] = data
        return found

    @cached_property
    def replayed(self) -> pd.DataFrame:
        """``replay.table``: what R2 does."""
        return replay.table(self.study)

    def of_unit(self, unit: str) -> pd.DataFrame:
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
            (OUTCOMES, f"claims_{unit}", {"steps": pd.DataFrame(), "outcomes": rows})
            for unit in DRAWN
            if len(rows := self.of_unit(unit))
        ]
        by_number = {claim.number: claim for claim in CLAIMS}
        if all(self.study.has(arm) for arm in FIRST_TESTBED):
            data = draw.data(self.study.tables(FIRST_TESTBED), ANSWER.takes)
            data["standings"] = _primary(self.standings.table(FIRST_TESTBED), accuracy=False).assign(curve=True)
            every.append((ANSWER, "claims_first_testbed", data))
        if len(self.replayed):
            every.append((REPLAY, stem(by_number[replay.CLAIM]), {"replay": self.replayed}))
        return every + [
            (SPECS[by_number[number].figure], stem(by_number[number]), data) for number, data in self.drawn.items()
        ]


def stem(claim: Claim) -> str:
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


def rows(number: int, found: Sequence[Finding]) -> list[dict[str, Any]]:
    """A row for each finding, with the protocol's letters: m, n, … for gradients beside runs, else a, b, …."""
    legs = [each.outcome.leg for each in found]
    starts = {leg: "m" if leg == "mechanism" and len(set(legs)) > 1 else "a" for leg in legs}
    letters = [chr(ord(starts[leg]) + legs[:place].count(leg)) for place, leg in enumerate(legs)]
    return [_row(number, letter, each) for letter, each in zip(letters, found, strict=True)]


def _row(number: int, letter: str, found: Finding) -> dict[str, Any]:
    outcome, effect = found.outcome, found.seen.estimate
    what = f"{outcome.what} ({found.seen.note})" if found.seen.note else outcome.what
    row = {"claim": number, "letter": letter, "outcome": what, "leg": outcome.leg, "effect": effect, "n": effect.n}
    row |= {"claimed": outcome.claimed, "p": found.p, "p (Holm)": found.corrected}
    least = "–" if np.isnan(found.detectable) else f"{'× ' if outcome.unit == 'ratio' else ''}{found.detectable:.2g}"
    return row | {"detectable": least, "verdict": found.verdict, "what would decide it": found.decides}
