"""The audits of an experiment as one long table, read from their folders or from an archive of them.

``steadymoe audit`` writes ``results/audits/<experiment>/…/seed=<n>/``. ``keep`` archives what tables and figures
need as one file, ``audits/<experiment>/audits.parquet``, small enough to be committed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.audit import tables
from steadymoe.bench.audit.gradients import BLOCKS
from steadymoe.bench.audit.measure import COLUMNS
from steadymoe.bench.config import identity
from steadymoe.bench.report import archive
from steadymoe.bench.runs.lifecycle import Damaged
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import all_visible, visible

_FILE, _MADE = "audits.parquet", "audits.json"
# What is kept of each audit's ``audit.json``.
_KEPT = (
    "command",
    "revision",
    "versions",
    "machine",
    "audit_hash",
    "config",
    "arms",
    "losses",
    "seconds",
    "cold_start",
)
# Beside the columns of an audit: the checkpoint, the words by which audits of an experiment differ, the sampler's
# strength, and of each loss its algorithm and, where it differs from the algorithm in nothing else, its band.
ADDED = ("checkpoint", "setting", "strength", "algorithm", "clip_low", "clip_high")
_BAND = ("clip_low", "clip_high")
# What tells checkpoints apart, not settings; and the strength has a column of its own.
_OF_CHECKPOINTS = ("seed", "start_from", "engine.strength")
# Estimates by block that are kept, and estimates whose replicates are kept, for paired contrasts.
_BY_BLOCK, _PAIRED = ("share", "snr", "usefulness"), ("snr", "usefulness")


class NoAudits(UserError):
    """No audit of the experiment is there; the message is one line and says how to make one."""


@dataclass(frozen=True)
class Archive:
    """The audits of an experiment."""

    rows: pd.DataFrame
    """The rows of all tables, with ``ADDED`` and with gains (``tables.with_gain``); texts are in one line each."""
    unfinished: list[str]
    """One line for each audit that lacks tables."""
    made: list[dict[str, Any]]
    """What made each checkpoint's audit, in the order of ``checkpoint``."""


def load(results: Path, experiment: str) -> Archive:
    """The audits of ``experiment`` below ``results``, from their folders, else from the archive that ``keep`` wrote.

    Raises NoAudits if there are none, and Damaged if a file cannot be read or labels mean different losses.
    """
    place = results / "audits" / experiment
    if not identity.is_name(experiment):
        raise NoAudits(f"{experiment!r} is no name of an experiment")
    folders = sorted(path.parent for path in place.glob("**/audit.json") if any(path.parent.glob("k=*.parquet")))
    if folders:
        return _joined(place, folders)
    if not (place / _FILE).exists():
        raise NoAudits(f"there is no audit in {place}; make some: steadymoe audit experiment={experiment}")
    rows = archive.read_kept(place / _FILE)
    tables.refuse_lacking(rows, place / _FILE, [*COLUMNS, *ADDED])
    try:
        made = json.loads((place / _MADE).read_text())
        unfinished = [visible(str(line)) for line in made["unfinished"]]
        return Archive(all_visible(tables.with_gain(rows)), unfinished, list(made["audits"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{place / _MADE} does not say what made the audits beside it") from error


def keep(found: Archive, experiment: str, to: Path) -> Path:
    """Write what tables and figures need to ``to/audits/<experiment>/``, in place of older files; return the first.

    Beside it lies what made the audits: commands, revisions, versions, machines, configs. Blocks keep share, snr and
    usefulness before the cut; replicates stay for snr and usefulness.
    """
    rows = found.rows[found.rows["quantity"] != "gain"]
    is_whole = ~rows["block"].isin(BLOCKS)
    rows = rows[is_whole | ((rows["cut"] == "before") & rows["quantity"].isin(_BY_BLOCK))]
    is_paired = rows["quantity"].isin(_PAIRED) & (rows["cut"] == "before")
    rows = rows.assign(replicates=rows["replicates"].where(is_paired, None)).reset_index(drop=True)
    path = to / "audits" / experiment / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write(path, partial(rows.to_parquet, index=False, compression="zstd"))
    for each in found.made:  # without the folders of this machine
        start = each["config"].get("start_from")
        if isinstance(start, str):
            each["config"] = each["config"] | {"start_from": start.partition("/runs/")[2] or start}
    made = json.dumps({"unfinished": found.unfinished, "audits": found.made}, indent=1, ensure_ascii=False)
    atomic_files.write(path.parent / _MADE, partial(Path.write_text, data=f"{made}\n"))
    return path


def _joined(place: Path, folders: Sequence[Path]) -> Archive:
    """The tables of all folders, with ``ADDED``."""
    facts = [_facts(folder) for folder in folders]
    settings = _settings([_flat(each, folder.relative_to(place)) for each, folder in zip(facts, folders, strict=True)])
    of_losses = _losses(facts, folders)
    audits = pd.DataFrame(
        {
            "checkpoint": range(len(folders)),
            "setting": settings,
            "strength": [_number(each["config"]["engine"].get("strength", 0.0)) for each in facts],
        }
    )
    rows = tables.read(folders).merge(audits, on="checkpoint", how="left").merge(of_losses, on="loss", how="left")
    rows["algorithm"] = rows["algorithm"].fillna("")
    made = [
        {"checkpoint": number} | {key: each[key] for key in _KEPT if key in each} for number, each in enumerate(facts)
    ]
    unfinished = [
        f"{folder.relative_to(place)} is not finished: {each['command']}"
        for folder, each in zip(folders, facts, strict=True)
        if not all((folder / f"k={k}.parquet").exists() for k in each["config"]["audit"]["drift"])
    ]
    return Archive(all_visible(rows), [visible(line) for line in unfinished], made)


def _facts(folder: Path) -> dict[str, Any]:
    """The content of ``audit.json`` as far as it is read here. Raises Damaged."""
    path = folder / "audit.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        wanted = [facts["config"], facts["config"]["engine"], facts["arms"], *facts["arms"].values()]
        is_audit = all(isinstance(each, Mapping) for each in [*wanted, *facts["losses"].values()])
        is_audit &= isinstance(facts["config"]["audit"]["drift"], list) and isinstance(facts["command"], str)
        is_audit &= all(isinstance(arm["algorithm"], str) for arm in facts["arms"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} is of no audit; make it again with --redo") from error
    if not is_audit:
        raise Damaged(f"{path} is of no audit; make it again with --redo")
    return facts


def _flat(facts: Mapping[str, Any], below: Path) -> dict[str, Any]:
    """Key → value of what may differ between settings; model and task by their names in the folder ``below``."""
    flat = identity.flatten(facts["config"])
    kept = {key: value for key, value in flat.items() if identity.changes_numbers(key) and key not in _OF_CHECKPOINTS}
    return dict(zip(("model", "task"), below.parts, strict=False)) | kept


def _settings(flats: Sequence[Mapping[str, Any]]) -> list[str]:
    """The words by which each setting differs from the others, ``key=value …``; "" for all where none differs."""

    def differ(key: str) -> bool:
        return len({str(each.get(key)) for each in flats}) > 1

    keys = [key for key in dict.fromkeys(key for each in flats for key in each) if differ(key)]
    # A name stands for everything in its section.
    keys = [key for key in keys if key.partition(".")[0] not in {"model", "task"} & set(keys) or "." not in key]
    return [" ".join(f"{_short(key)}={_told(each[key])}" for key in keys if key in each) for each in flats]


def _short(key: str) -> str:
    return key.removesuffix("._target_").rpartition(".")[2]


def _told(value: Any) -> str:
    """A value in few letters: of a class its name alone."""
    return value.rpartition(".")[2] if isinstance(value, str) and value.startswith("steadymoe.") else str(value)


def _losses(facts: Sequence[Mapping[str, Any]], folders: Sequence[Path]) -> pd.DataFrame:
    """Of each label its algorithm and, if it differs from the algorithm in nothing else, its band."""
    found: dict[str, dict[str, Any]] = {}
    for each, folder in zip(facts, folders, strict=True):
        for label, arm in each["arms"].items():
            row: dict[str, Any] = {"told": dict(arm), "algorithm": arm["algorithm"]}
            loss = each["losses"].get(label, {})
            is_band = set(arm) <= {"algorithm", *(f"algorithm.loss.{name}" for name in _BAND)}
            row |= {name: _number(loss.get(name)) if is_band else math.nan for name in _BAND}
            if label in found and found[label]["told"] != row["told"]:
                raise Damaged(f"{folder}: {label!r} is another loss than in {folders[0]}; give them different labels")
            found[label] = found.get(label, row)
    rows = [{"loss": label, **row} for label, row in found.items()]
    return pd.DataFrame(rows, columns=["loss", "algorithm", *_BAND])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
