"""The reference study: the tables of some of its arms, and one number for each run.

Each experiment of the study holds the arms that it adds; the arms to compare with stand in the experiment ``study``. A
comparison therefore names its arms by experiment, algorithm and axes, and gets the tables of ``archive.load`` for these
arms alone, under their labels.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from steadymoe.bench.config.identity import axes_name
from steadymoe.bench.measurement import columns
from steadymoe.bench.report import archive, head_to_head, tables
from steadymoe.bench.statistics import early_warning, efficiency
from steadymoe.bench.statistics.estimates import Estimate

NONE = Estimate(np.nan, np.nan, np.nan, 0)


class Arm(NamedTuple):
    """Runs that differ in their seed alone."""

    label: str
    experiment: str
    algorithm: str
    axes: Mapping[str, object] = {}
    """The config fields that differ from the experiment's own, with their values (``identity.axes_name``)."""


class NotRun(Exception):
    """An arm has no ended runs; the message names it."""


class Study:
    """The recorded runs below ``results``, in ``runs/`` or ``data/``."""

    def __init__(self, results: Path) -> None:
        self._recorded = cache(lambda experiment: archive.load(results, experiment))
        self._chosen = cache(self._choose)

    def tables(self, arms: Sequence[Arm]) -> dict[str, pd.DataFrame]:
        """The tables of ``archive.load`` for ``arms``, with their labels as ``arm``. Raises NotRun."""
        chosen = [self._chosen(arm.label, arm.experiment, arm.algorithm, axes_name(arm.axes)) for arm in arms]
        return {kind: pd.concat([each[kind] for each in chosen], ignore_index=True) for kind in chosen[0]}

    def _choose(self, label: str, experiment: str, algorithm: str, axes: str) -> dict[str, pd.DataFrame]:
        recorded = self._recorded(experiment)
        runs = recorded["runs"]
        ours = runs[(runs["algorithm"] == algorithm) & (runs["axes"] == axes)] if len(runs) else runs
        if ours.empty:
            raise NotRun(f"{label} ({experiment})")
        (name,) = ours["arm"].unique()
        return {kind: table[table["arm"] == name].assign(arm=label) for kind, table in recorded.items()}

    def numbers(self, arm: Arm, metric: str, how: str) -> pd.Series:
        """One number for each run by seed, made from a metric's curve by ``tables.one_number``."""
        steps = self.tables([arm])["steps"]
        curves = steps[steps["metric"] == metric].sort_values("step").groupby("seed")["value"]
        return pd.Series({seed: tables.one_number(curve, how) for seed, curve in curves}, dtype=float)

    def final(self, arm: Arm) -> pd.Series:
        """Final reward by seed."""
        return self.numbers(arm, "reward", "last")

    def first(self, arm: Arm) -> pd.Series:
        """The reward of the first step, sampled by the cold start, by seed."""
        steps = self.tables([arm])["steps"]
        return steps[(steps["metric"] == "reward") & (steps["step"] == 1)].set_index("seed")["value"].sort_index()

    def held_out(self, arm: Arm) -> pd.Series:
        """Held-out accuracy by seed: the mean of a run's last five evaluations, sampled without an engine's noise."""
        return self.numbers(arm, "eval_accuracy", "last")

    def has(self, arm: Arm) -> bool:
        """Whether any run of the arm has ended."""
        try:
            self.tables([arm])
        except NotRun:
            return False
        return True

    def judged(self, arm: Arm) -> pd.DataFrame:
        """The runs of the arm that are long enough for today's rule of a collapse."""
        runs = self.tables([arm])["runs"]
        return runs[(runs["judged_until"] > 0) | runs["collapsed_step"].notna()]

    def collapsed(self, arm: Arm) -> tuple[int, int]:
        """How many runs collapsed by today's rule, and how many runs it can judge."""
        runs = self.judged(arm)
        return int(runs["collapsed_step"].notna().sum()), len(runs)

    def recorded(self, arm: Arm) -> int:
        """How many runs recorded themselves as collapsed, by the rule of the day on which they ended."""
        return int((self.tables([arm])["runs"]["status"] == "diverged").sum())

    def routing_share(self, arm: Arm) -> pd.Series:
        """``tables.routing_share`` by seed."""
        return tables.routing_share(self.tables([arm])["steps"], [])

    def warning_area(self, arms: Sequence[Arm], metric: str, least_lead: int = 1) -> Estimate:
        """Area under the ROC curve of a metric's most alarming value up to ``least_lead`` steps before a collapse.

        Runs of all arms count, except runs that fell at their end, too late to be judged. The interval is over seeds.
        """
        found = self.tables(arms)
        runs = pd.concat([self.judged(arm).assign(arm=arm.label) for arm in arms])
        runs = runs[runs["collapsed_step"].notna() | runs["falling_since"].isna()]
        runs = runs.assign(collapsed=runs["collapsed_step"])
        return early_warning.auc(
            early_warning.extremes(found["steps"], runs, metric, least_lead, falls=columns.falls(metric))
        )

    def cost_factor(self, arm: Arm, over: Arm, unit: str) -> efficiency.CostRatio | None:
        """The amount of ``unit`` (``efficiency.COSTS``) that an arm needs for a reward, over the amount of another arm.

        The reward is the target of the head-to-head table: nine tenths of the way from the reward of the first step to
        the final reward of the better arm. None if neither arm gains reward.
        """
        found = self.tables([arm, over])
        target = head_to_head.target(found["steps"], max(self.final(each).mean() for each in (arm, over)))
        if target is None:
            return None
        ours, theirs = (head_to_head.spent(*self._steps_and_runs(each), target)[unit] for each in (arm, over))
        return efficiency.cost_ratio(ours, theirs)

    def wins(self, arm: Arm, over: Arm) -> Estimate:
        """The share of held-out prompts that an arm wins against another arm, less the share that it loses."""
        ours, theirs = (self.tables([each])["evaluations"] for each in (arm, over))
        return efficiency.win_rate(ours, theirs)

    def _steps_and_runs(self, arm: Arm) -> tuple[pd.DataFrame, pd.DataFrame]:
        found = self.tables([arm])
        return found["steps"], found["runs"]
