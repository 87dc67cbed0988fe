"""Bring recorded results to today's fields and hashes: ``python results/migrate.py FOLDER ...``

A config field that changes numbers is part of every hash, also in results from before there was the field. A folder has
runs and audits as their commands write them (``runs/``, ``audits/``), or archives (``data/``, ``audits/``). No recorded
number changes. ``recorded_hash`` keeps the hash that each run and audit was made with, next to its revision. A run
whose config is not archived keeps its hash, and so does an audit whose command means another config today. A second
call changes nothing.
"""

import copy
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.audit import archive as audit_archives
from steadymoe.bench.audit import plan as audits
from steadymoe.bench.config import compose, identity
from steadymoe.bench.report import archive as archives
from steadymoe.bench.statistics.collapse import Rule
from steadymoe.bench.support import atomic_files

# Fields of a config, each with the value that earlier runs had without it.
ADDED: dict[str, Any] = {
    "evaluation.permuted_routes": False,
    "probe.largest": 0,
    "routing.bias_speed": 0.0,
}
# The same of the columns of an archive's runs.
ADDED_COLUMNS = {"origin": "", "collapse_rule": Rule().text(), "config": None}


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded config with the fields of today."""
    done: dict[str, Any] = copy.deepcopy(dict(config))
    for key, value in ADDED.items():
        group, _, name = key.rpartition(".")
        (done.setdefault(group, {}) if group else done).setdefault(name, value)
    return done


def hashes(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return today's hash of a config, and that without its seed. Raises OSError where a file that counts is gone."""
    return identity.config_hash(config), identity.config_hash({**config, "seed": None, "start_from": None})


def run(path: Path) -> None:
    """Migrate a ``run.json``; one of another trainer has no config of the suite's."""
    facts = json.loads(path.read_text())
    if facts.get("origin"):
        return
    facts.setdefault("recorded_hash", facts["config_hash"])
    facts["config"] = completed(facts["config"])
    facts["config_hash"], facts["config_hash_without_seed"] = hashes(facts["config"])
    atomic_files.write_json(path, facts)


def archive(path: Path) -> None:
    """Migrate the ``runs.parquet`` of an archived experiment, and bind its tables together."""
    archives.refuse_mixed(path.parent)
    runs = pd.read_parquet(path)
    for name, value in ADDED_COLUMNS.items():
        runs[name] = runs.get(name, value)
    runs["recorded_hash"] = runs.get("recorded_hash", runs["config_hash"])
    for place, text in runs["config"].dropna().items():
        config = completed(json.loads(text))
        runs.loc[place, "config"] = json.dumps(config, sort_keys=True)
        runs.loc[place, ["config_hash", "config_without_seed"]] = hashes(config)
    atomic_files.write(path, partial(runs.to_parquet, index=False, compression="zstd"))
    archives.bind(path.parent)


def audit(path: Path) -> None:
    """Migrate an ``audit.json``."""
    atomic_files.write_json(path, _audit(json.loads(path.read_text())))


def audit_archive(path: Path) -> None:
    """Migrate the ``audits.json`` of an archived experiment, and bind it to the table."""
    made = json.loads(path.read_text())
    audit_archives.write_facts(path.parent, made["unfinished"], [_audit(each) for each in made["audits"]])


def _audit(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of an audit, migrated."""
    config = completed(facts["config"])
    facts = facts | {"config": config, "recorded_hash": facts.get("recorded_hash", facts["audit_hash"])}
    words = [word for word in shlex.split(facts["command"])[2:] if not word.startswith("-")]
    try:
        (made,) = audits.plan(words)
    except (compose.ConfigError, ValueError):
        return facts
    losses = {label: arm.plain["algorithm"]["loss"] for label, arm in made.losses.items()}
    is_same = made.run.config_hash == identity.config_hash(config) and made.run.plain["audit"] == config["audit"]
    return facts | ({"audit_hash": made.audit_hash} if is_same and losses == facts["losses"] else {})


FILES: dict[str, Callable[[Path], None]] = {
    "**/run.json": run,
    "data/*/runs.parquet": archive,
    "**/audit.json": audit,
    "audits/*/audits.json": audit_archive,
}


def migrate(folder: Path) -> Iterator[str]:
    """Migrate all results below a folder; yield one line for each file that could not be."""
    for pattern, bring in FILES.items():
        for path in sorted(folder.glob(pattern)):
            try:
                bring(path)
            except (OSError, ValueError, KeyError) as error:
                yield f"{path} is left as it is: {error}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for line in migrate(Path(name)):
            print(f"steadymoe: {line}", file=sys.stderr)
