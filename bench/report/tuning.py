"""``steadymoe run --tune``: the level at each learning rate, as a table and a figure, and the best rate of each arm."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.report import archive, tables, write
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.runs import command, provenance, record
from steadymoe.bench.runs.compose import Run
from steadymoe.bench.runs.overrides import command_of, key_of
from steadymoe.bench.runs.tuning import MEASURED, RATE
from steadymoe.bench.statistics.comparisons import ranking
from steadymoe.bench.statistics.estimates import INTERVAL, over_seeds
from steadymoe.bench.support.text import visible, without_mathematics
from steadymoe.bench.training import columns

# The level of a run. Not the mean of its last evaluations: a short run has few, and the first is of the cold start.
LEVEL = "final held-out accuracy"
# What chooses the best rate: of more rollouts than the last evaluation has prompts, and so less noisy.
REWARD = "final reward"
CAPTION = (
    f"Mean over tuning seeds with {INTERVAL}. Best: the rate with the highest {REWARD}, the mean of the last "
    f"{tables.LAST_STEPS} rollouts. Start: held-out accuracy of the cold start; {LEVEL}: the last "
    "evaluation, 0 after a number that is not finite. Less best: the difference from the arm's best rate, seed by "
    f"seed. {tables.COLLAPSED} The highest of several levels is biased upwards: compare algorithms "
    "on other seeds."
)
# What the runs that follow choose for themselves.
_TUNED = (RATE, "seed", "experiment_name")


def main(words: list[str]) -> int:
    """Run ``steadymoe run`` and return the exit code; with ``--tune`` extend the grid once, and report.

    An arm whose best rate is at an end of its grid gets one more rate beyond it. Raises UserError.
    """
    if "--tune" not in words:
        return command.main(words)
    made: list[Run] = []
    redo, typed = [word for word in words if word == "--redo"], {key_of(word) for word in words}
    code = command.main(words, made.extend)
    if not made or code == 130:
        return code
    for beyond in _beyond(made):
        print(visible(f"the best rate is at an end of the grid; extending the grid once: {beyond[-2]}"))
        if (last := command.main([*redo, "-m", *beyond], made.extend)) == 130:
            return last
        code = max(code, last)
    report(made, typed)
    return code


def _of_todays_code(results: Path, experiment: str) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    """Return runs and steps, as ``archive.load`` has them, without stale runs, and how many of these there are.

    The runs of a tuning are never stale; a run at another rate, from an earlier tuning, may be.
    """
    recorded = archive.load(results, experiment)
    runs, steps = recorded["runs"], recorded["steps"]
    facts = [record.known(Path(folder)) for folder in runs["folder"]]
    is_stale = np.array([provenance.difference(each).stale is not None for each in facts], bool)
    kept = runs[~is_stale]
    return kept, steps.merge(kept[["arm", "seed"]]), int(is_stale.sum())


def _beyond(runs: Sequence[Run]) -> list[list[str]]:
    """Return for each arm of ``runs`` that is best at an end of its grid the words of its runs beyond that end."""
    recorded, steps, _ = _of_todays_code(Path(runs[0].config.results_dir), runs[0].config.experiment_name)
    if recorded.empty:
        return []
    rows, found = table(recorded, steps, REWARD), []
    for ours, arm, _ in _by_arm(runs, recorded):
        its, grid = rows[rows["arm"] == arm], sorted({run.config.optimizer.learning_rate for run in ours})
        (best,) = its.loc[its["best"] != "", "learning rate"]
        if {record.status(run.folder) for run in ours} <= {*record.ENDED} and best in (grid[0], grid[-1]):
            rate = best / 2 if best == grid[0] else 2 * best
            seeds = ",".join(map(str, sorted({run.config.seed for run in ours})))
            fixed = [word for word in ours[0].words if key_of(word) not in (RATE, "seed")]
            found.append([*fixed, f"{RATE}={_text([rate])}", f"seed={seeds}"])
    return found


def _by_arm(
    runs: Sequence[Run], recorded: pd.DataFrame, typed: Collection[str] = ()
) -> Iterator[tuple[list[Run], str, Sequence[str]]]:
    """Yield the runs of each arm, the arm's name, and the words of the runs that follow, for arms with ended runs.

    ``typed``: the keys that the user gave, which stay as they are.
    """
    chosen = {*_TUNED, *(key for key in MEASURED if key not in typed)}
    arms = dict(zip((Path(folder).absolute() for folder in recorded["folder"]), _arms(recorded), strict=True))
    planned: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        planned.setdefault(tuple(word for word in run.words if key_of(word) not in chosen), []).append(run)
    for words, ours in planned.items():
        if ended := [arms[run.folder] for run in ours if run.folder in arms]:
            yield ours, str(ended[0]), words


def report(runs: Sequence[Run], typed: Collection[str] = ()) -> None:
    """Write table and figure of all ended runs of the experiment of ``runs``; print a line for each arm of ``runs``.

    ``typed``: see ``_by_arm``.
    """
    results, experiment = Path(runs[0].config.results_dir), runs[0].config.experiment_name
    if not any(record.status(run.folder) in record.ENDED for run in runs):
        return
    recorded, steps, stale = _of_todays_code(results, experiment)
    rows = table(recorded, steps, REWARD)
    paths = write.table(results, f"{experiment}-tuning", rows.drop(columns="algorithm"), CAPTION)
    paths += write.figure(results, f"{experiment}-level_over_rate", drawn(rows), "Level over learning rate.")
    old = [f"stale runs of earlier tunings, left out: {stale}; steadymoe status lists them"] if stale else []
    for text in (*(f"wrote {path}" for path in paths), *old, *lines(runs, recorded, rows, typed)):
        print(visible(text))


def table(runs: pd.DataFrame, steps: pd.DataFrame, by: str = LEVEL) -> pd.DataFrame:
    """Return one row for each arm and learning rate, rates ascending; an arm is what differs in rate and seed alone.

    ``runs`` and ``steps`` are tables of ``archive.load``; ``by`` is the number that chooses the best rate.
    """
    metric, how = tables.SUMMARY[LEVEL]
    starts, levels = (tables.run_numbers(steps, metric, number, ["arm", "seed"]) for number in ("first", how))
    deciding = levels if by == LEVEL else tables.run_numbers(steps, *tables.SUMMARY[by], ["arm", "seed"])
    collapsed = tables.summary(steps, runs).set_index("arm")["collapsed"]
    rows = []
    for arm, ours in runs.groupby(_arms(runs)):
        rates = ours.drop_duplicates("arm").set_index("arm")["learning_rate"]
        start = over_seeds(starts[list(rates.index)].groupby("seed").mean().tolist(), bounds=columns.bounds(metric))
        ranked = ranking(deciding[list(rates.index)].reset_index(), columns.bounds(metric)).to_dict("records")
        for row in ranked:
            is_best = row["arm"] == row["against"]
            level = over_seeds(levels[row["arm"]].tolist(), bounds=columns.bounds(metric))
            rows.append(
                {"arm": arm, "algorithm": ours["algorithm"].iloc[0], "learning rate": rates[row["arm"]]}
                | {"n": row["estimate"].n, "collapsed": collapsed[row["arm"]], "start": start, LEVEL: level}
                | ({} if by == LEVEL else {by: row["estimate"]})
                | {"less best": over_seeds([]) if is_best else row["difference"], "best": "best" if is_best else ""}
                | ({} if by == LEVEL else {"close": _is_close(deciding, row["arm"], row["against"])})
            )
    return pd.DataFrame(rows).sort_values(["arm", "learning rate"], ignore_index=True)


def _is_close(numbers: pd.Series, arm: str, best: str) -> bool:
    """Whether an arm is less than one paired standard error below the best one, or has too few seeds to say."""
    apart = (numbers[best] - numbers[arm]).dropna()
    return arm != best and (len(apart) < 2 or bool(apart.mean() < apart.std(ddof=1) / np.sqrt(len(apart))))


def _arms(runs: pd.DataFrame) -> pd.Series:
    """Return the name of each run's arm, without its learning rate."""
    return runs["arm"].str.replace(r" (optimizer\.)?learning_rate=\S+", "", regex=True)


def drawn(rows: pd.DataFrame) -> DataFigure:
    """The level over the learning rate: a line for each arm, with intervals.

    ``rows`` is what ``table`` returns.
    """
    rows = without_mathematics(rows)
    groups = looks.groups(looks.of_lines(rows))
    starts = {start.mean: start for start in rows["start"]}.values()
    with style.figure_style():
        figure, stacks = style.stacks(len(groups), 1, 2.4)
        for (axis,), group in zip(stacks, groups, strict=True):
            for place, (arm, look) in enumerate(group.items()):
                _line(axis, arm, rows[rows["arm"] == arm], look, (place + 0.5) / len(group) - 0.5)
            for start in starts:
                axis.axhline(start.mean, color="#777777", linestyle="--", linewidth=0.8, zorder=0)
            style.ticks_at(axis, rows["learning rate"], log=True)
            axis.set_xlabel("learning rate")
            axis.set_ylabel(LEVEL)
        for start in starts:
            style.note(axis, "start", pd.DataFrame([vars(start)]), panel=LEVEL)
        n = style.span([estimate.n for estimate in rows[LEVEL]])
        text = (
            f"Mean over tuning seeds, n = {n}, with a nominal 95 % interval; filled: the best rate; dashed grey: the "
            "start."
        )
        return style.finish(figure, axis, text)


def _line(axis: Axes, arm: str, its: pd.DataFrame, look: looks.Look, shift: float) -> None:
    """Draw the levels of an arm with their intervals; ``shift``: see ``style.aside``."""
    data = pd.DataFrame(map(vars, its[LEVEL])).assign(x=its["learning rate"].to_numpy())
    places = style.aside(axis, arm, data, replace(look, fill="none"), shift, LEVEL)
    is_best = (its["best"] != "").to_numpy()
    axis.plot(places[is_best], data["mean"][is_best], look.marker, color=look.colour, markersize=4, markeredgewidth=0.7)


def lines(
    runs: Sequence[Run], recorded: pd.DataFrame, rows: pd.DataFrame, typed: Collection[str] = ()
) -> Iterator[str]:
    """Yield a line for each arm of ``runs`` with ended runs: its best rate, and what to do next.

    ``recorded`` is the table ``runs`` of ``archive.load``, ``rows`` what ``table`` returns; ``typed``: see ``_by_arm``.
    """
    for ours, arm, words in _by_arm(runs, recorded, typed):
        ended = [run for run in ours if record.status(run.folder) in record.ENDED]
        prefix = ours[0].command.partition("steadymoe ")[0]  # STEADYMOE_PATH, or nothing
        missing = f"; {len(ours) - len(ended)} of {len(ours)} runs are missing" if len(ended) < len(ours) else ""
        yield verdict(rows[rows["arm"] == arm], missing, prefix, words)


def verdict(its: pd.DataFrame, missing: str, prefix: str, words: Sequence[str]) -> str:
    """Return the best rate of an arm and what to do next, in a line; ``its`` are the rows of ``table`` of the arm."""
    rates = its["learning rate"].tolist()
    (best,) = its[its["best"] != ""].to_dict("records")
    rate = best["learning rate"]
    lost = f", {best['collapsed']:.0f} collapsed" if best["collapsed"] > 0 else ""
    found = f"{best['arm']}: best learning rate {_text([rate])}, {REWARD} {best[REWARD]}, "
    found += f"{LEVEL} {best[LEVEL]}, n = {best['n']}{lost}{missing}"
    if rate in (rates[0], rates[-1]):
        wider = [rates[0] / 2] * (rate == rates[0]) + rates + [rates[-1] * 2] * (rate == rates[-1])
        return f"{found}; it is at an end of the grid; rerun with {RATE}={_text(wider, ',')}"
    close = its.loc[its["close"], "learning rate"].tolist()
    if not close:
        return f"{found}; next: {prefix}{command_of([*words, f'{RATE}={_text([rate])}'])}"
    both = f"{RATE}={_text(sorted([rate, *close]), ',')}"
    near = f"{_text(close)} within one paired standard error"
    if best["n"] < 2:
        near = f"one seed does not tell it from {_text(close)}"
    confirm = f"so confirm {'both' if len(close) == 1 else 'all'}"
    return f"{found}; {near}, {confirm}: {prefix}{command_of(['-m', *words, both])}"


def _text(rates: Iterable[float], comma: str = ", ") -> str:
    """Return rates as exact text that Hydra reads: 4e-4."""
    return comma.join(np.format_float_scientific(rate, trim="-", exp_digits=1) for rate in rates)
