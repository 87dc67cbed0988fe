"""The kept tables of ``results/reference`` are those of the data beside them."""

import io
import re
import subprocess
import sys
from pathlib import Path

import linked
import numpy as np
import pandas as pd
import pytest
from committed import assert_same
from known import known_arms

from steadymoe.bench.report import archive, report_page, write
from study import arms, experiments, exploratory, page
from study.arms import GRPO
from study.claims import CLAIMS, LEGS, findings
from study.gates import Gate, Need
from study.recorded import Recorded
from study.verdicts import Verdicts

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
STUDY = Path(__file__).parents[1]
TABLES = REFERENCE / "tables"
KEPT = archive.experiments(REFERENCE)
# Recorded before data were kept: results/README.md.
WITHOUT_DATA = {"tables/families-runs.csv"}
LINKED = {path.as_posix() for path in linked.kept()}
AUDITS = [path.parent.name for path in (REFERENCE / "audits").glob("*/audits.parquet")]


def test_git_keeps_exactly_what_pages_link() -> None:
    assert (REFERENCE / ".gitignore").read_text() == linked.ignored()
    listing = ["git", "-C", str(REFERENCE), "ls-files", "figures", "tables"]
    tracked = subprocess.run(listing, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a checkout")
    assert set(tracked.stdout.split()) == LINKED


@pytest.mark.check
def test_every_kept_file_has_its_data(verdicts: Verdicts) -> None:
    # Files of an audit are <experiment>-audit-<table>, and an experiment may hold a dash.
    stems = {Path(name).stem for name in LINKED - WITHOUT_DATA}
    of_claims = {spec.stem(named) for spec, named, _ in verdicts.figures()}
    named = {stem.split("-audit-" if "-audit-" in stem else "-")[0] for stem in stems - of_claims}
    assert named <= {*KEPT, *AUDITS}


@pytest.mark.check
@pytest.mark.parametrize("experiment", KEPT)
def test_kept_tables_match_the_data(experiment: str) -> None:
    data = report_page.with_derived(archive.load(REFERENCE, experiment))
    texts = report_page.texts(experiment, report_page.shown_tables(data), data["runs"])
    for spec in report_page.figures_of(experiment):
        if (lack := spec.lacks(data)) is not None:
            assert spec.experiment != experiment or spec.needs_own, f"its own figure {spec.id} lacks {lack}"
        elif f"tables/{spec.stem(experiment)}.csv" in LINKED:
            texts |= write.figure_texts(spec.stem(experiment), spec.figure(data), spec.caption)
    compare(texts)


def compare(texts: dict[str, str]) -> None:
    """Hold the kept ones of these tables equal to the committed files."""
    for name, text in texts.items():
        if f"tables/{name}" in LINKED:
            assert_same(text, (TABLES / name).read_text(), name)


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    return Verdicts(Recorded(REFERENCE))


@pytest.fixture(scope="module")
def shown(verdicts: Verdicts) -> str:
    return page.text(verdicts.study, verdicts, list(verdicts.gates.values()), "../results/reference/figures")


@pytest.mark.check
def test_verdicts_match_the_data(verdicts: Verdicts, shown: str) -> None:
    compare(verdicts.texts())
    for spec, named, data in verdicts.figures():
        compare(write.figure_texts(spec.stem(named), spec.figure(data), spec.caption))
    committed = (STUDY / "claims.md").read_text()
    assert_same(shown, committed, "claims.md")
    for link in re.findall(r"\]\(([^)#]+)\)", committed):
        assert (STUDY / link).exists(), link
    assert len(re.findall(r"\.png\)", committed)) == len(verdicts.figures())


@pytest.mark.check
def test_claim_is_answered_if_its_runs_and_gates_exist(verdicts: Verdicts, shown: str) -> None:
    for claim in CLAIMS:
        section = shown.partition(f"## Claim {claim.number}\n")[2].partition("\n## ")[0]
        for leg in LEGS:
            found = [each for each in verdicts.findings[claim.number] if each.outcome.leg == leg]
            assert (verdicts.verdict(claim, leg) is None) is (not found)
            lacking = [each for each in found if each.verdict == "not run"]
            assert all("to be run" in each.decides and each.measured.estimate.n == 0 for each in lacking)
            assert (verdicts.verdict(claim, leg) == "not run") is bool(lacking and len(lacking) == len(found))
        if claim.figure == "answer" and len(verdicts.recorded(claim.arms)) == len(claim.arms):
            controls = {
                "stale": ("frozen", "GRPO unclipped", "on policy"),
                "long": ("long, on policy, slow routers", "long, on policy, dense"),
                "longer": ("longer, on policy", "longer, unclipped, dense"),
                "mismatch": ("exact",),
                "learning": ("exact",),
            }[claim.needs[-1].setting]
            assert all(control in section for control in controls), claim.number
        assert ("rests on reconstructions" in section) is (claim.number == 10)


@pytest.mark.check
def test_every_recorded_arm_has_the_seeds_of_its_experiment(verdicts: Verdicts) -> None:
    of_study = {row.recorded_as for row in experiments.PARTS["reference"]}
    there = [arm for arm in known_arms() if arm.experiment in of_study and verdicts.study.has(arm)]
    assert len(there) > 30
    seeds = {row.recorded_as: row.seeds for row in experiments.TABLE.values()}
    for arm in there:
        assert verdicts.study.first(arm).index.tolist() == list(seeds[arm.experiment]), arm


@pytest.mark.check
def test_arms_of_one_setting_start_with_the_same_rollouts(verdicts: Verdicts) -> None:
    stale = ("study", "study_paper", "study_bands", "study_replay", "study_frozen", "study_best", "study_shift")
    for arm in known_arms():
        if arm.experiment in (*stale, "study_router") and verdicts.study.has(arm):
            assert verdicts.study.first(arm).tolist() == verdicts.study.first(GRPO).tolist(), arm
        elif arm.experiment in ("stale_best", "stale_replay"):  # on another processor, with its own cold starts
            assert verdicts.study.first(arm).tolist() == verdicts.study.first(arms.STALE_BEST["grpo"]).tolist(), arm


@pytest.mark.check
def test_failed_gate_blocks_every_answer(verdicts: Verdicts) -> None:
    failed = Gate(Need("V2", "stale"), "failed", "seen")
    for claim in CLAIMS:
        for each in findings(verdicts.study, claim.outcomes, [failed], [failed]):
            assert each.verdict == "not testable here"


@pytest.mark.check
def test_readme_verdict_counts_match_the_study(verdicts: Verdicts) -> None:
    assert verdicts.counts() in (STUDY.parent / "README.md").read_text()


@pytest.mark.check
def test_typed_factor_of_the_noise_is_the_recorded_one(verdicts: Verdicts) -> None:
    factor = exploratory.found(verdicts.study)["kl_factor"]
    for name in ("claims.yaml", "calibration.md"):
        assert f"{factor} times the upper end" in (STUDY / name).read_text()


@pytest.mark.check
def test_independent_implementation_agrees_with_the_claims(verdicts: Verdicts) -> None:
    script = STUDY / "tests" / "study_effects.py"
    made = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert_same(made, (STUDY / "tests" / "study_effects.csv").read_text(), "study_effects.csv")
    known = {each.outcome.what: each for found in verdicts.findings.values() for each in found}
    compared = set()
    for row in pd.read_csv(io.StringIO(made)).itertuples():
        if (each := known.get(what := f"{row.what}, {row.ours} less {row.theirs}")) is not None:
            assert each.measured.estimate.n == row.n
            assert np.mean(each.measured.seeds) == pytest.approx(row.mean, abs=1e-9)
            if each.outcome.threshold == 0:
                assert each.p == pytest.approx(row.p, abs=1e-9)
            compared.add(what)
    plain = re.compile(r"(mean reward|held-out accuracy|usefulness), (?!.*(MoE less|at its best))")
    assert compared == {what for what, each in known.items() if plain.match(what) and each.measured.estimate.n}
