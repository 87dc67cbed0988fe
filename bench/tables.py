"""Tables over seeds, from the long form of ``collect.steps`` (with a column ``arm``)."""

from typing import cast

import pandas as pd

from steadymoe.bench.stats import Estimate, mean_over_seeds

# Steps at the end of a run over which its final numbers are averaged.
LAST_STEPS = 5

# Column → (metric, how one seed's curve becomes one number).
SUMMARY = {
    "final reward": ("reward", "last"),
    "final held-out accuracy": ("eval_accuracy", "end"),
    "best minus final reward": ("reward", "fall"),
    "expert change": ("expert_change_rate", "median"),
    "expert change per update": ("expert_change_per_update", "mean"),
    "token-ratio variance": ("token_ratio_variance", "median"),
    "sequence-ratio variance": ("sequence_ratio_variance", "median"),
    "clip fraction": ("clip_fraction", "mean"),
}
# Averaged over seeds on a logarithmic scale.
GEOMETRIC = ("token-ratio variance", "sequence-ratio variance")
CAPTION = (
    "Mean over seeds (of variances the geometric one) with a 95 % t interval (none below three seeds); n is the "
    "number of seeds. Of each run: "
    f"final reward is the mean of its last {LAST_STEPS} steps, final held-out accuracy its last evaluation, "
    f"best minus final compares means over {LAST_STEPS} steps, expert change and the variances are medians "
    "over steps, expert change per update and clip fraction means. Diverged: runs that collapsed or met a "
    "number that is not finite; they are part of every mean, the latter with reward and accuracy 0 once they ended."
)


def one_number(curve: pd.Series, how: str) -> float:
    """One seed's number from its curve over steps, in the order of the steps."""
    smooth = curve.rolling(min(LAST_STEPS, len(curve))).mean().dropna()
    if how == "last":
        return float(smooth.iloc[-1])
    if how == "fall":
        return float(smooth.max() - smooth.iloc[-1])
    if how == "end":
        return float(curve.iloc[-1])
    return float(curve.median() if how == "median" else curve.mean())


def summary(steps: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """One row per arm, the highest final reward first: n, diverged, an ``Estimate`` for each column of ``SUMMARY``."""
    rows = []
    for arm in sorted(runs["arm"].unique()):
        ours = runs[runs["arm"] == arm]
        row: dict[str, object] = {
            "arm": arm,
            "n": len(ours),
            "diverged": int((ours["status"] == "diverged").sum()),
        }
        for column, (metric, how) in SUMMARY.items():
            chosen = steps[(steps["arm"] == arm) & (steps["metric"] == metric)].sort_values("step")
            numbers = [one_number(curve, how) for _, curve in chosen.groupby("seed")["value"]]
            row[column] = mean_over_seeds(numbers, log=column in GEOMETRIC)
        rows.append(row)
    rows.sort(key=lambda row: -cast(Estimate, row["final reward"]).mean if row["n"] else 0.0)
    return pd.DataFrame(rows, columns=["arm", "n", "diverged", *SUMMARY])


def to_markdown(summary: pd.DataFrame) -> str:
    """The table as people read it: estimates with their intervals."""
    return summary.map(str).to_markdown(index=False, disable_numparse=True)


def to_numbers(summary: pd.DataFrame) -> pd.DataFrame:
    """The table as programs read it: mean, low, high and n of each estimate in columns of their own."""
    plain = summary.drop(columns=[name for name in SUMMARY if name in summary])
    for column in SUMMARY:
        estimates: list[Estimate] = summary[column].tolist()
        for part in ("mean", "low", "high", "n"):
            plain[f"{column} {part}"] = [getattr(estimate, part) for estimate in estimates]
    return plain
