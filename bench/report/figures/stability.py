"""Figures of stability: survival curves, the frontier, the gain around it, and early warnings."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.patches import Rectangle

from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.statistics import estimates

# The final reward of ``gain_map`` is the mean over the rollouts of so many updates.
_LAST_UPDATES = 48


def survival(curves: pd.DataFrame, table: pd.DataFrame, steps: pd.DataFrame) -> DataFigure:
    """Share of runs that have not collapsed, over steps, and when they did (R3, 2510.11370, main table).

    ``curves``: ``collapse_tables.survival_curves``. ``table``: ``collapse_tables.collapse_steps``. ``steps`` names the
    algorithm of each arm.
    """
    few_seeds = curves["n"].max() < estimates.LEAST_FOR_BOOTSTRAP
    with style.figure_style():
        figure, (axis, below) = style.panels(2, 1, 2.3 + 0.17 * len(table), height_ratios=[1, 0.08 * (len(table) + 1)])
        axis.set_ylabel("runs not collapsed (share)")
        for arm, look in looks.of_lines(steps).items():
            curve = curves[curves["arm"] == arm].sort_values("step")
            drawn: Any = {"color": look.colour, "marker": look.marker if look.marked else None, "markersize": 2.6}
            axis.step(curve["step"], curve["survival"], look.dashes, where="post", linewidth=1.2, label=arm, **drawn)
            band = curve[["step", "low", "high"]].to_numpy().T
            if not few_seeds:
                axis.fill_between(*band, step="post", color=look.colour, alpha=0.08, linewidth=0)
            shown = curve.rename(columns={"step": "x", "survival": "mean"})
            style.note(axis, str(arm), shown[["x", "mean", *(() if few_seeds else ("low", "high")), "n"]])
        axis.set_ylim(0, 1.04)
        axis.set_xlabel("step (rollout)")
        below.axis("off")
        below.grid(visible=False)
        cells = table.map(lambda cell: f"{cell:.3g}" if isinstance(cell, float) else str(cell))
        lower = below.table(cells.to_numpy().tolist(), colLabels=list(table.columns), loc="center", cellLoc="left")
        lower.auto_set_font_size(False)
        lower.set_fontsize(6.5)
        lower.auto_set_column_width(range(len(table.columns)))
        for (row, _), cell in lower.get_celld().items():
            cell.visible_edges = "B" if row else "TB"
            cell.set_linewidth(0.4)
        counts = curves.groupby("arm")["n"].max()
        n = f"n = {counts.iloc[0]}" if counts.nunique() == 1 else f"n = {counts.min()} to {counts.max()}"
        shaded = "every step down is a seed" if few_seeds else "shaded: its 95 % interval"
        text = f"Kaplan–Meier estimate over seeds, {n}; {shaded}; runs that ended stable are censored."
        return style.finish(figure, axis, text)


def frontier(
    grid: pd.DataFrame,
    line: pd.DataFrame,
    steps: pd.DataFrame,
    x_label: str = "learning rate",
    y_label: str = "updates per rollout",
) -> DataFigure:
    """Where training is stable: the share of stable runs over two dials, and the frontier.

    ``grid`` has arm, x, y, stable (share of seeds), n. ``line`` has arm, x, y: the lowest y at which the share falls
    below one half, between two cells or at an edge of the grid. The caption takes from ``steps`` which quantity stays
    fixed while staleness varies.
    """
    design = style.design(steps)
    arms = sorted(grid["arm"].unique())
    columns = min(2, len(arms))
    rows = -(-len(arms) // columns)
    xs, ys = sorted(grid["x"].unique()), sorted(grid["y"].unique())
    with style.figure_style():
        figure, axes = style.panels(rows, columns, 0.5 + 1.7 * rows, sharex=True, sharey=True)
        for axis, arm in zip(axes, arms, strict=False):
            axis.set_title(arm)
            ours = grid[grid["arm"] == arm]
            wide = ours.pivot(index="y", columns="x", values="stable").reindex(index=ys, columns=xs)
            image = axis.imshow(wide, origin="lower", cmap="cividis", vmin=0, vmax=1, aspect="auto")
            axis.grid(visible=False)
            for row, y in enumerate(ys):
                for column, x in enumerate(xs):
                    share = wide.loc[y, x]
                    colour = "black" if share > 0.55 else "white"
                    text = "–" if pd.isna(share) else f"{share:.2g}"
                    axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=6)
            own = line[line["arm"] == arm].dropna().sort_values("x")
            # The line is interpolated over log y, like the statistic. At the lowest or the highest y of the grid it is
            # drawn at the edge of the panel.
            tops = dict(zip(own["x"], np.interp(np.log(own["y"]), np.log(ys), range(len(ys))), strict=True))
            tops = {x: -0.5 if top == 0 else top + 0.5 if top == len(ys) - 1 else top for x, top in tops.items()}
            heights = [tops.get(x, -0.5) for x in xs]
            edges = [place - 0.5 for place in range(len(xs) + 1)]
            axis.stairs(heights, edges, baseline=None, color=looks.COLOURS[1], linewidth=2, clip_on=False)
            axis.set_xticks(range(len(xs)), style.numbers(xs), rotation=45 if len(xs) > 3 else 0)
            axis.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
            axis.set_xlabel(x_label)
            axis.set_ylabel(y_label)
            axis.label_outer()
            style.note(axis, str(arm), ours[["x", "y", "stable", "n"]].rename(columns={"stable": "mean"}), "stable")
            style.note(axis, str(arm), own[["x", "y"]], "frontier")
        for axis in axes[len(arms) :]:
            axis.remove()
        figure.colorbar(image, ax=axes[: len(arms)], label="stable runs (share)", shrink=0.9)
        n = f"n = {grid['n'].min()}" + (f" to {grid['n'].max()}" if grid["n"].nunique() > 1 else "")
        text = (
            f"Share of seeds that did not collapse, {n} a cell; no smoothing, no interval; line: where, going up, it "
        )
        return style.finish(figure, None, f"{text}falls below one half.{design}")


def gain_map(steps: pd.DataFrame) -> DataFigure:
    """Where training learns: the gain in reward over learning rate and updates per rollout, a panel for each method.

    The gain is the mean reward of the last ``_LAST_UPDATES`` updates' rollouts less the held-out accuracy of the cold
    start. A frame marks the experiment's own setting.
    """
    several = steps["model"].nunique() > 1
    names = steps["algorithm"] + (" " + steps["model"] if several else "")
    keys = ["method", "learning_rate", "updates_per_rollout", "seed"]
    steps = steps.assign(method=names, update=steps["step"] * steps["updates_per_rollout"])
    rewards = steps[steps["metric"] == "reward"]
    ends = rewards.groupby(keys)["update"].transform("max")
    last = rewards[rewards["update"] > ends - _LAST_UPDATES].groupby(keys)["value"].mean()
    start = steps[(steps["metric"] == "eval_accuracy") & (steps["step"] == 0)].set_index(keys)["value"]
    gains = (last - start).rename("gain").reset_index()
    cells = gains.groupby(keys[:3])["gain"].agg(["mean", "min", "max", "size"]).reset_index()
    xs, ys = (sorted(cells[key].unique()) for key in keys[1:3])
    methods, most = sorted(cells["method"].unique()), cells["mean"].abs().max()
    own = steps[~steps["axes"].str.contains("learning_rate|updates_per_rollout")]
    marked = {(xs.index(x), ys.index(y)) for x, y in own[keys[1:3]].drop_duplicates().itertuples(index=False)}
    rows = -(-len(methods) // 2)
    with style.figure_style():
        size = 0.6 + (0.55 + 0.22 * len(ys)) * rows
        figure, axes = style.panels(rows, 2, size, style.TWO_COLUMNS, sharex=True, sharey=True)
        for axis, method in zip(axes, methods, strict=False):
            axis.set_title(method)
            ours = cells[cells["method"] == method]
            wide = ours.pivot(index=keys[2], columns=keys[1], values="mean").reindex(index=ys, columns=xs)
            image = axis.imshow(wide, origin="lower", cmap="PuOr", vmin=-most, vmax=most, aspect="auto")
            axis.grid(visible=False)
            for row, y in enumerate(ys):
                for column, x in enumerate(xs):
                    gain = wide.loc[y, x]
                    text = "–" if pd.isna(gain) else f"{gain:+.2f}".replace("-", "−")
                    colour = "white" if abs(gain) > 0.6 * most else "black"
                    axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=6)
            for x, y in marked:
                frame = Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="black", linewidth=1.4, zorder=3)
                axis.add_patch(frame)
            axis.set_xticks(range(len(xs)), style.numbers(xs))
            axis.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
            axis.set_xlabel("learning rate")
            axis.set_ylabel("updates per rollout")
            axis.label_outer()
            renamed = {"learning_rate": "x", "updates_per_rollout": "y", "size": "n"}
            style.note(axis, method, ours.drop(columns="method").rename(columns=renamed), "gain in reward")
        for axis in axes[len(methods) :]:
            axis.remove()
        figure.colorbar(image, ax=axes[: len(methods)], label="gain in reward", shrink=0.9)
        n = f"n = {style.span(cells['size'].tolist())}"
        text = (
            f"Mean over seeds, {n} a cell, of the mean reward over the last {_LAST_UPDATES} updates less the held-out "
        )
        text += (
            "accuracy of the cold start; no interval; the data beside the figure have each cell's lowest and highest "
        )
        text += "seed. Frame: the experiment's own setting."
        return style.finish(figure, None, text + style.design(steps))


def early_warning(roc: pd.DataFrame, warnings: pd.DataFrame) -> DataFigure:
    """How early a metric tells that a run will collapse: detected collapses against false alarms.

    ``roc`` has metric, false_alarms, detected. ``warnings`` has metric, area (an ``Estimate``), and the numbers of
    stable and of collapsed runs, the largest area first.
    """
    with style.figure_style():
        figure, (axis,) = style.panels(1, 1, 3.9)
        axis.set_ylabel("collapses detected (share)")
        axis.plot([0, 1], [0, 1], color="#999999", linewidth=0.8, linestyle=(0, (1, 2)))
        for index, row in enumerate(warnings.to_dict("records")):
            metric, area = row["metric"], row["area"]
            curve = roc[roc["metric"] == metric].sort_values(["false_alarms", "detected"])
            name = f"{metric.replace('_', ' ')} {area.mean:.2f}"
            name += "" if np.isnan(area.low) else f" [{area.low:.2f}, {area.high:.2f}]"
            look = looks.look(index)
            shape = {"linestyle": look.dashes, "color": look.colour}
            axis.plot(curve["false_alarms"], curve["detected"], linewidth=1.2, label=name, **shape)
            shown = curve.rename(columns={"false_alarms": "x", "detected": "mean"})
            style.note(axis, metric, shown[["x", "mean"]].assign(area=area.mean, low=area.low, high=area.high))
        axis.set_xlabel("false alarms (share of stable runs)")
        axis.set_aspect("equal")
        axis.set_xlim(-0.02, 1.02)
        axis.set_ylim(-0.02, 1.02)
        stable, collapsed = ([row[kind] for row in warnings.to_dict("records")] for kind in ("stable", "collapsed"))
        text = (
            "Each threshold of a metric is a point; beside its name the area under the curve and its 95 % interval; "
            "dotted: chance. All arms together; no smoothing. "
            f"n = {style.span(stable)} stable and {style.span(collapsed)} collapsed runs."
        )
        return style.finish(figure, axis, text)
