"""The verdicts on all claims, from recorded runs and gradients, with their tables and the data of their figures."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.bench.report import report_page, tuning, write
from steadymoe.bench.report.figures import FigureSpec
from steadymoe.bench.statistics.estimates import over_seeds
from steadymoe.bench.training import columns
from study import claims, exploratory, figures
from study.arms import DRIFT, FIRST_TESTBED
from study.claims import CLAIMS, LEGS, Claim, Dose, Leg, LegVerdict, OutcomeFinding
from study.effects import Measurement
from study.gates import audited, blocking, gates, moe_effect
from study.recorded import Arm, NotRun, Recorded

OUTCOMES = FigureSpec("outcomes", "outcomes", figures.outcomes, "study", takes=("outcomes",))
ANSWER = FigureSpec("answer", "answer", figures.arms, "study", takes=("steps", "standings"))
DOSE = FigureSpec("dose", "dose", figures.dose, "study_routes", takes=("doses",))
REPLAY = FigureSpec("replay", "replay", figures.replay, "study_replay", takes=("replay",))
LEVELS = FigureSpec("levels", "level_over_rate", tuning.drawn, "long_tuning", takes=("levels",))
SPECS = {spec.id: spec for spec in (OUTCOMES, ANSWER, DOSE, REPLAY, LEVELS)}
# The units whose outcomes have a figure.
DRAWN = ("reward", "accuracy", "usefulness")
LATE = "late accuracy"


class Verdicts:
    """The verdicts on all claims, from recorded runs and audits."""

    def __init__(self, study: Recorded) -> None:
        self.study = study
        self.gates = gates(study)
        self.audited = {name: audited(study, name, DRIFT) for name in ("study_audit", "study_audit_twin")}
        self.moe_effect = {setting: moe_effect(study, setting) for setting in ("stale", "long", "longer")}
        self.blocking = {claim.number: blocking(claim.needs, self.gates) for claim in CLAIMS}
        # Audits that have not run are "not run", not "not testable": of the mechanism leg only failed gates count.
        failed = {name: gate for name, gate in self.audited.items() if gate.state == "failed"}
        self.failed = {
            claim.number: [gate for name, gate in failed.items() if name in claim.experiments] for claim in CLAIMS
        }
        self.findings = {
            claim.number: claims.findings(study, claim.outcomes, self.blocking[claim.number], self.failed[claim.number])
            for claim in CLAIMS
        }
        self.contrasts = contrasts(study)

    def verdict(self, claim: Claim, leg: Leg) -> LegVerdict | None:
        """Return the verdict of one leg; None for a claim without it."""
        present = self.moe_effect[claim.setting] if claim.about_moe else None
        return claims.leg_verdict(self.findings[claim.number], leg, present)

    def in_words(self, claim: Claim, leg: Leg) -> str:
        """Return the verdict of one leg, with the outcomes that it comes from; "–" for a claim without it."""
        verdict = self.verdict(claim, leg)
        if verdict is None:
            return "–"
        counts = Counter(finding.verdict for finding in self.findings[claim.number] if finding.outcome.leg == leg)
        outcomes = ", ".join(f"{n} {name}" for name, n in counts.items())
        remarks = [*([outcomes] if set(counts) != {verdict} else []), *([claim.about] if claim.about else [])]
        return f"{verdict} ({'; '.join(remarks)})" if remarks else verdict

    def counts(self) -> str:
        """Return a sentence with the number of claims for each verdict of each leg."""
        parts, judged = [], sum(any(self.verdict(claim, leg) for leg in LEGS) for claim in CLAIMS)
        for leg, measured_on in zip(LEGS, ("runs", "gradients"), strict=True):
            counts = Counter(verdict for claim in CLAIMS if (verdict := self.verdict(claim, leg)))
            numbers = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
            parts.append(f"{sum(counts.values())} are about {measured_on}: {numbers}")
        return f"**Of {judged} claims, {'; '.join(parts)}.**"

    # --- tables of outcomes and arms ----------------------------------------------------------------------------

    def summary(self) -> pd.DataFrame:
        """Return one row for each claim: its verdict by runs and by gradients."""
        return pd.DataFrame(
            [
                {"": claim.number, "claim": claim.statement}
                | {"runs": self.in_words(claim, "trajectory"), "gradients": self.in_words(claim, "mechanism")}
                for claim in CLAIMS
            ]
        )

    def texts(self) -> dict[str, str]:
        """Return the tables of outcomes and of contrasts as text, by file name."""
        outcomes = [row for claim in CLAIMS for row in outcome_rows(claim.number, self.findings[claim.number])]
        return write.table_texts("claims", pd.DataFrame(outcomes)) | write.table_texts("contrasts", self.contrasts)

    def arms(self, arms: Sequence[Arm], by_accuracy: bool = False) -> pd.DataFrame:
        """Return a row for each arm that has run, best first: n, collapses, start, mean and final reward, accuracies.

        With ``by_accuracy`` the start is a held-out accuracy, and the final one gives the order; else both are rewards.
        Without an arm that has a late accuracy there is no such column.
        """
        recorded = self.recorded({arm.label: arm for arm in arms}.values())
        outcome = self.study.held_out if by_accuracy else self.study.mean_reward
        best_first = sorted(recorded, key=lambda arm: -float(outcome(arm).mean()))
        rows = pd.DataFrame([self._arm_row(arm, by_accuracy) for arm in best_first])
        has_late = len(rows) and any(number.n for number in rows[LATE])
        return rows if has_late else rows.drop(columns=LATE, errors="ignore")

    def _arm_row(self, arm: Arm, by_accuracy: bool) -> dict[str, Any]:
        study, (collapsed, judged) = self.study, self.study.collapsed(arm)
        numbers = {
            "start": study.numbers(arm, "eval_accuracy", "first") if by_accuracy else study.first(arm),
            "mean reward": study.mean_reward(arm),
            "final reward": study.final(arm),
            "held-out accuracy": study.held_out(arm),
            LATE: study.late_accuracy(arm),
        }
        bounds = columns.bounds("reward")
        first = {"arm": arm.label, "n": len(numbers["start"]), "collapsed": collapsed if judged else "–"}
        return first | {name: over_seeds(values.tolist(), bounds=bounds) for name, values in numbers.items()}

    @cached_property
    def arms_of(self) -> dict[int, pd.DataFrame]:
        """``arms`` of each claim whose arms have a figure and of its controls, by number, where any of them has run."""
        return {
            claim.number: self.arms([*claim.with_controls, *claim.beside], claim.by_accuracy)
            for claim in CLAIMS
            if claim.figure == ANSWER.id and self.recorded(claim.arms)
        }

    def recorded(self, arms: Iterable[Arm]) -> list[Arm]:
        """Return the arms that have run."""
        return [arm for arm in arms if self.study.has(arm)]

    # --- figures ------------------------------------------------------------------------------------------------

    @cached_property
    def drawn(self) -> dict[int, dict[str, pd.DataFrame]]:
        """The tables for the figure of each claim whose arms have all run, by number."""
        drawn = {}
        for claim in CLAIMS:
            if claim.figure and self.recorded(claim.arms) == list(claim.arms):
                if claim.figure == ANSWER.id:
                    data = self._answer(
                        claim.with_controls, self.arms_of[claim.number], claim.by_accuracy, claim.beside
                    )
                else:
                    data = {"doses": dose_rows(self.study, claim.doses)}
                if SPECS[claim.figure].lacks(data) is None:
                    drawn[claim.number] = data
        return drawn

    def _answer(
        self, curves: Sequence[Arm], rows: pd.DataFrame, by_accuracy: bool = False, beside: Sequence[Arm] = ()
    ) -> dict[str, pd.DataFrame]:
        """Return the tables of the figure ``answer``: ``arms`` as ``rows``, and which of them have a curve."""
        data = report_page.with_derived(self.study.tables(self.recorded([*curves, *beside])), ANSWER.takes)
        outcome, metric = ("held-out accuracy", "eval_accuracy") if by_accuracy else ("mean reward", "reward")
        standings = rows.rename(columns={outcome: "end"})[["arm", "start", "end"]]
        labels = [arm.label for arm in curves]
        data["standings"] = standings.assign(outcome=outcome, metric=metric, curve=standings["arm"].isin(labels))
        return data

    @cached_property
    def replayed(self) -> pd.DataFrame:
        """``exploratory.replay``: what R2 does."""
        return exploratory.replay(self.study)

    @cached_property
    def levels(self) -> dict[int, pd.DataFrame]:
        """``tuning.table`` of each claim whose arms were tuned for it, by number, where any of its runs has ended."""
        tunings = {claim.number: claim.tuning for claim in CLAIMS if claim.tuning}
        tuned = {number: exploratory.levels_over_rates(self.study, name) for number, name in tunings.items()}
        return {number: rows for number, rows in tuned.items() if len(rows)}

    def outcomes_in(self, unit: str) -> pd.DataFrame:
        """Return the outcomes of one unit that have a number, for their figure."""
        rows = [
            {"claim": number, "outcome": finding.outcome.what, "unit": unit, "side": finding.outcome.side}
            | {"threshold": finding.outcome.threshold, "upper": finding.outcome.upper}
            | {"effect": finding.measured.estimate, "verdict": finding.verdict}
            for number, findings in self.findings.items()
            for finding in findings
            if finding.outcome.unit == unit and finding.measured.estimate.n
        ]
        return pd.DataFrame(rows)

    def figures(self) -> list[tuple[FigureSpec, str, dict[str, pd.DataFrame]]]:
        """Return every figure that can be drawn: the figure, the beginning of its file name, and its tables."""
        drawable = [
            (OUTCOMES, f"claims_{unit}", {"steps": pd.DataFrame(), "outcomes": rows})
            for unit in DRAWN
            if len(rows := self.outcomes_in(unit))
        ]
        if self.recorded(FIRST_TESTBED) == list(FIRST_TESTBED):
            drawable.append((ANSWER, "claims_first_testbed", self._answer(FIRST_TESTBED, self.arms(FIRST_TESTBED))))
        if len(self.replayed):
            drawable.append((REPLAY, "claim03", {"replay": self.replayed}))
        drawable += [(LEVELS, f"claim{number:02}", {"levels": rows}) for number, rows in self.levels.items()]
        return drawable + [
            (SPECS[claim.figure], f"claim{claim.number:02}", self.drawn[claim.number])
            for claim in CLAIMS
            if claim.number in self.drawn
        ]


def contrasts(study: Recorded) -> pd.DataFrame:
    """Return the published contrasts next to the study's."""
    rows = []
    for number, contrast in enumerate(claims.CONTRASTS, 1):
        measured, sign = contrast.sign(study)
        rows.append(
            {"": number, "published": contrast.published, "here": contrast.here}
            | {"difference": "; ".join(map(str, measured)) or "–"}
            | {"n": "; ".join(str(one.estimate.n) for one in measured) or "–", "sign": sign}
            | {"each tuned": _tuned(*contrast.sign(study, tuned=True))}
        )
    return pd.DataFrame(rows)


def _tuned(measured: Sequence[Measurement], sign: str) -> str:
    """The differences of tuned losses with their sign; "–" for a contrast without them."""
    return f"{'; '.join(map(str, measured))}: {sign}" if measured else sign or "–"


def dose_rows(study: Recorded, doses: Sequence[Dose]) -> pd.DataFrame:
    """Return a row for each dose that has run: dial, value, quantity and number (an Estimate over seeds)."""
    rows = []
    for dose in doses:
        try:
            number = dose.effect(study).estimate
        except NotRun:
            continue
        rows.append({"dial": dose.dial, "value": dose.value, "quantity": dose.quantity, "number": number})
    return pd.DataFrame(rows, columns=["dial", "value", "quantity", "number"])


def outcome_rows(number: int, findings: Sequence[OutcomeFinding]) -> list[dict[str, Any]]:
    """Return a row for each finding, with the protocol's letters: m, n, … for gradients next to runs, else a, b, …."""
    rows, legs = [], [finding.outcome.leg for finding in findings]
    for place, finding in enumerate(findings):
        outcome, effect, note = finding.outcome, finding.measured.estimate, finding.measured.note
        first = "m" if outcome.leg == "mechanism" and len(set(legs)) > 1 else "a"
        factor = "× " if outcome.unit == "ratio" else ""
        rows.append(
            {"claim": number, "letter": chr(ord(first) + legs[:place].count(outcome.leg))}
            | {"outcome": f"{outcome.what} ({note})" if note else outcome.what, "leg": outcome.leg}
            | {"effect": effect, "n": effect.n, "claimed": outcome.claimed}
            | {"p": finding.p, "p (Holm)": finding.corrected}
            | {"detectable": "–" if np.isnan(finding.detectable) else f"{factor}{finding.detectable:.2g}"}
            | {"verdict": finding.verdict, "what would decide it": finding.decides}
        )
    return rows
