"""The verdicts on all claims, from recorded runs and gradients, with the tables and figures that show them."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.bench.measurement import columns
from steadymoe.bench.report import report_page, tables
from steadymoe.bench.report.figures import FigureSpec
from steadymoe.bench.score.arms import DRIFT, FROZEN, GRPO, GSPO, PAPERS, UNCLIPPED
from steadymoe.bench.score.recorded import Arm, NotRun, Recorded
from steadymoe.bench.statistics.estimates import over_seeds
from steadymoe.bench.study import contrasts, doses, figures, gspo_claims, other_claims, replay
from steadymoe.bench.study.arms import BEST, FIRST_TESTBED, ON_POLICY, TUNED
from steadymoe.bench.study.claim import LEGS, Claim, Finding, Leg, LegVerdict, findings
from steadymoe.bench.study.effects import NoNumber, best_setting
from steadymoe.bench.study.gates import MISMATCH, audited, blocking, gates
from steadymoe.bench.study.realism import moe_effect

# The tables of docs/protocol.md as code: outcomes, thresholds and gates were fixed there before the runs.
CLAIMS = tuple(sorted((*gspo_claims.CLAIMS, *other_claims.CLAIMS), key=lambda claim: claim.number))
OUTCOMES = FigureSpec("outcomes", "outcomes", figures.outcomes, "study", takes=("outcomes",))
ANSWER = FigureSpec("answer", "answer", figures.arms, "study", takes=("steps", "standings"))
DOSE = FigureSpec("dose", "dose", figures.dose, "study_routes", takes=("doses",))
REPLAY = FigureSpec("replay", "replay", figures.replay, "study_replay", takes=("replay",))
SPECS = {spec.id: spec for spec in (OUTCOMES, ANSWER, DOSE, REPLAY)}
# The units whose outcomes have a figure.
DRAWN = ("reward", "accuracy", "usefulness")
# The arms of README's first screen.
FIRST = (ON_POLICY, *BEST.values(), GSPO, PAPERS, FROZEN, UNCLIPPED)


class Verdicts:
    """The verdicts on all claims, from recorded runs and audits.

    Raises NotRun if neither GRPO nor GSPO of the study has run.
    """

    def __init__(self, study: Recorded) -> None:
        self.study = study
        if not any(self.study.has(arm) for arm in (GRPO, GSPO)):
            raise NotRun(f"{GRPO.label} ({GRPO.experiment})")
        self.gates = gates(self.study)
        self.audited = {each: audited(self.study, each, DRIFT) for each in ("study_audit", "study_audit_twin")}
        self.moe_effect = {
            claim.number: moe_effect(self.study, claim.moe_effect_at) for claim in CLAIMS if claim.moe_effect_at
        }
        self.blocking = {claim.number: blocking(claim.needs, self.gates) for claim in CLAIMS}
        # Audits that have not run are "not run", not "not testable": of the mechanism leg only failed gates count.
        failed = {each: gate for each, gate in self.audited.items() if gate.state == "failed"}
        self.failed = {
            claim.number: [gate for each, gate in failed.items() if each in claim.experiments] for claim in CLAIMS
        }
        self.findings = {
            claim.number: findings(self.study, claim.outcomes, self.blocking[claim.number], self.failed[claim.number])
            for claim in CLAIMS
        }
        self.contrasts = contrasts.table(self.study)
        self._arm_rows: dict[tuple[str, str, bool], dict[str, Any]] = {}

    def verdict(self, claim: Claim, leg: Leg) -> LegVerdict | None:
        """The verdict of one leg; None for a claim without it."""
        return claim.verdict(self.findings[claim.number], leg, self.moe_effect.get(claim.number))

    def in_words(self, claim: Claim, leg: Leg) -> str:
        """The verdict of one leg, with the outcomes that it comes from; "–" for a claim without it."""
        verdict = self.verdict(claim, leg)
        if verdict is None:
            return "–"
        counts = Counter(each.verdict for each in self.findings[claim.number] if each.outcome.leg == leg)
        outcomes = ", ".join(f"{n} {each}" for each, n in counts.items())
        remarks = [*([outcomes] if set(counts) != {verdict} else []), *([claim.about] if claim.about else [])]
        return f"{verdict} ({'; '.join(remarks)})" if remarks else verdict

    def counts(self) -> str:
        """A sentence with the number of claims for each verdict of each leg."""
        lines = []
        for leg, of in zip(LEGS, ("runs", "gradients"), strict=True):
            counts = Counter(verdict for claim in CLAIMS if (verdict := self.verdict(claim, leg)))
            each = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
            lines.append(f"of {sum(counts.values())} claims about {of}: {each}")
        return f"**{lines[0][0].upper()}{'; '.join(lines)[1:]}.**"

    # --- tables of outcomes and arms ----------------------------------------------------------------------------

    def summary(self) -> pd.DataFrame:
        """One row for each claim: its verdict by runs and by gradients."""
        return pd.DataFrame(
            [
                {"": claim.number, "claim": claim.statement}
                | {"runs": self.in_words(claim, "trajectory"), "gradients": self.in_words(claim, "mechanism")}
                for claim in CLAIMS
            ]
        )

    def table(self) -> pd.DataFrame:
        """One row for each outcome."""
        return pd.DataFrame([row for claim in CLAIMS for row in rows(claim.number, self.findings[claim.number])])

    def texts(self) -> dict[str, str]:
        """The tables as text, by file name."""
        texts: dict[str, str] = {}
        for name, rows in {"claims": self.table(), "contrasts": self.contrasts}.items():
            texts |= {f"{name}.md": tables.to_markdown(rows) + "\n", f"{name}.tex": tables.to_latex(rows)}
            texts[f"{name}.csv"] = tables.to_numbers(rows).to_csv(index=False)
        return texts

    def first_screen(self) -> str:
        """The arms of README's first screen, as a table."""
        return tables.to_markdown(self.arms(FIRST).drop(columns="final reward"))

    def tuned(self) -> str:
        """A sentence with each algorithm's best setting on the seeds of the tuning."""
        try:
            best = {name: best_setting(self.study, name) for name in TUNED}
        except (NotRun, NoNumber) as missing:
            return f"The tuning has not run whole; first to be run: {missing}."
        each = "; ".join(f"{name.upper()} at {rate:g} and {band}" for name, (rate, band) in best.items())
        return f"Best on the seeds of the tuning: {each}."

    def arms(self, arms: Sequence[Arm], by_accuracy: bool = False) -> pd.DataFrame:
        """A row for each arm that has run, best first: n, collapses, start, mean and final reward, accuracy.

        With ``by_accuracy`` the start is a held-out accuracy, and the final one gives the order; else both are rewards.
        """
        recorded = [arm for arm in {arm.label: arm for arm in arms}.values() if self.study.has(arm)]
        outcome = self.study.held_out if by_accuracy else self.study.mean_reward
        best_first = sorted(recorded, key=lambda arm: -float(outcome(arm).mean()))
        return pd.DataFrame([self._arm_row(arm, by_accuracy) for arm in best_first])

    def _arm_row(self, arm: Arm, by_accuracy: bool) -> dict[str, Any]:
        study, key = self.study, (arm.label, arm.experiment, by_accuracy)
        if key not in self._arm_rows:
            collapsed, judged = study.collapsed(arm)
            numbers = {
                "start": study.numbers(arm, "eval_accuracy", "first") if by_accuracy else study.first(arm),
                "mean reward": study.mean_reward(arm),
                "final reward": study.final(arm),
                "held-out accuracy": study.held_out(arm),
            }
            bounds = columns.bounds("reward")
            estimates = {what: over_seeds(values.tolist(), bounds=bounds) for what, values in numbers.items()}
            first = {"arm": arm.label, "n": len(numbers["start"]), "collapsed": collapsed if judged else "–"}
            self._arm_rows[key] = first | estimates
        return self._arm_rows[key]

    def arms_of(self, claim: Claim) -> pd.DataFrame:
        """``arms`` of a claim and its controls; empty for a claim about other numbers."""
        if claim.figure != ANSWER.id or not self.recorded(claim):
            return pd.DataFrame()
        return self.arms([*_with_controls(claim), *claim.beside], _by_accuracy(claim))

    def recorded(self, claim: Claim) -> list[Arm]:
        """The arms of a claim that have run."""
        return [arm for arm in claim.arms if self.study.has(arm)]

    # --- figures ------------------------------------------------------------------------------------------------

    @cached_property
    def drawn(self) -> dict[int, dict[str, pd.DataFrame]]:
        """The tables for the figure of each claim whose arms have all run, by number."""
        drawn = {}
        for claim in CLAIMS:
            if claim.figure and self.recorded(claim) == list(claim.arms):
                spec = SPECS[claim.figure]
                if claim.figure == ANSWER.id:
                    curves, beside = (
                        [arm for arm in arms if self.study.has(arm)] for arms in (_with_controls(claim), claim.beside)
                    )
                    data = report_page.with_derived(self.study.tables([*curves, *beside]), spec.takes)
                    levels = _levels(self.arms_of(claim), _by_accuracy(claim))
                    data["standings"] = levels.assign(curve=levels["arm"].isin([arm.label for arm in curves]))
                else:
                    data = {"doses": doses.table(self.study, claim.doses)}
                if spec.lacks(data) is None:
                    drawn[claim.number] = data
        return drawn

    @cached_property
    def replayed(self) -> pd.DataFrame:
        """``replay.table``: what R2 does."""
        return replay.table(self.study)

    def outcomes_in(self, unit: str) -> pd.DataFrame:
        """The outcomes of one unit that have a number, for their figure."""
        rows = [
            {"claim": number, "outcome": each.outcome.what, "unit": unit, "side": each.outcome.side}
            | {"threshold": each.outcome.threshold, "upper": each.outcome.upper}
            | {"effect": each.measured.estimate, "verdict": each.verdict}
            for number, findings in self.findings.items()
            for each in findings
            if each.outcome.unit == unit and each.measured.estimate.n
        ]
        return pd.DataFrame(rows)

    def figures(self) -> list[tuple[FigureSpec, str, dict[str, pd.DataFrame]]]:
        """Every figure that can be drawn: the figure, the beginning of its file name, and its tables."""
        every = [
            (OUTCOMES, f"claims_{unit}", {"steps": pd.DataFrame(), "outcomes": rows})
            for unit in DRAWN
            if len(rows := self.outcomes_in(unit))
        ]
        if all(self.study.has(arm) for arm in FIRST_TESTBED):
            data = report_page.with_derived(self.study.tables(FIRST_TESTBED), ANSWER.takes)
            data["standings"] = _levels(self.arms(FIRST_TESTBED), by_accuracy=False).assign(curve=True)
            every.append((ANSWER, "claims_first_testbed", data))
        if len(self.replayed):
            every.append((REPLAY, f"claim{replay.CLAIM:02}", {"replay": self.replayed}))
        drawn = [(claim, self.drawn[claim.number]) for claim in CLAIMS if claim.number in self.drawn]
        return every + [(SPECS[claim.figure], stem(claim), data) for claim, data in drawn]


def stem(claim: Claim) -> str:
    """The beginning of a claim's file names."""
    return f"claim{claim.number:02}"


def _by_accuracy(claim: Claim) -> bool:
    """Whether held-out accuracy decides: at the setting *mismatch*."""
    return claim.needs == MISMATCH


def _with_controls(claim: Claim) -> list[Arm]:
    """The arms of a claim, its controls and, at *stale*, the on-policy twin."""
    return [*claim.arms, *claim.controls, *([] if _by_accuracy(claim) else [ON_POLICY])]


def _levels(arms: pd.DataFrame, by_accuracy: bool) -> pd.DataFrame:
    """``Verdicts.arms`` as the figure takes it."""
    outcome, metric = ("held-out accuracy", "eval_accuracy") if by_accuracy else ("mean reward", "reward")
    kept = arms.rename(columns={outcome: "end"})[["arm", "start", "end"]]
    return kept.assign(outcome=outcome, metric=metric)


def rows(number: int, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """A row for each finding, with the protocol's letters: m, n, … for gradients beside runs, else a, b, …."""
    legs = [each.outcome.leg for each in findings]
    starts = {leg: "m" if leg == "mechanism" and len(set(legs)) > 1 else "a" for leg in legs}
    letters = [chr(ord(starts[leg]) + legs[:place].count(leg)) for place, leg in enumerate(legs)]
    return [_row(number, letter, each) for letter, each in zip(letters, findings, strict=True)]


def _row(number: int, letter: str, finding: Finding) -> dict[str, Any]:
    outcome, effect, note = finding.outcome, finding.measured.estimate, finding.measured.note
    what = f"{outcome.what} ({note})" if note else outcome.what
    row = {"claim": number, "letter": letter, "outcome": what, "leg": outcome.leg, "effect": effect, "n": effect.n}
    row |= {"claimed": outcome.claimed, "p": finding.p, "p (Holm)": finding.corrected}
    factor = "× " if outcome.unit == "ratio" else ""
    least = "–" if np.isnan(finding.detectable) else f"{factor}{finding.detectable:.2g}"
    return row | {"detectable": least, "verdict": finding.verdict, "what would decide it": finding.decides}
