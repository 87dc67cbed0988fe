"""What a user is told of a loss that learns nothing, breaks or runs away; through the command line, at tiny size."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from fixtures import steadymoe
from small_runs import SMALL

from steadymoe.bench.report import report_page
from steadymoe.bench.runs import outcome
from steadymoe.bench.support import blame

LOSSES = '''"""Losses that go wrong."""

from dataclasses import dataclass

import torch

from steadymoe.algorithms import Batch, RatioLoss, Surrogate


@dataclass(frozen=True, kw_only=True)
class Silent(RatioLoss):
    def surrogate(self, batch: Batch) -> Surrogate:
        return Surrogate(self.ratio_of(batch).detach() * batch.advantages_BT)


@dataclass(frozen=True, kw_only=True)
class Broken(RatioLoss):
    def surrogate(self, batch: Batch) -> Surrogate:
        return Surrogate(batch.logprobs_BT @ torch.ones(3, 17, 2))


@dataclass(frozen=True, kw_only=True)
class Runaway(RatioLoss):
    def surrogate(self, batch: Batch) -> Surrogate:
        return Surrogate(batch.logprobs_BT * float("nan"))


class Bare(BaseException):
    """No Exception."""


@dataclass(frozen=True, kw_only=True)
class Leaving(RatioLoss):
    error: str = "SystemExit"

    def surrogate(self, batch: Batch) -> Surrogate:
        raise {"SystemExit": SystemExit(0), "KeyboardInterrupt": KeyboardInterrupt(), "Bare": Bare("no")}[self.error]


@dataclass(frozen=True, kw_only=True)
class Fussy(Silent):
    def __post_init__(self) -> None:
        {}["width"]
'''
OTHER = {"steps": 2, "cold_start.check_every": 1, "evaluation.every": 2, "results_dir": "results"}
TWO_STEPS = [word for word in SMALL if word.partition("=")[0] not in OTHER] + [f"{k}={v}" for k, v in OTHER.items()]


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user's own losses, each with a config of its own, in which `steadymoe` is called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_losses", raising=False)
    (tmp_path / "odd_losses.py").write_text(LOSSES)
    (tmp_path / "conf" / "algorithm").mkdir(parents=True)
    for name in ("Silent", "Broken", "Runaway", "Leaving", "Fussy"):
        text = f"loss:\n  _target_: odd_losses.{name}\n" + ("  error: SystemExit\n" if name == "Leaving" else "")
        text += "advantage:\n  _target_: steadymoe.algorithms.advantages.GroupMean\n"
        (tmp_path / "conf" / "algorithm" / f"{name.lower()}.yaml").write_text(text)
    return tmp_path


def line_of(text: str) -> int:
    return 1 + next(number for number, line in enumerate(LOSSES.splitlines()) if text in line)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    return steadymoe(monkeypatch, "run", *TWO_STEPS, f"hydra.searchpath=[file://{folder}/conf]", *words)


def test_the_end_of_a_run_says_what_was_silent_what_diverged_and_where_a_users_loss_broke(
    losses: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, losses, "algorithm=silent") == 0
    said = capfd.readouterr().out
    assert "1 finished" in said
    assert "nothing to learn from: silent seed=0: gradient norm 0 in every update\n" in said

    assert run(monkeypatch, losses, "algorithm=runaway") == 0
    assert "diverged: runaway seed=0: not finite at step 1, update 1\n" in capfd.readouterr().out

    assert run(monkeypatch, losses, "algorithm=broken") == 1
    said = capfd.readouterr().err
    place = f"{losses}/odd_losses.py, line {line_of('batch.logprobs_BT @')}"
    (line,) = [each for each in said.splitlines() if each.startswith("steadymoe: failed: RuntimeError: ")]
    assert line.endswith(f" ({place})")
    assert steadymoe(monkeypatch, "status", "--results", "results") == 0
    assert place in capfd.readouterr().out

    monkeypatch.setattr(report_page, "figures_of", lambda *_: [])  # figures take their time
    assert steadymoe(monkeypatch, "report", "--results", "results", "--format", "svg") == 0
    told = "Nothing to learn from: silent (seed 0): gradient norm 0 in every update."
    assert told in capfd.readouterr().out
    assert told in (losses / "results" / "report.html").read_text()


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.check)])
def test_a_loss_that_ends_the_process_fails_its_run_and_no_other(
    launcher: str, losses: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEADYMOE_PATH", str(losses))
    words = ["-m", *TWO_STEPS, f"hydra/launcher={launcher}", "algorithm=leaving,silent"]
    assert steadymoe(monkeypatch, "run", *words) == 1
    printed = capfd.readouterr()
    assert "1 failed, 1 finished" in printed.out
    place = f"({losses}/odd_losses.py, line {line_of('raise {')})"
    (line,) = [each for each in printed.err.splitlines() if each.startswith("steadymoe: failed: ")]
    assert line.startswith("steadymoe: failed: SystemExit: 0")
    assert line.endswith(place)
    if launcher == "basic":
        for error in ("KeyboardInterrupt", "Bare"):
            words = ["algorithm=leaving", f"algorithm.loss.error={error}", f"results_dir=results/{error}"]
            assert steadymoe(monkeypatch, "run", *TWO_STEPS, *words) == 1
            assert place in capfd.readouterr().err


def test_a_module_or_class_that_is_wrong_and_a_section_that_is_missing_are_told_in_one_line_before_anything_runs(
    losses: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (losses / "no_syntax.py").write_text("x = 1\ndef broken(:\n")
    (losses / "no_name.py").write_text("x = 1\nx = nowhere + 1\n")
    grpo = "steadymoe.algorithms.grpo.GRPO"
    group_mean = "advantage:\n  _target_: steadymoe.algorithms.advantages.GroupMean\n"
    for name, text in (
        ("syntax", f"loss:\n  _target_: no_syntax.Loss\n{group_mean}"),
        ("name", f"loss:\n  _target_: no_name.Loss\n{group_mean}"),
        ("bare", f"loss:\n  _target_: {grpo}\n"),
        ("lossless", group_mean),
    ):
        (losses / "conf" / "algorithm" / f"{name}.yaml").write_text(text)
    for name, answer in (
        ("syntax", "no_syntax.Loss (SyntaxError: invalid syntax (no_syntax.py, line 2))"),
        ("name", f"(NameError: name 'nowhere' is not defined, {losses}/no_name.py, line 2)"),
        ("fussy", f"KeyError: 'width' ({losses}/odd_losses.py, line {line_of('width')})"),
        ("bare", "the YAML of algorithm bare has no section advantage; give it one with a _target_"),
        ("lossless", "`algorithm.loss` is missing"),
    ):
        assert run(monkeypatch, losses, f"algorithm={name}") == 2, name
        said = capfd.readouterr().err
        assert answer in said
        assert said.count("\n") == 1
    assert not (losses / "results").exists()
    assert (
        steadymoe(
            monkeypatch,
            "run",
            "--cfg",
            "job",
            *TWO_STEPS,
            f"hydra.searchpath=[file://{losses}/conf]",
            "algorithm=bare",
            "advantage=group_mean",
        )
        == 0
    )  # an advantage that is chosen stands in for the section


def test_what_is_silent_is_told_of_whole_columns_alone() -> None:
    learned = pd.DataFrame({"step": [1, 2], "reward": [0.0, 0.5], "grad_norm": [0.0, 0.1]})
    assert outcome.silent(learned) is None
    assert outcome.silent(learned.assign(grad_norm=0.0)) == "gradient norm 0 in every update"
    assert outcome.silent(learned.assign(reward=0.0)) == "reward 0 in every step"
    assert outcome.silent(learned * 0) == "reward 0 in every step, gradient norm 0 in every update"
    assert outcome.silent(learned.assign(grad_norm=float("nan"))) is None
    assert outcome.silent(learned[:0]) is None
    keyed = learned.assign(arm="a", seed=0)
    rows = [keyed.assign(seed=seed, grad_norm=norm) for seed, norm in ((0, 0.0), (1, 0.2), (2, 0.0))]
    long = pd.concat(rows).melt(id_vars=["arm", "seed", "step"], var_name="metric")
    assert outcome.findings_of_arms(long) == ["nothing to learn from: a (seed 0, 2): gradient norm 0 in every update"]


def test_an_error_of_the_suite_itself_has_no_place_in_a_users_code() -> None:
    with pytest.raises(AttributeError) as caught:
        outcome.reason(None)  # type: ignore[arg-type]
    here = caught.value.__traceback__
    assert here is not None
    assert blame.users_code(caught.value) == f"{__file__}, line {here.tb_lineno}"
    caught.value.__traceback__ = here.tb_next  # as the suite catches it
    assert blame.users_code(caught.value) is None
    assert blame.failure(caught.value).endswith("\nAttributeError: 'NoneType' object has no attribute 'get'")


def test_an_error_inside_a_package_is_placed_where_the_user_called_it() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert caught.value.__traceback__ is not None
    assert blame.failure(caught.value).endswith(f" ({__file__}, line {caught.value.__traceback__.tb_lineno})")
