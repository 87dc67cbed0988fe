"""The evaluation of a cold start is measured once; what is kept is used only where it would be measured alike."""

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from small_runs import planned

from steadymoe.bench.runs import compose, execute, provenance, record, start_evaluation
from steadymoe.bench.training.trainer import Trainer

WORDS = ("updates=2", "evaluation.pass_k=2", "evaluation.pass_prompts=4")


def first_rows(folder: Path) -> pd.DataFrame:
    rows = record.read_table(folder, "evaluations")
    return rows[rows["step"] == 0]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps at which an evaluation was measured."""
    steps, inner = [], Trainer.evaluate

    def evaluate(self: Trainer, step: int) -> list[dict[str, Any]]:
        steps.append(step)
        return inner(self, step)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    return steps


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> compose.Run:
    """The first run of a results folder."""
    made = planned(tmp_path_factory.mktemp("first"), *WORDS)
    assert execute.execute(made) == "finished"
    return made


@pytest.fixture
def cache(first: compose.Run, tmp_path: Path) -> Path:
    """What it leaves to later runs in ``tmp_path``: its cold start, and the evaluation of that."""
    return Path(shutil.copytree(Path(first.config.results_dir) / "cold_starts", tmp_path / "cold_starts"))


def test_arms_of_a_seed_share_the_evaluation_of_their_start(tmp_path: Path, measured: list[int]) -> None:
    arms = (), ("algorithm=gspo",), ("routing=r2",), ("routing=pinned",), ("evaluation.every=1",)
    rows = []
    for arm in arms:
        run = planned(tmp_path, *WORDS, *arm)
        assert execute.execute(run) == "finished"
        rows.append(first_rows(run.folder))
    assert measured.count(0) == 1
    alone = planned(tmp_path / "alone", *WORDS, "algorithm=gspo")
    assert execute.execute(alone) == "finished"
    for each in rows:  # kept or measured: the same bits
        pd.testing.assert_frame_equal(each, first_rows(alone.folder), check_exact=True)
    assert rows[0][["score", "score_greedy", "score_pass"]].notna().any().all()


@pytest.mark.parametrize("word", ["evaluation.prompts=4", "evaluation.pass_k=3", "evaluation.permuted_routes=true"])
@pytest.mark.usefixtures("cache")
def test_another_evaluation_is_measured(tmp_path: Path, measured: list[int], word: str) -> None:
    execute.execute(planned(tmp_path, *(each for each in WORDS if each[:17] != word[:17]), word))
    assert measured.count(0) == 1


@pytest.mark.parametrize(("k", "measurements"), [(0, 1), (2, 2)])
def test_size_of_a_rollout_matters_to_pass_k_alone(
    tmp_path: Path, measured: list[int], k: int, measurements: int
) -> None:
    for prompts in (2, 3):
        execute.execute(planned(tmp_path, "updates=2", f"evaluation.pass_k={k}", f"minibatch_prompts={prompts}"))
    assert measured.count(0) == measurements


@pytest.mark.usefixtures("cache")
def test_other_code_is_measured(tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "TRAINING_VERSION", provenance.TRAINING_VERSION + 1)
    execute.execute(planned(tmp_path, *WORDS, "algorithm=gspo"))
    assert measured.count(0) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: json.dumps(kept)[:-9],
        lambda kept: "[]",
        lambda kept: "{}",
        lambda kept: json.dumps(kept | {"rows": kept["rows"][1:]}),
        lambda kept: json.dumps(kept | {"key": kept["key"] | {"seed": 7}}),
    ],
    ids=["torn", "a list", "empty", "a row is missing", "another's"],
)
def test_damaged_evaluation_is_named_and_measured_again(
    tmp_path: Path,
    first: compose.Run,
    cache: Path,
    measured: list[int],
    damage: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (path,) = cache.glob("*.evaluation-*.json")
    whole = path.read_text()
    path.write_text(damage(json.loads(whole)))
    second = planned(tmp_path, *WORDS, "algorithm=gspo")
    assert execute.execute(second) == "finished"
    assert path.name in capsys.readouterr().err
    assert (measured.count(0), path.read_text()) == (1, whole)
    pd.testing.assert_frame_equal(first_rows(second.folder), first_rows(first.folder), check_exact=True)


def test_start_that_is_not_cached_keeps_nothing(tmp_path: Path) -> None:
    rows = [{"step": 0}]
    assert start_evaluation.of_start(planned(tmp_path).config, {"path": "elsewhere"}, tmp_path, lambda: rows) is rows
    assert not list(tmp_path.iterdir())
