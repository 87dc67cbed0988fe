"""The one writer of figures, tables and pages. A file appears whole or not at all.

Cells may be texts, numbers and ``Estimate``: rounding and escaping happen here. The plots themselves are in
``figures/style.py``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from steadymoe.bench.report import latex, paper
from steadymoe.bench.statistics.estimates import Estimate
from steadymoe.bench.support import files
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import markdown, visible, without_formulas

if TYPE_CHECKING:
    from steadymoe.bench.report.figures.style import DataFigure

FORMATS = ("png", "svg", "pdf")
# A longer table of a figure's numbers is written as CSV alone.
_LONGEST = 60
# Of the table of a terminal: rows, and characters of a name.
_MOST_ROWS, _WIDEST = 20, 36
# A number that a table has as text, such as a multiple (``statistics.tolerance.Tolerance``); many digits may be a hash.
_MULTIPLE = re.compile(r"(?:> )?(\d+\.\d+|\d{1,6}|\d(?:\.\d+)?e-\d\d)(?: \[.*\])?(?: \*)?")


def formats(text: str | None) -> list[str]:
    """Return the formats that ``png,svg`` names, all for None. Raises UserError for an unknown one."""
    names = list(FORMATS) if text is None else text.split(",")
    if not set(names) <= set(FORMATS):
        raise UserError(f"--format takes {', '.join(FORMATS)}; got {text}")
    return names


# Files


def text_files(root: Path, texts: Mapping[str, str], below: str = "") -> list[Path]:
    """Write ``texts`` (file name → text) to the folder ``root``, or one below it, and return the paths.

    Nothing is written through a link below ``root``, because a results folder may have been made elsewhere.
    """
    folder = files.folder(root, below)
    for name, text in texts.items():
        files.write(folder / name, partial(Path.write_text, data=text))
    return [folder / name for name in texts]


def figure(
    results: Path, stem: str, drawn: "DataFigure", caption: str = "", formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write a figure to ``results/figures`` in each format and its numbers to ``results/tables``; return the paths.

    ``caption``, what it shows, and the figure's own caption are a text file beside it, unless the paper wants the
    latter in the image.
    """
    folder = files.folder(results, "figures")
    paths = [folder / f"{stem}.{suffix}" for suffix in formats]
    for path in paths:
        files.write(path, partial(drawn.write, suffix=path.suffix[1:]))
    if formats and not paper.current().caption and (text := whole_caption(drawn, caption)):
        paths += text_files(results, {f"{stem}.txt": f"{text}\n"}, "figures")
    is_long = len(drawn.numbers) > _LONGEST
    return paths + table(results, stem, drawn.numbers, caption, ("csv",) if is_long else ("md", "csv", "tex"))


def whole_caption(drawn: "DataFigure", caption: str) -> str:
    """Return what a figure shows, and its own caption; without the latter if that is in the image."""
    own = "" if paper.current().caption else " ".join(drawn.caption.split()).replace(r"\$", "$")
    return f"{caption} {own}".strip()


def table(
    results: Path, stem: str, rows: pd.DataFrame, caption: str = "", kinds: Sequence[str] = ("md", "csv", "tex")
) -> list[Path]:
    """Write a table to ``results/tables``, for people (md, tex) and for programs (csv), and return the paths."""
    below = f"\n\n{caption}\n" if caption else "\n"
    text = {
        "md": lambda: to_markdown(rows) + below,
        "csv": lambda: without_formulas(to_numbers(rows)).to_csv(index=False),
        "tex": lambda: latex.table(rows, rows.map(to_text), caption),
    }
    return text_files(results, {f"{stem}.{kind}": text[kind]() for kind in kinds}, "tables")


def pieces(path: Path, suffix: str, parts: Iterator[pd.DataFrame]) -> None:
    """Write a table that comes in parts as one file; ``suffix`` is parquet or csv. The first part gives the types."""
    if suffix == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            for place, part in enumerate(parts):
                without_formulas(part).to_csv(file, index=False, header=place == 0)
        return
    first = next(parts)
    schema = pa.Schema.from_pandas(first, preserve_index=False)
    with pq.ParquetWriter(path, schema) as writer:
        for part in chain([first] if len(first) else [], parts):
            writer.write_table(pa.Table.from_pandas(part, schema=schema, preserve_index=False))


def html(room: str, template: str, **values: Any) -> str:
    """Return the page ``bench/<room>/<template>``, which fills the blocks of base.html; every value is escaped."""
    places = [jinja2.PackageLoader(f"steadymoe.bench.{name}", ".") for name in (room, "report")]
    environment = jinja2.Environment(
        autoescape=True, loader=jinja2.ChoiceLoader(places), trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.globals["cells"] = _cells
    return environment.get_template(template).render(**values)


def _cells(rows: pd.DataFrame) -> list[list[dict[str, Any]]]:
    """Return the text of each cell, and the number by which a page sorts its column ("" for none)."""

    def cell(value: Any) -> dict[str, Any]:
        number = to_number(value)
        return {"text": to_text(value), "number": "" if isinstance(number, str) or number != number else number}

    return [[cell(value) for value in row] for row in rows.astype(object).to_numpy().tolist()]


# Cells


def to_text(cell: Any) -> str:
    """Return a cell for people: an estimate with its interval, a number to three digits, – for no number."""
    if isinstance(cell, float):
        return "–" if np.isnan(cell) else f"{float(f'{cell:.12g}'):z.3g}"  # a tie is one on every processor
    return str(cell)


def to_number(cell: Any) -> Any:
    """Return the number by which a cell's column is sorted; a text that is none, such as a name, as it is."""
    if isinstance(cell, str) and (multiple := _MULTIPLE.fullmatch(cell)):
        return float(multiple[1])
    return cell.mean if isinstance(cell, Estimate) else cell


def to_markdown(rows: pd.DataFrame) -> str:
    """Return the table for people; every cell is one line and is escaped, so that it shows letter by letter."""
    shown = rows.map(lambda cell: markdown(cell) if isinstance(cell, str) else to_text(cell).replace("<", "\\<"))
    shown = shown.rename(columns=markdown)
    return shown.to_markdown(index=False, disable_numparse=True)


def to_terminal(rows: pd.DataFrame) -> str:
    """Return the first ``_MOST_ROWS`` as text; cells wider than ``_WIDEST`` are wrapped."""
    shown = rows.head(_MOST_ROWS).map(lambda cell: visible(to_text(cell))[: 4 * _WIDEST]).rename(columns=visible)
    more = [f"… and {len(rows) - _MOST_ROWS} more"] if len(rows) > _MOST_ROWS else []
    table = shown.to_markdown(index=False, disable_numparse=True, tablefmt="simple", maxcolwidths=_WIDEST)
    return "\n".join([table, *more])


def to_numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the table for programs: mean, low, high and n of an estimate, each in a column.

    Cells without an estimate stay empty there.
    """
    estimated = [name for name in rows if any(isinstance(cell, Estimate) for cell in rows[name])]
    plain = rows.drop(columns=estimated)
    for column in estimated:
        cells = rows[column].tolist()
        for part in ("mean", "low", "high", "n"):
            plain[f"{column} {part}"] = [getattr(cell, part, None) for cell in cells]
    return plain
