"""The first lines of a report: who is ahead, whether that is decided, what collapsed, and one table of six columns."""

from collections.abc import Mapping
from math import isnan

import pandas as pd

from steadymoe.bench.report import tables
from steadymoe.bench.statistics.estimates import INTERVAL, Estimate

# The tables of ``report_page.shown_tables``: kind → (table, caption).
Shown = Mapping[str, tuple[pd.DataFrame, str]]

CAPTION = (
    "Mean over n seeds with a 95 % interval. Differences are paired, seed by seed. Collapsed: number of runs, by "
    "today's rule."
)
# Words of the page, besides those of ``outcome.TERMS``.
TERMS = {
    "arm": "Runs that differ in their seed alone.",
    "final reward": f"Mean reward of the last {tables.LAST_STEPS} steps.",
    "interval": f"{INTERVAL[0].upper()}{INTERVAL[1:]}.",
    "decided": "The interval of the paired difference excludes 0. The leading arm was picked by its result, and the "
    "interval is not corrected for that; the p-values under Head to head are.",
}


def sentences(shown: Shown) -> list[str]:
    """Return who is ahead, by how much and whether that is decided, and which arms collapsed; a sentence each."""
    best = shown["leaderboard"][0].iloc[0]
    apart = _apart(shown)
    said = [f"{best['arm']} has the highest final reward: {best['final reward']}, n = {best['n']}."]
    if apart:
        (other, behind), *rest = apart.items()
        lead = Estimate(-behind.mean, -behind.high, -behind.low, behind.n)
        said.append(f"It leads {other}, the next arm, by {lead}, n = {lead.n}: {_verdict(lead)}.")
        clear = [arm for arm, difference in rest if _decided(difference)]
        if clear and not _decided(lead):
            said.append(f"Its lead over {', '.join(clear)} is decided.")
    return [*said, *_collapses(shown["summary"][0])]


def table(shown: Shown) -> pd.DataFrame:
    """Return the six columns that a reader looks for first; one row per arm, the highest final reward first."""
    summary, best, apart = shown["summary"][0], shown["leaderboard"][0]["arm"].iloc[0], _apart(shown)
    accuracy = "final held-out accuracy"
    first = summary[["arm", "n", "final reward", accuracy, "collapsed"]].rename(columns={accuracy: "held-out accuracy"})
    first.insert(3, f"less {best}", [apart.get(arm, "–") for arm in first["arm"]])
    return first


def _apart(shown: Shown) -> dict[str, Estimate]:
    """Arm → its final reward less the best arm's, the highest first."""
    rows = shown["head_to_head"][0] if "head_to_head" in shown else pd.DataFrame(columns=["arm"])
    return dict(zip(rows["arm"], rows.get("final reward, difference", ()), strict=True))


def _decided(difference: Estimate) -> bool:
    return difference.low > 0 or difference.high < 0


def _verdict(lead: Estimate) -> str:
    if _decided(lead):
        return "decided"
    return "not decided, there is no interval" if isnan(lead.low) else "not decided, the interval includes 0"


def _collapses(summary: pd.DataFrame) -> list[str]:
    if summary["collapsed"].isna().all():
        return ["The runs are too short for the rule of collapse."]
    lost = summary[summary["collapsed"] > 0].sort_values("collapsed", ascending=False, kind="stable")
    said = [f"{row['arm']} ({row['collapsed']:.0f} of {row['n']})" for row in lost.to_dict("records")]
    falling = int(summary["falling"].sum())
    return [
        f"Collapsed: {', '.join(said)}." if said else "No run collapsed.",
        *([f"{falling} more {'was' if falling == 1 else 'were'} falling at the end."] if falling else []),
    ]
