"""A table of arms: how many runs, how many collapsed, where they started, and their outcomes."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from steadymoe.bench.measurement import columns
from steadymoe.bench.score.recorded import Arm, Recorded
from steadymoe.bench.statistics.estimates import over_seeds


class Standings:
    """Tables of the arms of a study; each arm is counted once for all tables."""

    def __init__(self, study: Recorded) -> None:
        self._study = study
        self._rows: dict[tuple[str, str, bool], dict[str, Any]] = {}

    def table(self, arms: Sequence[Arm], accuracy: bool = False) -> pd.DataFrame:
        """A row for each arm that has run, best first: n, collapses, start, mean and final reward, accuracy.

        With ``accuracy`` the start is a held-out accuracy, and the final one gives the order; else both are rewards.
        """
        there = [arm for arm in {arm.label: arm for arm in arms}.values() if self._study.has(arm)]
        outcome = self._study.held_out if accuracy else self._study.mean_reward
        best_first = sorted(there, key=lambda arm: -float(outcome(arm).mean()))
        return pd.DataFrame([self._row(arm, accuracy) for arm in best_first])

    def _row(self, arm: Arm, accuracy: bool) -> dict[str, Any]:
        key = (arm.label, arm.experiment, accuracy)
        if key not in self._rows:
            self._rows[key] = self._count(arm, accuracy)
        return self._rows[key]

    def _count(self, arm: Arm, accuracy: bool) -> dict[str, Any]:
        study = self._study
        collapsed, judged = study.collapsed(arm)
        numbers = {
            "start": study.numbers(arm, "eval_accuracy", "first") if accuracy else study.first(arm),
            "mean reward": study.mean_reward(arm),
            "final reward": study.final(arm),
            "held-out accuracy": study.held_out(arm),
        }
        bounds = columns.bounds("reward")
        estimates = {what: over_seeds(values.tolist(), bounds=bounds) for what, values in numbers.items()}
        first = {"arm": arm.label, "n": len(numbers["start"]), "collapsed": collapsed if judged else "–"}
        return first | estimates
