"""The standard ``steadymoe-3``: the learning rates that a loss tolerates on an MoE with free and with pinned routes,
and on its dense twin, and the numbers recorded with it.

Its runs are those of ``experiment=cell`` on ``SEEDS``. With other numbers it is another version:
``refuse_other_settings`` compares GRPO's runs with those recorded. The share of GRPO's gain that sets the threshold
(``statistics.tolerance.SHARE``) belongs to the version, too.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.runs import identity
from steadymoe.bench.runs.compose import Run
from steadymoe.bench.support.errors import ConfigError

VERSION = "steadymoe-3"
EXPERIMENT = "cell"
SEEDS = "seed=1000,1001,1002,1003,1004"
# A first look, with free and pinned routes: rates on both sides of what GRPO tolerates, fewer seeds.
QUICK = ("optimizer.learning_rate=4e-4,1.6e-3", "seed=1000,1001,1002")
# Optimizers with rates of their own: "× GRPO's rate" would compare units.
OWN_RATES = ("sgd", "sign")
# Numbers of a loss's own that may be tuned.
MOST_TUNED = 3
# A loss that learns from shuffled rewards does not learn from rewards: of GRPO's gain it may have this share.
SHUFFLED = 0.25
FOLDER = Path(__file__).parent / VERSION
# In the first, ``COLUMNS`` and the block of a row: 7 tokens, or the loss that was recorded first beside its GRPO.
OUTCOMES, MADE = "outcomes.csv", "made.json"
# One row for each run: ``loss`` is its label; accuracies of the cold start and of the end, sampled and greedy; mean
# share of experts that change with an update and median variance of the token ratio, where they were measured.
COLUMNS = (
    *("side", "loss", "algorithm", "rate", "seed", "start", "start_greedy", "sampled", "greedy"),
    *("expert_change", "variance"),
)
# The side of numbers from ``experiment=tolerance``, responses of 7 tokens; recorded alone.
CHEAP = "cheap"


@dataclass(frozen=True)
class Side:
    """Where a loss runs over learning rates."""

    name: str
    choices: tuple[str, ...]
    """Model and routing; what is scored may choose its own routing."""
    more: tuple[str, ...] = ()


FREE = Side("free", ("model=flat", "routing=off"))
PINNED = Side("pinned", ("model=flat", "routing=pinned"))
DENSE = Side("dense", ("model=dense_flat", "routing=off"))
SIDES = (FREE, PINNED, DENSE)
# At a loss's best rate with free routes: what its routes and ratios do, and, once, whether it reads rewards.
MEASURED = Side("measured", FREE.choices, ("measure=all", f"experiment_name={EXPERIMENT}_measured"))
CONTROL = Side(
    "shuffled", FREE.choices, ("rollout.shuffle_rewards=true", f"experiment_name={EXPERIMENT}_shuffled", "seed=1000")
)


def blocks() -> dict[str, pd.DataFrame]:
    """Return the recorded outcomes (``COLUMNS``) by the name of their block; seeds are paired within a block."""
    by_block = pd.read_csv(FOLDER / OUTCOMES).groupby("block", sort=False)
    return {str(name): block[list(COLUMNS)].reset_index(drop=True) for name, block in by_block}


def made() -> dict[str, Any]:
    """Return what is known of the recorded runs: hashes of GRPO's by side and rate, minutes of one run, its machine.

    ``losses``: loss → machine, revision, versions, date and label; ``cheap``: a sentence on that side's runs.
    """
    return dict(json.loads((FOLDER / MADE).read_text()))


def refuse_other_settings(side: Side, runs: Sequence[Run]) -> None:
    """Raise ConfigError if GRPO's planned ``runs`` have other numbers than the recorded ones: another standard."""
    if hashes(runs) != made()["hashes"][side.name]:
        what = f"experiment={EXPERIMENT} is not as it was recorded for {VERSION}"
        raise ConfigError(f"{what}; score with the version of steadymoe that recorded it")


def hashes(runs: Sequence[Run]) -> dict[str, str]:
    """Return rate → hash of the config without its seed."""
    return {f"{run.config.optimizer.learning_rate:g}": identity.config_hash(run.plain | {"seed": None}) for run in runs}


def changed_setting(theirs: Mapping[str, Any], ours: Mapping[str, Any], free: Collection[str]) -> str | None:
    """Return the first field fixed by the standard that two configs differ in, as ``key: theirs -> ours``, or None.

    An algorithm chooses its own section of the config, except ``algorithm.sampling``: dynamic sampling draws more
    rollouts for the same number of updates. The groups ``free`` are what is scored.
    """
    before, after = identity.flatten(theirs), identity.flatten(ours)
    for key in before | after:
        fixed = key.startswith("algorithm.sampling.") or key.partition(".")[0] not in {"algorithm", *free}
        if fixed and key not in identity.NO_NUMBERS and before.get(key) != after.get(key):
            return f"{key}: {before.get(key)} -> {after.get(key)}"
    return None
