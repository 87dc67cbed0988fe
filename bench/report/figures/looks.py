"""The colour, line style and mark of a line: an algorithm looks the same in every figure; a variant adds a mark.

There are more algorithms than colours that can be told apart, so an algorithm is known by its colour and its line
style together. A variant of an algorithm (a preset, routing replay on, another number) keeps the colour and has
another line style and a mark.
"""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import matplotlib as mpl
import pandas as pd

# Okabe and Ito's palette without its yellow (distinguishable without colour vision), and line styles for print.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F"]
STYLES = ["-", "--", "-.", ":"]
# In place of them from the 33rd line on: on and off lengths, in line widths.
_MORE_STYLES = [(0, (7, 2, 1, 2, 1, 2)), (0, (9, 4)), (0, (2, 2)), (0, (1, 4))]
Dashes = str | tuple[int, tuple[int, ...]]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
# Every shipped algorithm, eight a line: its place gives its look. Algorithms of one line differ in colour, because they
# are compared most. A new algorithm goes to the end, so that no other look changes.
ALGORITHMS = (
    *("grpo", "gspo", "reinforce", "cispo", "vespo", "sapo", "grpo_unclipped", "dppo"),
    *("rspo_grpo", "rspo_gspo", "gepo", "dapo", "minirl", "m2po", "dr_grpo", "dppo_kl"),
    *("opsm", "gspo_token", "reinforce_pp", "aspo", "topr", "rspo", "rloo", "ppo_clip"),
    *("lite_ppo", "luspo", "reinforce_pp_baseline", "gmpo", "fspo", "minpro", "trm", "r2vpo"),
    *("score_centering", "score_centering_tis", "score_centering_mis", "dis", "dis_code", "icepop", "ipo", "mis_po"),
    *("sat", "sat_gspo", "cppo", "flash_reinforce", "r2vpo_fixed", "fspo_dual_clip"),
)
# These words in the name of a line mean that a choice is off; the line is the plain algorithm.
_OFF = {"off", "none", "exact"}


@dataclass(frozen=True)
class Look:
    """How one line is drawn."""

    colour: str
    dashes: Dashes
    marker: str
    """The mark of a point."""
    marked: bool = False
    """Whether a curve shows the mark too."""

    def with_marks(self) -> "Look":
        """Return the look of a curve that shows the marks."""
        return replace(self, marked=True)


def look(index: int) -> Look:
    """Return the look of the ``index``-th line, for lines without an order."""
    styles = _styles(index // (len(COLOURS) * len(STYLES)))
    style = styles[(index + index // len(COLOURS)) % len(styles)]
    return Look(COLOURS[index % len(COLOURS)], style, MARKERS[index % len(MARKERS)])


def ramp(index: int, of: int) -> Look:
    """Return the look of the ``index``-th of ``of`` ordered lines: cividis, dark to light."""
    shade = mpl.colormaps["cividis"](0.85 * index / max(1, of - 1))
    return Look(mpl.colors.to_hex(shade), STYLES[index % len(STYLES)], MARKERS[index % len(MARKERS)])


def ordered(names: Iterable[str]) -> dict[str, Look]:
    """Return name → look, for lines in an order."""
    listed = list(names)
    return {name: ramp(place, len(listed)) for place, name in enumerate(listed)}


def of_algorithm(name: str) -> Look:
    """Return the look of an algorithm, the same in every figure. A user's own algorithm gets a look from its name."""
    if name in ALGORITHMS:
        return look(ALGORITHMS.index(name))
    number = zlib.crc32(name.encode())
    marker = MARKERS[number // 32 % len(MARKERS)]
    return Look(COLOURS[number % len(COLOURS)], STYLES[number // 8 % len(STYLES)], marker, marked=True)


def of_lines(table: pd.DataFrame, column: str = "arm") -> dict[str, Look]:
    """Return line → look, in the order of names: ``table`` has the line's name in ``column``, and its ``algorithm``.

    Words in the name besides the algorithm name a variant. The same variant of two algorithms has the same shift of
    line style and mark.
    """
    pairs = table[[column, "algorithm"]].astype(str).drop_duplicates(column).sort_values(column)
    variants = [(line, algorithm, _variant(line, algorithm)) for line, algorithm in pairs.to_numpy().tolist()]
    order = sorted({variant for _, _, variant in variants})
    return {
        line: _varied(of_algorithm(algorithm.partition("@")[0]), order.index(variant))
        for line, algorithm, variant in variants
    }


def reference(lines: Mapping[str, Look]) -> str:
    """Return the line to compare with: plain GRPO if there is such a line, else the first line."""
    grpo = of_algorithm("grpo")
    return next((name for name, its in lines.items() if its == grpo), next(iter(lines)))


def _styles(round_: int) -> list[Dashes]:
    """Return the line styles of the algorithms of one round through all colours and line styles."""
    return [*_MORE_STYLES] if round_ % 2 else [*STYLES]


def _variant(name: str, algorithm: str) -> str:
    """Return the words in the name of a line besides its algorithm; "" for the plain algorithm."""
    rest, (base, _, preset) = name.casefold().replace(" ", "_"), algorithm.casefold().partition("@")
    rest = rest.removeprefix(algorithm.casefold()).removeprefix(base)
    words = [word for word in rest.split("_") if word not in _OFF]
    return "_".join([preset, *words]).strip("_")


def _varied(plain: Look, index: int) -> Look:
    """Return the look of the ``index``-th variant of ``plain``; index 0 is ``plain`` itself."""
    if index == 0:
        return plain
    styles = _styles(plain.dashes not in STYLES)
    style = styles[(styles.index(plain.dashes) + index) % len(styles)]
    marker = MARKERS[(MARKERS.index(plain.marker) + index) % len(MARKERS)]
    return Look(plain.colour, style, marker, marked=True)
