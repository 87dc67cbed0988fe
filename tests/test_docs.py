"""The README says what is there."""

import re
import shlex
from pathlib import Path

import pytest

from steadymoe.bench.config import compose
from steadymoe.bench.measurement import columns
from steadymoe.bench.report import algorithm_page, archive, tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
REFERENCE = ROOT / "results" / "reference"


def test_the_page_of_columns_is_fresh_and_explains_every_column() -> None:
    page = (ROOT / "docs" / "columns.md").read_text()
    assert page == columns.page()
    assert {name for table in columns.TABLES.values() for name in table} <= set(
        re.findall(r"^\| `(\w+)` \|", page, re.M)
    )


@pytest.mark.parametrize("group", ["algorithm", "advantage", "correction", "routing", "engine", "model", "task"])
def test_the_readme_names_every_algorithm_model_and_task(group: str) -> None:
    for path in (compose.CONF / group).glob("*.yaml"):
        assert f"`{path.stem}`" in README


@pytest.mark.parametrize("path", ["algorithms/grpo.py", "conf/algorithm/grpo.yaml"])
def test_the_readme_shows_the_two_files_of_an_algorithm_whole(path: str) -> None:
    assert (ROOT / path).read_text().rstrip() in README


def test_every_run_command_of_the_readme_composes() -> None:
    commands = [line.partition("#")[0] for line in README.splitlines() if line.startswith("steadymoe run ")]
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command)[2:]
        assert compose.plan([word for word in words if word != "-m"], multirun="-m" in words)


def test_the_experiment_on_doses_has_a_command_for_every_engine_which_starts_from_the_exact_one() -> None:
    text = (compose.CONF / "experiment" / "dose.yaml").read_text()
    commands = re.findall(r"^#   steadymoe run (.+?)(?:  .*)?$", text, re.MULTILINE)
    planned = [compose.plan(shlex.split(command), multirun=True) for command in commands]
    engines = [{run.choices["engine"] for run in runs} for runs in planned]
    assert sorted(engine for (engine,) in engines) == sorted(
        path.stem for path in (compose.CONF / "engine").glob("*.yaml") if path.stem != "exact"
    )
    for runs in planned:
        strengths = {run.config["engine"]["strength"] for run in runs}
        assert min(strengths) == 0
        assert len(strengths) >= 3
    assert len({runs[0].config["experiment_name"] for runs in planned}) == len(planned)


def test_every_link_and_make_target_of_the_readme_exists() -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(
        r"make (quickstart|test|check|reference|figures|speed|oracles|(?:test-)?megablocks|check-launchers)(?![\w-])",
        README,
    ):
        assert f"\n{target}:" in makefile


def test_the_readmes_table_is_that_of_the_recorded_runs() -> None:
    kept = archive.load(REFERENCE, "quickstart")
    rebuilt = tables.to_markdown(tables.summary(kept["steps"], kept["runs"]))
    assert rebuilt in (REFERENCE / "tables" / "quickstart-summary.md").read_text()
    assert rebuilt in README


def test_the_catalogue_of_algorithms_is_fresh() -> None:
    assert (ROOT / "docs" / "algorithms.md").read_text() == algorithm_page.markdown()


def test_the_readmes_claims_are_those_of_the_recorded_runs() -> None:
    steps = archive.load(REFERENCE, "quickstart")["steps"]
    means = steps.groupby(["metric", "seed", "arm"])["value"].mean()
    slower = means["reward"].unstack("arm")
    assert (slower["gspo"] < slower["grpo"]).all()
    assert "lower mean reward than GRPO in each of the three seeds" in " ".join(README.split())
    clipped = means["clip_fraction"].groupby("arm").mean()
    assert 30 < clipped["gspo"] / clipped["grpo"] < 300
    assert "clips two orders of magnitude more" in " ".join(README.split())
    assert tables.CAPTION in " ".join(README.split())
