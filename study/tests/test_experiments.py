"""The table of experiments: what Hydra composes of it, the arms and pages that follow from it, and its command."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from known import known_arms

from steadymoe.bench import cli
from steadymoe.bench.runs import compose, identity
from steadymoe.bench.runs.compose import Run
from steadymoe.bench.runs.identity import axes_name
from study import command, experiments
from study.claims import CLAIMS
from study.experiments import PARTS, TABLE, Experiment

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def registered() -> None:
    experiments.register()


def runs_of(row: Experiment, *overrides: str) -> list[Run]:
    return [run for words in row.commands(overrides) for run in compose.plan(words)]


def kind_of(row: Experiment) -> tuple[bool, ...]:
    """What a row has that others lack: what composing it takes."""
    return row.base == row.name, bool(row.also), row.audits, bool(row.losses), "start_from" in row.sets


def one_of_each_kind(rows: Sequence[Experiment]) -> list[Any]:
    """Rows as parameters; all but the first of each kind wait for `make check`."""
    first = {kind_of(row): row for row in reversed(rows)}
    return [
        pytest.param(row, id=row.name, marks=[] if row is first[kind_of(row)] else pytest.mark.check) for row in rows
    ]


@pytest.mark.parametrize("row", one_of_each_kind([*TABLE.values()]))
def test_hydra_composes_the_runs_of_a_row(row: Experiment) -> None:
    """Of its first seed; test_recorded_runs_have_the_hashes_of_the_table composes every seed of three rows."""
    trunk = ["start_from=null"] if "start_from" in row.sets else []  # which need not be there
    runs = runs_of(row, f"seed={row.seeds[0]}", *trunk)
    assert len(runs) * len(row.seeds) == row.runs
    assert {run.config.experiment_name for run in runs} == {row.recorded_as}
    if not (row.audits or trunk):
        planned = {(run.choices["algorithm"], axes_name(run.axes)) for run in runs}
        assert {(point["algorithm"], axes_name(row.axes(point))) for point in row.points()} == planned


def test_recorded_runs_have_the_hashes_of_the_table() -> None:
    for name in ("study_best", "study_minirl", "gates_dense"):
        kept = pd.read_parquet(ROOT / "results" / "reference" / "data" / name / "runs.parquet")
        planned = [run.config_hash for run in runs_of(TABLE[name])]
        assert len(planned) == TABLE[name].runs
        assert set(kept["config_hash"]) == set(planned)


def test_every_arm_is_one_that_an_experiment_runs() -> None:
    planned = {
        (row.recorded_as, point["algorithm"], axes_name(row.axes(point)))
        for row in TABLE.values()
        if not row.audits
        for point in row.points()
    }
    known = {(arm.experiment, arm.algorithm, axes_name(arm.axes)) for arm in known_arms()}
    assert len(known) > 80
    assert known <= planned
    for algorithm, overrides in (("gspo", "optimizer.learning_rate=1.0"), ("vespo", ""), ("grpo", "")):
        with pytest.raises(LookupError, match=r"x: .* arms of study_tuning"):
            experiments.arm("x", "study_tuning", algorithm, overrides)


def test_pages_and_makefile_name_existing_experiments() -> None:
    known = {*TABLE, *PARTS, *(row.recorded_as for row in TABLE.values()), "study_rates"}  # of the first edition
    for page in (*(ROOT / "docs").glob("*.md"), *(ROOT / "study").glob("*.md"), ROOT / "Makefile"):
        text = page.read_text()
        named = set(re.findall(r"`(?:experiment=)?((?:study|gates)_\w+)`", text))
        assert named | set(re.findall(r"^\t?\S*python -m study run (\w+)", text, re.MULTILINE)) <= known, page
    assert {name for claim in CLAIMS for name in claim.experiments} <= TABLE.keys()


def test_experiment_and_part_names_do_not_overlap() -> None:
    assert not PARTS.keys() & TABLE.keys()


def test_each_part_has_the_seeds_of_the_protocol() -> None:
    for row in (*PARTS["reference"], *PARTS["settings"]):
        allowed = range(300, 330) if row.audits else range(10)
        allowed = range(200, 230) if row in PARTS["settings"] else allowed
        tunes = row.name in ("study_tuning", "stale_tuning", "stale_baseline", "first_testbed")
        allowed = range(100, 120) if tunes else allowed
        assert set(row.seeds) <= set(allowed), row.name


def test_plan_continues_after_branches_without_a_trunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["audit_mid", "gates_branches", "study_best", "seed=3", "--dry"]
    assert command.main(["run", *words]) == 0
    shown = capsys.readouterr().out
    assert all(f"starts from runs of {trunk}" in shown for trunk in ("audit_trunk", "gates_trunk"))
    assert "1 runs: 1 to run" in shown
    assert list(tmp_path.iterdir()) == []


def test_command_of_a_run_reproduces_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = compose.plan(["experiment=study_best", "seed=3", f"results_dir={tmp_path}"])[0]
    words = shlex.split(run.command)
    assert words[:5] == ["python", "-m", "study", "run", "study_best"]
    for arguments, shown in (
        ([*words[4:], "--dry"], "1 runs: 1 to run"),
        (["study_best", "--dry", f"results_dir={tmp_path}"], "10 runs: 10 to run"),
        (["study_audit", "seed=305", f"results_dir={tmp_path}", "--dry"], f"{tmp_path}/audits/study_audit/"),
    ):
        assert command.main(["run", *arguments]) == 0
        assert shown in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("row", one_of_each_kind([row for row in TABLE.values() if row.also]))
def test_command_of_a_run_selects_it_among_several_sweeps(row: Experiment) -> None:
    for run in runs_of(row, f"seed={row.seeds[0]}"):
        words = [word for word in shlex.split(run.command) if "=" in word and not word.startswith("experiment=")]
        (again,) = runs_of(row, *words)
        assert again.folder == run.folder


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("study_best", "seed=3"),
        ("study_best", "seed=3 algorithm=gspo"),
        ("study_best", "seed=3 algorithm=grpo,gspo"),  # none gets the other's rate
        ("routers", "seed=200 optimizer.router_factor=1.0"),
        ("routers", "seed=200,201 optimizer.router_factor=0.1"),  # frozen and dense ones have another
        ("centering", "seed=203 engine.strength=0.2 updates_per_rollout=8"),
    ],
)
def test_overrides_select_runs_across_sweeps(name: str, overrides: str) -> None:
    def has(run: Run, key: str, values: str) -> bool:
        return str(run.choices.get(key, identity.flatten(run.plain).get(key))) in values.split(",")

    asked = [word.split("=") for word in overrides.split()]
    expected = {run.folder for run in runs_of(TABLE[name]) if all(has(run, *each) for each in asked)}
    chosen = [run.folder for run in runs_of(TABLE[name], *overrides.split())]
    assert len(chosen) == len(expected) > 1
    assert set(chosen) == expected


def test_overrides_may_set_fields_outside_the_sweeps() -> None:
    assert len(runs_of(TABLE["study_best"], "seed=3", "algorithm=vespo")) == 1
    assert len(runs_of(TABLE["centering_tuning"], "seed=101")) == TABLE["centering_tuning"].runs


@pytest.mark.parametrize(
    "words",
    [
        ["run", "study_bset"],
        ["run", "study_best", "--redoo"],
        ["run", "study_best", "algorithm=nothing"],
        ["run", "study_best", "algorithm=["],
        ["run", "--keep"],
        ["--format", "gif"],
    ],
)
def test_invalid_argument_is_refused_in_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["study", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main(command.main)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("codes", "ends", "kept"), [((0, 1, 0, 0), 1, ["study_frozen"]), ((0, 2), 2, []), ((0, 130), 130, [])]
)
def test_a_failed_run_does_not_stop_the_sweeps_after_it(
    codes: tuple[int, ...], ends: int, kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """study_best has three sweeps and study_frozen one; an invalid request or an interrupt stops both."""
    left, archived = list(codes), []
    monkeypatch.setattr(command.tuning, "main", lambda words: left.pop(0))
    monkeypatch.setattr(command.report_page, "keep", lambda results, name, target: archived.append(name) or [])
    assert command.run(["study_best", "study_frozen", "--keep", str(tmp_path)]) == ends
    assert not left
    assert archived == kept


def test_the_list_has_every_experiment_with_its_number_of_runs() -> None:
    lines = command.listing().splitlines()
    assert len(lines) == 2 + len(TABLE)
    (line,) = [line for line in lines if "| study_tuning " in line]
    assert "| 48 runs " in line
