"""``docs/claims.md``: what papers claim, and what the recorded runs and gradients say, claim by claim."""

import re

import pandas as pd

from steadymoe.algorithms import provenance
from steadymoe.bench.report import draw, tables
from steadymoe.bench.report.realism import to_table
from steadymoe.bench.score.arms import CONTROLS, GRPO, GSPO, OTHERS, PAPERS, PAPERS_R2
from steadymoe.bench.score.recorded import NotRun, Recorded
from steadymoe.bench.study import contrasts, doses, replay, summary
from steadymoe.bench.study.arms import FIRST_TESTBED, ON_POLICY
from steadymoe.bench.study.claim import LEGS, Claim, findings
from steadymoe.bench.study.realism import realism
from steadymoe.bench.study.verdicts import CLAIMS, DRAWN, OUTCOMES, REPLAY, SPECS, Verdicts, rows, stem

# A page that is named in a claim's limits, and its link from the page of claims.
_LINKED, _LINK = re.compile(r"\bdocs/((\w+)\.md)"), r"[\2](\1)"
_HEAD = """# What papers claim, and what the reference study says

`make figures` makes this page from `results/reference`; a test makes it again and compares. Questions, outcomes,
thresholds and gates were fixed in [protocol.md](protocol.md) before the runs; what changed later stands at its end.
`make reference` runs the study again. Every statement holds at this scale alone: 0.85 M parameters, one task.

A claim is asked of runs (*trajectory*) and of gradients on frozen rollouts (*mechanism*). An outcome is *supported* if
its whole nominal 95 % interval lies on the claimed side, *contradicted* if it lies wholly elsewhere, both at a
corrected p of at most 5 %; otherwise it is *not decided*. The verdict on the runs, or on the gradients, of a claim is
the first of these that applies:

- *not testable here*: a gate that the claim needs is not passed;
- *not run*: no outcome has all of its runs;
- *under stress only*: the claim is about MoE, and the MoE effect is absent where it was run. Neither is the token
  ratio's variance at least twice the dense twin's (R5), nor routing's share of the log-ratio at least a half (R8). The
  outcomes hold under this stress and say little about MoE;
- *mixed*: some outcomes are supported, others contradicted;
- *supported*: all outcomes are; *contradicted*: at least one is; otherwise *not decided*.

[What a disagreement of runs and gradients means](protocol.md#outcomes).

*Mean reward* is the mean over the steps that count; the *start* is a run's first reward; *frozen* is GRPO at a
learning rate of 0. Claims 6, 8, 9 and 13 have a noisy sampler: held-out accuracy decides, sampled without the noise,
and the start in their tables is the first held-out accuracy; their rewards are sampled with the noise. *Collapsed*
counts runs by today's rule ([metrics.md](metrics.md), "Collapse").

Differences are taken seed by seed. Only MoE and dense twin are compared by Welch's t, because their cold starts have
nothing in common. p is exact by sign flips, or Student's (Welch's t, areas under a ROC curve), and corrected by Holm
for all outcomes of a claim, those that have not run too. Intervals are nominal: [metrics.md](metrics.md) says how they
are made and how often they hold the truth. *Detectable* is the distance from the threshold that these seeds find with
80 % power, given their spread, at 5 % divided by the number of the claim's outcomes; for a ratio it is a factor.
Letters are the protocol's: pages cite an outcome as 1 a. `steadymoe study list` has all runs.
"""

_FIRST_TESTBED = """[The first testbed](calibration.md#the-first-testbed) fell on policy too,
so it could say nothing about stale data:

![Rewards on the first testbed over gradient updates, on policy and not]({figures}/claims_first_testbed-answer.png)
"""


def _summary(verdicts: Verdicts) -> str:
    """A table of the answers, with links to the sections of the claims."""
    rows = [
        f"| [{claim.number}](#claim-{claim.number}) | {claim.statement} | "
        f"{verdicts.in_words(claim, 'trajectory')} | {verdicts.in_words(claim, 'mechanism')} |"
        for claim in CLAIMS
    ]
    return "\n".join(["| | claim | runs | gradients |", "|---|---|---|---|", *rows])


def _findings(study: Recorded) -> list[str]:
    """The section on what was found; empty if something of it was not recorded."""
    try:
        bullets, rows = summary.bullets(study), summary.speed_and_level(study)
    except NotRun:
        return []
    return ["## What was found", "", *(f"- {each}" for each in bullets), "", tables.to_markdown(rows), ""]


def text(verdicts: Verdicts, figures: str) -> str:
    """The text of ``docs/claims.md``; ``figures`` is the path from the page's folder to the figures."""
    lines = [_HEAD, verdicts.counts(), "", "## Answers", "", _summary(verdicts), "", *_findings(verdicts.study)]
    for unit in DRAWN:
        if len(verdicts.outcomes_in(unit)):
            file = f"{figures}/{draw.stem(OUTCOMES, f'claims_{unit}')}.png"
            lines += [f"![{OUTCOMES.caption} In {unit}.]({file})", ""]
    lines += ["## Published contrasts", "", f"{contrasts.counts(verdicts.contrasts)} {contrasts.RULE}", ""]
    lines += [tables.to_markdown(verdicts.contrasts), "", *_testbed(verdicts, figures)]
    for claim in CLAIMS:
        lines += [f"## Claim {claim.number}", "", f"{claim.statement} ({claim.source})", "", *_answer(verdicts, claim)]
        lines += [*_outcomes(verdicts, claim), *_arms(verdicts, claim, figures)]
        lines += [f"Runs: `steadymoe study run {' '.join(claim.experiments)}`.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _testbed(verdicts: Verdicts, figures: str) -> list[str]:
    """The section on the testbed: the gates that are not passed, and every arm of ``study`` beside its controls."""
    needed = {need for claim in CLAIMS for need in claim.needs}
    states = [verdicts.gates[need] for need in verdicts.gates if need in needed] + list(verdicts.audited.values())
    open_gates = [f"- {gate.need} {gate.state}: {gate.reason}." for gate in states if gate.state != "passed"]
    passed, audited = sum(gate.state == "passed" for gate in states), len(verdicts.audited)
    drawn = all(verdicts.study.has(arm) for arm in FIRST_TESTBED)
    rivals = (GRPO, GSPO, *OTHERS.values(), PAPERS, PAPERS_R2)
    return [
        "## The testbed",
        "",
        f"Claims need {len(states)} gates: {len(states) - audited} of the [settings](gates.md) and {audited} of the "
        f"audits, in which the reward of fresh samples has to stay. {passed} are passed.",
        "",
        *([*open_gates, ""] if open_gates else []),
        "The arms of the study at *stale* beside the controls. *On policy* is on the gates' seeds.",
        "",
        tables.to_markdown(verdicts.arms((*rivals, *CONTROLS, ON_POLICY))),
        "",
        verdicts.tuned(),
        "",
        "How near the settings come to real models ([gates](gates.md#realism)). Claims about MoE need R5 or R8:",
        "",
        tables.to_markdown(to_table(realism(verdicts.study)).drop(columns="source")),
        "",
        *(_FIRST_TESTBED.format(figures=figures).split("\n") if drawn else []),
    ]


def _answer(verdicts: Verdicts, claim: Claim) -> list[str]:
    """The answers of a claim's legs, the gates that block them, and its limits."""
    by_leg = {leg: verdicts.in_words(claim, leg) for leg in LEGS if verdicts.verdict(claim, leg)}
    answers = "; ".join(f"{leg}: {words}" for leg, words in by_leg.items())
    gates = [*verdicts.blocking[claim.number], *verdicts.failed[claim.number]]
    if verdicts.verdict(claim, "trajectory") == "under stress only":
        gates.append(verdicts.moe_effect[claim.number])
    reasons = [f"- {gate.need} {gate.state}: {gate.reason}." for gate in gates]
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


def _outcomes(verdicts: Verdicts, claim: Claim) -> list[str]:
    """The outcomes of a claim as a table, then exploratory outcomes and numbers over dials."""
    asked = pd.DataFrame(rows(claim.number, verdicts.findings[claim.number])).drop(columns="claim")
    lines = [tables.to_markdown(asked), ""]
    more = [each for each in findings(verdicts.study, claim.exploratory) if each.measured.estimate.n]
    if more:
        looked_at = pd.DataFrame(rows(claim.number, more))[["outcome", "effect", "n"]]
        lines += ["Exploratory, part of no verdict:", "", tables.to_markdown(looked_at), ""]
    if len(numbers := doses.table(verdicts.study, claim.doses)):
        lines += ["Over the dials, part of no verdict:", "", tables.to_markdown(doses.shown(numbers)), ""]
    return lines


def _arms(verdicts: Verdicts, claim: Claim, figures: str) -> list[str]:
    """The arms of a claim with their controls as a table, and its figure."""
    lines = []
    if not (arms := verdicts.arms_of(claim)).empty:
        lines += [tables.to_markdown(arms), ""]
    if claim.number in verdicts.drawn:
        spec = SPECS[claim.figure]
        lines += [f"![{spec.caption}]({figures}/{draw.stem(spec, stem(claim))}.png)", ""]
    if claim.number == replay.CLAIM and len(verdicts.replayed):
        lines += [replay.paragraph(verdicts.replayed), ""]
        lines += [f"![{REPLAY.caption}]({figures}/{draw.stem(REPLAY, stem(claim))}.png)", ""]
    return lines
