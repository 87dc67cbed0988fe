"""What a paper asks of figures and tables: captions next to them, its names, its style sheet, its width.

``with used(Paper(columns=1)):`` draws and writes figures that way.
"""

from __future__ import annotations  # pandas takes half a second, and `steadymoe report --help` needs none of it

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadymoe import conf
from steadymoe.bench.support import external, files
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import nearest, visible

if TYPE_CHECKING:
    import pandas as pd

OPTIONS = ("caption", "names", "style", "columns")


@dataclass(frozen=True)
class Paper:
    """How figures are drawn and arms are named."""

    caption: bool = False
    """Whether a figure's caption is part of the image; else it is a text file beside it."""
    columns: int | None = None
    """The width of every figure, in columns of a page: 1 or 2; None for each figure's own."""
    sheet: Mapping[str, Any] = field(default_factory=dict)
    """Settings of matplotlib on top of ours."""
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
    parser.add_argument("--style", metavar="SHEET", help="a matplotlib style sheet, file or name, over the default")
    parser.add_argument("--columns", type=int, choices=(1, 2), help="width of all figures, in columns of a page")


def given(arguments: argparse.Namespace) -> Paper:
    """Return what the options say. Raises UserError for a wrong value."""
    own = _names(arguments.names) if arguments.names else {}
    names = own if arguments.names == "" else published() | own
    sheet = _sheet(arguments.style) if arguments.style is not None else {}
    return Paper(arguments.caption, arguments.columns, sheet, names, tuple(own))


def _names(text: str) -> dict[str, str]:
    pairs = [item.rpartition("=") for item in text.split(",")]
    names = {old.strip(): visible(new.strip()) for old, _, new in pairs}
    if not all(old and new for old, new in names.items()) or len(names) < len(pairs):
        raise UserError(f"--names takes grpo=GRPO,gspo=GSPO, each name once; got {visible(text)!r}")
    return names


def _sheet(text: str) -> dict[str, Any]:
    """Return the settings of style sheets, by file or by matplotlib's name, joined by commas. Raises UserError."""
    import matplotlib as mpl
    import matplotlib.style

    found: dict[str, Any] = {}
    for name in text.split(","):
        if name in mpl.style.library:
            found |= dict(mpl.style.library[name].items())
        elif Path(name).is_file():
            found |= _read_sheet(Path(name))
        else:
            hint = nearest(name, mpl.style.available, "matplotlib.style.available")
            raise UserError(f"--style: there is neither a file nor a matplotlib style {visible(name)!r}; {hint}")
    if found.get("text.usetex"):
        raise UserError("--style: text.usetex is not supported, because names of arms are not LaTeX; leave it out")
    found.pop("backend", None)
    return found


def _read_sheet(path: Path) -> dict[str, Any]:
    import matplotlib as mpl

    try:
        lines = files.read_bytes(path).decode().splitlines()
        keys = [key.strip() for line in lines if (key := line.partition("#")[0].partition(":")[0]).strip()]
        if unknown := [key for key in keys if key not in mpl.rcParams]:  # matplotlib itself only warns
            raise ValueError(f"{unknown[0]!r} is not a matplotlib setting")
        return dict(mpl.rc_params_from_file(path, fail_on_error=True, use_default_template=False).items())
    except (OSError, ValueError) as error:
        raise UserError(f"--style: {visible(path)}: {visible(' '.join(str(error).split()))}") from error


def scale(own: Sequence[str] = ("legend.fontsize", "font.size")) -> float:
    """Return the size of a style sheet's text in multiples of ours, 7 points."""
    sizes = [current().sheet[key] for key in own if isinstance(current().sheet.get(key), int | float)]
    return float(sizes[0]) / 7 if sizes else 1.0
