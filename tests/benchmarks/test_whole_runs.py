"""Whole runs, timed: the table of the page is that of the record, and what is timed is a whole run."""

import json
from pathlib import Path

import whole_runs
from small_runs import SMALL

ROOT = Path(__file__).parents[2]


def test_page_shows_what_was_recorded() -> None:
    seconds = json.loads((ROOT / whole_runs.RECORDED).read_text())["seconds"]
    assert whole_runs.table(seconds) in (ROOT / whole_runs.speed.PAGE).read_text()
    taken = {"suite": [3.0, 1.0, 2.0], "TRL": [8.0, 5.0, 4.0]}
    assert "| 2.0              | 2.50  |" in whole_runs.table({"made up": taken})


def test_suite_makes_the_run_anew_from_a_cached_start(tmp_path: Path) -> None:
    whole = whole_runs.suite(" ".join(SMALL), tmp_path, "all")
    ends = []
    for _ in range(2):
        whole()
        (table,) = tmp_path.glob("runs/**/steps.parquet")
        ends.append((table.stat().st_ino, len(list(tmp_path.glob("cold_starts/*.safetensors")))))
    assert ends[0] != ends[1]
    assert [starts for _, starts in ends] == [1, 1]
