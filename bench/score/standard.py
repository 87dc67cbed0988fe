"""The standard ``steadymoe-2``: how much stress a loss tolerates on three dials, and the numbers recorded with it.

A dial is an experiment of ``conf/experiment``, which fixes its values, seeds and setting. With other numbers it is
another version: ``refuse_other_settings`` compares it with what was recorded, all but the seeds. These and the share of
GRPO's gain that sets the threshold (``statistics.tolerance.SHARE``) belong to the version, too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.report.folders import NUMBERS
from steadymoe.bench.runs import identity
from steadymoe.bench.runs.compose import Run
from steadymoe.bench.statistics.tolerance import REFERENCE
from steadymoe.bench.support.errors import ConfigError

VERSION = "steadymoe-2"
# Losses that run on the scorer's machine too, so that ratios are of the same cold starts.
ANCHORS = (REFERENCE, "gspo")
# A first look: one dial, fewer rates and seeds.
QUICK = ("optimizer.learning_rate=1e-4,2e-4,4e-4", "seed=0,1,2")
# Numbers of a loss's own that may be tuned.
MOST_TUNED = 3
# A loss that learns from shuffled rewards does not learn from rewards: of GRPO's gain it may have this share.
SHUFFLED = 0.25
FOLDER = Path(__file__).parent / VERSION
# In the first, ``COLUMNS`` and the block of a row: ``suite``, or the loss that was recorded with a GRPO of its own.
OUTCOMES, MADE = "outcomes.csv", "made.json"
# One row for each run: ``loss`` is its label, ``rate`` its learning rate, ``value`` that of the dial; accuracies of the
# cold start and of the end, sampled and greedy.
COLUMNS = ("dial", "loss", "algorithm", "rate", "value", "seed", "start", "start_greedy", "sampled", "greedy")


@dataclass(frozen=True)
class Dial:
    """One dial: what is turned while everything else stays."""

    name: str
    experiment: str
    """The file of ``conf/experiment`` with its values and seeds, and the name of its runs."""
    column: str
    """What it turns, in recorded tables."""
    at: float | None = None
    """The value at which GRPO's gain sets the threshold: that of the setting. None: GRPO's best."""
    at_best_rate: bool = False
    """Whether it is turned at a loss's best learning rate; else at that of its experiment."""
    overrides: tuple[str, ...] = ()
    """Further overrides; none in the standard."""

    def levels(self, outcomes: pd.DataFrame) -> pd.DataFrame:
        """Return the outcomes of this dial as levels (``statistics.tolerance``)."""
        return outcomes[outcomes["dial"] == self.name].rename(columns={"loss": "arm"})


RATE = Dial("rate", "tolerance", "learning_rate")
STALENESS = Dial("staleness", "tolerance_staleness", "updates_per_rollout")
MISMATCH = Dial("mismatch", "tolerance_mismatch", "strength", at=0.0, at_best_rate=True)
DIALS = (RATE, STALENESS, MISMATCH)


def blocks() -> list[pd.DataFrame]:
    """Return the recorded outcomes (``COLUMNS``) by block, the suite's first; seeds are paired within a block."""
    table = pd.read_csv(FOLDER / OUTCOMES)
    return [block[list(COLUMNS)].reset_index(drop=True) for _, block in table.groupby("block", sort=False)]


def recorded() -> pd.DataFrame:
    """Return the recorded outcomes of the suite's block."""
    return blocks()[0]


def made() -> dict[str, Any]:
    """Return what is known of the recorded runs: hashes of GRPO's by dial and value, minutes, machine, date.

    ``also``: what was made elsewhere, a loss or the repetition → machine, date and, of a loss with a block of its own,
    its label.
    """
    return dict(json.loads((FOLDER / MADE).read_text()))


def refuse_other_settings(dial: Dial, runs: Sequence[Run]) -> None:
    """Raise ConfigError if GRPO's planned ``runs`` have other numbers than the recorded ones: another standard."""
    hashes = made()["hashes"][dial.name]
    for run in runs:
        value = f"{value_of(dial, run):g}"
        if value in hashes and identity.config_hash(run.plain | {"seed": None}) != hashes[value]:
            what = f"experiment={dial.experiment} is not as it was recorded for {VERSION}"
            raise ConfigError(f"{what}; score with the version of steadymoe that recorded it")


def value_of(dial: Dial, run: Run) -> float:
    """Return the value of the dial in a planned run."""
    return float(identity.flatten(run.plain)[NUMBERS[dial.column]])


def changed_setting(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Return the first field fixed by the standard that two configs differ in, as ``key: theirs -> ours``, or None.

    An algorithm chooses its own section of the config, except ``algorithm.sampling``: dynamic sampling draws more
    rollouts for the same number of updates.
    """
    before, after = identity.flatten(theirs), identity.flatten(ours)
    for key in before | after:
        fixed = not key.startswith("algorithm.") or key.startswith("algorithm.sampling.")
        if fixed and identity.changes_numbers(key) and before.get(key) != after.get(key):
            return f"{key}: {before.get(key)} -> {after.get(key)}"
    return None
