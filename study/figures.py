"""The figures of claims: what the arms of one claim did, and the outcomes of all claims."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.curves import curves
from steadymoe.bench.report.figures.looks import Look
from steadymoe.bench.report.figures.style import DataFigure
from study.arms import FROZEN, LONG, LONG_ON_POLICY
from study.exploratory import LEFT, MOVED, NEXT, SEEN, STALE_RATE, START

AT_LONG = {arm.label for arm in (*LONG.values(), *LONG_ON_POLICY.values())}
# Dial → label of its axis.
_DIALS = {"layers": "layers", "experts": "experts", "margin": "factor of the routers' weights"}
_DIALS |= {
    f"noise, {updates}": f"noise on the sampler's weights, {updates} a rollout" for updates in ("8 updates", "1 update")
}
# More quantities than these stand side by side, so far apart.
_FEW, _BESIDE = 3, 0.05
# Quantity → the label of its panel in ``replay``.
_REPLAYED = {
    LEFT: "experts that left the old\nroutes in rollout 1 (share)",
    NEXT: "reward of rollout 2\n(dotted: of rollout 1)",
    SEEN: "variance of the token ratio\nin the loss, rollout 1",
    MOVED: "mean squared log-ratio of\nthe sampled policy (nats²)",
}
# Verdict → index of its colour, and its mark (for readers without colour vision).
_VERDICTS = {
    "supported": (2, "o"),
    "contradicted": (1, "X"),
    "not decided": (7, "s"),
    "not testable here": (7, "d"),
}


def arms(steps: pd.DataFrame, standings: pd.DataFrame) -> DataFigure:
    """The arms of a claim next to their controls: curves over gradient updates, and the primary outcome with its start.

    ``standings`` has a row for each arm, best first: arm, metric, outcome (its name), start and end, both Estimates,
    and whether the arm has a curve. A row with too few seeds for an interval would look the most precise, and is left
    out.
    """
    lines, (metric,), (outcome,) = looks.of_lines(steps), *(set(standings[name]) for name in ("metric", "outcome"))
    lines |= {arm: Look(looks.COLOURS[7], ":", "o") for arm in lines if arm == FROZEN.label}
    lines |= {arm: _of_routers(arm) for arm in lines if arm in AT_LONG}
    named, n = _with_n({arm: end.n for arm, end in zip(standings["arm"], standings["end"], strict=True)})
    steps, standings = (table.assign(arm=table["arm"].map(named)) for table in (steps, standings))
    lines = {named[arm]: look for arm, look in lines.items()}
    with_curves = standings.loc[standings["curve"], "arm"].tolist()
    is_bare = standings["end"].map(lambda end: bool(np.isnan(end.low)))
    left_out = standings.loc[is_bare, "arm"].tolist() if not is_bare.all() else []
    standings = standings[~standings["arm"].isin(left_out)]
    unpaired = [arm for arm in _unpaired(steps) if arm in (*with_curves, *standings["arm"])]
    with style.figure_style():
        height = max(2.4, 0.9 + 0.2 * len(standings))
        figure, axes = style.panels(1, 2, height, style.TWO_COLUMNS)
        most = int(steps["updates_per_rollout"].max())
        steps = steps[steps["arm"].isin(with_curves)]
        for updates in sorted(steps["updates_per_rollout"].unique()):  # arms are smoothed over equally many updates
            alike = steps[steps["updates_per_rollout"] == updates]
            present = set(alike["arm"].unique())
            ours = {arm: look for arm, look in lines.items() if arm in present}
            over = style.smoothed_over(metric) * most // int(updates) if style.smoothed_over(metric) > 1 else 1
            curves(axes[0], alike, metric, ours, x=_updates(steps), smoothed_over=over)
        axes[0].set_xlabel("gradient updates")
        rows: list[Any] = list(standings.itertuples())
        for y, row in enumerate(rows):
            look = replace(lines[row.arm], marker="o")
            style.dot(axes[1], row.arm, y, row.end, look, outcome, start=row.start.mean)
            axes[1].plot(row.start.mean, y, "o", color=look.colour, markersize=4.5, markerfacecolor="white")
        for face, name in (("black", outcome), ("white", "start")):
            axes[1].plot([], [], "o", color="black", markerfacecolor=face, markersize=4.5, label=name)
        style.named_rows(axes[1], [row.arm for row in rows], top_down=True)
        axes[1].set_xlabel(outcome)
        axes[1].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        smoothed = f"{most * style.SMOOTHED_OVER} updates" if metric == "reward" else ""
        caption = style.curves_caption(steps, smoothed=smoothed).replace(style.seeds(steps), n)
        caption += " Right: means over seeds; bars: nominal 95 % interval"
        caption += f"; without one, left out: {'; '.join(left_out)}." if left_out else "."
        if unpaired:
            caption += f" Other seeds or cold starts, so not paired with the rest: {'; '.join(unpaired)}."
        return style.finish(figure, axes[0], caption)


def _with_n(counts: Mapping[str, int]) -> tuple[dict[str, str], str]:
    """Return the names of rows, with n where it is not the most frequent one, and the caption's words on n."""
    usual = max(counts.values(), key=list(counts.values()).count)
    named = {name: name if n == usual else f"{name} (n = {n})" for name, n in counts.items()}
    return named, f"n = {usual}" + ("" if set(counts.values()) == {usual} else " where no other is named")


def _unpaired(steps: pd.DataFrame) -> list[str]:
    """Return the arms that share at most half of their cold starts with the arm that shares most with the others."""
    first = steps[(steps["metric"] == "eval_accuracy") & (steps["step"] == 0)]
    starts = {str(arm): set(zip(ours["seed"], ours["value"], strict=True)) for arm, ours in first.groupby("arm")}
    if not starts:
        return []
    most = max(starts.values(), key=lambda ours: sum(len(ours & others) for others in starts.values()))
    return [arm for arm, ours in starts.items() if 2 * len(ours & most) <= len(ours)]


def _of_routers(arm: str) -> Look:
    """Return the look of an arm of *long*: the colour of its routers, the line and mark of its loss."""
    _, loss, routers = arm.split(", ")
    colours = {"fast routers": 1, "slow routers": 0, "frozen routers": 2, "dense": 6}
    dashes, marker = {"unclipped": ("-", "o"), "on policy": ("--", "s"), "GSPO": (":", "^")}[loss]
    return Look(looks.COLOURS[colours[routers]], dashes, marker, marked=True)


def dose(table: pd.DataFrame) -> DataFigure:
    """Dose and response: quantities over the values of dials, a panel for each dial.

    ``table`` is ``verdicts.dose_rows``. One dial is turned at a time.
    """
    dials, quantities = list(dict.fromkeys(table["dial"])), list(dict.fromkeys(table["quantity"]))
    numbers = pd.DataFrame([vars(number) for number in table["number"]], index=table.index)
    with style.figure_style():
        figure, axes = style.panels(1, len(dials), 2.2, style.TWO_COLUMNS, sharey=True)
        for axis, dial in zip(axes, dials, strict=True):
            values = table.loc[table["dial"] == dial, "value"].drop_duplicates().tolist()
            for place, quantity in enumerate(quantities):
                chosen = (table["dial"] == dial) & (table["quantity"] == quantity)
                rows, look = numbers[chosen], looks.look(place)
                if rows.empty:
                    continue
                beside = (place - (len(quantities) - 1) / 2) * _BESIDE if len(quantities) > _FEW else 0
                at = table.loc[chosen, "value"].map(values.index) + beside
                axis.vlines(at, rows["low"], rows["high"], color=look.colour, linewidth=1.1)
                axis.plot(at, rows["mean"], **_marks(place))
                style.note(axis, quantity, rows.assign(x=table.loc[chosen, "value"]), dial)
            axis.set_xticks(range(len(values)), [f"{value:g}" for value in values])
            axis.set_xlim(-0.4, len(values) - 0.6)
            axis.set_xlabel(_DIALS[dial])
            axis.set_ylim(0, 1.06 * np.nanmax(numbers[["mean", "high"]]))
        for place, quantity in enumerate(quantities if len(quantities) > 1 else []):
            axes[0].plot([], [], label=quantity, **_marks(place))
        of_several = "held-out accuracy" if dials[0].startswith("noise") else "share of the experts"
        axes[0].set_ylabel(of_several if len(quantities) > 1 else quantities[0])
        n = style.span(numbers["n"].tolist())
        return style.finish(figure, axes[0], f"Means over seeds, n = {n}; bars: nominal 95 % interval.")


def _marks(place: int) -> dict[str, Any]:
    """How the line at ``place`` is drawn; where colours and marks begin again, marks are hollow."""
    look = looks.look(place)
    marks = {"marker": look.marker, "linestyle": look.dashes, "color": look.colour}
    hollow = {"markerfacecolor": "white"} if place >= len(looks.COLOURS) else {}
    return marks | {"markersize": 4.5, "linewidth": 1} | hollow


def replay(table: pd.DataFrame) -> DataFigure:
    """What R2 does: the loss sees a smaller ratio variance, the sampled policy moves no less, and the reward falls.

    ``table`` is ``exploratory.replay``.
    """
    names, arms = list(_REPLAYED), list(dict.fromkeys(table["arm"]))
    heights = {arm: place + 0.6 * (place // 2) for place, arm in enumerate(arms)}  # two algorithms, free and R2
    with style.figure_style():
        figure, axes = style.panels(1, len(names), 1.9, style.TWO_COLUMNS, sharey=True)
        for axis, name in zip(axes, names, strict=True):
            rows: list[Any] = list(table[table["quantity"] == name].itertuples())
            for row in rows:
                y, effect, ends = heights[row.arm], row.effect, {}
                if effect.n:
                    shown = (f"{effect}" if name == NEXT else f"× {effect}").replace("-", "−")
                    words = axis.text(0.5, y - 0.5, shown, fontsize=6, transform=axis.get_yaxis_transform())
                    words.set(ha="center", va="center", bbox={"facecolor": "white", "linewidth": 0, "pad": 0.5})
                    ends = {"effect": effect.mean, "effect low": effect.low, "effect high": effect.high}
                look = replace(looks.of_algorithm(row.algorithm), marker="o")
                style.dot(axis, row.arm, y, row.number, look, name, is_open=row.routing != "R2", **ends)
            axis.set_xlabel(_REPLAYED[name])
            axis.set_xlim(0, 1.12 * max(row.number.high for row in rows))
            axis.grid(visible=False, axis="y")
        start = table.loc[table["quantity"] == START, "number"].iloc[0]
        axes[names.index(NEXT)].axvline(start.mean, color="black", linewidth=0.8, linestyle=":", zorder=0)
        style.note(axes[names.index(NEXT)], "all arms", pd.DataFrame([vars(start)]), START)
        axes[0].set_yticks(list(heights.values()), arms)
        axes[0].set_ylim(max(heights.values()) + 0.5, -0.5)
        n = style.span([each.n for each in table["number"]])
        text = (
            f"Means over seeds, n = {n}; bars: nominal 95 % interval; open: free routes, filled: R2. Numbers: R2 less "
            "free (reward) or over free (×, geometric mean), seed by seed. Right: routers free, before and after a "
            f"rollout's updates, mean over the probed rollouts. All at a learning rate of {STALE_RATE:g}."
        )
        return style.finish(figure, None, text)


def _updates(steps: pd.DataFrame) -> pd.Series:
    """The gradient updates that an arm has made after each step, by arm and step."""
    rows = steps[["arm", "step", "updates_per_rollout"]].drop_duplicates().set_index(["arm", "step"])
    return (rows["updates_per_rollout"] * rows.index.get_level_values("step")).sort_index()


def outcomes(table: pd.DataFrame) -> DataFigure:
    """What papers claim, and what was seen: effect, 95 % interval, threshold and verdict.

    ``table`` has a row for each outcome, all of one unit: claim, outcome, unit, effect, side, threshold, upper,
    verdict. An effect without an interval is drawn open.
    """
    (unit,) = set(table["unit"])
    label = f"difference in {'mean reward' if unit == 'reward' else unit}"
    with style.figure_style():
        figure, (axis,) = style.panels(1, 1, 0.9 + 0.19 * len(table), style.TWO_COLUMNS)
        rows: list[Any] = list(table.itertuples())
        names = [f"{row.claim}  {row.outcome.partition(', ')[2].replace(' less ', ' − ')}" for row in rows]
        shown, n = _with_n({name: row.effect.n for name, row in zip(names, rows, strict=True)})
        named = [shown[name] for name in names]
        for y, row in enumerate(rows):
            index, mark = _VERDICTS[row.verdict]
            ends = {"threshold": row.threshold, "upper": row.upper}
            look = Look(looks.COLOURS[index], "-", mark)
            is_open = bool(np.isnan(row.effect.low))
            style.dot(axis, names[y], y, row.effect, look, label, is_open, **ends, verdict=row.verdict)
            for end, pointing in zip(ends.values(), ("<" if row.side == "below" else ">", "<"), strict=True):
                axis.plot(end, y, "|", color="black", markersize=9)
                axis.plot(end, y, pointing, color="black", markersize=2.6)
        for verdict in [verdict for verdict in _VERDICTS if (table["verdict"] == verdict).any()]:
            index, mark = _VERDICTS[verdict]
            axis.plot([], [], mark, color=looks.COLOURS[index], markersize=4.5, label=verdict)
        axis.axvline(0, color="#999999", linewidth=0.6, zorder=0)
        style.named_rows(axis, named, top_down=True)
        axis.set_xlabel(label)
        what = "checkpoints" if unit == "usefulness" else "seeds"
        text = (
            f"Mean differences over {what}, {n}; bars: nominal 95 % interval. Black: the threshold and the claimed "
            "side. The number before a comparison is the number of the claim."
        )
        return style.finish(figure, axis, text)
