"""Tables for LaTeX."""

from typing import Any

import pandas as pd

from steadymoe.bench.support.text import visible

# Characters that LaTeX reads as commands, and characters that its usual fonts lack.
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
_LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"–": "--", "−": "$-$", "²": "$^2$", "₀": "$_0$", "₁": "$_1$"}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "≥": r"$\geq$", "≤": r"$\leq$"}
_LATEX |= {"π": r"$\pi$", "θ": r"$\theta$", "χ": r"$\chi$"}


def table(rows: pd.DataFrame, texts: pd.DataFrame, caption: str = "") -> str:
    r"""Return a table with ``\usepackage{booktabs}`` from its rows and their texts: text left, numbers right."""
    align = "".join("l" if not len(rows) or isinstance(rows[name].iloc[0], str) else "r" for name in rows)
    shown = texts.map(escape).rename(columns=escape)
    return shown.to_latex(index=False, caption=escape(caption) or None, column_format=align)


def escape(text: Any) -> str:
    r"""Return ``text`` in one line, escaped so that LaTeX prints it letter by letter.

    The end of a row, ``\\``, takes a star or a bracket that follows for its own.
    """
    escaped = "".join(_LATEX.get(letter, letter) for letter in visible(text))
    return f"{{{escaped[0]}}}{escaped[1:]}" if escaped.startswith(("*", "[")) else escaped
