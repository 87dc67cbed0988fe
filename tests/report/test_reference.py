"""The tables of ``results/reference`` are those of the data beside them, to the last digit; its figures are there."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from steadymoe.bench.claims import page, registry
from steadymoe.bench.claims.arms import CONTENDERS, FROZEN, GRPO, GSPO, SLOW
from steadymoe.bench.claims.gates import blocking
from steadymoe.bench.claims.verdict import NOT_TESTABLE, findings
from steadymoe.bench.report import archive, draw, report_page
from steadymoe.bench.statistics.collapse import Rule, collapsed_at

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
DOCS = Path(__file__).parents[2] / "docs"
TABLES, FIGURES = REFERENCE / "tables", REFERENCE / "figures"
KEPT = archive.experiments(REFERENCE)
# Recorded before data were kept: results/README.md.
WITHOUT_DATA = {"families"}


def test_every_table_has_its_data() -> None:
    named = {path.stem.split("-")[0] for folder in (TABLES, FIGURES) for path in folder.iterdir()}
    claims = {"claims", "gates", *(page.name(claim) for claim in registry.CLAIMS)}
    audits = {path.parent.name for path in (REFERENCE / "audits").glob("*/audits.parquet")}
    assert named - claims == {*KEPT, *WITHOUT_DATA, *audits}


@pytest.mark.parametrize("experiment", KEPT)
def test_tables_and_figures_are_those_of_the_data(experiment: str) -> None:
    data = draw.data(archive.load(REFERENCE, experiment))
    texts = report_page.texts(experiment, report_page.shown_tables(data), data["runs"])
    for spec in report_page.figures_of(experiment, registry.COMPARED_ELSEWHERE):
        if (lack := spec.lacks(data)) is None:
            texts |= draw.texts(spec, spec.figure(data), experiment)
            for suffix in ("png", "svg"):
                assert (FIGURES / f"{draw.stem(spec, experiment)}.{suffix}").exists()
        else:
            assert spec.experiment != experiment, f"its own figure {spec.id} lacks {lack}"
    committed = {path.name: path.read_text() for path in TABLES.glob(f"{experiment}-*")}
    assert committed.keys() == texts.keys()
    for name, text in texts.items():
        assert committed[name] == text, name


@pytest.fixture(scope="module")
def verdicts() -> page.Verdicts:
    return page.Verdicts(REFERENCE)


@pytest.fixture(scope="module")
def shown(verdicts: page.Verdicts) -> str:
    return verdicts.page("../results/reference/figures")


def test_the_verdicts_are_those_of_the_data(verdicts: page.Verdicts, shown: str) -> None:
    for name, text in verdicts.texts().items():
        assert (TABLES / name).read_text() == text, name
    committed = (DOCS / "claims.md").read_text()
    assert committed == shown
    for link in re.findall(r"\]\(([^)#]+)\)", committed):
        assert (DOCS / link).exists(), link
    assert len(re.findall(r"\.png\)", committed)) == 1 + len(verdicts.drawn) == 1 + len(registry.CLAIMS)


def test_on_this_testbed_no_claim_is_answered_and_each_says_why(verdicts: page.Verdicts, shown: str) -> None:
    assert {id for id, gate in verdicts.gates.items() if gate.state == "failed"} == {"V2", "V4", "V6", "dials"}
    assert "passed" not in {gate.state for gate in verdicts.gates.values()}
    asked = [claim for claim in registry.CLAIMS if not claim.moved]
    assert [claim.number for claim in asked] == list(range(1, 14))
    assert {verdicts.of(claim) for claim in asked} == {NOT_TESTABLE}
    assert verdicts.answered() == f"**Of 13 claims: 13 {NOT_TESTABLE}.**"
    for claim in asked:
        section = shown.partition(f"## Claim {claim.number}\n")[2].partition("\n## ")[0]
        failed = [gate for gate in verdicts.blocking[claim.number] if gate.state == "failed"]
        assert failed
        assert all(f"- {gate.id}: {gate.reason}." in section for gate in failed)
        assert "| verdict" not in section
        assert ("| frozen " in section) is (claim.number not in (4, 12))
        assert ("rests on reconstructions" in section) is (claim.number == 10)
    assert "| [14]" not in shown
    assert "**No answer**: both numbers come from a summary" in shown


def test_with_every_gate_passed_the_effects_decide(verdicts: page.Verdicts) -> None:
    passed = {id: replace(gate, state="passed") for id, gate in verdicts.gates.items()}
    claims = {claim.number: claim for claim in registry.CLAIMS}
    assert not any(blocking(claim.needs, passed) for claim in claims.values())
    found = {number: findings(verdicts.study, claims[number].outcomes) for number in (1, 2, 13)}
    for number in (2, 13):
        assert claims[number].verdict([each.verdict for each in found[number]]) == "contradicted"
    first = found[1][0]  # its interval lies above 0, and four outcomes are asked
    assert first.seen.estimate.low > 0
    assert first.p < 0.05 < first.corrected
    assert first.verdict == "not decided"


def test_the_readmes_first_screen_is_what_the_study_can_say(verdicts: page.Verdicts, shown: str) -> None:
    readme = (DOCS.parent / "README.md").read_text()
    result, words = readme.partition("## What was found")[2].partition("\n## ")[0], " ".join(readme.split())
    assert verdicts.first_screen() in result
    assert len(verdicts.first_screen().splitlines()) == 2 + 5
    assert f"all thirteen claims of papers that the study was built for are *{NOT_TESTABLE}*" in " ".join(
        result.split()
    )
    assert "No algorithm learns" in result
    for file in (readme, (DOCS / "protocol.md").read_text(), shown):
        assert "GSPO holds where GRPO collapses in most" not in " ".join(file.split())
    study = verdicts.study
    stressed, slow = (
        [(study.final(arm) - study.final(FROZEN)).mean() for arm in arms] for arms in (CONTENDERS, SLOW.values())
    )
    assert max(stressed) < 0 < min(slow)
    trained = [arm for arm in registry.CLAIMS[0].arms if arm != FROZEN]
    assert len(trained) == 6
    assert max(study.final(arm).mean() for arm in trained) < study.final(FROZEN).mean()
    assert "every algorithm ends below the policy that is not trained at all (frozen)" in words
    assert "GRPO and GSPO both learn" in words
    # What the detector sees with a patience of 1 step in place of 10: docs/protocol.md.
    rule, updates, hasty = Rule(), 16, {}
    for arm in (GSPO, GRPO):
        steps = study.tables([arm])["steps"]
        rewards = steps[steps["metric"] == "reward"].sort_values("step").groupby("seed")["value"]
        numbers = (rule.window(updates), rule.reward_fraction, 1, rule.least_reward)
        fallen = [collapsed_at(curve.tolist(), *numbers) is not None for _, curve in rewards]
        hasty[arm.label] = (sum(fallen), len(fallen))
    assert hasty == {"GSPO": (5, 10), "GRPO": (8, 10)}
    assert "With a patience of 1 step in place of 10, GSPO collapses in 5 and GRPO in 8" in words
    assert "with a patience of 1 step in place of 10 GSPO collapses in 5 of 10 seeds and GRPO in 8" in (
        registry.CLAIMS[0].limits
    )
