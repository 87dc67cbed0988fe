"""Figures of audits: pure functions of ``tables.joined``, estimates over checkpoints; none reads the disk.

Every function takes the rows of one setting. A figure of one drift shows the largest.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.audit import clip_atlas, clips
from steadymoe.bench.audit.gradients import BLOCKS
from steadymoe.bench.report import paper
from steadymoe.bench.report.figures import CannotDraw, looks, style
from steadymoe.bench.report.figures.looks import Look
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.statistics.estimates import Estimate

QUANTITIES = {"usefulness": "usefulness", "snr": "signal-to-noise ratio", "bias": "bias², rescaled"}
_ROUTINGS = {"free": "free routes", "r2": "old routes (R2)", "r3": "sampler's routes (R3)"}
_MARKERS = dict(zip(_ROUTINGS, ("o", "s", "^"), strict=True))
# The unit of the ratio that an algorithm clips, on the map of bands.
_UNITS = {"grpo": "token ratio ({})", "gspo": "sequence ratio ({})"}
# With more lines, bands of intervals cover each other: the figure of one drift and the tables have the intervals.
_MAX_BANDS = 6
# Smaller clip shares are not drawn.
_MIN_SHARE = 3e-4
_DRAWN = ["mean", "low", "high", "n"]
Labels = Mapping[Any, str]


def _grid(
    table: pd.DataFrame,
    rows: tuple[str, Labels],
    columns: tuple[str, Labels],
    lines: tuple[str, Mapping[Any, tuple[str, Look]]],
    x: tuple[str, str],
    height: float,
    panel: str = "{row}, {column}",
    ylabel: str = "{row}",
    has_intervals: bool = True,
) -> tuple[DataFigure, dict[str, Axes]]:
    """Draw ``mean`` over a column: a panel per value of two columns, a line per value of a third.

    ``rows``, ``columns`` and ``lines`` are the name of a column and the labels of its values (with looks, for lines),
    ``x`` is a column and its label. ``panel`` names panels in the figure's table. Returns the axes by these names.
    """
    width = style.TWO_COLUMNS if len(columns[1]) > 1 else 4.2
    figure, axes = style.panels(len(rows[1]), len(columns[1]), height, width, sharex=True, sharey="row")
    cells = [(row, column) for row in rows[1] for column in columns[1]]
    named: dict[str, Axes] = {}
    for place, (axis, (row, column)) in enumerate(zip(axes, cells, strict=True)):
        labels = {"row": rows[1][row], "column": columns[1][column]}
        named[panel.format(**labels)] = axis
        here = table[(table[rows[0]] == row) & (table[columns[0]] == column)].dropna(subset=["mean"]).sort_values(x[0])
        for value, (label, look) in lines[1].items():
            points = here[here[lines[0]] == value].rename(columns={x[0]: "x"})
            drawn = points[["x", *(_DRAWN if has_intervals else ["mean", "n"])]]
            style.line(axis, label, drawn, replace(look, marked=True), panel.format(**labels))
        axis.axhline(0, color="#999999", linewidth=0.6, zorder=0)
        _explain_empty(axis, here)
        if place < len(columns[1]):
            axis.set_title(labels["column"])
        axis.set(xlabel=x[1], ylabel=ylabel.format(**labels))
        axis.label_outer()
    return figure, named


def over_drift(table: pd.DataFrame) -> DataFigure:
    """Draw usefulness, SNR and bias over the updates of drift, a line for each loss, a column for each routing."""
    whole = _gradients(table)
    drifts = sorted(whole["k"].unique())
    lines = {label: (label, look) for label, look in looks.of_lines(whole, "loss").items()}
    has_bands = len(lines) <= _MAX_BANDS
    rows, columns, x = ("quantity", QUANTITIES), ("routing", _routings(whole)), ("k", "k, updates of drift")
    with style.figure_style():
        figure, axes = _grid(whole, rows, columns, ("loss", lines), x, 4.8, has_intervals=has_bands)
        text = _caption(table, whole, "shaded" if has_bands else "")
        text += "" if has_bands else " Intervals are in the tables."
        style.finish(figure, next(iter(axes.values())), text)
        for axis in figure.axes:
            axis.set_xscale("symlog", base=2, linthresh=1, linscale=1)
            axis.set_xticks(drifts, [str(k) for k in drifts])
            axis.set_xticks([], minor=True)
        return figure


def ranked(table: pd.DataFrame) -> DataFigure:
    """Draw every loss at one drift by falling usefulness, with SNR, bias and intervals, a mark for each routing."""
    table = _at_last(table)
    whole = _gradients(table)
    routings, lines = _routings(whole), looks.of_lines(whole, "loss")
    means = whole[(whole["quantity"] == "usefulness") & (whole["routing"] == next(iter(routings)))].set_index("loss")
    order = means["mean"].reindex(list(lines)).sort_values(na_position="first", kind="stable").index.tolist()
    with style.figure_style():
        figure, axes = style.panels(1, 3, 1.2 + 0.19 * len(order), style.TWO_COLUMNS, sharey=True)
        for axis, (quantity, label) in zip(axes, QUANTITIES.items(), strict=True):
            here = whole[whole["quantity"] == quantity].dropna(subset=["mean"]).set_index(["routing", "loss"])
            for place, routing in enumerate(routings):
                up = 0.36 * (0.5 - (place + 0.5) / len(routings))
                for row, loss in enumerate(order):
                    if (routing, loss) in here.index:
                        mean, low, high, n = here[_DRAWN].loc[(routing, loss)].to_numpy()
                        estimate = Estimate(mean, low, high, int(n))
                        look = replace(lines[loss], marker=_MARKERS[routing])
                        style.dot(axis, loss, row + up, estimate, look, f"{label}, {routings[routing]}")
            axis.axvline(0, color="#999999", linewidth=0.6, zorder=0)
            axis.set_xlabel(label)
            style.named_rows(axis, order)
            _explain_empty(axis, here)
        for routing, name in routings.items():
            axes[0].plot([], [], _MARKERS[routing], color="black", linestyle="none", label=name)
        text = f"k = {_last(table)}. " + _caption(table, whole, "bars")
        return style.finish(figure, axes[0], text)


def blocks(table: pd.DataFrame) -> DataFigure:
    """Draw the share of each block of weights in the squared norm of the mean gradient at one drift, stacked."""
    table = _at_last(table)
    shares = table[table["quantity"].eq("share") & table["cut"].eq("before")].dropna(subset=["mean"])
    if shares.empty:
        raise CannotDraw("it lacks shares of blocks: no gradient has a signal")
    named = [name for name in BLOCKS if (shares["block"] == name).any()]
    colours = [look.colour for look in looks.ordered(named).values()]
    routings, losses = _routings(shares), sorted(_whole(table)["loss"].unique())
    height = 0.9 + 1.3 * len(routings)
    with style.figure_style():
        figure, axes = style.panels(len(routings), 1, height, style.TWO_COLUMNS, sharex=True, sharey=True)
        for axis, (routing, label) in zip(axes, routings.items(), strict=True):
            here = shares[shares["routing"] == routing].sort_values("loss", kind="stable")
            style.stacked(
                axis, here.pivot(index="loss", columns="block", values="mean").reindex(losses)[named], colours
            )
            for name in named:
                style.note(axis, name, here.loc[here["block"] == name, ["loss", *_DRAWN]], f"share, {label}")
            axis.set_ylabel(f"share of ‖E g‖²\n{label}")
            axis.set_xticks(range(len(losses)), losses, rotation=40, ha="right", rotation_mode="anchor")
        lacking = sorted(set(losses) - set(shares["loss"]))
        without = f" Without a signal, so without a bar: {', '.join(lacking)}." if lacking else ""
        text = f"k = {_last(table)}. " + _caption(table, shares, "") + " Intervals are in the table." + without
        return style.finish(figure, axes[0], text)


def bands(table: pd.DataFrame) -> DataFigure:
    """Draw usefulness of the token ratio and of the sequence ratio over the width of the band.

    A panel for each drift and routing. The papers' bands are not symmetric, and stand at the geometric mean of their
    widths.
    """
    whole = _whole(table)
    known = whole[whole["quantity"].eq("usefulness") & whole["clip_low"].gt(0) & whole["clip_high"].gt(0)]
    known = known[known["k"] > 0].dropna(subset=["mean"])
    widths = known[known["clip_low"] == known["clip_high"]].groupby("algorithm")["clip_low"].nunique()
    names = widths.index[widths > 1].tolist()
    if not names:
        raise CannotDraw("it lacks two symmetric bands of one algorithm with a usefulness at k above 0")
    shown = known[known["algorithm"].isin(names)]
    shown = shown.assign(width=np.sqrt(shown["clip_low"] * shown["clip_high"])).sort_values("width", kind="stable")
    is_even = shown["clip_low"] == shown["clip_high"]
    routings, drifts = _routings(shown), {k: f"k = {k}" for k in sorted(shown["k"].unique())}
    lines = {name: (_UNITS.get(name, "{}").format(paper.shown(name, name)), looks.of_algorithm(name)) for name in names}
    with style.figure_style():
        figure, axes = _grid(
            shown[is_even], ("routing", routings), ("k", drifts), ("algorithm", lines), ("width", "width of the band"),
            0.8 + 1.9 * len(routings), "{column}, {row}", "usefulness, {row}",
        )  # fmt: skip
        for row in shown[~is_even].to_dict("records"):
            panel = f"{drifts[row['k']]}, {routings[row['routing']]}"
            _paper_band(axes[panel], row, *lines[row["algorithm"]], panel)
        for axis in axes.values():
            axis.set_xscale("log")
        text = _caption(table, shown, "shaded and bars") + " A ratio is clipped outside 1 ± width; outlined: a paper's "
        text += "own band [1 − low, 1 + high], at √(low · high)."
        return style.finish(figure, next(iter(axes.values())), text)


def _paper_band(axis: Axes, row: Mapping[Any, Any], name: str, look: Look, panel: str) -> None:
    """Draw a star at a band that is not symmetric."""
    low, high = style.numbers([row["clip_low"], row["clip_high"]])
    star: Any = {"fmt": "*", "color": look.colour, "markeredgecolor": "black", "markeredgewidth": 0.7}
    bars = None if math.isnan(row["low"]) else [[row["mean"] - row["low"]], [row["high"] - row["mean"]]]
    axis.errorbar(row["width"], row["mean"], bars, markersize=9, elinewidth=0.7, zorder=5, **star)
    axis.annotate(f"{low} / {high}", (row["width"], row["mean"]), (5, 6), textcoords="offset points", fontsize=6)
    drawn = {"x": row["width"]} | {key: row[key] for key in (*_DRAWN, "clip_low", "clip_high")}
    style.note(axis, f"{name}, paper", pd.DataFrame([drawn]), panel)


def clip_shares(rows: pd.DataFrame, anchor: str) -> DataFigure:
    """Draw the clip share over the width of the band: a row for each unit, a column for each setting, a line per k > 0.

    ``rows`` are of one start, scale and routing (``archive.load``).
    """
    table = clip_atlas.atlas(rows)
    table = table[(table["side"] == "both") & (table["anchor"] == anchor) & (table["k"] > 0)]
    is_drawn = table["mean"] >= _MIN_SHARE
    table = table.assign(**{name: table[name].where(is_drawn) for name in ("mean", "low", "high")})
    table["column"] = list(zip(table["setting"], table["strength"], strict=True))
    columns, drifts = _by_length(rows), sorted(table["k"].unique())
    lines = {k: (f"k = {k}", replace(look, dashes="-")) for k, look in looks.ordered(drifts).items()}
    with style.figure_style():
        figure, axes = _grid(
            table, ("unit", {unit: unit for unit in clips.UNITS}), ("column", columns), ("k", lines),
            ("band", "width of the band"), 4.4, ylabel="clipped share,\n{row}",
        )  # fmt: skip
        for axis in axes.values():
            axis.set(xscale="log", yscale="log", ylim=(_MIN_SHARE, 1))
        counts = table["n"].astype(int).tolist()
        text = f"Mean over checkpoints, n = {style.span(counts)}{'; shaded: 95 % t interval' * (max(counts) > 2)}. "
        text += f"A ratio to the {anchor} is clipped outside 1 ± width, where the advantage's sign asks for it. "
        text += f"Shares below {_MIN_SHARE:g} are not drawn."
        return style.finish(figure, next(iter(axes.values())), text)


def _by_length(rows: pd.DataFrame) -> dict[tuple[str, float], str]:
    """Return (setting, strength) → title of each column, by the mean length of the responses."""
    lengths = rows[rows["quantity"] == "response_length"].groupby(["setting", "strength"])["value"].mean()
    ascending: dict[Any, float] = lengths.sort_values(kind="stable").to_dict()
    titles = {key: f"responses of {length:.0f} tokens" for key, length in ascending.items()}
    if len(set(titles.values())) < len(titles):
        titles = {key: f"{title}\n{key[0]} strength {key[1]:g}" for key, title in titles.items()}
    return titles


def _whole(table: pd.DataFrame) -> pd.DataFrame:
    """Return ``QUANTITIES`` of losses' whole gradients on the audited rollout, before the norm cut."""
    is_whole = (table["block"] == "whole") & (table["cut"] == "before")
    return table[is_whole & table["routing"].isin(list(_ROUTINGS)) & table["quantity"].isin(QUANTITIES)]


def _gradients(table: pd.DataFrame) -> pd.DataFrame:
    """Return ``_whole``. Raises CannotDraw if no estimate is defined."""
    whole = _whole(table)
    if whole["mean"].isna().all():
        raise CannotDraw("it lacks estimates of gradients, as usefulness")
    return whole


def _last(table: pd.DataFrame) -> int:
    return int(table["k"].max())


def _at_last(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the largest drift, and the start's reward."""
    is_reward = (table["quantity"] == "reward") & (table["k"] == 0)
    return table[(table["k"] == _last(table)) | is_reward]


def _routings(table: pd.DataFrame) -> dict[str, str]:
    return {name: label for name, label in _ROUTINGS.items() if (table["routing"] == name).any()}


def _explain_empty(axis: Axes, shown: pd.DataFrame) -> None:
    if shown.empty:
        axis.text(0.5, 0.7, "undefined: no signal", transform=axis.transAxes, ha="center", color="#444444")


def _caption(table: pd.DataFrame, shown: pd.DataFrame, drawn: str) -> str:
    """Return n, the interval as ``drawn`` ("shaded", "bars", "" for none), and the reward along the drift."""
    counts = shown.loc[shown["n"] > 0, "n"].astype(int).tolist() or [0]
    most = max(counts)
    text = f"Mean over checkpoints, n = {style.span(counts)}" if most > 1 else "One checkpoint, n = 1"
    if drawn and most != 2:
        interval = "t interval over checkpoints" if most > 1 else "jackknife interval over mini-batches"
        text += f"; {drawn}: 95 % {interval}"
    elif drawn:
        text += "; two checkpoints have no interval"
    rewards = table[table["quantity"] == "reward"].groupby("k")["mean"].agg(["min", "max"])
    by_drift = [
        f"{'start' if k == 0 else f'k = {k}'}: {' to '.join(dict.fromkeys(f'{value:.2f}' for value in row))}"
        for k, row in zip(rewards.index, rewards.to_numpy(), strict=True)
    ]
    return f"{text}. Reward of fresh samples at the {', '.join(by_drift)}." if by_drift else f"{text}."


FIGURES = {"over_drift": over_drift, "ranked": ranked, "blocks": blocks, "bands": bands}
