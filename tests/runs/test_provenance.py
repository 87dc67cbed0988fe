"""What a run stands on: code is compared by what it does, read and never executed, and other code is never mixed."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import training_code
from fixtures import Said, as_new_process, grpo_by, on_path, write_all
from small_runs import SMALL, planned

from steadymoe.algorithms import load
from steadymoe.bench.report import report_page
from steadymoe.bench.report.figures import FIGURES
from steadymoe.bench.runs import compose, execute, provenance, record, run_folder, status
from steadymoe.bench.schema import ConfigError
from steadymoe.bench.support import external, files, source
from steadymoe.bench.training import checkpoint

OLD = Path(__file__).parents[1] / "recorded" / "results" / "runs" / "small"
TRAINING = Path(__file__).parents[1] / "recorded" / "training_code.json"
TINY = [*(word for word in SMALL if not word.startswith("updates=")), "updates=2", "hydra/launcher=basic"]

LOSS = '''"""A loss."""
from dataclasses import dataclass
from steadymoe.algorithms.grpo import GRPO
import my_signs


@dataclass(frozen=True, kw_only=True)
class Mine(GRPO):
    """Doc."""

    def surrogate(self, batch):
        return super().surrogate(batch)
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user's own, named by STEADYMOE_PATH, with a loss and a module that it imports."""
    folder = tmp_path / "mine"
    write_all(folder, {"my_losses.py": LOSS, "my_signs.py": "SIGN = 1\n"})
    write_all(folder, {"conf/algorithm/mine.yaml": grpo_by("my_losses.Mine")})
    monkeypatch.chdir(tmp_path)
    on_path(monkeypatch, Path("mine"), "my_losses", "my_signs")
    return folder


def config(algorithm: str) -> dict[str, Any]:
    return compose.plan([*TINY, f"algorithm={algorithm}"])[0].plain


def recorded(made: compose.Run, **changes: Any) -> None:
    """As if ``made`` had ended here today: the tables of an old run, with what identifies this one."""
    shutil.copytree(next(OLD.glob("grpo/micro/chain/*/seed=0")), made.folder)
    ended = {"status": "finished", "wall_seconds": 1.0, "tables": run_folder.known(made.folder)["tables"]}
    facts = execute._facts(made) | ended | changes
    files.write_json(made.folder / "run.json", facts)


def test_code_hash_ignores_comments_and_formatting(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        (tmp_path / "a.py").write_text(text)
        return training_code.statements(tmp_path / "a.py")

    code = 'class A:\n    """Doc."""\n\n    x: int = 1\n    """Its x."""\n\n    def f(self, y): return -y * 2.0\n'
    same = [
        code.replace('"""Doc."""', '"""Another."""'),
        code.replace('    """Doc."""\n', ""),
        code.replace("-y * 2.0", "  (-y)*2.0  # a comment"),
        code.replace("2.0", "(\n  2.0\n)"),
        code.replace("2.0", "2."),
    ]
    other = [code.replace("-y", "+y"), code.replace("2.0", "2"), code.replace("x", "z"), code + "A.x = 2\n"]
    assert {digest(each) for each in same} == {digest(code)}
    assert len({digest(each) for each in [code, *other]}) == 1 + len(other)
    assert digest("x = None") != digest("x = []") != digest("x: int")


def test_loss_hash_covers_its_file_and_imports_only(mine: Path) -> None:
    settings = config("mine")
    before = provenance.code_hash(settings)
    (mine / "unread.py").write_text("x = 1\n")
    assert provenance.code_hash(settings) == before
    for edit in ("SIGN = -1\n", "# a comment\nSIGN = 1\n"):
        (mine / "my_signs.py").write_text(edit)
        assert provenance.code_hash(settings) not in (before, None)
    (mine / "my_signs.py").write_text("SIGN = \n")
    assert provenance.code_hash(settings) is None
    (mine / "my_signs.py").unlink()
    write_all(mine / "my_signs", {"__init__.py": "from .deeper import SIGN\n", "deeper.py": "SIGN = 1\n"})
    in_a_package = provenance.code_hash(settings)
    (mine / "my_signs" / "deeper.py").write_text("SIGN = -1\n")
    assert provenance.code_hash(settings) not in (in_a_package, None)


def test_shipped_loss_hash_covers_its_file_and_shared_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "digest", lambda files, first: ",".join(sorted({file.stem for file in files})))
    for name, own in (("grpo", {"grpo"}), ("rspo_gspo", {"gmpo", "gspo", "rspo"})):
        shared = {"advantages", "batch", "corrections", "loss", "objective", "ops", "parts"}
        assert set((provenance.code_hash(config(name)) or "").split(",")) == shared | own


def test_incomparable_code_is_unknown_but_never_stale(mine: Path, monkeypatch: pytest.MonkeyPatch, ran: Said) -> None:
    (made,) = compose.plan([*TINY, "algorithm=mine"])
    recorded(made)
    facts = run_folder.known(made.folder)
    assert provenance.difference(facts) == provenance.Difference(None, None, None)
    skipped = run_folder.describe([made], {made.folder: run_folder.read_state(made.folder)})
    assert skipped == ["1 of 1 runs have already finished and are skipped"]
    for code in ("", None):
        without = facts | {"algorithm_code": code, "training_version": 7}
        assert provenance.difference(without).unknown == "its code was not found"
    monkeypatch.delenv(external.VARIABLE)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(mine)])
    as_new_process(monkeypatch, "my_losses", "my_signs")
    first, second = ran("status").splitlines()
    assert first == "default: 1 finished"
    assert second.startswith("  finished, their code cannot be compared: 1 (its code is missing; set STEADYMOE_PATH")


def test_loss_that_is_edited_during_a_sweep_is_recorded_as_it_ran(mine: Path) -> None:
    runs = compose.plan([*TINY, "algorithm=mine", "seed=0,1"], multirun=True)
    assert execute.execute(runs[0]) == "finished"
    (mine / "my_signs.py").write_text("SIGN = -1\n")  # a helper that the loss imports
    assert execute.execute(runs[1]) == "finished"
    one, other = (run_folder.known(run.folder) for run in runs)
    assert one["algorithm_code"] == other["algorithm_code"] != provenance.code_hash(runs[0].plain)
    assert [provenance.difference(facts).code for facts in (one, other)] == [
        "other code of its algorithm, task or engine"
    ] * 2
    with pytest.raises(ConfigError, match=r"my_losses\.Mine has changed since this process imported it"):
        compose.plan([*TINY, "algorithm=mine", "seed=2"])
    assert compose.plan([*TINY, "algorithm=grpo", "seed=2"]), "which does not use it"


def test_loss_that_was_edited_between_its_import_and_the_first_plan_is_refused(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook: the loss is imported by ``load``, and nothing has read its file yet."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    load("mine")
    with (mine / "my_losses.py").open("a") as content:
        content.write("# changed\n")
    with pytest.raises(ConfigError, match=r"my_losses\.Mine has changed since this process imported it"):
        compose.plan([*TINY, "algorithm=mine", "seed=3"])


def test_edited_loss_is_refused_unless_redo_is_given(
    mine: Path, monkeypatch: pytest.MonkeyPatch, ran: Said, refused: Said
) -> None:
    words = ["run", *TINY, "-m", "algorithm=grpo,mine"]
    shipped, made = compose.plan([*TINY, "algorithm=grpo,mine"], multirun=True)
    recorded(shipped)
    recorded(made)
    before = (shipped.folder / "run.json").read_bytes()
    old = (made.folder / "steps.parquet").read_bytes()
    (mine / "my_losses.py").write_text(LOSS.replace("super().surrogate(batch)", "super().surrogate(batch * 1)"))
    as_new_process(monkeypatch, "my_losses", "my_signs")

    said = refused(*words)
    assert said.startswith(f"steadymoe: {made.folder} was made with other code of its algorithm, task or engine; ")
    assert (made.folder / "steps.parquet").read_bytes() == old
    assert not Path("results/replaced").exists()
    told = status.lines(Path("results"))
    assert told[0] == "default: 2 finished, 1 stale"
    assert "(made by other code of its algorithm, " in told[1]
    assert told[2] == f"    rerun: {made.command} --redo"
    assert made.command.startswith("STEADYMOE_PATH=mine steadymoe run ")

    (mine / "my_losses.py").write_text(LOSS)
    run_folder.refuse_others([shipped, made])  # the same file again
    (mine / "my_losses.py").write_text(LOSS.replace("my_signs", "my_signs as signs"))
    as_new_process(monkeypatch, "my_losses", "my_signs")
    aside = Path("results/replaced") / made.folder.relative_to(Path("results/runs").absolute()) / "1"
    assert str(aside) in ran(*words, "--redo")
    assert (aside / "steps.parquet").read_bytes() == old
    assert (shipped.folder / "run.json").read_bytes() == before
    assert run_folder.read_state(made.folder).status == "finished"
    assert provenance.difference(run_folder.known(made.folder)).stale is None
    assert len(record.read_table(made.folder, "steps")) == 1
    assert run_folder.redo([shipped, made]) == []
    assert len(list(aside.parent.iterdir())) == 1


def test_other_training_code_is_refused_but_not_other_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said, refused: Said
) -> None:
    made = planned(tmp_path)
    words = ["run", *SMALL, f"results_dir={tmp_path}"]
    recorded(made)
    ran(*words)
    facts = run_folder.known(made.folder)
    versions = facts["versions"] | {"torch": "1.0"}
    files.write_json(made.folder / "run.json", facts | {"versions": versions})
    ran(*words)
    assert status.lines(tmp_path)[1].endswith("(made with torch 1.0)")
    files.write_json(made.folder / "run.json", facts)
    then, now = provenance.TRAINING_VERSION, provenance.TRAINING_VERSION + 1
    monkeypatch.setattr(provenance, "TRAINING_VERSION", now)
    assert f"was made with other training code (version {then}; now {now}); add --redo" in refused(*words)
    assert f"(made by other training code (version {then}; now {now}))" in status.lines(tmp_path)[1]
    refused(*words, "--redo", "--retry-failed")


def test_run_resumes_only_with_known_equal_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "step_of", lambda _: 4)
    monkeypatch.setattr(record.Record, "holds", lambda *_: True)
    made = planned(tmp_path)
    recorded(made)
    (made.folder / "checkpoint.safetensors").touch()
    facts = run_folder.known(made.folder)
    assert execute._resume_from(record.Record(made.folder, execute._facts(made)), keep=None) == 4
    for change in ({"algorithm_code": "ast1:0"}, {"algorithm_code": "0" * 16}, {"training_version": 0}):
        files.write_json(made.folder / "run.json", facts | change)
        folder = record.Record(made.folder, execute._facts(made))
        assert execute._resume_from(folder, keep=None) is None
        assert "changed since its checkpoint" in folder.run["restarted"]


def test_only_run_imports_classes_named_in_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said) -> None:
    evil = f"from pathlib import Path\nPath({str(tmp_path / 'executed')!r}).touch()\nclass Loss: ...\n"
    write_all(tmp_path, {f"{place}/evil_{place}.py": evil for place in ("cwd", "pythonpath", "mine")})
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "pythonpath"), *sys.path])
    monkeypatch.setenv(external.VARIABLE, str(tmp_path / "mine"))
    (facts,) = [json.loads(path.read_text()) for path in OLD.glob("grpo/micro/chain/*/seed=0/run.json")]
    targets = ["this.Zen", "evil_cwd.Loss", "evil_pythonpath.Loss", "evil_mine.Loss", "../evil.Loss", "..", ""]
    for seed, target in enumerate(targets):
        folder = Path("results/runs/study/grpo/micro/chain") / f"seed={seed}"
        shutil.copytree(next(OLD.glob("grpo/micro/chain/*/seed=0")), folder)
        named = json.loads(
            json.dumps(facts["config"]),
            object_hook=lambda each, target=target: each | ({"_target_": target} if "_target_" in each else {}),
        )
        changes = {"config": named, "seed": seed, "experiment": "study", "algorithm_code": "ast1:0"}
        files.write_json(folder / "run.json", facts | changes)
    said = ran("status")
    monkeypatch.setattr(report_page, "figures_of", lambda *_: [FIGURES["overview"]])  # for time
    for words in (
        ["report", "--format", "svg"],
        ["report", "--keep", "kept"],
        ["report", "--export", "csv"],
        ["report", "--list"],
        ["report", "--figure", "fig02", "--experiment", "study", "--format", "svg"],
    ):
        said += ran(*words)
    assert Path("kept/data/study").is_dir()
    assert not (tmp_path / "executed").exists()
    assert not [module for module in sys.modules if module == "this" or module.startswith("evil_")]
    assert "Beautiful is better than ugly" not in said


def test_training_code_matches_its_version() -> None:
    then, now = json.loads(TRAINING.read_text()), training_code.training_code()
    changed = sorted({file for file, _ in then["modules"].items() ^ now["modules"].items()})
    assert then == now, (
        f"training code has changed: {', '.join(changed) or 'its version'}. If a run records the same numbers as "
        "before (make one again and compare) record the code; if not, raise provenance.TRAINING_VERSION first: "
        "python tests/runs/training_code.py > tests/recorded/training_code.json"
    )
    assert {"bench/training/trainer.py", "bench/tasks/sort.py", "models/engine.py"} <= now["modules"].keys()
    assert "bench/cli.py" not in now["modules"]
