"""The writer: cells for people and for programs, and whole files."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from steadymoe.bench.report import latex, write
from steadymoe.bench.statistics.estimates import Estimate
from steadymoe.bench.support.errors import UserError

ROWS = pd.DataFrame(
    {
        "arm_a": ["50 % & more", r"a|b~c^d {e} $f# π²" + "\n<b>"],
        "n": [1, 2],
        "reward": [Estimate(0.5, 0.4, 0.6, 3), Estimate(np.nan, np.nan, np.nan, 0)],
    }
)


def test_csv_has_each_number_in_its_own_column_and_a_cell_without_an_estimate_stays_empty() -> None:
    """Wherever it is: ``tolerances.table`` has one for a loss that never reaches the threshold."""
    rows = pd.DataFrame({"factor": pd.Series([np.nan, Estimate(0.5, 0.4, 0.6, 3), np.nan], dtype=object)})
    numbers = write.to_numbers(rows)
    assert list(numbers) == ["factor mean", "factor low", "factor high", "factor n"]
    assert numbers.iloc[1].tolist() == [0.5, 0.4, 0.6, 3]
    assert numbers.iloc[[0, 2]].isna().all(axis=None)
    assert write.to_numbers(ROWS[:0]).empty
    assert [line.strip("| ") for line in write.to_markdown(rows).splitlines()[2:5]] == ["–", "0.5 [0.4, 0.6]", "–"]


def test_a_table_is_escaped_for_markdown_latex_and_html() -> None:
    line = write.to_markdown(ROWS).splitlines()[-1]
    assert line.count(" | ") == 2
    assert r"a\|b\~c^d {e} $f# π²\\n\<b>" in line
    text_of = latex.table(ROWS, ROWS.map(write.to_text), "of 100 %")
    assert r"\begin{tabular}{lrr}" in text_of
    rows = [text for text in text_of.splitlines() if text.endswith(r"\\")]
    assert all(len(re.findall(r"(?<!\\)&", row)) == 2 for row in rows)
    assert r"arm\_a" in rows[0]
    assert rows[1].startswith(r"50 \% \& more & 1 & 0.5 [0.4, 0.6]")
    assert r"a\textbar{}b\textasciitilde{}c\textasciicircum{}d \{e\} \$f\# $\pi$$^2$" in rows[2]
    assert r"\caption{of 100 \%}" in text_of
    cells = write._cells(ROWS)
    assert [cell["number"] for cell in cells[0]] == ["", 1, 0.5]
    assert [cell["number"] for cell in cells[1]] == ["", 2, ""]


def test_multiples_sort_by_their_number() -> None:
    numbers = {"> 10.60": 10.6, "2.02 [1.79, 2.28] *": 2.02, "0.24 [0.00, > grid]": 0.24, "5e-05": 5e-5, "256": 256.0}
    others = ["not run", "–", "2 or 3", "dapo", "2026-11-26", "12345e678", "356346721234"]
    cells = write._cells(pd.DataFrame({"staleness": [*numbers, *others]}))
    assert [cell["number"] for (cell,) in cells] == [*numbers.values(), *[""] * len(others)]


def test_names_never_become_spreadsheet_formulas(tmp_path: Path) -> None:
    names = ["=1+2", "+cmd", "-2+3+x", "@sum", "grpo", "-0.5", "+"]
    rows = pd.DataFrame({"arm": names, "value": [-1.0] * len(names)})
    write.pieces(tmp_path / "export.csv", "csv", iter([rows]))
    (table,) = write.table(tmp_path, "t", rows, kinds=("csv",))
    for path in (tmp_path / "export.csv", table):
        found = pd.read_csv(path)
        assert found["arm"].tolist() == ["'=1+2", "'+cmd", "'-2+3+x", "'@sum", "grpo", "-0.5", "+"]
        assert found["value"].tolist() == rows["value"].tolist()


def test_files_are_written_atomically_and_formats_are_checked(tmp_path: Path) -> None:
    paths = write.table(tmp_path, "t", ROWS, "A caption.")
    assert [path.name for path in paths] == ["t.md", "t.csv", "t.tex"]
    assert paths[0].read_text().endswith("\n\nA caption.\n")
    pd.testing.assert_frame_equal(pd.read_csv(paths[1])[["arm_a", "n"]], ROWS[["arm_a", "n"]])
    assert write.formats("svg,png") == ["svg", "png"]
    with pytest.raises(UserError, match="gif"):
        write.formats("gif")
