"""Columns from outside the checkout: the numbers that a loss reports of itself."""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fixtures import grpo_by, on_path, write_all
from small_runs import assert_resumes, executed, planned

from steadymoe.algorithms import Batch, Surrogate
from steadymoe.algorithms.batch import summed
from steadymoe.algorithms.grpo import GRPO
from steadymoe.algorithms.parts import joined
from steadymoe.bench.check import properties
from steadymoe.bench.check.batches import part, ragged
from steadymoe.bench.check.properties import CheckFailed
from steadymoe.bench.report import report_page
from steadymoe.bench.report.results import Results
from steadymoe.bench.runs import compose, record, run_folder
from steadymoe.bench.support import external, files
from steadymoe.bench.training import columns, token_metrics

LOSS = """from dataclasses import dataclass, replace
from steadymoe.algorithms.grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class Mine(GRPO):
    def surrogate(self, batch):
        ratio_BT = self.ratio_of(batch)
        numbers = {"above": ratio_BT > 1, "copy": ratio_BT, "rows": len(ratio_BT), "nan": ratio_BT.sum() * float("nan")}
        return replace(super().surrogate(batch), numbers=numbers)
"""


@dataclass(frozen=True, kw_only=True)
class Reports(GRPO):
    """GRPO with numbers: of a test."""

    reports: Any

    def surrogate(self, batch: Batch) -> Surrogate:
        return replace(super().surrogate(batch), numbers=self.reports(batch))


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on STEADYMOE_PATH with a loss that reports numbers."""
    folder = tmp_path / "mine"
    write_all(folder, {"my_losses.py": LOSS, "conf/algorithm/mine.yaml": grpo_by("my_losses.Mine")})
    monkeypatch.chdir(tmp_path)
    on_path(monkeypatch, folder, "my_losses")
    return folder


# --- the numbers of a loss ---------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(0, 6), (0, 2, 6), (0, 1, 3, 6)])
def test_parts_report_the_same_numbers_as_the_whole(cuts: tuple[int, ...]) -> None:
    batch = ragged()
    scalar = torch.tensor(0.1)
    loss = Reports(reports=lambda part: {"hot": part.logprobs_BT > -1, "x": part.logprobs_BT, "c": scalar, "p": 0.25})
    parts = [loss(part(batch, torch.arange(first, last))) for first, last in itertools.pairwise(cuts)]
    found = token_metrics.of_numbers(joined(parts).numbers)
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
    found = token_metrics.of_numbers(joined(outputs).numbers)
    assert {name: value.item() for name, value in found.items()} == {"loss/x": 3.0, "loss/first": 5.0, "loss/last": 1.0}
    without = summed({"x": torch.inf}, torch.zeros(1, 3))
    assert without["x"].tolist() == [0.0, 0.0]  # a micro-batch without a token adds nothing
    for number, recorded in ((torch.inf, torch.inf), (-1e200, -torch.inf), (2.0**99, 2.0**99)):
        assert token_metrics.of_numbers(summed({"x": number}, one))["loss/x"].item() == recorded


WRONG: list[tuple[str, Any]] = [
    ("x must .*got \\(6,\\)", {"x": torch.zeros(6)}),
    ("x must .*got str", {"x": "1"}),
    ("x must .*got Tensor", {"x": torch.tensor(1j)}),
    ("'../x'", {"../x": 1.0}),
    ("40", {"x" * 41: 1.0}),
    ("'3'", {3: 1.0}),
    ("16", {f"x{number}": 1.0 for number in range(17)}),
    ("dict", [1.0]),
]


@pytest.mark.parametrize(("named", "numbers"), WRONG)
def test_invalid_number_fails_in_one_line_in_loss_and_check(named: str, numbers: Any) -> None:
    loss = Reports(reports=lambda _: numbers)
    with pytest.raises(ValueError, match=rf"^[^\n]*{named}[^\n]*$"):
        loss(ragged())
    with pytest.raises(CheckFailed, match=named):
        properties.of(loss)["shapes"]()


def test_check_accepts_numbers_unless_they_read_padding() -> None:
    good = properties.of(Reports(reports=lambda batch: {"hot": batch.logprobs_BT > -1, "nan": torch.nan}))
    for name in ("shapes", "gradient", "padding", "masked tokens", "order", "micro-batches", "no tokens"):
        good[name]()
    careless = properties.of(Reports(reports=lambda batch: {"mean": batch.logprobs_BT.mean()}))
    with pytest.raises(CheckFailed, match="reports another mean"):
        careless["padding"]()


# --- runs --------------------------------------------------------------------------------------------


def test_run_with_own_columns_resumes_bit_for_bit_and_exports_them(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = assert_resumes(mine.parent, 5, "algorithm=mine", "microbatch=3")
    updates, steps = (record.read_table(made.folder, table) for table in ("updates", "steps"))
    assert len(updates) == 12
    for table in (updates, steps):
        assert table["loss/nan"].isna().all()
    assert updates["loss/above"].between(0, 1).all()
    assert updates["loss/above"].nunique() > 4
    assert updates["loss/rows"].between(1, 3, inclusive="right").all()  # five parts of three rows and one of one
    assert updates.groupby("step")["loss/copy"].mean().tolist() == pytest.approx(steps["loss/copy"].tolist())
    assert updates["loss/copy"].tolist() == pytest.approx(updates["token_ratio_mean"].tolist(), rel=1e-6)
    assert made.command.startswith(f"{external.VARIABLE}={mine} ")

    monkeypatch.delenv(external.VARIABLE)  # what was recorded is read without its code
    results = mine.parent / "whole"
    tidy = pd.read_parquet(report_page.export(results, None, "parquet"))
    rows = tidy[tidy["metric"] == "loss/above"]
    assert rows[rows["update"].isna()]["value"].tolist() == steps["loss/above"].tolist()
    assert rows[rows["update"].notna()]["value"].tolist() == updates["loss/above"].tolist()
    experiment = made.config.experiment_name
    report_page.keep(results, experiment, mine.parent / "kept")
    kept = Results.load(mine.parent / "kept", experiment).joined["steps"]
    assert kept[kept["metric"] == "loss/above"]["value"].tolist() == steps["loss/above"].tolist()
    (spec,) = (each for each in report_page.figures_of(experiment) if each.id == "fig18")
    report_page.draw(spec, results, experiment, ["svg"])
    assert (results / "figures" / f"{experiment}-fig18-own_numbers.svg").is_file()


def reporting(monkeypatch: pytest.MonkeyPatch, numbers: Callable[[], dict[str, float]]) -> None:
    """Let GRPO report numbers of its own in every update."""
    plain = GRPO.surrogate
    monkeypatch.setattr(GRPO, "surrogate", lambda self, batch: replace(plain(self, batch), numbers=numbers()))


def test_a_number_that_only_some_updates_report_is_null_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = planned(tmp_path), iter(range(100))
    reporting(monkeypatch, lambda: {"even": number} if (number := next(seen)) % 4 == 0 else {})
    assert executed(made) == "finished"
    assert record.read_table(made.folder, "updates")["loss/even"].dropna().tolist() == [0, 4, 8]
    steps = record.read_table(made.folder, "steps")
    assert steps[["step", "loss/even"]].dropna().to_numpy().tolist() == [[1, 0], [3, 4], [5, 8]]


def test_too_many_columns_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = planned(tmp_path), iter(range(10_000))
    reporting(monkeypatch, lambda: {f"x{next(seen)}": 1.0 for _ in range(16)})
    assert executed(made) == "failed"
    assert "a run may have at most 64 columns from its loss" in run_folder.known(made.folder)["error"]


def test_odd_columns_are_ignored_and_too_many_damage_a_table(whole: compose.Run, tmp_path: Path) -> None:
    folder = shutil.copytree(whole.folder, tmp_path / "run")
    path = folder / "steps.parquet"
    recorded = pq.read_table(path)
    odd = ["loss/<script>", "loss/a b", "loss/", "other/x", "loss/a/b", f"loss/{'x' * 41}"]

    def write(names: list[str]) -> None:
        table = recorded
        for name in names:
            table = table.append_column(name, pa.array([1e200] * len(recorded)))
        files.write(path, partial(pq.write_table, table))

    write(odd)
    assert list(record.read_table(folder, "steps")) == list(columns.TABLES["steps"])
    write(["loss/x"])
    assert "loss/x" in record.read_table(folder, "steps")
    with pytest.raises(run_folder.Damaged, match=r"loss/x has a number beyond"):
        record.read_tables(folder, run_folder.known(folder))
    write([f"loss/x{number}" for number in range(65)])
    with pytest.raises(run_folder.Damaged, match="more than 64 columns of its own"):
        record.read_table(folder, "steps")
