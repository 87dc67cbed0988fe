"""From runs to three numbers a loss: its outcomes over each dial, what it tolerates, and its level at its best rate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from steadymoe.bench.report.folders import ended_runs
from steadymoe.bench.report.results import Results
from steadymoe.bench.report.tolerances import ends
from steadymoe.bench.runs.compose import Run
from steadymoe.bench.score.standard import COLUMNS, DIALS, RATE, REFERENCE, SHUFFLED, Dial
from steadymoe.bench.statistics.comparisons import holm, is_decided
from steadymoe.bench.statistics.estimates import Estimate, over_seeds, t_quantile
from steadymoe.bench.statistics.tolerance import Tolerance, best_value, of_arm, order


@dataclass(frozen=True)
class Score:
    """What a loss tolerates, in multiples of GRPO's, and where it ends."""

    loss: str
    tolerances: Mapping[str, Tolerance | None]
    """Dial → number, None where there is no threshold; a dial that did not run is missing."""
    decided: Mapping[str, bool]
    """Dial → whether the ratio differs from 1: t test on its logarithm, Holm over the losses of the table."""
    best_rate: float
    sampled: Estimate
    greedy: Estimate
    """At the best rate, the highest of several, and so biased upwards; on the seeds that all losses have there."""

    @property
    def seeds(self) -> int:
        """Return the number of seeds behind the number of the rate's dial."""
        number = self.tolerances.get(RATE.name)
        return self.sampled.n if number is None else number.n

    def text(self, dial: Dial) -> str:
        """Return the number with its interval, and a star if it is decided."""
        if dial.name not in self.tolerances:
            return "not run"
        number = self.tolerances[dial.name]
        return "no threshold" if number is None else f"{number}{' *' if self.decided[dial.name] else ''}"


def of_runs(runs: Sequence[Run], dial: Dial, loss: str) -> pd.DataFrame:
    """Return the outcomes (``standard.COLUMNS``) of those of ``runs`` that have ended, under the label ``loss``."""
    folders = {str(run.folder) for run in runs}
    ended = ended_runs(Path(runs[0].config.results_dir), runs[0].config.experiment_name)
    own = ended[ended["origin"] == ""]  # another trainer's run is not the suite's, wherever it lies
    ours = own[own["folder"].map(lambda folder: str(Path(folder).absolute()) in folders).astype(bool)]
    if not len(ours):
        return pd.DataFrame(columns=list(COLUMNS))
    return of_steps(Results.of_folders(ours).joined["steps"], dial, loss)


def of_steps(steps: pd.DataFrame, dial: Dial, loss: str) -> pd.DataFrame:
    """Return the outcomes of one loss from ``Results.joined["steps"]``."""
    steps = steps.assign(rate=steps["learning_rate"], turned=steps[dial.column].astype(float))
    rows = ends(steps, ["algorithm", "rate", "turned", "seed"]).rename(columns={"turned": "value"})
    return rows.assign(dial=dial.name, loss=loss)[list(COLUMNS)]


def best_rate(outcomes: pd.DataFrame, loss: str) -> float:
    """Return the learning rate with the highest mean sampled accuracy on the rate's dial."""
    ours = outcomes[(outcomes["dial"] == RATE.name) & (outcomes["loss"] == loss)]
    return best_value(ours["value"], ours["sampled"]).value


def wider(outcomes: pd.DataFrame, loss: str, grid: Sequence[float]) -> list[float]:
    """Return the rates by which a loss's ``grid``, ascending, is extended: once, below if its first rate is the best,
    above if it still reaches the threshold at the last.
    """
    levels = RATE.levels(outcomes)
    rates = sorted(levels.loc[levels["arm"] == loss, "value"].unique())
    found, _ = of_arm(levels, loss)
    more = [grid[0] / 2] if best_rate(outcomes, loss) == rates[0] == grid[0] else []
    if found is not None and np.isinf(found.crossing) and rates[-1] == grid[-1]:
        more.append(2 * rates[-1])
    return more


def scores(*blocks: pd.DataFrame) -> list[Score]:
    """Return a score for each loss with runs on the rate's dial, the highest tolerated rate first.

    A loss is compared with GRPO in its own block, the first that has it. Holm's correction is over all blocks.
    """
    of: dict[str, pd.DataFrame] = {}
    for block in blocks:
        for loss in dict.fromkeys(block.loc[block["dial"] == RATE.name, "loss"]):
            of.setdefault(loss, block)
    tolerances: dict[str, dict[str, Tolerance | None]] = {loss: {} for loss in of}
    decided: dict[str, dict[str, bool]] = {loss: {} for loss in of}
    for dial in DIALS:
        levels = {loss: dial.levels(block) for loss, block in of.items()}
        numbers = {loss: of_arm(ours, loss, dial.at)[0] for loss, ours in levels.items() if loss in set(ours["arm"])}
        known = {loss: number for loss, number in numbers.items() if number is not None}
        others = [loss for loss in known if loss != REFERENCE]
        corrected = dict(zip(others, holm([known[loss].p for loss in others]), strict=True))
        for loss, number in numbers.items():
            tolerances[loss][dial.name] = number
            decided[loss][dial.name] = loss in corrected and is_decided(corrected[loss], known[loss].n)
    found = []
    for loss, block in of.items():
        rate, of_rate = best_rate(block, loss), _on_shared_seeds(block)
        ours = of_rate[(of_rate["loss"] == loss) & (of_rate["value"] == rate)]
        at_best = (over_seeds(ours[name].dropna().tolist(), bounds=(0, 1)) for name in ("sampled", "greedy"))
        found.append(Score(loss, tolerances[loss], decided[loss], rate, *at_best))
    return sorted(found, key=lambda each: -order(each.tolerances.get(RATE.name)))


def _on_shared_seeds(outcomes: pd.DataFrame) -> pd.DataFrame:
    """Return the outcomes of the rate's dial on the seeds of every loss: only there levels are of the same starts."""
    of_rate = outcomes[outcomes["dial"] == RATE.name]
    seeds = of_rate.groupby("loss")["seed"].agg(set)
    return of_rate[of_rate["seed"].isin(set.intersection(*seeds))]


def gains_without_reward(outcomes: pd.DataFrame, shuffled: pd.DataFrame) -> str:
    """Return what is wrong if a loss gains from shuffled rewards a share of what GRPO gains from rewards, else ""."""
    of_rate = outcomes[(outcomes["dial"] == RATE.name) & (outcomes["loss"] == REFERENCE)]
    best = of_rate.groupby("value")[["start", "sampled"]].mean()
    gain = float((best["sampled"] - best["start"]).max())
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
    """Return the scores for people."""
    columns = ["loss", *(f"{dial.name} × {REFERENCE}" for dial in DIALS), "best rate", "sampled", "greedy"]
    rows = [(s.loss, *map(s.text, DIALS), f"{s.best_rate:g}", s.sampled, s.greedy) for s in found]
    return pd.DataFrame(rows, columns=columns)


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
        first = "A first look: three seeds decide nothing, and the grid is short. Leave out --quick for the full score."
        return [*lines, first]
    (mine,) = [each for each in found if each.loss == own]
    for name, number in mine.tolerances.items() if own != REFERENCE else ():
        if number is not None and np.isfinite(least := smallest(number, len(found) - 1)):
            lines.append(f"{name}: {number.n} seeds decide no ratio closer to 1 than {least:.2f}, or its inverse.")
    return lines
