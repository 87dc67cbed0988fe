"""Append to the recorded outcomes: ``steadymoe score --record``, in a checkout.

A loss and the GRPO beside it are a *block* of their own, named after the loss. Seeds are paired within a block alone:
on another processor they have other cold starts.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.algorithms import names
from steadymoe.bench.report import write
from steadymoe.bench.score import standard
from steadymoe.bench.support import source
from steadymoe.bench.support.errors import ConfigError


def refuse(overrides: Sequence[str]) -> None:
    """Raise ConfigError if the algorithm of ``overrides`` cannot be recorded."""
    path = standard.FOLDER / standard.OUTCOMES
    if not source.is_tracked(path):
        raise ConfigError(f"--record needs a git checkout of steadymoe, and git does not track {path}")
    if list(overrides) not in [[f"algorithm={name}"] for name in names(presets=True)]:
        raise ConfigError(
            f"--record takes an algorithm of the checkout with the numbers of its YAML, got {shlex.join(overrides)}"
        )
    (loss,) = (override.partition("=")[2] for override in overrides)
    if any(loss in set(block["loss"]) for block in standard.blocks()):
        raise ConfigError(f"{loss} was recorded before")


def append(loss: str, rows: pd.DataFrame, facts: Mapping[str, Any]) -> list[Path]:
    """Append the outcomes of a loss and of the GRPO beside it, and what is known of its runs; return the files.

    Raises ConfigError for what ``refuse`` refuses, and for runs that are not paired.
    """
    refuse([f"algorithm={loss}"])  # another process may have recorded it meanwhile
    if (rows.groupby(["dial", "seed"])["start"].nunique() > 1).any():
        raise ConfigError(f"{loss} is not recorded: GRPO's runs began from other cold starts; run both on one machine")
    made = standard.made()
    made["also"][loss] = dict(facts)
    text = (standard.FOLDER / standard.OUTCOMES).read_text()
    text += rows.assign(block=loss).to_csv(index=False, header=False)
    # The rows come last: without them the loss is not recorded, and the same command records it.
    return write.text_files(
        standard.FOLDER, {standard.MADE: json.dumps(made, indent=1) + "\n", standard.OUTCOMES: text}
    )
