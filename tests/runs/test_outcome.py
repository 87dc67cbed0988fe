"""What a user is told of a loss that learns nothing, breaks or runs away; through the command line, at tiny size."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from fixtures import Said, write_all
from small_runs import SMALL

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
TWO_STEPS = [*SMALL, "updates=4", "cold_start.check_every=1", "evaluation.every=4", "results_dir=results"]
GROUP_MEAN = "advantage:\n  _target_: steadymoe.algorithms.advantages.GroupMean\n"


def loss(target: str) -> str:
    return f"loss:\n  _target_: {target}\n{GROUP_MEAN}"


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user's own losses, each with a config of its own, in which `steadymoe` is called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_losses", raising=False)
    texts = {name.lower(): loss(f"odd_losses.{name}") for name in ("Silent", "Broken", "Runaway", "Fussy")}
    texts["leaving"] = loss("odd_losses.Leaving\n  error: SystemExit")
    configs = {f"conf/algorithm/{name}.yaml": text for name, text in texts.items()}
    write_all(tmp_path, {"odd_losses.py": LOSSES, **configs})
    return tmp_path


def line_of(text: str) -> int:
    return 1 + next(number for number, line in enumerate(LOSSES.splitlines()) if text in line)


@pytest.fixture
def run(losses: Path, ran: Said) -> Said:
    """What ``steadymoe run`` says for two steps of one of them."""
    return lambda *words, code=0: ran("run", *TWO_STEPS, f"hydra.searchpath=[file://{losses}/conf]", *words, code=code)


@pytest.mark.usefixtures("no_figures")
def test_outcome_names_silent_and_diverged_runs_and_user_errors(losses: Path, run: Said, ran: Said) -> None:
    said = run("algorithm=silent")
    assert "1 finished" in said
    assert "nothing to learn from: silent seed=0: gradient norm 0 in every update\n" in said
    assert "diverged: runaway seed=0: not finite at step 1, update 1\n" in run("algorithm=runaway")
    said, place = run("algorithm=broken", code=1), f"{losses}/odd_losses.py, line {line_of('batch.logprobs_BT @')}"
    (line,) = [each for each in said.splitlines() if each.startswith("steadymoe: failed: RuntimeError: ")]
    assert line.endswith(f" ({place})")
    assert place in ran("status", "--results", "results")
    told = "Nothing to learn from: silent (seed 0): gradient norm 0 in every update."
    assert told in ran("report", "--results", "results", "--format", "svg")
    assert told in (losses / "results" / "report.html").read_text()


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.check)])
def test_loss_that_exits_fails_only_its_own_run(
    launcher: str, losses: Path, monkeypatch: pytest.MonkeyPatch, ran: Said
) -> None:
    monkeypatch.setenv("STEADYMOE_PATH", str(losses))
    said = ran("run", "-m", *TWO_STEPS, f"hydra/launcher={launcher}", "algorithm=leaving,silent", code=1)
    assert "1 failed, 1 finished" in said
    place = f"({losses}/odd_losses.py, line {line_of('raise {')})"
    (line,) = [each for each in said.splitlines() if each.startswith("steadymoe: failed: ")]
    assert line.startswith("steadymoe: failed: SystemExit: 0")
    assert line.endswith(place)
    for error in ("KeyboardInterrupt", "Bare") if launcher == "basic" else ():
        words = ["algorithm=leaving", f"algorithm.loss.error={error}", f"results_dir=results/{error}"]
        assert place in ran("run", *TWO_STEPS, *words, code=1)


def test_wrong_target_or_missing_section_fails_in_one_line_before_any_run(losses: Path, run: Said) -> None:
    grpo = "loss:\n  _target_: steadymoe.algorithms.grpo.GRPO\n"
    texts = {"syntax": loss("no_syntax.Loss"), "name": loss("no_name.Loss"), "bare": grpo, "lossless": GROUP_MEAN}
    write_all(losses / "conf" / "algorithm", {f"{name}.yaml": text for name, text in texts.items()})
    write_all(losses, {"no_syntax.py": "x = 1\ndef broken(:\n", "no_name.py": "x = 1\nx = nowhere + 1\n"})
    for name, answer in (
        ("syntax", "no_syntax.Loss (SyntaxError: invalid syntax (no_syntax.py, line 2))"),
        ("name", f"(NameError: name 'nowhere' is not defined, {losses}/no_name.py, line 2)"),
        ("fussy", f"KeyError: 'width' ({losses}/odd_losses.py, line {line_of('width')})"),
        ("bare", "the YAML of algorithm bare has no section advantage"),
        ("lossless", "`algorithm.loss` is missing"),
    ):
        said = run(f"algorithm={name}", code=2)
        assert answer in said
        assert said.count("\n") == 1
    assert not (losses / "results").exists()
    run("--cfg", "job", "algorithm=bare", "advantage=group_mean")  # what is chosen stands in for the section


def test_only_all_zero_columns_are_reported_as_silent() -> None:
    learned = pd.DataFrame({"step": [1, 2], "reward": [0.0, 0.5], "grad_norm": [0.0, 0.1]})
    assert outcome.silent(learned) is None
    assert outcome.silent(learned.assign(grad_norm=0.0)) == "gradient norm 0 in every update"
    assert outcome.silent(learned.assign(reward=0.0)) == "reward 0 in every step"
    assert outcome.silent(learned * 0) == "reward 0 in every step, gradient norm 0 in every update"
    assert outcome.silent(learned.assign(grad_norm=float("nan"))) is None
    assert outcome.silent(learned[:0]) is None
    keyed = learned.assign(arm="a", seed=0)
    rows = [keyed.assign(run=f"s{seed}", seed=seed, grad_norm=norm) for seed, norm in ((0, 0.0), (1, 0.2), (2, 0.0))]
    wide = pd.concat(rows).set_index("run").reindex(columns=["step", *outcome.READ, "arm", "seed"])  # ``Results.wide``
    assert outcome.findings_of_arms(wide) == ["nothing to learn from: a (seed 0, 2): gradient norm 0 in every update"]


def test_suite_error_has_no_location_in_user_code() -> None:
    with pytest.raises(AttributeError) as caught:
        outcome.reason(None)  # type: ignore[arg-type]
    here = caught.value.__traceback__
    assert here is not None
    assert blame.users_code(caught.value) == f"{__file__}, line {here.tb_lineno}"
    caught.value.__traceback__ = here.tb_next  # as the suite catches it
    assert blame.users_code(caught.value) is None
    assert blame.failure(caught.value).endswith("\nAttributeError: 'NoneType' object has no attribute 'get'")


def test_package_error_is_located_at_the_users_call() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert caught.value.__traceback__ is not None
    assert blame.failure(caught.value).endswith(f" ({__file__}, line {caught.value.__traceback__.tb_lineno})")
