"""From runs to the numbers of a loss: its outcomes on each side, what it tolerates there, what routes cost it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from steadymoe.bench.report import tables
from steadymoe.bench.report.folders import ended_runs
from steadymoe.bench.report.results import Results
from steadymoe.bench.report.tolerances import changes_routes, ends, pinned
from steadymoe.bench.runs.compose import Run
from steadymoe.bench.score.standard import CHEAP, COLUMNS, CONTROL, DENSE, FREE, MEASURED, PINNED, SHUFFLED, Side
from steadymoe.bench.statistics.comparisons import holm, is_decided
from steadymoe.bench.statistics.estimates import Estimate, over_seeds, t_quantile
from steadymoe.bench.statistics.tolerance import REFERENCE, Tolerance, best_value, gap_closed, of_arm

_MOE = (FREE.name, PINNED.name)


class Ratio(NamedTuple):
    """One ratio of what is tolerated."""

    title: str
    side: str
    over: str = REFERENCE
    """GRPO, or ``free``: the loss itself with free routes."""


RATIOS = {
    "rate": Ratio(f"rate × {REFERENCE}", FREE.name),
    "pinned": Ratio(f"pinned × {REFERENCE}", PINNED.name),
    "cost": Ratio("routing cost", PINNED.name, over=FREE.name),
    "dense": Ratio(f"dense × {REFERENCE}", DENSE.name),
    "cheap": Ratio(f"7 tokens × {REFERENCE}", CHEAP),
}
# Those of the table; ``pinned``, their product, stands in the picture.
SHOWN = ("rate", "cost", "dense", "cheap")


@dataclass(frozen=True)
class Score:
    """What a loss tolerates, in multiples of GRPO's, what moving routes cost it, and where it ends."""

    loss: str
    algorithm: str
    numbers: Mapping[str, Tolerance | None]
    """Name in ``RATIOS`` → number, None where there is no threshold; one that did not run is missing."""
    decided: Mapping[str, bool]
    """Whether the ratio differs from 1: t test on its logarithm, Holm over the losses of the table."""
    closed: Estimate
    """The gap closed (``statistics.tolerance.gap_closed``)."""
    is_raw: bool
    """Whether that is of a change that means nothing with pinned routes."""
    best_rate: float
    """With free routes; nan if only the cheap side ran."""
    sampled: Estimate
    greedy: Estimate
    """At the best rate, the highest of several, and so biased upwards; on the seeds that all losses have there."""
    expert_change: Estimate
    variance: Estimate
    """Geometric mean; both at the best rate."""

    @property
    def seeds(self) -> int:
        """Return the number of seeds with free routes; 0 if only the cheap side ran."""
        number = self.numbers.get("rate")
        return self.sampled.n if number is None else number.n

    def text(self, name: str) -> str:
        """Return a number with its interval, and a star if it is decided."""
        if name not in self.numbers:
            return "–" if changes_routes(self.loss) else "not run"
        number, base = self.numbers[name], RATIOS[name].over
        text = str(number).replace("reference", base) + (" *" if self.decided.get(name) else "")
        return "no threshold" if number is None else text


def of_runs(runs: Sequence[Run], side: Side, loss: str) -> pd.DataFrame:
    """Return the outcomes (``standard.COLUMNS``) of those of ``runs`` that have ended, under the label ``loss``."""
    folders = {str(run.folder) for run in runs}
    ended = ended_runs(Path(runs[0].config.results_dir), runs[0].config.experiment_name)
    own = ended[ended["origin"] == ""]  # another trainer's run is not the suite's, wherever it lies
    ours = own[own["folder"].map(lambda folder: str(Path(folder).absolute()) in folders).astype(bool)]
    if not len(ours):
        return pd.DataFrame(columns=list(COLUMNS))
    steps = Results.of_folders(ours).joined["steps"].rename(columns={"learning_rate": "rate"})
    keys = ["algorithm", "rate", "seed"]
    rows = ends(steps, keys)
    for name, (metric, how) in {
        "expert_change": ("expert_change_per_update", "mean"),
        "variance": ("token_ratio_variance", "median"),
    }.items():
        numbers = tables.run_numbers(steps, metric, how, keys) if side.name == MEASURED.name else pd.Series(dtype=float)
        rows[name] = [numbers.get(run, np.nan) for run in rows[keys].itertuples(index=False, name=None)]
    return rows.assign(side=side.name, loss=loss)[list(COLUMNS)]


def levels(outcomes: pd.DataFrame, side: str) -> pd.DataFrame:
    """Return the outcomes of a side as levels (``statistics.tolerance``).

    With free or pinned routes those of both: a loss with pinned routes is an arm of its own.
    """
    its = outcomes[outcomes["side"].isin(_MOE if side in _MOE else (side,))].rename(columns={"rate": "value"})
    return its.assign(arm=[_arm(*pair) for pair in zip(its["loss"], its["side"], strict=True)])


def _arm(loss: str, side: str) -> str:
    return pinned(loss) if side == PINNED.name else loss


def best_rate(outcomes: pd.DataFrame, loss: str, side: str = FREE.name) -> float:
    """Return the learning rate with the highest mean sampled accuracy on a side."""
    ours = outcomes[(outcomes["side"] == side) & (outcomes["loss"] == loss)]
    return best_value(ours["rate"], ours["sampled"])[0]


def wider(outcomes: pd.DataFrame, loss: str, side: Side) -> list[float]:
    """Return the rates by which the grid of ``outcomes`` is extended for a loss on a side: below if its first rate is
    the best, above if it still reaches the threshold at the last.
    """
    its, arm = levels(outcomes, side.name), _arm(loss, side.name)
    rates = sorted(its.loc[its["arm"] == arm, "value"].unique())
    if not rates:
        return []
    found, best = of_arm(its, arm)
    more = [rates[0] / 2] if best == rates[0] else []
    return [*more, 2 * rates[-1]] if found is not None and np.isinf(found.crossing) else more


def scores(*blocks: pd.DataFrame) -> list[Score]:
    """Return a score for each loss, the highest tolerated rate first.

    A loss is compared with GRPO in its own block, the first that has runs of it on the side in question. Holm's
    correction is over all blocks.
    """
    losses = dict.fromkeys(loss for block in blocks for loss in block["loss"])
    numbers: dict[str, dict[str, Tolerance | None]] = {loss: {} for loss in losses}
    decided: dict[str, dict[str, bool]] = {loss: {} for loss in losses}
    for name, ratio in RATIOS.items():
        for loss in losses:
            if (block := _block(blocks, loss, ratio.side)) is not None:
                over = loss if ratio.over == FREE.name else None
                numbers[loss][name] = of_arm(levels(block, ratio.side), _arm(loss, ratio.side), over)[0]
        known = {loss: number for loss, its in numbers.items() if (number := its.get(name)) is not None}
        others = [loss for loss in known if loss != REFERENCE or name == "cost"]
        corrected = dict(zip(others, holm([known[loss].p for loss in others]), strict=True))
        for loss in known:
            decided[loss][name] = loss in corrected and is_decided(corrected[loss], known[loss].n)
    found = [_score(loss, numbers[loss], decided[loss], blocks) for loss in losses]
    return sorted(found, key=lambda each: [-_rank(each.numbers.get(name)) for name in ("rate", "cheap")])


def _rank(number: Tolerance | None) -> float:
    return -1.0 if number is None or np.isnan(number.ratio) else number.ratio


def _block(blocks: Sequence[pd.DataFrame], loss: str, side: str) -> pd.DataFrame | None:
    return next((each for each in blocks if ((each["loss"] == loss) & (each["side"] == side)).any()), None)


def _score(
    loss: str, numbers: Mapping[str, Tolerance | None], decided: Mapping[str, bool], blocks: Sequence[pd.DataFrame]
) -> Score:
    """Return a score with its gap closed and its numbers at the best rate."""
    (algorithm, *_) = (name for block in blocks for name in block.loc[block["loss"] == loss, "algorithm"])
    none = over_seeds([])
    if (block := _block(blocks, loss, FREE.name)) is None:
        return Score(loss, algorithm, numbers, decided, none, False, np.nan, none, none, none, none)
    of_moe, rate, shared = levels(block, FREE.name), best_rate(block, loss), _on_shared_seeds(block)
    has_pinned, is_route = "cost" in numbers, loss.startswith(f"{REFERENCE} ") and changes_routes(loss)
    closed = none
    if loss != REFERENCE and (has_pinned or is_route):
        closed = gap_closed(of_moe, loss, pinned(loss) if has_pinned else None, pinned(REFERENCE))
    at = [rows[(rows["loss"] == loss) & (rows["rate"] == rate)] for rows in (shared, block)]
    measured = at[1][at[1]["side"] == MEASURED.name]
    sampled, greedy = (over_seeds(at[0][name].dropna().tolist(), bounds=(0, 1)) for name in ("sampled", "greedy"))
    changes = over_seeds(measured["expert_change"].dropna().tolist(), bounds=(0, 1))
    variance = over_seeds(measured["variance"].dropna().tolist(), log=True)
    return Score(loss, algorithm, numbers, decided, closed, not has_pinned, rate, sampled, greedy, changes, variance)


def _on_shared_seeds(outcomes: pd.DataFrame) -> pd.DataFrame:
    """Return the outcomes with free routes on the seeds of every loss: only there levels are of the same starts."""
    free = outcomes[outcomes["side"] == FREE.name]
    seeds = free.groupby("loss")["seed"].agg(set)
    return free[free["seed"].isin(set.intersection(*seeds))]


def gains_without_reward(outcomes: pd.DataFrame) -> str:
    """Return what is wrong if a loss gains from shuffled rewards a share of what GRPO gains from rewards, else ""."""
    reference = outcomes[(outcomes["side"] == FREE.name) & (outcomes["loss"] == REFERENCE)]
    best = reference.groupby("rate")[["start", "sampled"]].mean()
    gain, shuffled = float((best["sampled"] - best["start"]).max()), outcomes[outcomes["side"] == CONTROL.name]
    without = float((shuffled["sampled"] - shuffled["start"]).mean())
    if without <= max(0.0, SHUFFLED * gain):
        return ""
    return f"with shuffled rewards it gains {without:.3f}, GRPO with real ones {gain:.3f}: rewards are not why it gains"


def smallest(number: Tolerance, losses: int) -> float:
    """Return the smallest ratio above 1 that a number this noisy would decide, in a table of ``losses`` others.

    nan without an interval. Bonferroni's level stands for Holm's first step.
    """
    if not (number.low > 0 and np.isfinite(number.high)):
        return float("nan")
    error = np.log(number.high / number.ratio) / t_quantile(0.95, number.n - 1)
    return float(np.exp(t_quantile(1 - 0.05 / losses, number.n - 1) * error))


def table(found: Sequence[Score]) -> pd.DataFrame:
    """Return the scores for people; a ratio that no loss has is left out."""
    shown = [name for name in SHOWN if any(name in each.numbers for each in found)]
    rows: list[dict[str, Any]] = [
        {"loss": each.loss}
        | {RATIOS[name].title: each.text(name) for name in shown}
        | {"gap closed": f"{each.closed}{' raw' if each.is_raw and each.closed.n else ''}"}
        | {"best rate": "–" if np.isnan(each.best_rate) else f"{each.best_rate:g}"}
        | {"sampled": each.sampled, "greedy": each.greedy}
        | {"experts changed": each.expert_change, "ratio variance": each.variance}
        for each in found
    ]
    return pd.DataFrame(rows)


def start(outcomes: pd.DataFrame) -> tuple[Estimate, Estimate]:
    """Return the accuracy of the frozen policy, the cold start: sampled and greedy, on the seeds of the levels."""
    starts = _on_shared_seeds(outcomes).groupby("seed")[["start", "start_greedy"]].first()
    sampled, greedy = (over_seeds(starts[name].dropna().tolist(), bounds=(0, 1)) for name in starts)
    return sampled, greedy


def notes(found: Sequence[Score], outcomes: pd.DataFrame, own: str, quick: bool) -> list[str]:
    """Return what a reader of a score must know: the start, what was seen or could have been, what a star means."""
    sampled, greedy = start(outcomes)
    lines = [f"Without training: {sampled} sampled, {greedy} greedy, n = {sampled.n}. *: decided."]
    if quick:
        first = "A first look: three seeds decide nothing, and two rates make no grid. Leave out --quick for the score."
        return [*lines, first]
    (mine,) = [each for each in found if each.loss == own]
    for name in SHOWN if own != REFERENCE else ():
        family = sum(name in each.numbers and (each.loss != REFERENCE or name == "cost") for each in found)
        if (number := mine.numbers.get(name)) is not None and np.isfinite(least := smallest(number, family)):
            title = RATIOS[name].title
            lines.append(f"{title}: {number.n} seeds decide no ratio closer to 1 than {least:.2f}, or its inverse.")
    return lines
