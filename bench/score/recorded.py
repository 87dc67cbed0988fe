"""Append to the recorded outcomes: ``steadymoe score --record``, in a checkout.

The losses recorded beside one GRPO are a *block*, named after the first of them. Seeds are paired within a block alone:
on another processor they have other cold starts.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe import conf
from steadymoe.algorithms import names
from steadymoe.bench.report import write
from steadymoe.bench.runs.overrides import key_of
from steadymoe.bench.score import standard
from steadymoe.bench.statistics.tolerance import REFERENCE
from steadymoe.bench.support import source
from steadymoe.bench.support.errors import ConfigError


def refuse(loss: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError if ``loss``, the label of ``overrides``, cannot be recorded."""
    path = standard.FOLDER / standard.OUTCOMES
    if not source.is_tracked(path):
        raise ConfigError(f"--record needs a git checkout of steadymoe, and git does not track {path}")
    shipped = {group: conf.names(group) for group in ("routing", "optimizer")} | {"algorithm": names(presets=True)}
    groups = {key_of(word): word.partition("=")[2] for word in overrides}
    is_own = any(value not in shipped[group] for group, value in groups.items() if group in shipped)
    if is_own or any(key.startswith("algorithm.") for key in groups):
        raise ConfigError(
            f"--record takes an algorithm of the checkout with the numbers of its YAML, got {shlex.join(overrides)}"
        )
    if any(loss in set(block.loc[block["side"] != standard.CHEAP, "loss"]) for block in standard.blocks().values()):
        raise ConfigError(f"{loss} was recorded before")


def append(loss: str, overrides: Sequence[str], rows: pd.DataFrame, facts: Mapping[str, Any]) -> list[Path]:
    """Append the outcomes of a loss and of the GRPO beside it, and what is known of its runs; return the files.

    Where a block has the same GRPO, the loss joins it. Raises ConfigError for what ``refuse`` refuses, and for runs
    that are not paired.
    """
    refuse(loss, overrides)  # another process may have recorded it meanwhile
    of_moe = rows["side"] != standard.DENSE.name
    if any((its.groupby("seed")["start"].nunique() > 1).any() for _, its in rows.groupby(of_moe)):
        raise ConfigError(f"{loss} is not recorded: GRPO's runs began from other cold starts; run both on one machine")
    made, block = standard.made(), loss
    made["losses"][loss] = dict(facts)
    for name, known in standard.blocks().items():
        if _of_reference(known) == _of_reference(rows):
            rows, block = rows[rows["loss"] == loss], name
    text = (standard.FOLDER / standard.OUTCOMES).read_text()
    text += rows.assign(block=block).to_csv(index=False, header=False)
    # The rows come last: without them the loss is not recorded, and the same command records it.
    return write.text_files(
        standard.FOLDER, {standard.MADE: json.dumps(made, indent=1) + "\n", standard.OUTCOMES: text}
    )


def _of_reference(rows: pd.DataFrame) -> set[tuple[Any, ...]]:
    """Return the runs of GRPO with free routes: they tell machines apart."""
    its = rows[(rows["loss"] == REFERENCE) & (rows["side"] == standard.FREE.name)]
    return set(its[["rate", "seed", "start", "sampled"]].itertuples(index=False, name=None))
