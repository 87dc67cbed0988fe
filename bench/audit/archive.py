"""The audits of an experiment as one long table, read from their folders or from an archive of them.

``steadymoe audit`` writes ``results/audits/<experiment>/…/seed=<n>/``. ``keep`` archives what tables and figures need
as one file, ``audits/<experiment>/audits.parquet``, small enough to be committed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe import conf
from steadymoe.bench.audit import tables
from steadymoe.bench.audit.gradients import BLOCKS
from steadymoe.bench.audit.measure import COLUMNS, table_path
from steadymoe.bench.report import archive
from steadymoe.bench.runs import identity, lifecycle, record
from steadymoe.bench.runs.lifecycle import Damaged
from steadymoe.bench.support import atomic_files, external, regular_files
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import all_visible, portable, visible

_TABLE, _PROVENANCE = "audits.parquet", "audits.json"
# What is archived of each audit's ``audit.json``.
_FACTS = (
    *("command", "revision", "versions", "machine", "audit_hash"),
    *("config", "arms", "losses", "seconds", "cold_start"),
)
# What an ``audit.json`` must have to be joined with others.
_FIELDS: lifecycle.Fields = {
    **{"command": str, "config": dict, "config.engine": dict, "config.audit.drift": list},
    **{"arms": dict, "losses": dict},
}
_BAND = ("clip_low", "clip_high")
# Next to the columns of an audit: the checkpoint, the overrides by which audits of an experiment differ, the engine's
# strength, and each loss's algorithm and, if it differs from the algorithm in nothing else, its band.
ADDED = ("checkpoint", "setting", "strength", "algorithm", *_BAND)
# What tells checkpoints apart, not settings; and the strength has a column of its own.
_NOT_SETTINGS = ("seed", "engine.strength")
# Estimates by block that are archived, and estimates whose replicates are archived, for paired contrasts.
_BY_BLOCK, _PAIRED = ("share", "snr", "usefulness"), ("snr", "usefulness")


class NoAudits(UserError):
    """There is no audit of the experiment; the message says how to make one."""


@dataclass(frozen=True)
class Archive:
    """The audits of an experiment."""

    rows: pd.DataFrame
    """The rows of all tables, with ``ADDED`` and with gains (``tables.with_gain``); texts are in one line each."""
    unfinished: list[str]
    """One line for each audit that lacks tables."""
    made: list[dict[str, Any]]
    """The provenance of each checkpoint's audit, in the order of ``checkpoint``."""


def load(results: Path, experiment: str) -> Archive:
    """Return the audits of ``experiment`` below ``results``, from their folders, else from what ``keep`` wrote.

    Raises NoAudits if there are none, and Damaged if a file cannot be read or one label means different losses.
    """
    if not identity.is_name(experiment):
        raise NoAudits(f"{experiment!r} is not the name of an experiment")
    place = regular_files.refuse_links(results / "audits" / experiment, results)
    folders = sorted(path.parent for path in place.glob("**/audit.json") if any(path.parent.glob("k=*.parquet")))
    if folders:
        return _joined(place, folders)
    if not (place / _TABLE).exists():
        own = (folder / "experiment" / f"{experiment}.yaml" for folder in external.confs())
        is_config = experiment in conf.names("experiment") or any(path.exists() for path in own)
        words = f"experiment={experiment}" if is_config else f"experiment=audit experiment_name={experiment}"
        raise NoAudits(f"there is no audit in {place}; make one: steadymoe audit {words}")
    rows = archive.read_kept(place / _TABLE)
    tables.refuse_lacking(rows, place / _TABLE, [*COLUMNS, *ADDED])
    facts = _read(place / _PROVENANCE, {"unfinished": list, "audits": list, "checksum": str})
    if record.checksum(place / _TABLE) != facts["checksum"]:
        raise Damaged(f"{place / _TABLE} is damaged, or does not belong to {_PROVENANCE}; archive it again")
    unfinished = [visible(str(line)) for line in facts["unfinished"]]
    return Archive(all_visible(tables.with_gain(rows)), unfinished, facts["audits"])


def keep(results: Path, experiment: str, to: Path) -> tuple[Path, list[str]]:
    """Archive an experiment in ``to/audits/<experiment>/``; return the file, and a line for each unfinished audit.

    ``audits.json`` has commands, revisions, versions, machines, configs. Blocks keep share, snr and usefulness before
    the cut; replicates stay for snr and usefulness. Raises as ``load`` does.
    """
    audits = load(results, experiment)
    path = regular_files.folder(to, "audits", experiment) / _TABLE
    for name in (_TABLE, _PROVENANCE):
        atomic_files.replaceable(path.with_name(name))
    rows = audits.rows[audits.rows["quantity"] != "gain"]
    is_whole = ~rows["block"].isin(BLOCKS)
    rows = rows[is_whole | ((rows["cut"] == "before") & rows["quantity"].isin(_BY_BLOCK))]
    is_paired = rows["quantity"].isin(_PAIRED) & (rows["cut"] == "before")
    rows = rows.assign(replicates=rows["replicates"].where(is_paired, None)).reset_index(drop=True)
    atomic_files.write(path, partial(rows.to_parquet, index=False, compression="zstd"))
    for facts in audits.made:  # without the folders of this machine
        facts["command"] = portable(facts["command"])
    facts = {"unfinished": audits.unfinished, "audits": audits.made, "checksum": record.checksum(path)}
    atomic_files.write_json(path.with_name(_PROVENANCE), facts)
    return path, audits.unfinished


def _joined(place: Path, folders: Sequence[Path]) -> Archive:
    """Join the tables of all folders, with ``ADDED``."""
    every = {folder: _facts(folder) for folder in folders}
    strengths = [_number(facts["config"]["engine"].get("strength", 0.0)) for facts in every.values()]
    audits = {"checkpoint": range(len(every)), "setting": _settings(place, every), "strength": strengths}
    rows = tables.read(folders).merge(pd.DataFrame(audits), on="checkpoint", how="left")
    rows = rows.merge(_losses(every), on="loss", how="left")
    rows["algorithm"] = rows["algorithm"].fillna("")
    unfinished = [
        visible(f"{folder.relative_to(place)} is not finished: {facts['command']}")
        for folder, facts in every.items()
        if not all(table_path(folder, k).exists() for k in facts["config"]["audit"]["drift"])
    ]
    made = [
        {"checkpoint": number} | {key: facts[key] for key in _FACTS if key in facts}
        for number, facts in enumerate(every.values())
    ]
    return Archive(all_visible(rows), unfinished, made)


def _facts(folder: Path) -> dict[str, Any]:
    """Return the content of ``audit.json``. Raises Damaged unless it has what is read here."""
    facts = _read(folder / "audit.json", _FIELDS)
    has_names = all(isinstance(lifecycle.at(arm, "algorithm"), str) for arm in facts["arms"].values())
    if not has_names or not all(isinstance(loss, dict) for loss in facts["losses"].values()):
        raise Damaged(f"{folder / 'audit.json'} has no valid losses")
    return facts


def _read(path: Path, fields: lifecycle.Fields) -> dict[str, Any]:
    """Return facts. Raises Damaged without them, or without all ``fields``."""
    if (facts := lifecycle.read(path, fields)) is None:
        raise Damaged(f"{path} is missing; it records how the audits were made")
    return facts


def _settings(place: Path, every: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    """Return the overrides by which each audit differs from the others, ``key=value …``; "" for all if none does.

    Model and task are named as in the folder, and the names stand for everything in their sections.
    """
    flats = []
    for folder, facts in every.items():
        named = dict(zip(("model", "task"), folder.relative_to(place).parts, strict=False))
        flat = {key: value for key, value in identity.flatten(facts["config"]).items() if identity.changes_numbers(key)}
        flats.append(named | {key: value for key, value in flat.items() if key not in _NOT_SETTINGS})
    keys = [key for key in dict.fromkeys(chain(*flats)) if len({str(flat.get(key)) for flat in flats}) > 1]
    keys = [key for key in keys if "." not in key or key.partition(".")[0] not in {"model", "task"} & set(keys)]
    return [" ".join(_override(key, flat[key]) for key in keys if key in flat) for flat in flats]


def _override(key: str, value: Any) -> str:
    """Return ``key=value`` by the last part of the key; a class of the suite by its name alone."""
    is_class = isinstance(value, str) and value.startswith("steadymoe.")
    return f"{key.removesuffix('._target_').rpartition('.')[2]}={value.rpartition('.')[2] if is_class else value}"


def _losses(every: Mapping[Path, Mapping[str, Any]]) -> pd.DataFrame:
    """Return each label's algorithm and, if it differs from the algorithm in nothing else, its band."""
    rows: dict[str, dict[str, Any]] = {}
    arms: dict[str, dict[str, Any]] = {}
    first = next(iter(every))
    for folder, facts in every.items():
        for label, arm in facts["arms"].items():
            if arms.setdefault(label, arm) != arm:
                raise Damaged(f"{folder}: {label!r} is a different loss in {first}; give them different labels")
            is_band = set(arm) <= {"algorithm", *(f"algorithm.loss.{name}" for name in _BAND)}
            loss = facts["losses"].get(label, {}) if is_band else {}
            numbers = {name: _number(loss.get(name)) for name in _BAND}
            rows.setdefault(label, {"loss": label, "algorithm": arm["algorithm"]} | numbers)
    return pd.DataFrame(rows.values(), columns=["loss", "algorithm", *_BAND])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
