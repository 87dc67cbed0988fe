"""HTML pages: a template of any folder of the suite fills the blocks of base.html; every value is escaped."""

from typing import Any

import jinja2
import pandas as pd

from steadymoe.bench.report import tables

_SHARED = "report"  # the folder of base.html, tables.html and sorting.html


def render(room: str, template: str, **values: Any) -> str:
    """The text of the page ``template`` in the folder ``bench/<room>``."""
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(f"steadymoe.bench.{each}", ".") for each in (room, _SHARED)])
    environment = jinja2.Environment(autoescape=True, loader=loader, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.globals["cells"] = cells
    return environment.get_template(template).render(**values)


def cells(table: pd.DataFrame) -> list[list[dict[str, Any]]]:
    """For each cell its text, and the number by which a page sorts its column, or ""."""
    shown = table.map(tables.to_text).to_numpy().tolist()
    numbers = table.map(tables.to_number).to_numpy().tolist()
    return [
        [
            {"text": text, "number": "" if isinstance(number, str) or number != number else number}
            for text, number in zip(*row, strict=True)
        ]
        for row in zip(shown, numbers, strict=True)
    ]
