"""``steadymoe run --tune``: the level at each learning rate, as a table and a figure, and the best rate of each arm."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from steadymoe.bench.config import compose
from steadymoe.bench.config.compose import Run
from steadymoe.bench.config.tuning import RATE
from steadymoe.bench.measurement import columns
from steadymoe.bench.report import archive, tables, write
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.runs import command, record
from steadymoe.bench.statistics.comparisons import ranking
from steadymoe.bench.statistics.estimates import INTERVAL, over_seeds
from steadymoe.bench.support.text import visible, without_mathematics

# The level of a run. Not the mean of its last evaluations: a short run has few, and the first is of the cold start.
LEVEL = "final held-out accuracy"
CAPTION = (
    f"Mean over tuning seeds with {INTERVAL}. Start: held-out accuracy of the cold start; {LEVEL}: the last evaluation, "
    "0 after a number that is not finite. Less best: the difference from the arm's best rate, seed by seed. "
    f"{tables.COLLAPSED.partition(';')[0]}. The best of several rates looks better than it is: compare algorithms on "
    "other seeds."
)
# Lines of one rate stand side by side, each shifted by this factor.
_APART = 1.04
# What ``config.tuning.overrides`` chooses. The runs that follow have their own.
_TUNED = (RATE, "seed", "experiment_name", "measure")


def main(words: list[str]) -> int:
    """Run ``steadymoe run`` with ``--tune`` in ``words`` and report; return the exit code. Raises UserError."""
    return command.main(words, report)


def report(runs: Sequence[Run]) -> None:
    """Write table and figure of all ended runs of the experiment of ``runs``; print a line for each arm of ``runs``."""
    results, experiment = Path(runs[0].config.results_dir), runs[0].config.experiment_name
    if not any(record.status(run.folder) in record.ENDED for run in runs):
        return
    recorded = archive.load(results, experiment)
    rows = table(recorded["runs"], recorded["steps"])
    paths = write.table(results, f"{experiment}-tuning", rows.drop(columns="algorithm"), CAPTION)
    paths += write.figure(results, f"{experiment}-level_over_rate", drawn(rows), "Level over learning rate.")
    print("\n".join([*(visible(f"wrote {path}") for path in paths), *map(visible, lines(runs, recorded["runs"], rows))]))


def table(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each arm and learning rate, rates ascending; an arm is what differs in rate and seed alone.

    ``runs`` and ``steps`` are tables of ``archive.load``.
    """
    metric, how = tables.SUMMARY[LEVEL]
    curves = steps[steps["metric"] == metric].sort_values("step").groupby(["arm", "seed"], observed=True)["value"]
    starts, levels = curves.first(), curves.agg(lambda curve: tables.one_number(curve, how))
    collapsed = tables.summary(steps, runs).set_index("arm")["collapsed"]
    rows = []
    for arm, ours in runs.groupby(_arms(runs)):
        rates = ours.drop_duplicates("arm").set_index("arm")["learning_rate"]
        start = over_seeds(starts[list(rates.index)].groupby("seed").mean().tolist(), bounds=columns.bounds(metric))
        ranked = ranking(levels[list(rates.index)].reset_index(), columns.bounds(metric)).to_dict("records")
        for row in ranked:
            is_best = row["arm"] == row["against"]
            rows.append(
                {"arm": arm, "algorithm": ours["algorithm"].iloc[0], "learning rate": rates[row["arm"]]}
                | {"n": row["estimate"].n, "collapsed": collapsed[row["arm"]], "start": start, LEVEL: row["estimate"]}
                | {"less best": over_seeds([]) if is_best else row["difference"], "best": "best" if is_best else ""}
            )
    return pd.DataFrame(rows).sort_values(["arm", "learning rate"], ignore_index=True)


def _arms(runs: pd.DataFrame) -> pd.Series:
    """Return the name of each run's arm, without its learning rate."""
    axes = [{key: value for key, value in each.items() if key != RATE} for each in runs["axes_values"]]
    return archive.name_arms(runs.assign(axes_values=axes))


def drawn(rows: pd.DataFrame) -> DataFigure:
    """Draw the level over the learning rate, one line per arm with intervals; ``rows`` is what ``table`` returns."""
    rows = without_mathematics(rows)
    rates = sorted(set(rows["learning rate"]))
    lines = looks.of_lines(rows)
    with style.figure_style():
        figure, (axis,) = style.panels(1, 1, 2.4)
        axis.set_ylabel(LEVEL)
        for place, (arm, look) in enumerate(lines.items()):
            ours = rows[rows["arm"] == arm]
            data = pd.DataFrame(map(vars, ours[LEVEL])).assign(x=ours["learning rate"].to_numpy())
            shift = _APART ** (place - (len(lines) - 1) / 2)  # intervals of one rate stand side by side
            axis.vlines(data["x"] * shift, data["low"], data["high"], color=look.colour, linewidth=0.8)
            axis.plot(data["x"] * shift, data["mean"], look.dashes, color=look.colour, linewidth=1.2)
            for x, mean, best in zip(data["x"] * shift, data["mean"], ours["best"], strict=True):
                face = look.colour if best else "white"
                axis.plot(x, mean, look.marker, color=look.colour, markerfacecolor=face, markersize=4)
            axis.plot([], [], look.dashes + look.marker, color=look.colour, markersize=4, label=arm)
            style.note(axis, arm, data[["x", "mean", "low", "high", "n"]])
        for start in {start.mean: start for start in rows["start"]}.values():
            axis.axhline(start.mean, color="#777777", linestyle="--", linewidth=0.8, zorder=0)
            style.note(axis, "start", pd.DataFrame([vars(start)]))
        axis.set_xscale("log")
        axis.set_xticks(rates, style.numbers(rates))
        axis.minorticks_off()
        axis.set_xlabel("learning rate")
        n = style.span([estimate.n for estimate in rows[LEVEL]])
        text = f"Mean over tuning seeds, n = {n}, with a nominal 95 % t interval; filled: the best rate; dashed: start."
        return style.finish(figure, axis, text)


def lines(runs: Sequence[Run], recorded: pd.DataFrame, rows: pd.DataFrame) -> Iterator[str]:
    """Yield a line for each arm of ``runs`` with ended runs: its best rate, and what to do next.

    ``recorded`` is the table ``runs`` of ``archive.load``, ``rows`` what ``table`` returns.
    """
    arms = dict(zip((Path(folder).absolute() for folder in recorded["folder"]), _arms(recorded), strict=True))
    planned: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        planned.setdefault(tuple(word for word in run.words if word.partition("=")[0] not in _TUNED), []).append(run)
    for words, ours in planned.items():
        ended = [arms[run.folder] for run in ours if run.folder in arms]
        if ended:
            missing = f"; {len(ours) - len(ended)} of {len(ours)} runs are missing" if len(ended) < len(ours) else ""
            path = ours[0].command.partition("steadymoe ")[0]  # STEADYMOE_PATH, or nothing
            yield verdict(rows[rows["arm"] == ended[0]], missing, path, words)


def verdict(its: pd.DataFrame, missing: str, path: str, words: Sequence[str]) -> str:
    """Return the best rate of an arm and what to do next, in a line; ``its`` are the rows of ``table`` of the arm."""
    rates = its["learning rate"].tolist()
    (best,) = its[its["best"] != ""].to_dict("records")
    rate = best["learning rate"]
    # No difference has an interval below three seeds, and the best rate's own is none.
    close = [each["learning rate"] for each in its.to_dict("records") if not each["less best"].high < 0]
    doubt = f" (not clearly better than {_text(close)})" if (close := [each for each in close if each != rate]) else ""
    found = f"{best['arm']}: best learning rate {_text([rate])}{doubt}, {LEVEL} {best[LEVEL]}, n = {best['n']}{missing}"
    if rate in (rates[0], rates[-1]):
        wider = [rates[0] / 2] * (rate == rates[0]) + rates + [rates[-1] * 2] * (rate == rates[-1])
        return f"{found}; it is at an end of the grid, extend it: {RATE}={_text(wider, ',')}"
    return f"{found}; next: {path}{compose.command([*words, f'{RATE}={_text([rate])}'])}"


def _text(rates: Sequence[float], comma: str = ", ") -> str:
    """Return rates as exact text that Hydra reads: 4e-4."""
    return comma.join(np.format_float_scientific(rate, trim="-", exp_digits=1) for rate in rates)
