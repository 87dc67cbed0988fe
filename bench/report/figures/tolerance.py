"""Tolerances of a sweep over a dial: the outcomes over the dial, the threshold, and where each loss crosses it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.report import paper, tolerances
from steadymoe.bench.report.figures import colours, style
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.statistics.estimates import over_seeds
from steadymoe.bench.statistics.tolerance import REFERENCE, SHARE, heights, of_arm
from steadymoe.bench.training import columns


def over_dial(steps: pd.DataFrame) -> DataFigure:
    """Tolerance: held-out accuracy over a dial, and where each loss falls below a share of GRPO's best gain.

    A row for each setting besides the dial; sampled accuracy decides, greedy accuracy stands beside it.
    """
    runs, (dial, *_) = tolerances.levels(steps), tolerances.varying(steps)
    outcomes = [name for name in tolerances.OUTCOMES if runs[name].notna().any()]
    panels = [
        _Panel(ours, outcome, title, tolerances.LABELS[dial], called=f"{title}, {_label(outcome)}" if title else "")
        for title, ours in ((str(panel), ours) for panel, ours in runs.groupby("panel", sort=False))
        for outcome in outcomes
    ]
    names, alone = sorted(set(runs["arm"])), runs["algorithm"].nunique() == 1  # its colour would tell nothing apart
    arms = {name: colours.look(place) for place, name in enumerate(names)} if alone else colours.of_lines(runs)
    gain = f"of the gain of {paper.shown(REFERENCE, REFERENCE)} at its best"
    return _figure(panels, style.beside(len(outcomes)), arms, gain)


def profile(levels: Mapping[str, tuple[pd.DataFrame, str, float | None]]) -> DataFigure:
    """Held-out accuracy over several dials: a panel for each, with the threshold and where each loss crosses it.

    ``levels`` is name → levels, the column of ``tolerances.LABELS`` that they turn, and the ``at`` of ``threshold``.
    """
    panels = [
        _Panel(ours, "sampled", name, tolerances.LABELS[column], at, name if len(levels) > 1 else "")
        for name, (ours, column, at) in levels.items()
    ]
    arms = colours.of_lines(pd.concat([panel.levels for panel in panels]))
    return _figure(panels, style.beside(len(panels)), arms, f"of {REFERENCE}'s gain")


class _Panel(NamedTuple):
    """One outcome over the dial, in one setting."""

    levels: pd.DataFrame
    outcome: str
    title: str
    dial: str
    at: float | None = None
    """See ``statistics.tolerance.threshold``."""
    called: str = ""
    """The panel's name in the figure's numbers, if not the label of its outcome."""


def _label(outcome: str) -> str:
    return columns.label(tolerances.OUTCOMES[outcome])


def _figure(panels: Sequence[_Panel], across: int, arms: Mapping[str, colours.Look], gain: str) -> DataFigure:
    """Draw the panels row by row; ``gain`` names the gain that sets the threshold."""
    rows = len(panels) // across
    counts = [panel.levels.groupby(["arm", "value"])["seed"].nunique() for panel in panels]
    with style.figure_style():
        width, groups = style.ONE_COLUMN if across == 1 else style.TWO_COLUMNS, colours.groups(arms)
        if len(groups) > 1:
            figure, blocks = style.blocks(len(groups), across, 2.0, rows, sharey=True)
        else:
            figure, axes = style.panels(rows, across, 2.0 * rows + 0.3, width, sharey=True)
            blocks = [axes]
        for axes, group in zip(blocks, groups, strict=True):
            for place, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
                _draw(axis, panel, group)
                axis.set_title(panel.title)
                is_labelled = place % across == 0 or panel.outcome != panels[place - 1].outcome
                axis.set_ylabel(_label(panel.outcome) if is_labelled else "")
                below = panels[place + across : place + across + 1]
                axis.set_xlabel("" if below and below[0].dial == panel.dial else panel.dial)
                style.ticks_at(axis, panel.levels["value"], log=panel.levels["value"].min() > 0)
            nothing = pd.DataFrame(columns=["x", "mean", "low", "high", "n"], dtype=float)
            for name in [name for name in group if name not in set(panels[0].levels["arm"])]:  # the legend is its
                style.aside(axes[0], name, nothing, group[name])
        text = (
            f"Mean over seeds, n = {style.span(pd.concat(counts).tolist())}, with a nominal 95 % interval; dotted: the "
            f"start; dashed: the threshold, the start plus {SHARE:.0%} {gain}; ticks below: where each loss first "
            "falls below it."
        )
        return style.finish(figure, axes[0], text)


def _draw(axis: Axes, panel: _Panel, arms: Mapping[str, colours.Look]) -> None:
    """Draw the curves ``arms`` of a panel; of sampled accuracy the threshold and its crossings, too."""
    levels = panel.levels
    names = [name for name in dict.fromkeys(levels["arm"]) if name in arms]
    for place, name in enumerate(names):
        groups = levels[levels["arm"] == name].groupby("value")[panel.outcome]
        points = [{"x": x} | vars(over_seeds(each.dropna().tolist(), bounds=(0, 1))) for x, each in groups]
        beside, label = (place + 0.5) / len(names) - 0.5, panel.called or _label(panel.outcome)
        style.aside(axis, name, pd.DataFrame(points), arms[name], beside, label)
    if panel.outcome != "sampled" or (both := heights(levels, panel.at)) is None:
        return
    for height, dashes in zip(both, (":", "--"), strict=True):
        axis.axhline(height, color="#777777", linestyle=dashes, linewidth=0.8, zorder=0)
    for name in names:
        tolerance, _ = of_arm(levels, name, panel.at)
        if tolerance is not None and np.isfinite(x := tolerance.crossing):
            axis.plot([x, x], [0, 0.05], color=arms[name].colour, transform=axis.get_xaxis_transform())
            crossing = pd.DataFrame([{"x": x, "mean": both[1]}])
            style.note(axis, name, crossing, panel=f"{panel.called} crossing".strip())
