"""Which colour, line style and mark a line has: an algorithm's own in every figure, a variant's mark on top.

There are more algorithms than colours that can be told apart, so an algorithm is known by its colour and its line
style together. A variant of an algorithm (a preset, routing replay on, another number) keeps the colour and has
another line style and a mark.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib as mpl
import pandas as pd

# Okabe and Ito's palette, distinguishable without colour vision, without its yellow; and line styles for print.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F"]
STYLES = ["-", "--", "-.", ":"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
# Every shipped algorithm, eight a line: its place gives its look. Those of one line, which are compared most, differ in
# colour. A new algorithm goes to the end, or the looks of others would change.
ALGORITHMS = (
    *("grpo", "gspo", "reinforce", "cispo", "vespo", "sapo", "grpo_unclipped", "dppo"),
    *("rspo_grpo", "rspo_gspo", "gepo", "dapo", "minirl", "m2po", "dr_grpo", "dppo_kl"),
    *("opsm", "gspo_token", "reinforce_pp", "aspo", "topr", "rspo", "rloo", "ppo_clip"),
    *("lite_ppo", "luspo", "reinforce_pp_baseline", "gmpo", "fspo", "minpro", "trm", "r2vpo"),
)
# Choices that are off say nothing in the name of a line: it is the algorithm's plain one.
_OFF = {"off", "none", "exact"}


@dataclass(frozen=True)
class Look:
    """How one line is drawn."""

    colour: str
    dashes: str
    marker: str
    """Of points."""
    marked: bool = False
    """Whether a curve shows the marker too."""


def look(index: int) -> Look:
    """The look of the ``index``-th of things that have no order and are no algorithms."""
    style = STYLES[(index + index // len(COLOURS)) % len(STYLES)]
    return Look(COLOURS[index % len(COLOURS)], style, MARKERS[index % len(MARKERS)])


def ramp(index: int, of: int) -> Look:
    """The same for things that have an order: dark to light of cividis, which reads the same without colour vision."""
    shade = mpl.colormaps["cividis"](0.85 * index / max(1, of - 1))
    return Look(mpl.colors.to_hex(shade), STYLES[index % len(STYLES)], MARKERS[index % len(MARKERS)])


def of_algorithm(name: str) -> Look:
    """The look of an algorithm, the same in every figure; one that is not shipped has a mark, chosen by its name."""
    if name in ALGORITHMS:
        return look(ALGORITHMS.index(name))
    number = zlib.crc32(name.encode())
    colour, style, marker = (
        each[number // divisor % len(each)] for each, divisor in ((COLOURS, 1), (STYLES, 8), (MARKERS, 32))
    )
    return Look(colour, style, marker, marked=True)


def of_lines(table: pd.DataFrame, column: str = "arm") -> dict[str, Look]:
    """The look of each line that ``column`` names, in the order of names; ``table`` has a column ``algorithm`` too.

    What a name says beside the algorithm's is a variant. Variants of one name have one mark throughout the figure.
    """
    pairs = table[[column, "algorithm"]].astype(str).drop_duplicates(column)
    algorithms: Mapping[str, str] = dict(pairs.itertuples(index=False, name=None))
    variants = {name: _variant(name, algorithm) for name, algorithm in sorted(algorithms.items())}
    order = sorted(set(variants.values()) | {""}) if "" in variants.values() else sorted(set(variants.values()))
    return {
        name: _varied(of_algorithm(algorithms[name].partition("@")[0]), order.index(variant))
        for name, variant in variants.items()
    }


def reference(lines: Mapping[str, Look]) -> str:
    """The line that others are compared with: plain GRPO where it is there, otherwise the first."""
    grpo = of_algorithm("grpo")
    return next((name for name, its in lines.items() if its == grpo), next(iter(lines)))


def _variant(name: str, algorithm: str) -> str:
    """What the name of a line says beside its algorithm's; "" for the plain one."""
    said, (base, _, preset) = name.casefold().replace(" ", "_"), algorithm.casefold().partition("@")
    said = said.removeprefix(algorithm.casefold()).removeprefix(base)
    words = [word for word in said.split("_") if word not in _OFF]
    return "_".join([preset, *words]).strip("_")


def _varied(plain: Look, index: int) -> Look:
    """The ``index``-th variant of what is drawn as ``plain``, which is the first."""
    if index == 0:
        return plain
    style = STYLES[(STYLES.index(plain.dashes) + index) % len(STYLES)]
    return Look(plain.colour, style, MARKERS[(MARKERS.index(plain.marker) + index) % len(MARKERS)], marked=True)
