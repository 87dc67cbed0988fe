"""What a paper asks of figures and tables: captions next to them, its names, its width.

``with used(Paper(columns=1)):`` draws and writes figures that way.
"""

from __future__ import annotations  # pandas takes half a second, and `steadymoe report --help` needs none of it

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from steadymoe import conf
from steadymoe.bench.support import external
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import nearest, visible

if TYPE_CHECKING:
    import pandas as pd

OPTIONS = ("caption", "names", "columns")


@dataclass(frozen=True)
class Paper:
    """How figures are drawn and arms are named."""

    caption: bool = False
    """Whether a figure's caption is part of the image; else it is a text file beside it."""
    columns: int | None = None
    """The width of every figure, in columns of a page: 1 or 2; None for each figure's own."""
    names: Mapping[str, str] = field(default_factory=dict)
    """An algorithm or arm → its name in figures and tables."""
    asked: tuple[str, ...] = ()
    """Those of ``names`` that the user gave; each must be there."""
    stacked: bool = False
    """Whether panels stand below each other, for a narrow screen."""


_in_use = [Paper()]


def current() -> Paper:
    """Return the paper in use."""
    return _in_use[-1]


@contextmanager
def used(paper: Paper) -> Iterator[None]:
    """Draw and name as ``paper`` says, until the block ends."""
    _in_use.append(paper)
    try:
        yield
    finally:
        _in_use.pop()


# Names


def published() -> dict[str, str]:
    """Return algorithm → its name in papers: the line ``# Name: …`` of its YAML, yours too."""
    texts = {name: conf.text("algorithm", name) for name in conf.names("algorithm")}
    texts |= {
        path.stem: path.read_text() for folder in external.confs() for path in sorted(folder.glob("algorithm/*.yaml"))
    }
    found = {name: re.search(r"^# Name: (.+)$", text, re.MULTILINE) for name, text in texts.items()}
    return {name: visible(line[1].strip()) for name, line in found.items() if line}


def shown(arm: str, algorithm: str) -> str:
    """Return the name of an arm of ``algorithm`` in figures and tables."""
    names = current().names
    word = next((word for word in (algorithm, algorithm.partition("@")[0]) if word in names), None)
    if arm in names or word is None or not arm.startswith(word):
        return names.get(arm, arm)
    return names[word] + arm[len(word) :]


def recorded(name: str, algorithm: str) -> str:
    """Return the inverse of ``shown``."""
    names = current().names
    words = (algorithm, algorithm.partition("@")[0])
    full = [arm for arm, its in names.items() if its == name and arm.startswith(words[1])]
    start = next((word for word in words if word in names and name.startswith(names[word])), None)
    if full or start is None:
        return full[0] if full else name
    return start + name[len(names[start]) :]


def rename(runs: pd.DataFrame) -> pd.DataFrame:
    """Return ``runs`` with their arms as ``shown``; they have the columns arm and algorithm.

    Raises UserError for two arms of one name.
    """
    pairs = runs[["arm", "algorithm"]].drop_duplicates("arm").to_numpy().tolist()
    names = {arm: shown(arm, algorithm) for arm, algorithm in pairs}
    for arm, name in names.items():
        if alike := [other for other, its in names.items() if its == name and other != arm]:
            raise UserError(f"{visible(arm)} and {visible(alike[0])} would both be {name!r}; rename one with --names")
    return runs.assign(arm=runs["arm"].map(names))


def refuse_unknown(arms: pd.DataFrame) -> None:
    """Raise UserError unless everything that ``--names`` names is an arm or an algorithm of ``arms``."""
    known = sorted(set(arms["arm"]) | set(arms["algorithm"]))
    for name in current().asked:
        if name not in known:
            hint = nearest(name, [visible(each) for each in known], "a report without --names")
            raise UserError(f"--names: there is no loss or arm {visible(name)!r}; {hint}")


# The command line


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``OPTIONS``."""
    parser.add_argument("--caption", action="store_true", help="draw captions into the images, not into text files")
    parser.add_argument(
        "--names",
        metavar="A=X,B=Y",
        help='names in figures and tables (default: those of papers, like GRPO; "" for those you type, like grpo)',
    )
    parser.add_argument("--columns", type=int, choices=(1, 2), help="width of all figures, in columns of a page")


def given(arguments: argparse.Namespace) -> Paper:
    """Return what the options say. Raises UserError for a wrong value."""
    own = _names(arguments.names) if arguments.names else {}
    names = own if arguments.names == "" else published() | own
    return Paper(arguments.caption, arguments.columns, names, tuple(own))


def _names(text: str) -> dict[str, str]:
    pairs = [item.rpartition("=") for item in text.split(",")]
    names = {old.strip(): visible(new.strip()) for old, _, new in pairs}
    if not all(old and new for old, new in names.items()) or len(names) < len(pairs):
        raise UserError(f"--names takes grpo=GRPO,gspo=GSPO, each name once; got {visible(text)!r}")
    return names
