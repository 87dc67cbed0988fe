"""Figures of audits: pure functions of ``tables.joined``, estimates over checkpoints; none reads the disk.

Every function takes the rows of one setting, and shows the largest drift in them where it shows one drift.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.audit.gradients import BLOCKS
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.looks import Look
from steadymoe.bench.report.figures.style import DataFigure

QUANTITIES = {"usefulness": "usefulness", "snr": "signal-to-noise ratio", "bias": "bias², rescaled"}
_ROUTINGS = {"free": "free routes", "r2": "old routes (R2)", "r3": "sampler's routes (R3)"}
# The unit of the ratio that an algorithm clips, on the map of bands.
_UNITS = {"grpo": "token ratio (grpo)", "gspo": "sequence ratio (gspo)"}
# With more lines, bands of intervals cover each other: the figure of one drift and the tables have the intervals.
_MOST_BANDS = 6
_DRAWN = ["mean", "low", "high", "n"]


def over_drift(table: pd.DataFrame) -> DataFigure:
    """Usefulness, SNR and bias of each loss over the updates of drift, a column for each routing."""
    whole = _whole(table)
    routings, lines, drifts = _routings(whole), looks.of_lines(whole, "loss"), sorted(whole["k"].unique())
    has_bands = len(lines) <= _MOST_BANDS
    with style.figure_style():
        figure, axes = style.panels(
            3, len(routings), 4.8, style.TWO_COLUMNS if len(routings) > 1 else 4.2, sharex=True, sharey="row"
        )
        for place, axis in enumerate(axes):
            quantity, routing = list(QUANTITIES)[place // len(routings)], routings[place % len(routings)]
            shown = whole[(whole["quantity"] == quantity) & (whole["routing"] == routing)].dropna(subset=["mean"])
            _label(axis, QUANTITIES[quantity], _ROUTINGS[routing], place, len(routings))
            for loss, look in lines.items():
                points = shown[shown["loss"] == loss].sort_values("k").rename(columns={"k": "x"})
                columns = ["x", *_DRAWN] if has_bands else ["x", "mean", "n"]
                marked = Look(look.colour, look.dashes, look.marker, marked=True)
                style.line(axis, loss, points[columns], marked, f"{QUANTITIES[quantity]}, {_ROUTINGS[routing]}")
            axis.set_xscale("symlog", base=2, linthresh=1, linscale=1)
            axis.set_xticks(drifts, [str(k) for k in drifts])
            axis.set_xticks([], minor=True)
            _zero(axis)
            _say_if_empty(axis, shown)
            if place >= 2 * len(routings):
                axis.set_xlabel("k, updates of drift")
        of_bands = "" if has_bands else " Intervals are in the tables."
        shown = whole[whole["quantity"].isin(QUANTITIES)]
        text = _caption(table, shown, "shaded" if has_bands else "") + of_bands
        return style.finish(figure, axes[0], text)


def ranked(table: pd.DataFrame) -> DataFigure:
    """Every loss at one drift by falling usefulness, with SNR, bias and intervals, a mark for each routing."""
    table = _at_last(table)
    whole = _whole(table)
    routings, lines = _routings(whole), looks.of_lines(whole, "loss")
    first = whole[(whole["quantity"] == "usefulness") & (whole["routing"] == routings[0])].set_index("loss")["mean"]
    order = sorted(lines, key=lambda loss: first.get(loss, math.nan) if first.get(loss) == first.get(loss) else -1e9)
    with style.figure_style():
        figure, axes = style.panels(1, 3, 1.2 + 0.19 * len(order), style.TWO_COLUMNS, sharey=True)
        for axis, (quantity, label) in zip(axes, QUANTITIES.items(), strict=True):
            axis.set_xlabel(label)
            for place, routing in enumerate(routings):
                shown = whole[(whole["quantity"] == quantity) & (whole["routing"] == routing)].set_index("loss")
                up = 0.36 * (0.5 - (place + 0.5) / len(routings))
                for row, loss in enumerate(order):
                    if loss in shown.index and shown["mean"].notna()[loss]:
                        _across(axis, row + up, loss, shown.loc[[loss]], lines[loss], _ROUTINGS[routing], label)
            axis.axvline(0, color="#999999", linewidth=0.6, zorder=0)
            _say_if_empty(axis, whole[whole["quantity"] == quantity].dropna(subset=["mean"]))
            axis.grid(visible=False, axis="y")
        for routing in routings:
            axes[0].plot([], [], _mark(routing), color="black", linestyle="none", label=_ROUTINGS[routing])
        axes[0].set_yticks(range(len(order)), order)
        axes[0].set_ylim(-0.6, len(order) - 0.4)
        text = f"k = {_last(table)}. " + _caption(table, whole[whole["quantity"].isin(QUANTITIES)], "bars")
        return style.finish(figure, axes[0], text)


def blocks(table: pd.DataFrame) -> DataFigure:
    """Share of each block of weights in the squared norm of the mean gradient at one drift, stacked, by loss."""
    table = _at_last(table)
    shares = table[table["quantity"].eq("share") & table["cut"].eq("before")].dropna(subset=["mean"])
    named = [name for name in BLOCKS if (shares["block"] == name).any()]
    routings, losses = _routings(shares), sorted(_whole(table)["loss"].unique())
    with style.figure_style():
        figure, axes = style.panels(
            len(routings), 1, 0.9 + 1.3 * len(routings), style.TWO_COLUMNS, sharex=True, sharey=True
        )
        for axis, routing in zip(axes, routings, strict=True):
            axis.set_ylabel(f"share of ‖E g‖²\n{_ROUTINGS[routing]}")
            ends = {True: np.zeros(len(losses)), False: np.zeros(len(losses))}  # above and below 0
            for place, name in enumerate(named):
                mine = shares[(shares["routing"] == routing) & (shares["block"] == name)].set_index("loss")
                heights = np.nan_to_num(mine["mean"].reindex(losses).to_numpy(dtype=float))
                bottoms = np.where(heights >= 0, ends[True], ends[False])
                ends = {up: ends[up] + np.where((heights >= 0) == up, heights, 0.0) for up in ends}
                colour = looks.ramp(place, len(named)).colour
                axis.bar(losses, heights, bottom=bottoms, color=colour, width=0.7, label=name)
                drawn = mine.reindex([loss for loss in losses if loss in mine.index]).reset_index()
                style.note(axis, name, drawn[["loss", *_DRAWN]], f"share, {_ROUTINGS[routing]}")
            _zero(axis)
            axis.grid(visible=False, axis="x")
            axis.tick_params(axis="x", labelrotation=40)
            axis.set_xticks(range(len(losses)), losses, ha="right", rotation_mode="anchor")
        lacking = sorted(set(losses) - set(shares["loss"]))
        without = f" Without a signal, so without a bar: {', '.join(lacking)}." if lacking else ""
        text = f"k = {_last(table)}. " + _caption(table, shares, "") + " Intervals are in the table." + without
        return style.finish(figure, axes[0], text)


def dose(table: pd.DataFrame) -> DataFigure:
    """Usefulness and SNR at one drift over the strength of the sampler's engine, a line for each routing."""
    table = _at_last(table)
    whole = _whole(table)
    routings, losses = _routings(whole), list(looks.of_lines(whole, "loss"))
    drawn = list(QUANTITIES)[:2]
    with style.figure_style():
        width = min(style.TWO_COLUMNS, 1.0 + 2.0 * len(losses))
        figure, axes = style.panels(2, len(losses), 3.4, width, sharex=True, sharey="row")
        for place, axis in enumerate(axes):
            quantity, loss = drawn[place // len(losses)], losses[place % len(losses)]
            shown = whole[(whole["quantity"] == quantity) & (whole["loss"] == loss)].dropna(subset=["mean"])
            _label(axis, QUANTITIES[quantity], loss, place, len(losses))
            for index, routing in enumerate(routings):
                points = shown[shown["routing"] == routing].sort_values("strength").rename(columns={"strength": "x"})
                look = looks.ramp(index, len(routings))
                marked = Look(look.colour, look.dashes, look.marker, marked=True)
                style.line(axis, _ROUTINGS[routing], points[["x", *_DRAWN]], marked, f"{QUANTITIES[quantity]}, {loss}")
            _zero(axis)
            if place >= len(losses):
                axis.set_xlabel("strength of the engine")
        text = f"k = {_last(table)}. " + _caption(table, whole[whole["quantity"].isin(drawn)], "shaded")
        return style.finish(figure, axes[0], text)


def bands(table: pd.DataFrame) -> DataFigure:
    """Usefulness of the token ratio and of the sequence ratio over the width of the band, with the papers' own bands.

    A panel for each drift and routing. The papers' bands are not symmetric, and stand at the geometric mean of their
    widths.
    """
    whole = _whole(table)
    shown = whole[whole["quantity"].eq("usefulness") & whole["clip_low"].gt(0) & whole["clip_high"].gt(0)]
    shown = shown[(shown["k"] > 0) & shown["algorithm"].isin(_on_map(shown))].dropna(subset=["mean"])
    shown = shown.assign(x=np.sqrt(shown["clip_low"] * shown["clip_high"]))
    routings, drifts = _routings(shown), sorted(shown["k"].unique())
    with style.figure_style():
        width = style.TWO_COLUMNS if len(drifts) > 1 else 4.2
        figure, axes = style.panels(len(routings), len(drifts), 0.8 + 1.9 * len(routings), width, sharey=True)
        for place, axis in enumerate(axes):
            routing, k = routings[place // len(drifts)], drifts[place % len(drifts)]
            here = shown[(shown["routing"] == routing) & (shown["k"] == k)].sort_values("x")
            axis.set_title(f"k = {k}, {_ROUTINGS[routing]}")
            for algorithm in _on_map(shown):
                _on_axis(axis, algorithm, here[here["algorithm"] == algorithm], f"k = {k}, {_ROUTINGS[routing]}")
            axis.set_xscale("log")
            _zero(axis)
            axis.set_xlabel("width of the band")
            if place % len(drifts) == 0:
                axis.set_ylabel("usefulness")
        text = _caption(table, shown, "shaded and bars") + " A ratio is clipped outside 1 ± width; outlined: a paper's "
        return style.finish(figure, axes[0], text + "own band [1 − low, 1 + high], at √(low · high).")


def _on_axis(axis: Axes, algorithm: str, here: pd.DataFrame, panel: str) -> None:
    """The line of one unit over symmetric bands, and its marks at the other bands."""
    look, name = looks.of_algorithm(algorithm), _UNITS.get(algorithm, algorithm)
    is_even = here["clip_low"] == here["clip_high"]
    marked = Look(look.colour, look.dashes, look.marker, marked=True)
    style.line(axis, name, here.loc[is_even, ["x", *_DRAWN]], marked, panel)
    for row in here[~is_even].to_dict("records"):
        low, high = style.numbers([row["clip_low"], row["clip_high"]])
        of_axis: Any = {"fmt": "*", "color": look.colour, "markeredgecolor": "black", "markeredgewidth": 0.7}
        bars = None if np.isnan(row["low"]) else [[row["mean"] - row["low"]], [row["high"] - row["mean"]]]
        axis.errorbar(row["x"], row["mean"], bars, markersize=9, elinewidth=0.7, zorder=5, **of_axis)
        axis.annotate(f"{low} / {high}", (row["x"], row["mean"]), (5, 6), textcoords="offset points", fontsize=6)
        drawn = pd.DataFrame([{key: row[key] for key in ("x", *_DRAWN, "clip_low", "clip_high")}])
        style.note(axis, f"{name}, paper", drawn, panel)


def _on_map(table: pd.DataFrame) -> list[str]:
    """The algorithms that have two symmetric bands or more."""
    even = table[table["clip_low"] == table["clip_high"]]
    counts = even.groupby("algorithm")["clip_low"].nunique()
    return sorted(str(name) for name in counts.index[counts > 1])


def _whole(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of losses' whole gradients on the audited rollout, before the norm cut."""
    return table[(table["block"] == "whole") & (table["cut"] == "before") & table["routing"].isin(list(_ROUTINGS))]


def _last(table: pd.DataFrame) -> int:
    return int(table["k"].max())


def _at_last(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the largest drift, and the start's reward."""
    is_reward = (table["quantity"] == "reward") & (table["k"] == 0)
    return table[(table["k"] == _last(table)) | is_reward]


def _routings(table: pd.DataFrame) -> list[str]:
    return [name for name in _ROUTINGS if (table["routing"] == name).any()]


def _mark(routing: str) -> str:
    return dict(zip(_ROUTINGS, ("o", "s", "^"), strict=True))[routing]


def _label(axis: Axes, row: str, column: str, place: int, columns: int) -> None:
    """The words of a grid of panels: of a row on its left, of a column on its top."""
    if place % columns == 0:
        axis.set_ylabel(row)
    if place < columns:
        axis.set_title(column)


def _zero(axis: Axes) -> None:
    axis.axhline(0, color="#999999", linewidth=0.6, zorder=0)


def _say_if_empty(axis: Axes, shown: pd.DataFrame) -> None:
    """Say in the panel why nothing is drawn."""
    if shown.empty:
        axis.text(0.5, 0.7, "undefined: no signal", transform=axis.transAxes, ha="center", color="#444444")


def _across(axis: Axes, height: float, loss: str, row: pd.DataFrame, look: Look, routing: str, label: str) -> None:
    """One estimate as a mark with a horizontal bar."""
    mean, low, high = (float(row[name].iloc[0]) for name in ("mean", "low", "high"))
    bars = None if np.isnan(low) else [[mean - low], [high - mean]]
    mark = _mark({words: name for name, words in _ROUTINGS.items()}[routing])
    axis.errorbar(mean, height, xerr=bars, fmt=mark, color=look.colour, markersize=3.4, elinewidth=0.8)
    style.note(axis, loss, row[_DRAWN], f"{label}, {routing}")


def _caption(table: pd.DataFrame, shown: pd.DataFrame, drawn: str) -> str:
    """The words for n, the interval as ``drawn`` ("shaded", "bars", "" for none), and the reward along the drift."""
    counts = shown.loc[shown["n"] > 0, "n"].astype(int).tolist() or [0]
    most = max(counts)
    said = f"Mean over checkpoints, n = {style.span(counts)}" if most > 1 else "One checkpoint, n = 1"
    if drawn and most != 2:
        interval = "t interval over checkpoints" if most > 1 else "jackknife interval over mini-batches"
        said += f"; {drawn}: 95 % {interval}"
    elif drawn:
        said += "; two checkpoints have no interval"
    rewards = table[table["quantity"] == "reward"].groupby("k")["mean"].agg(["min", "max"])
    of_k = [
        f"{'start' if k == 0 else f'k = {k}'}: {' to '.join(dict.fromkeys(f'{value:.2f}' for value in row))}"
        for k, row in zip(rewards.index, rewards.to_numpy(), strict=True)
    ]
    return f"{said}. Reward of fresh samples at the {', '.join(of_k)}." if of_k else f"{said}."


@dataclass(frozen=True)
class AuditFigure:
    """One figure: its name, its drawing function, and the words for what a table lacks."""

    name: str
    draw: Callable[[pd.DataFrame], DataFigure]
    lacks: Callable[[pd.DataFrame], str | None]
    over_strengths: bool = False
    """Whether it shows all strengths of an engine together."""


def _no_gradients(table: pd.DataFrame) -> str | None:
    whole = _whole(table)
    found = whole[whole["quantity"].isin(QUANTITIES)].dropna(subset=["mean"])
    return "estimates of gradients, as usefulness" if found.empty else None


def _no_shares(table: pd.DataFrame) -> str | None:
    shares = _at_last(table).query("quantity == 'share' and cut == 'before'").dropna(subset=["mean"])
    return "shares of blocks: no gradient has a signal" if shares.empty else None


def _no_doses(table: pd.DataFrame) -> str | None:
    return _no_gradients(table) or ("two strengths of an engine" if table["strength"].nunique() < 2 else None)


def _no_bands(table: pd.DataFrame) -> str | None:
    whole = _whole(table)
    there = whole[(whole["quantity"] == "usefulness") & (whole["k"] > 0)].dropna(subset=["mean"])
    return (
        None
        if _on_map(there)
        else "two symmetric bands of one algorithm with a usefulness at k above 0: steadymoe study run audit_bands"
    )


FIGURES: Mapping[str, AuditFigure] = {
    each.name: each
    for each in (
        AuditFigure("over_drift", over_drift, _no_gradients),
        AuditFigure("ranked", ranked, _no_gradients),
        AuditFigure("blocks", blocks, _no_shares),
        AuditFigure("dose", dose, _no_doses, over_strengths=True),
        AuditFigure("bands", bands, _no_bands),
    )
}
