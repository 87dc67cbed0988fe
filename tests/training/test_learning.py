"""Reinforcement works: held-out accuracy rises by more than its noise, for every algorithm by itself."""

import os
from pathlib import Path

import pytest
from fixtures import CORE_SIX

from steadymoe import algorithms
from steadymoe.bench.report import folders, tables, write
from steadymoe.bench.report.results import Results
from steadymoe.bench.runs import compose, execute, record
from steadymoe.bench.statistics import estimates


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of pytest, so that a cold start is trained once; the suite locks what is made."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "learning"


def rise(folder: Path) -> estimates.Estimate:
    """Held-out accuracy after the last step minus before the first, paired: the same prompts and the same draws."""
    table = record.read_table(folder, "evaluations")
    before, after = (table.loc[table["step"] == step, "score"].to_numpy() for step in (0, table["step"].max()))
    # Prompts are the replicates of a claim on one run.
    return estimates.over_seeds((after - before).tolist(), may_bootstrap=False)


@pytest.mark.parametrize("algorithm", CORE_SIX)
def test_algorithm_raises_held_out_accuracy_beyond_noise(results: Path, algorithm: str) -> None:
    words = ["experiment=every_algorithm", f"algorithm={algorithm}", "seed=0", "updates=32", "evaluation.every=32"]
    (run,) = compose.plan([*words, "measure=little", "task.max_operands=3", f"results_dir={results}"])
    assert execute.execute(run) == "finished"
    assert rise(run.folder).low > 0


@pytest.mark.check
@pytest.mark.parametrize("algorithm", algorithms.names())
def test_algorithm_raises_accuracy_in_the_runs_of_make_check(algorithm: str) -> None:
    """Reads what `make check` has just run into ``results/``."""
    runs = folders.read_runs(Path(__file__).parents[2] / "results", "every_algorithm")
    ours = runs[runs["algorithm"] == algorithm]
    assert sorted(ours["seed"]) == [0, 1, 2]
    assert min(rise(Path(folder)).low for folder in ours["folder"]) > 0


def test_committed_runs_cover_every_algorithm_and_none_collapsed() -> None:
    recorded = Results.load(Path(__file__).parents[2] / "results" / "reference", "every_algorithm")
    table = write.to_numbers(tables.summary(recorded.joined["steps"], recorded.runs))
    assert set(table["arm"]) == set(algorithms.names())
    assert (table["n"] == 3).all()
    assert set(recorded.runs["status"]) == {"finished"}
