"""docs/columns.md: every column of every table, from the objects of ``columns``."""

import pyarrow as pa

from steadymoe.bench.measurement import columns
from steadymoe.bench.measurement.columns import Column

_ABOUT = {
    "steps": "One row a rollout. Beside these it has every column of `updates` but `update`, reduced as said there.",
    "updates": "One row a gradient update. *In steps* says how a step reduces its updates.",
    "layers": "One row for each MoE layer and gradient update, and for the rollout before the first update.",
    "evaluations": "One row for each held-out prompt and evaluation.",
}


def to_markdown(table: str) -> str:
    """The columns of one table as docs/columns.md shows them; of steps without the columns of updates."""
    in_steps = table == "updates"
    of_updates = {each.name for each in columns.UPDATE} if table == "steps" else set()
    shown = [each for name, each in columns.TABLES[table].items() if name not in of_updates]
    header = ["column", "meaning", "unit", "warns", *(["in steps"] if in_steps else [])]
    rows = [
        [f"`{each.name}`", each.meaning, _unit(each), _warns(each)]
        + ([each.over_updates if each in columns.UPDATE else ""] if in_steps else [])
        for each in shown
    ]
    lines = [header, ["---"] * len(header), *([cell.replace("|", "&#124;") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _unit(column: Column) -> str:
    return "0 to 1" if column.share else column.unit


def _warns(column: Column) -> str:
    """Nothing for keys, counts and timings."""
    if column.type != pa.float64() or column.name.endswith(("_seconds", "_per_second")):
        return ""
    return "falls" if column.worse == "lower" else "rises"


def page() -> str:
    """docs/columns.md."""
    head = """# Columns

Made by `python -m steadymoe.bench.measurement.columns > docs/columns.md`, from the objects of
`bench/measurement/columns.py`. What the quantities are and where they come from: [metrics.md](metrics.md). A column
that a run does not have is null. *Warns* says what an early warning looks for. Columns that end in `_seconds` or
`_per_second` differ between two runs of one config; no other column does. Archives (`results/*/data`) keep of the
steps: KEPT.
"""
    kept_names = ", ".join(f"`{name}`" for name in columns.TABLES["steps"] if name in columns.kept())
    parts = [f"## {table}\n\n{_ABOUT[table]}\n\n{to_markdown(table)}\n" for table in columns.TABLES]
    return "\n".join([head.replace("KEPT", kept_names), *parts])
