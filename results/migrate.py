"""Bring recorded results to today's format and hashes: ``python results/migrate.py FOLDER ...``

A folder has runs and audits as their commands write them (``runs/``, ``audits/``), or archives (``data/``, ``audits/``,
``calibration/``). No recorded number changes. ``recorded_hash`` keeps the hash that each run, audit and calibration was
made with, next to its revision. A run whose config is not at hand keeps its hash: an archive of before configs were
archived, whose command composes another config today, or a checkpoint that is gone. A second call changes nothing.
"""

import copy
import hashlib
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.audit import plan as audits
from steadymoe.bench.config import compose, identity
from steadymoe.bench.measurement import columns
from steadymoe.bench.runs import record
from steadymoe.bench.runs.record import ENDED
from steadymoe.bench.statistics.collapse import Rule
from steadymoe.bench.support import atomic_files

# Fields that changed no number when they were added, each with the value that earlier runs had without it.
ADDED: dict[str, Any] = {
    "experts": "grouped_mm",
    "compile": False,
    "measure": "all",
    "probe.every": 1,
    "savings.share_prompts": False,
    "savings.sampler_as_old": None,
    "rollout.minibatch_prompts": None,
    "total_updates": None,
    "evaluation.every_updates": None,
    "evaluation.permuted_routes": False,
    "probe.every_updates": None,
    "probe.largest": 0,
    "start_from": None,
    "weight_noise": 0.0,
    "algorithm.updates_per_rollout": None,
    "optimizer.router_factor": 1.0,
    "cold_start.router_factor": 1.0,
    "cold_start.aux_loss": 0.0,
    "cold_start.z_loss": 0.0,
    "routing.bias_speed": 0.0,
    "collapse.window_updates": 80,
    "collapse.patience_updates": 160,
    "collapse.entropy_fraction": 0.05,
    "collapse.grad_norm_factor": 100.0,
    "collapse.solved_reward": 0.9,
}
# Of some engines only.
RELATIVE = "engine.relative"
# Fields that are gone, each with the value that was part of every hash. A collapse was once counted in rollouts; the
# savings changed numbers by rounding only, and a run without them did not count them.
REMOVED: dict[str, Any] = {
    "collapse.window": 5,
    "collapse.patience": 10,
    "savings.trim_padding": True,
    "savings.skip_silent": True,
    "savings.drop_finished": True,
}
# A field with this value was no part of a hash.
_NEUTRAL = ADDED | {RELATIVE: False} | {key: False for key in REMOVED if key.startswith("savings.")}


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded config with the fields of today."""
    done: dict[str, Any] = copy.deepcopy(dict(config))
    is_relative = str(done["engine"].get("_target_")).endswith(".RouterNoise")
    for key, value in (ADDED | ({RELATIVE: False} if is_relative else {})).items():
        group, _, name = key.rpartition(".")
        (done.setdefault(group, {}) if group else done).setdefault(name, value)
    for key in REMOVED:
        group, _, name = key.rpartition(".")
        done[group].pop(name, None)
    return done


def old_hash(config: Mapping[str, Any]) -> str:
    """Return the hash that a run with this config had before fields at rest were part of it."""
    flat = {key: value for key, value in REMOVED.items() if key.partition(".")[0] in config} | identity.flatten(config)
    numbers = {
        key: value
        for key, value in identity.hashed_fields(flat).items()
        if not (key in _NEUTRAL and _NEUTRAL[key] == value)
    }
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]


def hashes(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return today's hash of a config, and that without its seed. Raises OSError where a file that counts is gone."""
    return identity.config_hash(config), identity.config_hash({**config, "seed": None, "start_from": None})


@cache
def _composed(words: tuple[str, ...]) -> compose.Run | None:
    """The run of these words, None where today's configs refuse them."""
    try:
        return compose.plan(words)[0]
    except compose.ConfigError:
        return None


def _words(command: str) -> list[str]:
    """The overrides of a recorded command, without flags."""
    return [word for word in shlex.split(command)[2:] if not word.startswith("-")]


def _comparable(code: Any) -> str:
    """The hash of an algorithm's code; empty for one from before code was compared by its syntax tree."""
    return code if str(code).startswith("ast1:") else ""


def run(folder: Path) -> None:
    """Migrate the ``run.json`` of a run's folder."""
    facts = json.loads((folder / "run.json").read_text())
    facts.setdefault("recorded_hash", facts["config_hash"])
    facts.setdefault("training_version", 1)
    facts["algorithm_code"] = _comparable(facts["algorithm_code"])
    if facts["status"] in ENDED and "tables" not in facts:
        facts["tables"] = {
            name: record.checksum(folder / f"{name}.parquet")
            for name in columns.TABLES
            if (folder / f"{name}.parquet").exists()
        }
    if not facts.get("origin"):
        facts["config"] = completed(facts["config"])
        facts["config_hash"], facts["config_hash_without_seed"] = hashes(facts["config"])
    atomic_files.write_json(folder / "run.json", facts)


def archive(path: Path) -> None:
    """Migrate the ``runs.parquet`` of an archived experiment."""
    runs = pd.read_parquet(path)
    for name, value in {"origin": "", "collapse_rule": Rule().text(), "config": None}.items():
        runs[name] = runs.get(name, value)
    runs["recorded_hash"] = runs.get("recorded_hash", runs["config_hash"])
    runs["algorithm_code"] = runs["algorithm_code"].map(_comparable)
    rows = runs.to_dict("records")
    configs = [json.loads(row["config"]) if isinstance(row["config"], str) else _recomposed(row) for row in rows]
    for place, config in enumerate(configs):
        if config is not None:
            numbers = {key: value for key, value in completed(config).items() if key not in identity.NO_NUMBERS}
            runs.loc[place, "config"] = json.dumps(numbers, sort_keys=True)
            runs.loc[place, ["config_hash", "config_without_seed"]] = hashes(numbers)
    made = [None if row["origin"] else _composed(tuple(_words(row["command"]))) for row in rows]
    if all(config is not None and each is not None for config, each in zip(configs, made, strict=True)):
        swept = {key for each in made if each is not None for key in each.axes}
        runs["settings"] = [identity.settings_hash(each.plain, swept) for each in made if each is not None]
    atomic_files.write(path, partial(runs.to_parquet, index=False, compression="zstd"))


def _recomposed(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of an archived run, by its command; None unless it has the recorded hash."""
    made = None if row["origin"] else _composed(tuple(_words(row["command"])))
    return made.plain if made is not None and old_hash(made.plain) == row["config_hash"] else None


def audit(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what ``audit.json`` or an entry of ``audits.json`` says, migrated."""
    config = completed(facts["config"])
    config["audit"] = {"clips": False} | config["audit"]
    facts = facts | {"config": config, "recorded_hash": facts.get("recorded_hash", facts["audit_hash"])}
    try:
        (made,) = audits.plan(_words(facts["command"]))
    except (compose.ConfigError, ValueError):
        return facts
    losses = {label: arm.plain["algorithm"]["loss"] for label, arm in made.losses.items()}
    is_same = made.run.config_hash == identity.config_hash(config) and made.run.plain["audit"] == config["audit"]
    return facts | ({"audit_hash": made.audit_hash} if is_same and losses == facts["losses"] else {})


def calibration(path: Path) -> None:
    """Migrate a ``calibration.json``."""
    facts = json.loads(path.read_text())
    facts.setdefault("recorded_hash", facts["config_hash"])
    facts["config"] = completed(facts["config"])
    facts["config_hash"], _ = hashes(facts["config"])
    atomic_files.write_json(path, facts)


def migrate(folder: Path) -> Iterator[str]:
    """Migrate all results below a folder; yield one line for each that could not be."""
    for path in sorted(folder.rglob("run.json")):
        try:
            run(path.parent)
        except (OSError, ValueError, KeyError) as error:
            yield f"{path.parent} is left as it is: {error}"
    for path in sorted(folder.glob("data/*/runs.parquet")):
        archive(path)
    for path in sorted(folder.rglob("audit.json")):
        atomic_files.write_json(path, audit(json.loads(path.read_text())))
    for path in sorted(folder.glob("audits/*/audits.json")):
        made = json.loads(path.read_text())
        made["audits"] = [audit(each) for each in made["audits"]]
        text = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
        atomic_files.write(path, partial(Path.write_text, data=text))
    for path in sorted(folder.glob("calibration/calibration.json")):
        calibration(path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for line in migrate(Path(name)):
            print(f"steadymoe: {line}", file=sys.stderr)
