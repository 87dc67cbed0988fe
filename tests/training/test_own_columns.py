"""Columns from outside the checkout: numbers that a loss reports of itself, and a user's metrics."""

import itertools
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builds import ROOT
from fixtures import Said, grpo_by, on_path, write_all
from small_runs import PROPORTIONAL, SMALL, assert_resumes, finished, planned, scalars, tables, trainer, updated
from torch import Tensor

from steadymoe.algorithms import Batch, Surrogate
from steadymoe.algorithms.batch import summed
from steadymoe.algorithms.grpo import GRPO
from steadymoe.algorithms.parts import joined
from steadymoe.bench.check import properties
from steadymoe.bench.check.batches import part, ragged
from steadymoe.bench.report import archive, report_page
from steadymoe.bench.runs import compose, execute, loggers, provenance, record
from steadymoe.bench.schema import ConfigError
from steadymoe.bench.support import atomic_files, external
from steadymoe.bench.support.findings import CheckFailed
from steadymoe.bench.training import columns, own_metrics, token_metrics

LOSS = """from dataclasses import dataclass, replace
from steadymoe.algorithms.grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class Mine(GRPO):
    def surrogate(self, batch):
        ratio_BT = self.ratio_of(batch)
        numbers = {"above": ratio_BT > 1, "copy": ratio_BT, "rows": len(ratio_BT), "nan": ratio_BT.sum() * float("nan")}
        return replace(super().surrogate(batch), numbers=numbers)
"""
METRICS = '''from steadymoe.bench.training.own_metrics import Metric


def above(update):
    """Share of response tokens whose ratio is above 1."""
    return update.batch.logprobs_BT > update.batch.get("old_logprobs_BT")


def moved(update):
    """Share of routes that changed."""
    return (update.now.routes_LBFK != update.old_routes_LMFK).double().mean()


METRICS = [Metric(above, label="tokens above 1", unit="share"), Metric(moved, over_updates="largest")]
'''
ABOVE = ["loss/above", "own/above"]


@dataclass(frozen=True, kw_only=True)
class Reports(GRPO):
    """GRPO with numbers: of a test."""

    reports: Any

    def surrogate(self, batch: Batch) -> Surrogate:
        return replace(super().surrogate(batch), numbers=self.reports(batch))


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on STEADYMOE_PATH with a loss that reports numbers, and metrics."""
    folder = tmp_path / "mine"
    write_all(folder, {"my_losses.py": LOSS, "my_metrics.py": METRICS})
    write_all(folder, {"conf/algorithm/mine.yaml": grpo_by("my_losses.Mine")})
    monkeypatch.chdir(tmp_path)
    on_path(monkeypatch, folder, "my_losses")
    own_metrics._load.cache_clear()
    yield folder
    monkeypatch.delenv(external.VARIABLE, raising=False)
    own_metrics._load.cache_clear()
    own_metrics.load()


# --- the numbers of a loss ---------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(0, 6), (0, 2, 6), (0, 1, 3, 6)])
def test_parts_report_the_same_numbers_as_the_whole(cuts: tuple[int, ...]) -> None:
    batch = ragged()
    scalar = torch.tensor(0.1)
    loss = Reports(reports=lambda part: {"hot": part.logprobs_BT > -1, "x": part.logprobs_BT, "c": scalar, "p": 0.25})
    parts = [loss(part(batch, torch.arange(first, last))) for first, last in itertools.pairwise(cuts)]
    found = token_metrics.of_numbers("loss", joined(parts).numbers)
    mask_BT = batch.mask_BT.bool()
    logprobs_N = batch.logprobs_BT.detach()[mask_BT]
    assert found["loss/hot"] == (logprobs_N > -1).double().sum() / len(logprobs_N)
    assert 0 < found["loss/hot"] < 1
    assert found["loss/x"].item() == pytest.approx(logprobs_N.double().mean().item(), rel=1e-12)
    assert found["loss/c"] == scalar.double()  # to the bit
    assert found["loss/p"] == 0.25
    assert not any(values.requires_grad for values in found.values())


def test_scalars_average_over_the_tokens_of_the_parts_that_report_them() -> None:
    one, other = torch.tensor([[1, 1, 1]]), torch.tensor([[1, 0, 0]])
    parts = [summed({"x": 2.0, "first": 5}, one), summed({"x": 6.0, "last": torch.tensor(True)}, other)]
    outputs = [replace(Reports(reports=lambda _: {})(ragged()), numbers=each) for each in parts]
    found = token_metrics.of_numbers("loss", joined(outputs).numbers)
    assert {name: value.item() for name, value in found.items()} == {"loss/x": 3.0, "loss/first": 5.0, "loss/last": 1.0}
    without = summed({"x": torch.inf}, torch.zeros(1, 3))
    assert without["x"].tolist() == [0.0, 0.0]  # a micro-batch without a token adds nothing
    for number, recorded in ((torch.inf, torch.inf), (-1e200, -torch.inf), (2.0**99, 2.0**99)):
        assert token_metrics.of_numbers("loss", summed({"x": number}, one))["loss/x"].item() == recorded


WRONG = {
    "the number x must be a scalar or have the shape (B, T) = (6, 5); got (6,)": {"x": torch.zeros(6)},
    "the number x must be real, a scalar or a tensor; got str": {"x": "1"},
    "the number x must be real, a scalar or a tensor; got Tensor": {"x": torch.tensor(1j)},
    "got '../x'": {"../x": 1.0},
    "at most 40; got 'xxx": {"x" * 41: 1.0},
    "got '3'": {3: 1.0},
    "numbers must be a dict of at most 16 scalars": {f"x{number}": 1.0 for number in range(17)},
    "numbers must be a dict": [1.0],
}


@pytest.mark.parametrize("message", WRONG)
def test_invalid_number_fails_in_one_line_in_loss_and_check(message: str) -> None:
    loss = Reports(reports=lambda _: WRONG[message])
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        loss(ragged())
    assert "\n" not in str(refused.value)
    with pytest.raises(CheckFailed, match=re.escape(message)):
        properties.of(loss)["shapes"]()


def test_check_accepts_numbers_unless_they_read_padding() -> None:
    good = properties.of(Reports(reports=lambda batch: {"hot": batch.logprobs_BT > -1, "nan": torch.nan}))
    for name in ("shapes", "gradient", "padding", "masked tokens", "order", "micro-batches", "no tokens"):
        good[name]()
    careless = properties.of(Reports(reports=lambda batch: {"mean": batch.logprobs_BT.mean()}))
    with pytest.raises(CheckFailed, match="reports another mean"):
        careless["padding"]()


def test_micro_batches_record_the_numbers_of_the_whole(tmp_path: Path, mine: Path) -> None:
    whole = updated(trainer(tmp_path, "algorithm=mine", *PROPORTIONAL))
    split = updated(trainer(tmp_path, "algorithm=mine", *PROPORTIONAL, "microbatch=3"))
    for one, other in zip(whole, split, strict=True):
        assert one.overall["loss/rows"] == 16
        assert 1 < other.overall["loss/rows"] <= 3  # five parts of three rows and one of one
        assert one.overall["loss/copy"].item() == pytest.approx(other.overall["loss/copy"].item(), rel=1e-5)
        assert one.overall["loss/nan"].isnan()
    assert whole[0].overall["own/moved"] == 0
    assert whole[1].overall["loss/copy"] != 1


# --- runs --------------------------------------------------------------------------------------------


def test_run_with_own_columns_resumes_bit_for_bit_and_exports_them(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = assert_resumes(mine.parent, 5, "algorithm=mine", "microbatch=3")
    updates, steps = (record.read_table(made.folder, table) for table in ("updates", "steps"))
    assert len(updates) == 12
    for table in (updates, steps):
        assert (table["loss/above"] == table["own/above"]).all()  # the same mask, by both ways
        assert table["loss/nan"].isna().all()
    assert updates["loss/above"].between(0, 1).all()
    assert updates["loss/above"].nunique() > 4
    assert updates.groupby("step")["loss/copy"].mean().tolist() == pytest.approx(steps["loss/copy"].tolist())
    assert updates["loss/copy"].tolist() == pytest.approx(updates["token_ratio_mean"].tolist(), rel=1e-6)
    assert updates.groupby("step")["own/moved"].max().tolist() == steps["own/moved"].tolist()
    facts = record.known(made.folder)
    assert facts["metrics"]["my_metrics"].startswith("files:")
    assert facts["own_columns"]["own/above"]["meaning"] == "Share of response tokens whose ratio is above 1."
    assert made.command.startswith(f"{external.VARIABLE}={mine} ")

    assert columns.label("own/above") == "tokens above 1"
    monkeypatch.delenv(external.VARIABLE)  # what was recorded is read without its code
    results = mine.parent / "whole"
    tidy = pd.read_parquet(report_page.export(results, None, "parquet"))
    for metric in ABOVE:
        rows = tidy[tidy["metric"] == metric]
        assert rows[rows["update"].isna()]["value"].tolist() == steps[metric].tolist()
        assert rows[rows["update"].notna()]["value"].tolist() == updates[metric].tolist()
    experiment = made.config.experiment_name
    report_page.keep(results, experiment, mine.parent / "kept")
    kept = archive.load(mine.parent / "kept", experiment)["steps"]
    assert kept[kept["metric"] == "own/moved"]["value"].tolist() == steps["own/moved"].tolist()
    (spec,) = (each for each in report_page.figures_of(experiment) if each.id == "fig18")
    report_page.draw(spec, results, experiment, ["svg"])
    assert (results / "figures" / f"{experiment}-fig18-own_numbers.svg").is_file()


def test_a_number_that_only_some_updates_report_is_null_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = planned(tmp_path), iter(range(100))

    def some(self: GRPO, batch: Batch) -> Surrogate:
        number = next(seen)
        return replace(plain(self, batch), numbers={"even": number} if number % 4 == 0 else {})

    plain = GRPO.surrogate
    monkeypatch.setattr(GRPO, "surrogate", some)
    assert execute.execute(made) == "finished"
    assert record.read_table(made.folder, "updates")["loss/even"].dropna().tolist() == [0, 4, 8]
    steps = record.read_table(made.folder, "steps")
    assert steps[["step", "loss/even"]].dropna().to_numpy().tolist() == [[1, 0], [3, 4], [5, 8]]


def test_too_many_columns_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = planned(tmp_path), iter(range(10_000))

    def more(self: GRPO, batch: Batch) -> Surrogate:
        return replace(plain(self, batch), numbers={f"x{next(seen)}": 1.0 for _ in range(16)})

    plain = GRPO.surrogate
    monkeypatch.setattr(GRPO, "surrogate", more)
    assert execute.execute(made) == "failed"
    assert "a run may have at most 64 columns from its loss and own metrics" in record.known(made.folder)["error"]


@pytest.mark.usefixtures("mine")
def test_metric_does_not_change_other_numbers(whole: compose.Run, tmp_path: Path) -> None:
    made = finished(tmp_path)
    assert made.config_hash == whole.config_hash
    assert not {"metrics", "own_columns"} & record.known(whole.folder).keys()
    for table in ("updates", "steps"):
        one, other = (tables(run.folder)[table] for run in (made, whole))
        assert set(one) - set(other) == {"own/above", "own/moved"}
        pd.testing.assert_frame_equal(one[list(other)], other)


# --- a user's metrics --------------------------------------------------------------------------------


def test_editing_a_metric_but_not_another_module_makes_runs_stale(mine: Path) -> None:
    (made,) = compose.plan([*SMALL, "algorithm=grpo"])
    facts = execute._facts(made)
    assert provenance.difference(facts) == provenance.Difference(None, None, None)
    (mine / "more_metrics.py").write_text("METRICS = []\n")
    assert provenance.difference(facts).code is None
    (mine / "my_metrics.py").write_text(METRICS.replace(" > ", " >= "))
    assert provenance.difference(facts).code == "other code of its metrics"
    (mine / "my_metrics.py").unlink()
    assert provenance.difference(facts).code is None
    assert "code of its metrics is missing" in (provenance.difference(facts).unknown or "")
    assert execute._facts(compose.plan([*SMALL, "measure=little"])[0]).get("metrics") is None


REFUSED = {
    "there is already a column reward": METRICS.replace("moved", "reward"),
    "there is already a column above": METRICS.replace("METRICS = [", "METRICS = [Metric(above), "),
    "over_updates of moved must be mean, largest or least; got 'most'": METRICS.replace("largest", "most"),
    "moved needs a docstring": METRICS.replace('"""Share of routes that changed."""', ""),
    "a metric is a function with a short ASCII name; got '<lambda>'": "{}\nMETRICS = [Metric(lambda update: 1.0)]",
    "must define METRICS, a list of steadymoe.bench.training.own_metrics.Metric": "METRICS = [print]",
    "ZeroDivisionError: division by zero": "1 / 0",
    "SystemExit: 3": "import sys\nsys.exit(3)",
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_metric_is_refused_before_anything_is_written(message: str, mine: Path, refused: Said) -> None:
    (mine / "my_metrics.py").write_text(REFUSED[message].replace("{}", METRICS))
    said = refused("run", *SMALL)
    assert said.startswith(f"steadymoe: {mine / 'my_metrics.py'}")
    assert message in said
    assert not (mine.parent / "results").exists()


def test_shadowed_module_is_refused(mine: Path) -> None:
    (mine / "my_metrics.py").rename(mine / "my-metrics.py")
    with pytest.raises(ConfigError, match=r"my-metrics.py is not a valid module name, or shadows another module"):
        own_metrics.load()


def test_metric_of_the_wrong_shape_fails_the_run_in_one_line(mine: Path) -> None:
    (mine / "my_metrics.py").write_text(METRICS.replace(").double().mean()", ").double()"))
    made = planned(mine.parent)
    assert execute.execute(made) == "failed"
    error = record.known(made.folder)["error"].splitlines()[-1]
    assert error.startswith("ValueError: the number moved must be a scalar or have the shape (B, T) = ")


def test_odd_columns_are_ignored_and_too_many_damage_a_table(whole: compose.Run, tmp_path: Path) -> None:
    folder = shutil.copytree(whole.folder, tmp_path / "run")
    path = folder / "steps.parquet"
    recorded = pq.read_table(path)
    odd = ["loss/<script>", "own/a b", "loss/", "other/x", "loss/a/b", f"own/{'x' * 41}"]

    def write(names: list[str]) -> None:
        table = recorded
        for name in names:
            table = table.append_column(name, pa.array([1e200] * len(recorded)))
        atomic_files.write(path, partial(pq.write_table, table))

    write(odd)
    assert list(record.read_table(folder, "steps")) == list(columns.TABLES["steps"])
    assert record.own_columns(folder) == []
    write(["loss/x"])
    assert "loss/x" in record.read_table(folder, "steps")
    with pytest.raises(record.Damaged, match=r"loss/x has a number beyond"):
        record.read_tables(folder, record.known(folder))
    write([f"loss/x{number}" for number in range(65)])
    with pytest.raises(record.Damaged, match="more than 64 columns of its own"):
        record.read_table(folder, "steps")


def test_example_metric_in_the_docs_works(mine: Path) -> None:
    text = (ROOT / "docs" / "your_algorithm.md").read_text()
    (example,) = re.findall(r"```python\n(from steadymoe\.bench\.training\.own_metrics.*?)```", text, re.DOTALL)
    (mine / "my_metrics.py").write_text(example)
    (metric,) = own_metrics.load().values()
    batch = replace(ragged(), entropy_BT=torch.where(ragged().mask_BT.bool(), 2.0, 0.0).double())
    output = Reports(reports=lambda _: {})(batch)
    update = own_metrics.Update(batch, output, None, None)  # type: ignore[arg-type]
    measured: dict[str, Tensor] = own_metrics.measured({metric.column.name: metric}, update)
    assert {name: value.item() for name, value in measured.items()} == {"own/unsure": 1.0}


def test_loggers_get_own_columns(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = planned(tmp_path, "log=tensorboard").config
    rows = {"steps": [{"step": 1, "loss/x": 1.5}], "updates": [{"step": 1, "update": 1, "own/y": 2.5}]}
    with loggers.sending(config, tmp_path, resumed=False) as send:
        send(rows)
    assert scalars(tmp_path) == {"steps/loss/x": {1: [1.5]}, "updates/own/y": {1: [2.5]}}
