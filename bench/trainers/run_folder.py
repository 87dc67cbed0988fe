"""The run folder of another trainer: its place, and what ``run.json`` says of it.

Such a run has an ``origin``, "trl 1.16.0" or a file that was read. ``steadymoe status``, ``report`` and ``report
--export`` take it; ``archive.load`` keeps it from claims unless a caller asks for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steadymoe.bench.config import identity
from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.runs import provenance, record
from steadymoe.bench.support.revision import revision

# The choice in a group that a log does not name.
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class ForeignRun:
    """A run of another trainer, as ``run.json`` names it."""

    results: Path
    origin: str
    """The trainer and its version."""
    experiment: str
    algorithm: str
    model: str
    task: str
    correction: str = "none"
    routing: str = "off"
    engine: str = "exact"
    axes: Mapping[str, Any]
    """What tells the run from others of its experiment, besides the names above and the seed."""
    seed: int
    config: Mapping[str, Any]
    """What the run was made with. ``damage.in_facts`` says which fields every run has."""
    command: str

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps on one rollout."""
        return int(dict(self.config)["updates_per_rollout"])

    @property
    def all_axes(self) -> dict[str, Any]:
        """``axes``, the trainer, and each group that is known and not off, as in the suite's own runs."""
        groups = {"correction": self.correction, "routing": self.routing, "engine": self.engine}
        chosen = {group: name for group, name in groups.items() if name not in (identity.OFF[group], UNKNOWN)}
        return {**self.axes, **chosen, "trainer": self.origin.split()[0]}

    @property
    def folder(self) -> Path:
        """Where the run is recorded. Raises ConfigError for a name that can be no folder."""
        parts = {key: getattr(self, key) for key in ("experiment", "algorithm", "model", "task")}
        for key, name in parts.items():
            if not identity.is_name(name):
                raise ConfigError(f"{key} must be letters, digits, '.', '_', '-' or '@'; got {name!r}")
        named = [*parts.values(), identity.axes_name(self.all_axes), f"seed={self.seed}"]
        return self.results.joinpath("runs", *named)

    def facts(self) -> dict[str, Any]:
        """The content of ``run.json`` before the run starts."""
        # The suite neither built the model nor trained a cold start.
        plain = {"model": {}, **self.config, "cold_start": {"path": None}}
        return {
            "status": "running",
            "origin": self.origin,
            **{key: getattr(self, key) for key in ("experiment", "algorithm", "correction", "routing", "engine")},
            "model": self.model,
            "task": self.task,
            "axes": self.all_axes,
            "axes_name": identity.axes_name(self.all_axes),
            "seed": self.seed,
            "config_hash": identity.config_hash(plain),
            "config_hash_without_seed": identity.config_hash(plain | {"seed": None}),
            "algorithm_code": provenance.code_hash(plain) or "",
            "training_version": provenance.TRAINING_VERSION,
            "command": self.command,
            "cold_start": {},
            "start_from": None,
            "versions": provenance.versions(None),
            "revision": revision(),
            "machine": provenance.machine(str(plain["device"]), torch.get_num_threads()),
            "config": plain,
            "diverged": None,
            "error": None,
        }

    def refuse_taken(self) -> None:
        """Raise ConfigError if the folder holds a run that must not be overwritten.

        A run that has ended or is running must not, nor an interrupted run of another config.
        """
        before, status = record.known(self.folder), record.status(self.folder)
        choose = "choose another experiment or axes, or remove that folder"
        if status in (*record.ENDED, "damaged", "running"):
            raise ConfigError(f"{self.folder} holds a run that is {status}; {choose}")
        facts = self.facts()
        if before and before["config_hash"] != facts["config_hash"]:
            other = identity.difference(before["config"], facts["config"])
            raise ConfigError(f"{self.folder} holds an interrupted run of another config ({other}); {choose}")
