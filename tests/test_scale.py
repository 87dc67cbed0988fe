"""What a command does grows no faster than the runs: operations are counted, and nothing is timed."""

import importlib.metadata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import many_runs
import pandas as pd
import pytest

from steadymoe.bench.report import folders, report_page, tables
from steadymoe.bench.report.results import Results
from steadymoe.bench.runs import compose, dry, identity, provenance, run_folder, status
from steadymoe.bench.support import files, source

FEW, MANY = 10, 60


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Number of runs → a results folder with so many."""
    folders = {n: tmp_path_factory.mktemp(f"runs{n}") for n in (FEW, MANY)}
    for n, folder in folders.items():
        many_runs.make(folder, n)
    return folders


class Calls:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.counts = monkeypatch, Counter[str]()

    def of(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return function(*args, **kwargs)

        self.monkeypatch.setattr(owner, name, counted)

    def during(self, function: Callable[[], Any]) -> Counter[str]:
        self.counts.clear()
        function()
        return Counter(self.counts)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_status_reads_each_file_once_and_looks_for_shared_code_once(results: dict[int, Path], calls: Calls) -> None:
    calls.of(files, "opened")
    calls.of(source, "find")
    with provenance.unchanging():
        few, many = (calls.during(lambda n=n: status.main(["--results", str(results[n])])) for n in (FEW, MANY))
    assert few["find"] == many["find"] > 0
    assert (many["opened"] - few["opened"]) % (MANY - FEW) == 0
    assert many["opened"] - few["opened"] <= 6 * (MANY - FEW)  # run.json and five tables


def test_next_command_sees_changed_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYMOE_PATH", str(tmp_path))
    config = {"algorithm": {"loss": {"_target_": "own_loss.Own"}}}
    hashes = []
    for number in (1, 2):
        (tmp_path / "own_loss.py").write_text(f"class Own:\n    number = {number}\n")
        with provenance.unchanging():
            hashes += [provenance.code_hash(config), provenance.code_hash(config)]
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]
    assert None not in hashes


def test_points_that_differ_in_values_are_composed_once(tmp_path: Path, calls: Calls) -> None:
    words = ["algorithm=grpo,gspo", "model=micro", "experiment_name=x", f"results_dir={tmp_path}"]
    compose.plan([*words, "seed=0,1"], True)  # fills the caches of this process
    calls.of(hydra, "compose")
    calls.of(importlib.metadata, "version")

    def looked_at(n: int) -> None:
        runs = compose.plan([*words, f"seed=range({n})"], True)
        dry.lines(runs, {run.folder: run_folder.read_state(run.folder) for run in runs}, 0)

    counted = [calls.during(lambda n=n: looked_at(n)) for n in (5, 30)]
    assert counted[0] == counted[1]


def test_path_labels_look_at_each_path_once(calls: Calls) -> None:
    calls.of(identity, "_tail")
    counts = []
    for n in (10, 100):
        paths = [f"/data/{number:03}/start.safetensors" for number in range(n)]
        counts.append(
            calls.during(lambda paths=paths: [identity.shortener(paths)(path) for path in paths[:1]])["_tail"]
        )
    assert counts[1] == 10 * counts[0] > 0


@pytest.mark.check
def test_an_export_holds_a_few_runs_at_a_time(results: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_RUNS_AT_ONCE", 4)
    runs = folders.ended_runs(results[FEW], "many")
    pieces = list(folders.tidy(runs))
    assert len({str(piece.dtypes.to_dict()) for piece in pieces}) == 1
    assert max(len(piece[["arm", "seed"]].drop_duplicates()) for piece in pieces) == 4
    monkeypatch.setattr(folders, "_RUNS_AT_ONCE", FEW)
    whole = pd.concat(folders.tidy(runs), ignore_index=True)
    pd.testing.assert_frame_equal(pd.concat(pieces, ignore_index=True), whole)
    monkeypatch.setattr(folders, "_RUNS_AT_ONCE", 4)
    exported = pd.read_parquet(report_page.export(results[FEW], "many", "parquet"))
    pd.testing.assert_frame_equal(exported, whole)
    text = pd.read_csv(report_page.export(results[FEW], "many", "csv"), dtype={"value": str})
    assert text["value"].astype(float).tolist() == whole["value"].tolist()


def test_report_reads_each_number_once_for_any_number_of_arms(results: dict[int, Path], calls: Calls) -> None:
    loaded = {n: Results.load(results[n], "many") for n in (FEW, MANY)}
    calls.of(tables, "run_numbers")

    def of(n: int) -> None:
        steps, runs = loaded[n].joined["steps"], loaded[n].runs
        tables.summary(steps, runs)
        tables.head_to_head(steps, loaded[n].joined["evaluations"])

    few, many = (calls.during(lambda n=n: of(n)) for n in (FEW, MANY))
    assert few == many
