"""The reference study: one number for each recorded run, and one for each audited checkpoint.

Each experiment of the study holds the arms that it adds. A comparison therefore names its arms by experiment, algorithm
and axes, and gets the tables of ``archive.load`` for these arms alone, under their labels.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from steadymoe.bench.audit import archive as audits
from steadymoe.bench.report import archive, realism, tables
from steadymoe.bench.runs.identity import axes_name
from steadymoe.bench.statistics.estimates import Estimate
from steadymoe.bench.support import regular_files
from steadymoe.bench.support.errors import UserError

NONE = Estimate(np.nan, np.nan, np.nan, 0)


class Arm(NamedTuple):
    """Runs that differ in their seed alone."""

    label: str
    experiment: str
    algorithm: str
    axes: Mapping[str, object] = {}
    """The config fields that differ from the experiment's own, with their values (``identity.axes_name``)."""


class Audited(NamedTuple):
    """A loss of an audit, under one routing."""

    label: str
    experiment: str
    loss: str
    """Its label in the audit (``audit.algorithms``, ``audit.arms``)."""
    routing: str = "free"

    def replayed(self) -> "Audited":
        """Return the same loss with the old policy's routes replayed."""
        return self._replace(label=f"{self.label} + R2", routing="r2")


class NotRun(UserError):
    """An arm has no finished runs, or a loss has no audits; the message names it."""


class Recorded:
    """The recorded runs and audits below ``results``."""

    def __init__(self, results: Path) -> None:
        self._recorded = cache(lambda experiment: archive.load(results, experiment))
        self._audited = cache(lambda experiment: audits.load(results, experiment).rows)
        self._by_arm = cache(self._divided)
        self._chosen = cache(self._choose)
        self._calibration = results / "calibration" / "calibration.csv"

    # --- runs ---------------------------------------------------------------------------------------------------

    def tables(self, arms: Sequence[Arm]) -> dict[str, pd.DataFrame]:
        """Return the tables of ``archive.load`` for ``arms``, with their labels as ``arm``. Raises NotRun."""
        chosen = [self._chosen(arm.label, arm.experiment, arm.algorithm, axes_name(arm.axes)) for arm in arms]
        if len(chosen) == 1:
            return chosen[0]
        return {kind: pd.concat([each[kind] for each in chosen], ignore_index=True) for kind in chosen[0]}

    def experiment(self, name: str) -> dict[str, pd.DataFrame]:
        """Return the tables of ``archive.load`` for a whole experiment, empty where nothing has run."""
        return self._recorded(name)

    def _divided(self, experiment: str) -> dict[str, dict[str, pd.DataFrame]]:
        """Return the tables of ``experiment`` by arm: an arm is asked for many times, and reads no other's rows."""
        return {
            kind: {str(name): rows.reset_index(drop=True) for name, rows in table.groupby("arm", sort=False)}
            for kind, table in self._recorded(experiment).items()
        }

    def _choose(self, label: str, experiment: str, algorithm: str, axes: str) -> dict[str, pd.DataFrame]:
        recorded = self._recorded(experiment)
        runs = recorded["runs"]
        ours = runs[(runs["algorithm"] == algorithm) & (runs["axes"] == axes)] if len(runs) else runs
        if ours.empty:
            raise NotRun(f"{label} ({experiment})")
        name, *others = ours["arm"].unique()
        if others:  # several models or tasks under one name
            raise NotRun(f"{label} alone ({experiment} holds {name} and {others[0]})")
        return {
            kind: self._by_arm(experiment)[kind].get(name, table.iloc[:0]).assign(arm=label)
            for kind, table in recorded.items()
        }

    def has(self, arm: Arm) -> bool:
        """Whether any run of the arm has ended."""
        try:
            self.tables([arm])
        except NotRun:
            return False
        return True

    def numbers(self, arm: Arm, metric: str, how: str) -> pd.Series:
        """Return one number for each run by seed, made from a metric's curve by ``tables.one_number``."""
        return tables.run_numbers(self.tables([arm])["steps"], metric, how)

    def at(self, arm: Arm, metric: str, step: int) -> pd.Series:
        """Return a metric at one step, by seed."""
        steps = self.tables([arm])["steps"]
        return steps[(steps["metric"] == metric) & (steps["step"] == step)].set_index("seed")["value"].sort_index()

    def mean_reward(self, arm: Arm, until: float | None = None) -> pd.Series:
        """Return the mean reward by seed up to the step ``until``.

        None means over the steps in which a collapse could begin and be seen before the end.
        """
        steps = self.tables([arm])["steps"]
        until = self.judged(arm)["judged_until"].max() if until is None else until
        counted = steps[(steps["metric"] == "reward") & (steps["step"] <= until)]
        return counted.groupby("seed")["value"].mean()

    def final(self, arm: Arm) -> pd.Series:
        """Return the final reward by seed."""
        return self.numbers(arm, "reward", "last")

    def first(self, arm: Arm) -> pd.Series:
        """Return the reward of the first step, sampled by the cold start, by seed."""
        return self.at(arm, "reward", 1)

    def held_out(self, arm: Arm) -> pd.Series:
        """Return held-out accuracy by seed: the last evaluation, sampled without engine noise."""
        return self.numbers(arm, "eval_accuracy", "end")

    def late_accuracy(self, arm: Arm) -> pd.Series:
        """Return late accuracy by seed: the mean of a run's last five evaluations, as far as its second half has them.

        A run that was evaluated only once in its second half has none.
        """
        steps = self.tables([arm])["steps"]
        evaluated = steps[steps["metric"] == "eval_accuracy"].sort_values("step")
        late = evaluated[evaluated["step"] > evaluated["step"].max() / 2].groupby("seed")["value"]
        return late.agg(partial(tables.one_number, how="last"))[late.size() > 1]

    def routing_share(self, arm: Arm) -> pd.Series:
        """Return ``tables.routing_share`` by seed."""
        return tables.routing_share(self.tables([arm])["steps"], [])

    def tokens(self, arm: Arm) -> pd.Series:
        """Return the response tokens sampled by each run, by seed; nan where they are not recorded."""
        return self.tables([arm])["runs"].set_index("seed")["tokens_sampled"].astype(float)

    def response_length(self, arm: Arm) -> pd.Series:
        """Return ``realism.response_length`` by seed."""
        return realism.response_length(self.tables([arm])["steps"])

    def judged(self, arm: Arm) -> pd.DataFrame:
        """Return the runs of the arm that are long enough for the rule of collapse."""
        runs = self.tables([arm])["runs"]
        return runs[(runs["judged_until"] > 0) | runs["collapsed_step"].notna()]

    def collapsed(self, arm: Arm) -> tuple[int, int]:
        """Count the runs that collapsed, and the runs that the rule can judge."""
        runs = self.judged(arm)
        return int(runs["collapsed_step"].notna().sum()), len(runs)

    def stable_or_collapsed(self, arms: Sequence[Arm]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return steps and runs of all arms for ``early_warning``, without runs that fell too late to be judged."""
        runs = pd.concat([self.judged(arm).assign(arm=arm.label) for arm in arms])
        runs = runs[runs["collapsed_step"].notna() | runs["falling_since"].isna()]
        return self.tables(arms)["steps"], runs.assign(collapsed=runs["collapsed_step"])

    # --- the calibration --------------------------------------------------------------------------------------------

    def calibrated(self, key: str, of: str) -> tuple[Estimate, str]:
        """A recorded reading of a cold start, and what its n counts; n is 0 without one."""
        if not self._calibration.exists():
            return NONE, ""
        with regular_files.opened(self._calibration) as file:
            readings = pd.read_csv(file)
        (found,) = readings[(readings["key"] == key) & (readings["of"].fillna("") == of)].to_dict("records")
        return Estimate(*(found[name] for name in ("mean", "low", "high", "n"))), found["unit"]

    # --- audits -------------------------------------------------------------------------------------------------

    def gradient(self, of: Audited, quantity: str, k: int) -> pd.Series:
        """Return an estimate of the whole gradient before the cut, or a count of tokens, by seed, where it is defined.

        ``quantity`` and ``k`` as in docs/audit.md. Raises NotRun.
        """
        rows = self._rows(of.label, of.experiment)
        chosen = rows[(rows["loss"] == of.loss) & (rows["routing"] == of.routing) & (rows["k"] == k)]
        chosen = chosen[(chosen["quantity"] == quantity) & chosen["block"].isin(("whole", ""))]
        chosen = chosen[chosen["cut"].isin(("before", ""))]
        if chosen.empty:
            raise NotRun(f"{of.label} ({of.experiment})")
        return chosen.set_index("seed")["value"].dropna().sort_index()

    def kept(self, experiment: str, k: int) -> pd.Series:
        """Return the reward of fresh samples after ``k`` updates over their reward before, by seed. Raises NotRun."""
        rows = self._rows("reward", experiment)
        of_fresh = rows[(rows["quantity"] == "reward") & (rows["routing"] == "fresh")]
        rewards = of_fresh.pivot_table(index="seed", columns="k", values="value")
        if k not in rewards:
            raise NotRun(f"k={k} ({experiment})")
        return (rewards[k] / rewards[0]).dropna()

    def _rows(self, label: str, experiment: str) -> pd.DataFrame:
        try:
            return self._audited(experiment)
        except audits.NoAudits as error:
            raise NotRun(f"{label} ({experiment})") from error
