"""``study/claims.md``: what papers claim, what the recorded runs and gradients say, and the gates of the settings."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jinja2
import pandas as pd

from steadymoe.algorithms import provenance
from steadymoe.bench.report import write
from steadymoe.bench.report.realism import to_table
from steadymoe.bench.statistics.estimates import over_seeds
from study import exploratory
from study.arms import CONTROLS, DISTANCE, FIRST_TESTBED, GRPO, GSPO, ON_POLICY, OTHERS, PAPERS, PAPERS_R2, TUNED
from study.claims import CLAIMS, LEGS, Claim, findings
from study.effects import NoNumber, best_setting
from study.gates import MIN_KEPT, Gate, designs, kept, realism, seconds_an_update
from study.recorded import NotRun, Recorded
from study.verdicts import DRAWN, SPECS, Verdicts, dose_rows, outcome_rows

# A page that is named in a claim's limits, and its link from the page of claims.
_LINKED, _LINK = re.compile(r"\bdocs/((\w+)\.md)"), r"[\2](../docs/\1)"
# A realism gate that misses its range by more than this factor is named above the table.
_FAR = 5


def text(study: Recorded, verdicts: Verdicts | None, gates: Sequence[Gate], figures: str) -> str:
    """Return the text of the page; without ``verdicts`` only the gates.

    ``gates`` are the validity gates, ``figures`` is the path from the page's folder to the figures.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("study", "."),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["table"] = write.to_markdown
    values = {"verdicts": verdicts, **_gates(study, gates)}
    if verdicts is not None:
        values |= {"figures": figures, **_claims(study, verdicts)}
    rendered = environment.get_template("claims.md.jinja").render(values)
    return re.sub(r"\n{3,}", "\n\n", rendered).rstrip() + "\n"


def _claims(study: Recorded, verdicts: Verdicts) -> dict[str, Any]:
    """The values of the page's sections on claims."""
    needed = {need for claim in CLAIMS for need in claim.needs}
    states = [gate for need, gate in verdicts.gates.items() if need in needed] + list(verdicts.audited.values())
    signs = Counter(verdicts.contrasts["sign"])
    rivals = (GRPO, GSPO, *OTHERS.values(), PAPERS, PAPERS_R2, *CONTROLS, ON_POLICY)
    try:
        found = exploratory.found(study)
    except NotRun:
        found = {}

    def reasons(claim: Claim) -> list[Gate]:
        gates = [*verdicts.blocking[claim.number], *verdicts.failed[claim.number]]
        is_stress = verdicts.verdict(claim, "trajectory") == "under stress only"
        return [*gates, verdicts.moe_effect[claim.setting]] if is_stress else gates

    def explored(claim: Claim) -> pd.DataFrame:
        more = [finding for finding in findings(study, claim.exploratory) if finding.measured.estimate.n]
        return pd.DataFrame(outcome_rows(claim.number, more))[["outcome", "effect", "n"]] if more else pd.DataFrame()

    def rebuilt(claim: Claim) -> str:
        return ", ".join(sorted({arm.algorithm for arm in claim.arms if provenance(arm.algorithm) == "reconstruction"}))

    return {
        "claims": CLAIMS,
        "found": found,
        "tuned_levels": exploratory.tuned(study) if found else pd.DataFrame(),
        "drawn": DRAWN,
        "captions": {name: spec.caption for name, spec in SPECS.items()},
        "contrasts": f"Of {signs.total()}: {', '.join(f'{n} {sign}' for sign, n in signs.items())}.",
        "needed": len(states),
        "open_gates": [gate for gate in states if gate.state != "passed"],
        "at_stale": verdicts.arms(rivals),
        "tuned": _tuned(study),
        "first_testbed": verdicts.recorded(FIRST_TESTBED) == list(FIRST_TESTBED),
        "answers": {claim.number: _answer(verdicts, claim) for claim in CLAIMS},
        "reasons": reasons,
        "rebuilt": rebuilt,
        "linked": lambda limits: _LINKED.sub(_LINK, limits),
        "outcomes": lambda claim: pd.DataFrame(outcome_rows(claim.number, verdicts.findings[claim.number])).drop(
            columns="claim"
        ),
        "explored": explored,
        "doses": lambda claim: shown_doses(dose_rows(study, claim.doses)),
        "distances": _distances(study),
        "baseline": exploratory.levels_over_rates(study, "stale_baseline"),
        "replay": exploratory.replay_numbers(verdicts.replayed) if len(verdicts.replayed) else {},
    }


def _answer(verdicts: Verdicts, claim: Claim) -> str:
    """The verdicts on a claim's legs."""
    by_leg = {leg: verdicts.in_words(claim, leg) for leg in LEGS if verdicts.verdict(claim, leg)}
    answer = "; ".join(f"{leg}: {words}" for leg, words in by_leg.items())
    return answer[0].upper() + answer[1:]


def _tuned(study: Recorded) -> str:
    """A sentence with each algorithm's best setting on the seeds of the tuning."""
    try:
        best = {name: best_setting(study, name) for name in TUNED}
    except (NotRun, NoNumber) as missing:
        return f"The tuning is incomplete; first to be run: {missing}."
    settings = "; ".join(f"{name.upper()} at {rate:g} and {band}" for name, (rate, band) in best.items())
    return f"Best on the seeds of the tuning: {settings}."


def _distances(study: Recorded) -> pd.DataFrame:
    """How far noise on the sampler's weights moves it from the trainer, in one rollout; empty where nothing has run."""
    shown = {"k3 (nats)": "rollout_kl_k3", "experts that differ": "rollout_expert_disagreement"}
    rows = []
    for strength, arm in DISTANCE.items():
        if study.has(arm):
            numbers = {name: over_seeds(study.numbers(arm, of, "first").tolist()) for name, of in shown.items()}
            rows.append({"noise": f"{strength:g}"} | numbers | {"n": numbers["k3 (nats)"].n})
    return pd.DataFrame(rows)


def shown_doses(rows: pd.DataFrame) -> pd.DataFrame:
    """Return ``verdicts.dose_rows`` for a page: a row for each value of a dial, a column for each quantity."""
    shown = []
    for (dial, value), group in rows.groupby(["dial", "value"], sort=False):
        numbers = dict(zip(group["quantity"], group["number"], strict=True))
        cells = {quantity: numbers.get(quantity, "–") for quantity in rows["quantity"].unique()}
        shown.append({"dial": dial, "value": f"{value:g}"} | cells | {"n": group["number"].iloc[0].n})
    return pd.DataFrame(shown)


def _gates(study: Recorded, gates: Sequence[Gate]) -> dict[str, Any]:
    """The values of the page's sections on gates."""
    by_arm, rows = kept(study), realism(study)
    far = [f"{each.row.gate} ({each.setting})" for each in rows if each.factor > _FAR or each.factor < 1 / _FAR]
    below = [arm for arm, number in by_arm.items() if number.mean < MIN_KEPT]
    return {
        "gate_counts": gate_counts(gates),
        "validity": validity(gates),
        "least_kept": f"{MIN_KEPT:.0%}",
        "below": below,
        "kept": pd.DataFrame(
            {"arm": arm, "reward kept": number if number.n else "not recorded", "n": number.n or "–"}
            | {"V5": "–" if not number.n else "below" if arm in below else "kept"}
            for arm, number in by_arm.items()
        ),
        "realism": to_table(rows),
        "far_factor": _FAR,
        "far": list(dict.fromkeys(far)),
        "designs": shown_designs(study),
    }


def gate_counts(gates: Sequence[Gate]) -> str:
    """Return a sentence with the number of validity gates that are passed, and the others by name."""
    sentence = f"**Of {len(gates)} validity gates {sum(gate.state == 'passed' for gate in gates)} are passed"
    for state in ("failed", "not measured"):
        names = ", ".join(str(gate.need) for gate in gates if gate.state == state)
        sentence += f"; {state}: {names}" if names else ""
    return f"{sentence}.**"


def validity(gates: Sequence[Gate]) -> pd.DataFrame:
    """Return the validity gates as a table."""
    return pd.DataFrame(
        {"gate": gate.need.gate, "setting": gate.need.setting, "passes when": gate.passes, "number": gate.number}
        | {"n": gate.number.n, "state": gate.state, "what was seen": gate.measured}
        for gate in gates
    )


def shown_designs(study: Recorded) -> pd.DataFrame:
    """Return ``gates.designs`` for a page, with the minutes of one core in place of updates."""
    rows, pace = designs(study), seconds_an_update(study)
    if rows.empty:
        return rows
    minutes = rows["updates"].map(lambda updates: "–" if pace is None else f"{updates * pace / 60:.0f}")
    spread = rows["standard deviation"].map("{:.2g}".format)
    return rows.assign(**{"standard deviation": spread, "core minutes": minutes}).drop(columns="updates")
