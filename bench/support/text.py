"""Text from recorded data, made harmless for the place that shows it: a terminal, Markdown, a matplotlib
figure, a spreadsheet."""

from __future__ import annotations  # pandas takes half a second, and `steadymoe --help` needs none of it

import difflib
import re
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

# What would break a Markdown table, or begin code, emphasis, a link, a picture, an entity or HTML in one of its cells;
# an underscore between letters begins nothing.
_MARKDOWN = re.compile(r"[\\|<`*\[\]&~]|!(?=\[)|(?<![^\W_])_|_(?![^\W_])")
# The folders of an absolute path that begins a word or a value.
_FOLDERS = re.compile(r"(?:^|(?<=[=:@',\[]))/(?:[^/:@',\]]+/)*(?=[^/])")
# How a formula begins in the cells of a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
# Names that an error lists in full.
_FEW = 8
# Lines of a list that a terminal shows.
_MAX_LINES = 20


def visible(text: Any) -> str:
    """``text`` in one line; a character that does not print (a newline, an escape) appears as Python escapes it."""
    text = str(text)
    if text.isprintable():  # nearly always, and ten times as fast
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def portable(command: str) -> str:
    """``command`` without the folders of this machine: no ``results_dir``, and the last part of any absolute path."""
    try:
        words = shlex.split(command)
    except ValueError:  # not what a shell would take
        return command
    kept = [word for word in words if not word.startswith("results_dir=")]
    return shlex.join(_FOLDERS.sub("", word) for word in kept)


def nearest(name: str, known: Sequence[str], where: str) -> str:
    """Return a hint for an unknown name: all names if they are few, else the nearest three and ``where`` all are."""
    if len(known) <= _FEW:
        return f"choose from {', '.join(known)}"
    section = f"{name.rpartition('.')[0]}."
    shared = section if all(each.startswith(section) for each in known) else ""  # it says nothing of which was meant
    ends = [each.removeprefix(shared) for each in known]
    near = difflib.get_close_matches(name.lower().removeprefix(shared), ends, n=3, cutoff=0.0)
    return f"did you mean {', '.join(shared + end for end in near)}? {where} lists all"


def shortened(lines: Sequence[str]) -> list[str]:
    """Return the first lines, and how many more there are."""
    further = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], *([f"… and {further} more"] if further > 0 else [])]


def markdown(text: Any) -> str:
    """``text`` escaped for a cell of a Markdown table, so that the cell shows it letter by letter."""
    return _MARKDOWN.sub(lambda found: f"\\{found[0]}", visible(text))


def without_mathematics(table: pd.DataFrame) -> pd.DataFrame:
    """``table`` with every ``$`` in its texts as ``\\$``: matplotlib draws that as ``$`` and begins no formula."""
    return _each_text(table, lambda text: text.replace("$", r"\$"))


def as_recorded(table: pd.DataFrame) -> pd.DataFrame:
    """Return the inverse of ``without_mathematics``: the table with the recorded texts."""
    return _each_text(table, lambda text: text.replace(r"\$", "$"))


def all_visible(table: pd.DataFrame) -> pd.DataFrame:
    """``table`` with ``visible`` applied to each of its texts."""
    return _each_text(table, visible)


def without_formulas(table: pd.DataFrame) -> pd.DataFrame:
    """``table`` with an apostrophe before every text that a spreadsheet would run as a formula.

    Numbers stay, and a sign alone, such as a token ``+``, which is no formula.
    """
    return _each_text(table, lambda text: f"'{text}" if _is_formula(text) else text)


def _is_formula(text: str) -> bool:
    if len(text) < 2 or not text.startswith(_FORMULA):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def _each_text(table: pd.DataFrame, change: Callable[[str], str]) -> pd.DataFrame:
    """``table`` with ``change`` applied to every text in it; the same object if no text changes."""
    changed: dict[str, pd.Series] = {}
    for name in table.select_dtypes(["object", "string", "category"]):
        column = table[name]
        values = column if column.dtype == object else column.unique()  # dicts have no order and no hash
        texts = {value for value in values if isinstance(value, str)}
        if any(change(text) != text for text in texts):
            changed[str(name)] = column.astype(object).map(lambda each: change(each) if isinstance(each, str) else each)
    return table.assign(**changed) if changed else table
