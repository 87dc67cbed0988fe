"""Bearable stress of a sweep with a dial: the outcomes over the dial, the line, and where each loss leaves it."""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steadymoe.bench.report import paper, tables
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.statistics.bearable import SHARE, Bearable, Curve, bearable, ranked_in_draws
from steadymoe.bench.statistics.comparisons import MIN_TO_DECIDE, kendall_tau
from steadymoe.bench.statistics.estimates import INTERVAL, RESAMPLES, Estimate, half_of_draws, over_seeds
from steadymoe.bench.training import columns

REFERENCE = "grpo"
# Column → what it is called. Of several that vary, the first is the dial, and the others divide the table.
DIALS = {
    "learning_rate": "learning rate",
    "updates_per_rollout": "updates per rollout",
    "strength": "strength of the mismatch",
}
# A rank correlation of fewer losses, the reference included, says next to nothing.
_MIN_RANKED = 4
_OUTCOMES = {"sampled": "eval_accuracy", "greedy": "eval_greedy"}
CAPTION = (
    "Bearable: the value of the dial, beyond a loss's best one, where its mean held-out accuracy (one sampled response "
    "per prompt, the last evaluation, 0 after a number that is not finite) first falls below the line: the start plus "
    f"{SHARE:.0%} of the gain of {REFERENCE} at its best value; between two values by interpolation. "
    f"× {REFERENCE}: the same in multiples of {REFERENCE}'s, with a 95 % interval over paired seeds from "
    f"{MIN_TO_DECIDE} seeds on. > grid, > 2: the loss never falls below the line on this grid; extend it. "
    f"reference > grid: {REFERENCE} never does, so no multiple is known. –: never reaches the line. own best ×, "
    f"headroom ×: the factors of the multiple, the loss's best rate over {REFERENCE}'s (the top of a parabola through "
    f"the highest level and its neighbours), and how far beyond its best rate it goes, over the same for {REFERENCE} "
    "(–: a best rate is at an end of the grid). Best: "
    f"the highest level and its value of the dial, with {INTERVAL}; greedy: the greedy accuracy there."
)
SHORT_CAPTION = (
    "Bearable: where mean held-out accuracy first falls below the dashed line of the figure. All columns are explained "
    "under Bearable, below."
)


def lacks(steps: pd.DataFrame) -> str | None:
    """Return what ``Results.joined["steps"]`` lacks for a bearable stress, or None."""
    if not _varying(steps):
        return f"runs of one loss at 2 values of {' or '.join(DIALS)}"
    if REFERENCE not in set(steps["algorithm"]):
        return f"runs of {REFERENCE}, the reference"
    keyed, keys = _keyed(steps.drop_duplicates(["experiment", "arm", "seed"]))  # one row for each run
    arms = keyed.groupby(keys, observed=True)["arm"].unique()
    if len(several := arms[arms.map(len) > 1]):
        return f"runs that a line tells apart: {' and '.join(map(str, several.iloc[0][:2]))} would be one"
    return "runs whose start and end were evaluated" if levels(steps)["start"].isna().all() else None


def _varying(steps: pd.DataFrame) -> list[str]:
    """Return those of ``DIALS`` that take two values with one loss of one experiment."""
    fixed = ["experiment", "algorithm", "model", "routing", "correction", "engine", "optimizer"]
    counts = steps.groupby(fixed, observed=True)[list(DIALS)].nunique().max()
    return [dial for dial in DIALS if counts[dial] > 1]


def levels(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the outcomes of each run: panel, line, algorithm, dial, seed, start, sampled, and greedy if recorded.

    Joined experiments, models (each has its own start), optimizers, the engines of a dial of their strength, and the
    dials after the first, divide the panels.
    """
    dial, (steps, keys) = _varying(steps)[0], _keyed(steps)
    found = {"start": tables.run_numbers(steps[steps["step"] == 0], "eval_accuracy", "first", keys)}
    found |= {name: tables.run_numbers(steps, metric, "end", keys) for name, metric in _OUTCOMES.items()}
    return pd.DataFrame(found).dropna(subset=["sampled"]).reset_index().rename(columns={dial: "dial"})


def _keyed(steps: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return ``steps`` with panel and line, and the columns that tell the runs of ``levels`` apart."""
    dial, *others = _varying(steps)
    of_engine = [] if dial == "strength" else ["engine"]
    more, divide = ["routing", "correction", *of_engine], ["experiment", "model", "optimizer"]
    divide += ["engine"] if dial == "strength" and len(set(steps["engine"]) - {"exact"}) > 1 else []
    parts = [steps[key].astype(str) for key in divide if steps[key].nunique() > 1]
    parts += [f"{DIALS[other]} " + steps[other].map("{:g}".format) for other in others]
    # Each panel has its own gain of the reference, and values of its own.
    panels = [", ".join(words) for words in zip(*parts, strict=True)] if parts else ""
    steps = steps.assign(line=tables.line_names(steps, more), panel=panels)
    return steps, ["panel", "line", "algorithm", dial, "seed"]


def table(steps: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each loss of each panel, the one that bears most first; empty if ``lacks`` names a reason."""
    if lacks(steps) is not None:
        return pd.DataFrame()
    rows, (dial, *_) = [], _varying(steps)
    for panel, ours in levels(steps).groupby("panel", sort=False):
        found = [(line, *borne(ours, str(line))) for line in dict.fromkeys(ours["line"])]
        for line, its_number, best in sorted(found, key=lambda each: -order(each[1])):
            its = ours[(ours["line"] == line) & (ours["dial"] == best)]
            row: dict[str, Any] = {"setting": panel} if panel else {}
            row |= {"loss": line, "n": its["seed"].nunique() if its_number is None else its_number.n}
            crossing = np.nan if its_number is None else its_number.crossing
            row["bearable"] = "–" if np.isnan(crossing) else f"{crossing:.3g}"
            row[f"× {paper.shown(REFERENCE, REFERENCE)}"] = "–" if its_number is None else str(its_number)
            if dial == "learning_rate" and its_number is not None:
                row |= {"own best ×": its_number.own_best, "headroom ×": its_number.headroom}
            row |= {f"best {DIALS[dial]}": f"{best:g}"}
            row |= {"start": over_seeds(its["start"].tolist(), bounds=(0, 1))}
            row |= {"sampled at best": over_seeds(its["sampled"].tolist(), bounds=(0, 1))}
            if its["greedy"].notna().any():
                row["greedy at best"] = over_seeds(its["greedy"].dropna().tolist(), bounds=(0, 1))
            rows.append(row)
    return pd.DataFrame(rows).replace({"bearable": {"inf": "> grid"}})


def sentences(rows: pd.DataFrame) -> list[str]:
    """Return which loss of ``table`` bears most, in each setting."""
    reference = paper.shown(REFERENCE, REFERENCE)
    (dial,) = (name.removeprefix("best ") for name in map(str, rows) if name.startswith("best "))
    said = []
    of_setting = rows["setting"] if "setting" in rows else pd.Series("", rows.index)
    for setting, ours in rows.groupby(of_setting, sort=False):
        loss, n, multiple = ours.iloc[0][["loss", "n", f"× {reference}"]]
        text = f"{loss} has the highest, {multiple} times {reference}'s, n = {n}"
        if multiple == "reference > grid":
            text = f"{reference} never falls below the line on this grid; extend it"
        elif (ours[f"× {reference}"] == "–").all():
            text = f"no line, because {reference} gains nothing or has one value of the dial"
        elif multiple == "1.00":
            text = f"no loss has a higher one than {reference}"
        said.append(f"Bearable {dial}{f', {setting!s}' if setting else ''}: {text}.")
    return said


def order(found: Bearable | None) -> float:
    """Return the crossing for ranks, largest first: a loss that bears nothing, or is not known, comes last."""
    return -1.0 if found is None or np.isnan(found.crossing) else found.crossing


def _wide(ours: pd.DataFrame, line: str) -> pd.DataFrame:
    """Return the sampled accuracy of a line, dial × seed, at the seeds that it has at every value."""
    return ours[ours["line"] == line].pivot_table(index="dial", columns="seed", values="sampled").dropna(axis=1)


def _reference(ours: pd.DataFrame) -> str | None:
    """Return the line of the reference: the one with the fewest further choices, if there are several."""
    lines = sorted(set(ours.loc[ours["algorithm"] == REFERENCE, "line"]), key=lambda line: (line.count(" "), line))
    return lines[0] if lines else None


def borne(ours: pd.DataFrame, line: str, at: float | None = None) -> tuple[Bearable | None, float]:
    """Return what a line of a panel of ``levels`` bears, None where no line can be drawn, and its best dial value.

    ``at``: the value at which the reference's gain draws the line (``statistics.bearable.line``).
    """
    mine, reference = _wide(ours, line), _reference(ours)
    means = mine.mean(axis=1) if mine.size else ours[ours["line"] == line].groupby("dial")["sampled"].mean()
    best = float(means.index.to_numpy(float)[means.argmax()])
    if reference is None:
        return None, best
    theirs = _wide(ours, reference)
    seeds = mine.columns.intersection(theirs.columns)
    start = ours[ours["line"] == reference].groupby("seed")["start"].first()
    if len(seeds) == 0:
        return None, best
    curves = [Curve(each.index.to_numpy(float), each[seeds].to_numpy()) for each in (mine, theirs)]
    generator = np.random.default_rng(0)  # the same draws for every loss: losses are paired, too
    try:
        return bearable(curves[0], curves[1], start[seeds].to_numpy(), generator, at), best
    except ValueError:  # one value of the dial, or a reference that gains nothing
        return None, best


def drawn(steps: pd.DataFrame) -> DataFigure:
    """Bearable stress: held-out accuracy over a dial, and where each loss falls below a share of GRPO's best gain.

    A row for each setting besides the dial; sampled accuracy decides, greedy accuracy stands beside it.
    """
    runs, (dial, *_) = levels(steps), _varying(steps)
    outcomes = [name for name in _OUTCOMES if runs[name].notna().any()]
    panels = [
        _Panel(ours, outcome, str(title), DIALS[dial], called=_called(str(title), outcome))
        for title, ours in runs.groupby("panel", sort=False)
        for outcome in outcomes
    ]
    names, alone = sorted(set(runs["line"])), runs["algorithm"].nunique() == 1  # its colour would tell nothing apart
    lines = {name: looks.look(place) for place, name in enumerate(names)} if alone else looks.of_lines(runs, "line")
    return _figure(
        panels, style.beside(len(outcomes)), lines, f"of the gain of {paper.shown(REFERENCE, REFERENCE)} at its best"
    )


def _called(title: str, outcome: str) -> str:
    return f"{title}, {columns.label(_OUTCOMES[outcome])}" if title else ""


class _Carried(NamedTuple):
    """A loss in one setting."""

    panel: str
    line: str
    its: Bearable
    apart: Estimate
    """Its sampled accuracy at its best value less the reference's at its own, over the seeds of both."""


def carried(steps: pd.DataFrame) -> DataFigure:
    """What losses bear in several settings, in multiples of GRPO's, and their accuracy at their best value less GRPO's.

    A setting is a panel of ``drawn``. Open marks: the loss is never below its line, so the multiple is a lower bound.
    """
    runs = levels(steps)
    found = _carried(runs)
    numbers = [(each.line, each.panel, each.its.ratio) for each in found]
    long = pd.DataFrame(numbers, columns=["line", "panel", "ratio"])
    ratios = long.pivot(index="line", columns="panel", values="ratio")
    names = np.log(ratios).mean(axis=1).sort_values(kind="stable").index.tolist()
    looked = looks.ordered(dict.fromkeys(each.panel for each in found))
    end = 1.15 * max(x for each in found for x in (each.its.ratio, each.its.high) if np.isfinite(x))
    with style.figure_style():
        height = 0.7 + (0.8 + 0.4 * len(looked)) * style.height_of(names)
        figure, axes = style.panels(1, 2, height, style.TWO_COLUMNS, sharey=True)
        for panel, line, its, apart in found:
            place, look = list(looked).index(panel), looked[panel]
            row = names.index(line) - 0.7 * ((place + 0.5) / len(looked) - 0.5)
            ratio = Estimate(its.ratio, its.low, min(its.high, end), its.n)
            if np.isinf(its.high):
                axes[0].plot(end, row, ">", color=look.colour, markersize=3)
            is_bound = bool(np.isinf(its.crossing))
            style.dot(axes[0], f"{line}, {panel}", row, ratio, look, "multiple", is_bound, high=its.high)
            style.dot(axes[1], f"{line}, {panel}", row, apart, look, "difference")
        for panel, look in looked.items():
            axes[0].plot([], [], linestyle="none", color=look.colour, markersize=4.5, label=panel, **look.mark)
        for axis, none in zip(axes, (1, 0), strict=True):
            axis.axvline(none, color="#999999", linewidth=0.8, zorder=0)
        style.named_rows(axes[0], style.wrapped(names))
        axes[1].grid(visible=False, axis="y")
        axes[0].set_xscale("log")
        reference = paper.shown(REFERENCE, REFERENCE)
        axes[0].set_xlabel(f"bearable {DIALS[_varying(steps)[0]]}, × {reference}'s")
        axes[1].set_xlabel(f"accuracy at best, less {reference}'s")
        shared, agree = ratios.dropna().index.tolist(), ""
        if len(shared) + 1 >= _MIN_RANKED:
            taus = agreement(runs[runs["panel"].isin(ratios.columns)], shared)
            of_multiples, of_accuracies = map(_tau_text, taus)
            agree = (
                f" Over the {len(shared) + 1} losses of all settings, Kendall's τ (mean of the pairs of settings) is "
                f"{of_multiples} for the multiples and {of_accuracies} for the accuracies."
            ).replace("-", "−")
        text = (
            f"Paired over seeds, n = {style.span([each.its.n for each in found])}, with a nominal 95 % interval, an "
            "arrow where it ends beyond the grid; open: a lower bound, because the loss never falls below the line on "
            f"its grid. Best values are chosen on these seeds.{agree}"
        )
        return style.finish(figure, axes[0], text)


def lacks_settings(steps: pd.DataFrame) -> str | None:
    """Return what ``Results.joined["steps"]`` lacks for ``carried``, or None."""
    if (lack := lacks(steps)) is not None:
        return lack
    runs = levels(steps)
    lines = [each.line for each in _carried(runs)] if runs["panel"].nunique() > 1 else []
    is_twice = len(set(lines)) < len(lines)
    return None if is_twice else "known multiples of a loss in 2 settings: join experiments, or see fig17"


def _carried(runs: pd.DataFrame) -> list[_Carried]:
    """Return each loss but the reference in each panel of ``levels`` in which its multiple is known."""
    found = []
    for panel, ours in runs.groupby("panel", sort=False):
        reference = _reference(ours)
        if reference is None:
            continue
        theirs = _wide(ours, reference).loc[borne(ours, reference)[1]]
        for line in dict.fromkeys(map(str, ours["line"])):
            its, best = borne(ours, line)
            if line != reference and its is not None and np.isfinite(its.ratio):
                apart = np.asarray((_wide(ours, line).loc[best] - theirs).dropna(), dtype=float)
                found.append(_Carried(str(panel), line, its, over_seeds(apart.tolist())))
    return found


def agreement(runs: pd.DataFrame, lines: Sequence[str]) -> tuple[Estimate, Estimate]:
    """Return Kendall's τ between settings, of what losses bear and of their accuracy at their best values.

    ``runs``: ``levels``, whose panels are the settings; ``lines``: the losses to rank beside the reference, all of them
    in every panel. τ is the mean over the pairs of panels. Its interval is Student's with the error of a bootstrap over
    the seeds of each panel, paired between losses, cut at −1 and 1; none below five seeds. n is the smallest number of
    seeds that all losses of a panel share; without one, or where a panel ties all losses, τ is nan.
    """
    generator, ranked, counts = np.random.default_rng(0), [], []
    for _, ours in runs.groupby("panel", sort=False):
        wide = [_wide(ours, line) for line in (str(_reference(ours)), *lines)]
        seeds = reduce(pd.Index.intersection, [each.columns for each in wide])
        if seeds.empty:
            return Estimate(np.nan, np.nan, np.nan, 0), Estimate(np.nan, np.nan, np.nan, 0)
        curves = [Curve(each.index.to_numpy(float), each[seeds].to_numpy()) for each in wide]
        start_S = ours.groupby("seed")["start"].first()[seeds].to_numpy()
        resampled = generator.integers(len(seeds), size=(RESAMPLES, len(seeds)))
        ranked.append(ranked_in_draws(curves, start_S, np.vstack([np.arange(len(seeds)), resampled])))
        counts.append(len(seeds))
    borne, best = (
        _tau_of_draws(np.mean([kendall_tau(*pair) for pair in combinations(numbers, 2)], axis=0), min(counts))
        for numbers in zip(*ranked, strict=True)
    )
    return borne, best


def _tau_of_draws(tau_N: np.ndarray, n: int) -> Estimate:
    """Return the τ of the recorded seeds, which come first, with an interval by the draws that have one."""
    tau, known_N = float(tau_N[0]), tau_N[1:][~np.isnan(tau_N[1:])]
    if np.isnan(tau) or n < MIN_TO_DECIDE:
        return Estimate(tau, np.nan, np.nan, n)
    half = half_of_draws(known_N, n)
    return Estimate(tau, max(-1.0, tau - half), min(1.0, tau + half), n)


def _tau_text(tau: Estimate) -> str:
    if np.isnan(tau.mean):
        return "unknown"
    return f"{tau.mean:.2f}" + ("" if np.isnan(tau.low) else f" [{tau.low:.2f}, {tau.high:.2f}]")


def profile(dials: Mapping[str, tuple[pd.DataFrame, str, float | None]]) -> DataFigure:
    """Held-out accuracy over several dials: a panel for each, with the line and where each loss leaves it.

    ``dials`` is name → its ``levels``, the column of ``DIALS`` that they turn, and the ``at`` of ``borne``.
    """
    panels = [
        _Panel(ours, "sampled", name, DIALS[column], at, name if len(dials) > 1 else "")
        for name, (ours, column, at) in dials.items()
    ]
    lines = looks.of_lines(pd.concat([panel.runs for panel in panels]), "line")
    return _figure(panels, style.beside(len(panels)), lines, f"of {REFERENCE}'s gain")


class _Panel(NamedTuple):
    """One outcome over the dial, in one setting."""

    runs: pd.DataFrame
    """As ``levels`` returns them."""
    outcome: str
    title: str
    dial: str
    at: float | None = None
    """See ``borne``."""
    called: str = ""
    """The panel's name in the figure's numbers, if not the label of its outcome."""


def _figure(panels: Sequence[_Panel], across: int, lines: Mapping[str, looks.Look], gain: str) -> DataFigure:
    """Draw the panels row by row; ``gain`` names the gain that draws the line."""
    rows = len(panels) // across
    counts = [panel.runs.groupby(["line", "dial"])["seed"].nunique() for panel in panels]
    with style.figure_style():
        width, groups = style.ONE_COLUMN if across == 1 else style.TWO_COLUMNS, looks.groups(lines)
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
                axis.set_ylabel(columns.label(_OUTCOMES[panel.outcome]) if is_labelled else "")
                below = panels[place + across : place + across + 1]
                axis.set_xlabel("" if below and below[0].dial == panel.dial else panel.dial)
                style.ticks_at(axis, panel.runs["dial"], log=panel.runs["dial"].min() > 0)
        text = (
            f"Mean over seeds, n = {style.span(pd.concat(counts).tolist())}, with a nominal 95 % interval; dotted: the "
            f"start; dashed: the line, the start plus {SHARE:.0%} {gain}; ticks below: where each loss first falls "
            "below it."
        )
        return style.finish(figure, axes[0], text)


def _draw(axis: Axes, panel: _Panel, lines: Mapping[str, looks.Look]) -> None:
    """Draw the curves ``lines`` of a panel; of sampled accuracy the line and its crossings, too."""
    ours, label = panel.runs, panel.called or columns.label(_OUTCOMES[panel.outcome])
    names = [name for name in dict.fromkeys(ours["line"]) if name in lines]
    for place, name in enumerate(names):
        groups = ours[ours["line"] == name].groupby("dial")[panel.outcome]
        found = [{"x": x} | vars(over_seeds(each.dropna().tolist(), bounds=(0, 1))) for x, each in groups]
        style.aside(axis, name, pd.DataFrame(found), lines[name], (place + 0.5) / len(names) - 0.5, label)
    reference = _reference(ours)
    if panel.outcome != "sampled" or reference is None:
        return
    start = ours.groupby("seed")["start"].first().mean()
    of_reference = _wide(ours, reference).mean(axis=1)
    height = start + SHARE * ((of_reference.max() if panel.at is None else of_reference[panel.at]) - start)
    axis.axhline(start, color="#777777", linestyle=":", linewidth=0.8, zorder=0)
    axis.axhline(height, color="#777777", linestyle="--", linewidth=0.8, zorder=0)
    for name in names:
        its, _ = borne(ours, name, panel.at)
        if its is not None and np.isfinite(its.crossing):
            ends = [its.crossing] * 2, [0, 0.05]
            axis.plot(*ends, color=lines[name].colour, transform=axis.get_xaxis_transform())
            crossing = pd.DataFrame([{"x": its.crossing, "mean": height}])
            style.note(axis, name, crossing, panel=f"{panel.called} crossing".strip())
