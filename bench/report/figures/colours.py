"""The colour, line style and mark of a line: an algorithm looks the same in every figure; a variant has open marks.

There are more algorithms than colours that can be told apart, so an algorithm is known by its colour and its line
style together, and in a figure of points by its colour and its mark. A variant of an algorithm (a preset, routing
replay on, another number) keeps the mark, open, and the hue, lighter or darker; its line style is another.
"""

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd

from steadymoe.bench.report import paper

# Okabe and Ito's palette without its yellow (distinguishable without colour vision), and line styles for print.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F"]
STYLES = ["-", "--", "-.", ":"]
Dashes = str | tuple[int, tuple[int, ...]]
# In place of them from the 33rd line on: on and off lengths, in line widths.
_MORE_STYLES: list[Dashes] = [(0, (7, 2, 1, 2, 1, 2)), (0, (9, 4)), (0, (2, 2)), (0, (1, 4))]
_ALL_STYLES: list[Dashes] = [*STYLES, *_MORE_STYLES]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
# The most lines of one panel, and the most that go without marks: more cannot be told apart.
TOGETHER = 8
# How the marks of variants are filled, for a round through the line styles each; the last is that of users' algorithms.
_FILLS = ["none", "left", "bottom", "right", "top"]
# How much white (or, below 0, black) the colours of variants have.
_SHADES = (0.0, 0.45, -0.45, 0.25, -0.25)
# Every shipped algorithm, eight a line: its place gives its look. Algorithms of one line differ in colour, because they
# are compared most. A new algorithm goes to the end, so that no other look changes.
ALGORITHMS = (
    *("grpo", "gspo", "reinforce", "cispo", "vespo", "sapo", "grpo_unclipped", "dppo"),
    *("rspo_grpo", "rspo_gspo", "gepo", "dapo", "minirl", "m2po", "dr_grpo", "dppo_kl"),
    *("opsm", "gspo_token", "reinforce_pp", "aspo", "topr", "rspo", "rloo", "ppo_clip"),
    *("lite_ppo", "luspo", "reinforce_pp_baseline", "gmpo", "fspo", "minpro", "trm", "r2vpo"),
    *("score_centering", "score_centering_tis", "score_centering_mis", "dis", "dis_code", "icepop", "ipo", "mis_po"),
    *("sat", "sat_gspo", "cppo", "flash_reinforce", "r2vpo_fixed", "fspo_dual_clip", "up_grpo", "up_gspo"),
    "gspo_scaled",
)


@dataclass(frozen=True)
class Look:
    """How one line is drawn."""

    colour: str
    dashes: Dashes
    marker: str
    """The mark of a point."""
    marked: bool = False
    """Whether a curve shows the mark too."""
    fill: str = "full"
    """Which part of the mark is filled: a ``fillstyle`` of matplotlib."""

    @property
    def mark(self) -> dict[str, Any]:
        """Return how matplotlib draws the mark."""
        if self.fill == "none":
            return {"marker": self.marker, "markerfacecolor": "white"}
        return {"marker": self.marker, "fillstyle": self.fill, "markerfacecoloralt": "white"}


def look(index: int) -> Look:
    """Return the look of the ``index``-th line, for lines without an order."""
    styles = _MORE_STYLES if index // (len(COLOURS) * len(STYLES)) % 2 else STYLES
    place = index % len(COLOURS) + index // len(COLOURS)  # lines of one colour differ in style and mark
    return Look(COLOURS[index % len(COLOURS)], styles[place % len(styles)], MARKERS[place % len(MARKERS)])


def ordered(names: Iterable[str]) -> dict[str, Look]:
    """Return name → look, for lines in an order: cividis, dark to light."""
    listed = list(names)
    shades = map(mpl.colors.to_hex, mpl.colormaps["cividis"](np.linspace(0, 0.85, len(listed))))
    shown = zip(listed, shades, cycle(STYLES), cycle(MARKERS), strict=False)
    return {name: Look(shade, dashes, marker) for name, shade, dashes, marker in shown}


def of_algorithm(name: str) -> Look:
    """Return the look of an algorithm, the same in every figure.

    A user's own algorithm gets a look from its name: marks filled like no shipped algorithm's, and another colour than
    GRPO's, with which it is compared.
    """
    if name in ALGORITHMS:
        return look(ALGORITHMS.index(name))
    number, colours = zlib.crc32(name.encode()), COLOURS[1:]
    marker = MARKERS[number // 32 % len(MARKERS)]
    return Look(colours[number % len(colours)], STYLES[number // 8 % len(STYLES)], marker, True, _FILLS[-1])


def of_lines(table: pd.DataFrame) -> dict[str, Look]:
    """Return arm → look, in the order of names, numbers in them by size; ``table`` has the columns arm and algorithm.

    Words in the name besides the algorithm name a variant. The same variant of two algorithms has the same shift of
    line style and the same fill of its marks. More than ``TOGETHER`` lines all have marks.
    """
    pairs = table[["arm", "algorithm"]].astype(str).drop_duplicates("arm")
    pairs = pairs.sort_values("arm", key=lambda names: pd.Series(map(_by_size, names), names.index))
    variants = [
        (line, algorithm.partition("@")[0], _variant(paper.recorded(line, algorithm), algorithm))
        for line, algorithm in pairs.to_numpy().tolist()
    ]
    is_full = len({variant for *_, variant in variants}) > len(_ALL_STYLES) * (len(_FILLS) - 1)
    lines = {}
    for line, base, variant in variants:  # if there are too many variants, each algorithm has an order of its own
        order = sorted({other for _, its, other in variants if its == base or not is_full}, key=_by_size)
        lines[line] = _varied(of_algorithm(base), order.index(variant))
    return {line: replace(look, marked=True) for line, look in lines.items()} if len(lines) > TOGETHER else lines


def _by_size(name: str) -> tuple[str | float, ...]:
    """Return a key that sorts names, and numbers in them by size: 2e-4 before 1.6e-3."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", name)
    return tuple(float(part) if place % 2 else part for place, part in enumerate(parts))


def groups(lines: Mapping[str, Look]) -> list[dict[str, Look]]:
    """Return the lines in as few groups as hold ``TOGETHER`` each, of about equal size."""
    count = max(1, -(-len(lines) // TOGETHER))
    names = list(lines)
    ends = [round(len(names) * part / count) for part in range(count + 1)]
    return [{name: lines[name] for name in names[low:high]} for low, high in pairwise(ends)]


def reference(lines: Mapping[str, Look]) -> str:
    """Return the line to compare with: plain GRPO if there is such a line, else the first line."""
    grpo = replace(of_algorithm("grpo"), marked=True)
    return next((name for name, its in lines.items() if replace(its, marked=True) == grpo), next(iter(lines)))


def _variant(name: str, algorithm: str) -> str:
    """Return the words in the name of a line other than its algorithm; "" for the plain algorithm."""
    rest, (base, _, preset) = name.casefold().replace(" ", "_"), algorithm.casefold().partition("@")
    rest = rest.removeprefix(algorithm.casefold()).removeprefix(base)
    return f"{preset}_{rest.strip('_')}".strip("_")


def _varied(plain: Look, index: int) -> Look:
    """Return the look of the ``index``-th variant of ``plain``; index 0 is ``plain`` itself."""
    if index == 0:
        return plain
    style = _ALL_STYLES[(_ALL_STYLES.index(plain.dashes) + index) % len(_ALL_STYLES)]
    shade = _SHADES[index % len(_SHADES)]
    red, green, blue = (part * (1 - abs(shade)) + max(0.0, shade) for part in mpl.colors.to_rgb(plain.colour))
    fill = _FILLS[index // len(_ALL_STYLES) % (len(_FILLS) - 1)]
    return Look(mpl.colors.to_hex((red, green, blue)), style, plain.marker, True, fill)
