"""Sweeps over a dial: the levels of their runs, and the table of what losses tolerate."""

from typing import Any

import numpy as np
import pandas as pd

from steadymoe.bench.report import paper, tables
from steadymoe.bench.statistics.comparisons import MIN_TO_DECIDE
from steadymoe.bench.statistics.estimates import INTERVAL, over_seeds
from steadymoe.bench.statistics.tolerance import REFERENCE, SHARE, gap_closed, of_arm, order

# Column → what it is called. Of several that vary, the first is the dial, and the others divide the table.
LABELS = {
    "learning_rate": "learning rate",
    "updates_per_rollout": "updates per rollout",
    "strength": "strength of the mismatch",
}
OUTCOMES = {"sampled": "eval_accuracy", "greedy": "eval_greedy"}
SHORT_CAPTION = (
    "Tolerance: where mean held-out accuracy first falls below the threshold, the dashed line of the figure. All "
    "columns are explained under Tolerance, below."
)


def pinned(arm: str) -> str:
    """Return the name of the same arm with pinned routes (``tables.arm_names``)."""
    return f"{arm} routing=pinned"


def changes_routes(arm: str) -> bool:
    """Return whether the name of an arm says that its routes are not free: it means nothing with pinned ones."""
    return any(word.startswith(("routing=", "routing.")) for word in arm.split(" "))


def caption() -> str:
    """Return the caption of ``table``, with the reference's name in papers."""
    reference = paper.shown(REFERENCE, REFERENCE)
    return (
        "Tolerance: the value of the dial, beyond a loss's best one, where its mean held-out accuracy (one sampled "
        "response per prompt, the last evaluation, 0 after a number that is not finite) first falls below the "
        f"threshold: the start plus {SHARE:.0%} of the gain of {reference} at its best value; between two values by "
        f"interpolation. × {reference}: the same in multiples of {reference}'s, with a 95 % interval over paired seeds "
        f"from {MIN_TO_DECIDE} seeds on. > grid, > 2: the loss never falls below the threshold on this grid; extend "
        f"it. reference > grid: {reference} never does, so no multiple is known; free > grid: the loss itself. –: "
        "never reaches the threshold. "
        "routing cost ×: the tolerance with pinned routes over that with free ones, the same loss and threshold. "
        f"gap closed: how much of {reference}'s routing cost the loss does not pay, 1 − log of its cost / log of "
        f"{reference}'s, no interval while {reference}'s reaches 1 or if more than 2.5 % of the bootstrap's draws have "
        f"no number; raw: of a change that means nothing with pinned routes. Best: the highest level and its value of "
        f"the dial, with {INTERVAL}; greedy: the greedy accuracy there."
    )


def varying(steps: pd.DataFrame) -> list[str]:
    """Return the columns of ``LABELS`` that take two values with one loss of one experiment, the dial first."""
    fixed = ["experiment", "algorithm", "model", "routing", "correction", "engine", "optimizer"]
    counts = steps.groupby(fixed, observed=True)[list(LABELS)].nunique().max()
    return [column for column in LABELS if counts[column] > 1]


def lacks(steps: pd.DataFrame) -> str | None:
    """Return what a table of ``Results.joined["steps"]`` lacks for ``table``, or None."""
    if not varying(steps):
        return f"runs of one loss at 2 values of {' or '.join(LABELS)}"
    if REFERENCE not in set(steps["algorithm"]):
        return f"runs of {REFERENCE}, the reference"
    runs = steps.drop_duplicates(["experiment", "arm", "seed"])
    named, keys = _keyed(runs)
    merged = runs["arm"].groupby([named[key] for key in keys], observed=True).unique()
    if len(several := merged[merged.map(len) > 1]):
        return f"runs that an arm tells apart: {' and '.join(map(str, several.iloc[0][:2]))} would be one"
    return "runs whose start and end were evaluated" if levels(steps)["start"].isna().all() else None


def ends(steps: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return the accuracy of each run at its start and its end: ``keys``, start, start_greedy, sampled, greedy.

    ``keys`` tell the runs apart. A run without a sampled accuracy is left out.
    """
    first = steps[steps["step"] == 0]
    accuracies = {
        "start": tables.run_numbers(first, "eval_accuracy", "first", keys),
        "start_greedy": tables.run_numbers(first, "eval_greedy", "first", keys),
        **{name: tables.run_numbers(steps, metric, "end", keys) for name, metric in OUTCOMES.items()},
    }
    return pd.DataFrame(accuracies).dropna(subset=["sampled"]).reset_index()


def levels(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the levels of a sweep (``statistics.tolerance``), with greedy accuracies if they were recorded.

    Joined experiments, models (each has its own start), optimizers, the engines of a dial of their strength, and the
    dials after the first, divide the panels.
    """
    named, keys = _keyed(steps)
    return ends(named, keys).rename(columns={varying(steps)[0]: "value"})


def _keyed(steps: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return ``steps`` with panel, and an arm for all values of the dial; and the columns that tell runs apart."""
    dial, *others = varying(steps)
    of_engine = [] if dial == "strength" else ["engine"]
    more, divide = ["routing", "correction", *of_engine], ["experiment", "model", "optimizer"]
    divide += ["engine"] if dial == "strength" and len(set(steps["engine"]) - {"exact"}) > 1 else []
    parts = [steps[key].astype(str) for key in divide if steps[key].nunique() > 1]
    parts += [f"{LABELS[other]} " + steps[other].map("{:g}".format) for other in others]
    # Each panel has its own gain of the reference, and values of its own.
    panels = [", ".join(words) for words in zip(*parts, strict=True)] if parts else ""
    named = steps.assign(arm=tables.arm_names(steps, more), panel=panels)
    return named, ["panel", "arm", "algorithm", dial, "seed"]


def table(steps: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each loss of each panel, the highest tolerance first; empty if ``lacks`` names a reason."""
    if lacks(steps) is not None:
        return pd.DataFrame()
    rows, (dial, *_), reference = [], varying(steps), paper.shown(REFERENCE, REFERENCE)
    for panel, ours in levels(steps).groupby("panel", sort=False):
        measured = [(arm, *of_arm(ours, str(arm))) for arm in dict.fromkeys(ours["arm"])]
        for arm, tolerance, best in sorted(measured, key=lambda each: -order(each[1])):
            runs = ours[(ours["arm"] == arm) & (ours["value"] == best)]
            row: dict[str, Any] = {"setting": panel} if panel else {}
            row |= {"loss": arm, "n": runs["seed"].nunique() if tolerance is None else tolerance.n}
            crossing = np.nan if tolerance is None else tolerance.crossing
            row["tolerance"] = "–" if np.isnan(crossing) else f"{crossing:.3g}"
            row[f"× {reference}"] = "–" if tolerance is None else str(tolerance)
            row |= _routing(ours, str(arm), reference)
            row |= {f"best {LABELS[dial]}": f"{best:g}"}
            row |= {"start": over_seeds(runs["start"].tolist(), bounds=(0, 1))}
            row |= {"sampled at best": over_seeds(runs["sampled"].tolist(), bounds=(0, 1))}
            if runs["greedy"].notna().any():
                row["greedy at best"] = over_seeds(runs["greedy"].dropna().tolist(), bounds=(0, 1))
            rows.append(row)
    found = pd.DataFrame(rows).replace({"tolerance": {"inf": "> grid"}})
    return found.fillna({name: "–" for name in ("routing cost ×", "gap closed") if name in found})


def _routing(levels: pd.DataFrame, arm: str, reference: str) -> dict[str, Any]:
    """Return what moving routes cost an arm, if it or the reference ran with pinned ones."""
    arms = set(levels["arm"])
    if pinned(reference) not in arms or arm.endswith(pinned("")):
        return {}
    if pinned(arm) in arms:
        cost, _ = of_arm(levels, pinned(arm), over=arm)
        shown = {"routing cost ×": "–" if cost is None else str(cost).replace("reference", "free")}
        closed = gap_closed(levels, arm, pinned(arm), pinned(reference))
        return shown if arm == reference else shown | {"gap closed": closed}
    if not (arm.startswith(f"{reference} ") and changes_routes(arm)):
        return {}
    # A change of routes alone means nothing with pinned ones.
    return {"gap closed": f"{gap_closed(levels, arm, None, pinned(reference))} raw"}


def sentences(rows: pd.DataFrame) -> list[str]:
    """Return which loss of ``table`` tolerates most, in each setting."""
    reference = paper.shown(REFERENCE, REFERENCE)
    (dial,) = (name.removeprefix("best ") for name in map(str, rows) if name.startswith("best "))
    said = []
    of_setting = rows["setting"] if "setting" in rows else pd.Series("", rows.index)
    for setting, ours in rows.groupby(of_setting, sort=False):
        loss, n, multiple = ours.iloc[0][["loss", "n", f"× {reference}"]]
        text = f"{loss} has the highest, {multiple} times {reference}'s, n = {n}"
        if multiple == "reference > grid":
            text = f"{reference} never falls below the threshold on this grid; extend it"
        elif (ours[f"× {reference}"] == "–").all():
            text = f"no threshold, because {reference} gains nothing or has one value of the dial"
        elif multiple == "1.00":
            text = f"no loss has a higher one than {reference}"
        said.append(f"Tolerated {dial}{f', {setting!s}' if setting else ''}: {text}.")
    return said
