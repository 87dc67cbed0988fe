"""results/trainers: what was recorded of three trainers side by side and of costs, and what the page says of it."""

import re
from pathlib import Path

import pandas as pd

from steadymoe.bench.report import archive

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "results" / "trainers"
LINES = (ROOT / "docs" / "on_your_trainer.md").read_text()
PAGE = " ".join(LINES.split())
RUNS = ["one process", "sharded"]
FIRST = [f"{name}, first step" for name in RUNS]


def test_three_trainers_side_by_side_have_the_columns_that_the_page_says() -> None:
    found = pd.read_csv(RECORDED / "side_by_side.csv").set_index(["table", "column"])
    for runs, pattern in (
        (FIRST, r"by at most (\S+) of its largest value in the first"),
        (RUNS, r"and by at most (\S+)"),
    ):
        (said,) = re.findall(pattern, PAGE)
        assert f"{found[runs].max(axis=None):.1g}" == f"{float(said):.1g}", runs
    assert found[FIRST].max(axis=None) < 2e-4
    for name in ("expert_change_rate", "expert_set_change_rate", "token_any_layer_change_rate"):
        row = found.loc[("updates", name)]
        assert row["largest"] > 0
        assert (row[FIRST] < 1e-6).all(), name
    shown = re.findall(r"^\| `(\w+)` ((?:\| [\d.e-]+ ){5})\|$", LINES, re.MULTILINE)
    assert len(shown) >= 5
    for name, numbers in shown:
        assert [float(each) for each in numbers.split("|")[1:]] == found.loc[("updates", name)].tolist(), name


def test_the_three_runs_stand_on_one_page_and_one_of_them_is_the_suites() -> None:
    everything = archive.load(RECORDED, "side_by_side", foreign=True)["runs"]
    assert sorted(everything["origin"].str.split().str[0].fillna("")) == ["", "trl", "trl"]
    assert everything["arm"].nunique() == 3
    assert set(everything["status"]) == {"finished"}
    own = archive.load(RECORDED, "side_by_side")
    assert own["runs"]["origin"].tolist() == [""]
    assert own["steps"]["arm"].nunique() == 1


def test_the_instruments_cost_less_than_a_tenth() -> None:
    seconds = pd.read_csv(RECORDED / "cost.csv")
    ratios = seconds.drop(columns="trl").div(seconds["trl"], axis=0)
    assert len(ratios) >= 5
    assert ratios["steadymoe"].median() < 1.1
    for name, ratio in ratios.median().items():
        assert f"{ratio:.2f}" in PAGE, name
