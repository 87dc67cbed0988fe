"""An entry of the board: a folder with a loss, its numbers, its README and the data of its runs.

``entry.yaml`` says what it is and holds the hash of every other file, so that a changed file is found. Reading an entry
imports none of its code.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from steadymoe.bench.config import identity
from steadymoe.bench.scores.standard import ANCHORS, PARTS, VERSION, Part
from steadymoe.bench.support import atomic_files

_ABOUT, _DATA, _MADE, _README = "entry.yaml", "outcomes.parquet", "made.json", "README.md"
# What ``entry.yaml`` says, beside the hashes of the files.
_SAID = ("standard", "name", "words", "paper", "equation", "tuned", "tuning")
_COLUMNS = ("part", "arm", "seed", "value", "start")
# The name of the entry's own arm in its data.
OWN = "yours"
_LARGEST = 2**20


class BadEntry(Exception):
    """A folder is no entry of this standard; the message is one line."""


@dataclass(frozen=True)
class Entry:
    """One entry, read and verified."""

    folder: Path
    about: Mapping[str, Any]
    outcomes: pd.DataFrame
    made: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name on the board."""
        return str(self.about["name"])

    def by_seed(self, part: Part, arm: str = OWN) -> pd.Series:
        """The outcomes of one arm in a part, by seed; empty for a part that was not run."""
        rows = self.outcomes[(self.outcomes["part"] == part.name) & (self.outcomes["arm"] == arm)]
        return rows.set_index("seed")["value"].sort_index()


def read(folder: Path) -> Entry:
    """The entry in ``folder``. Raises BadEntry."""
    about = _about(folder)
    _refuse_other_files(folder, about["files"])
    for name, known in about["files"].items():
        if _hash(folder / name) != known:
            raise BadEntry(f"{folder / name} is not the file that {_ABOUT} was written with")
    try:
        outcomes = pd.read_parquet(folder / _DATA)
        made = json.loads((folder / _MADE).read_text())
    except (OSError, ValueError) as error:
        raise BadEntry(f"{folder}: {' '.join(str(error).split())}") from error
    _refuse_other_data(folder, outcomes)
    if not isinstance(made, dict):
        raise BadEntry(f"{folder / _MADE} does not say what made the runs")
    return Entry(folder, about, outcomes, made)


def write(
    folder: Path, about: Mapping[str, Any], outcomes: pd.DataFrame, made: Mapping[str, Any], files: Mapping[str, str]
) -> Path:
    """Write an entry to the new folder ``folder``; ``files`` are further texts by their path in it. Returns the folder.

    Raises BadEntry if the folder exists.
    """
    if folder.exists():
        raise BadEntry(f"{folder} is there already, and an entry replaces none")
    for name, text in {**files, _MADE: json.dumps(made, indent=1, sort_keys=True) + "\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(folder / name, partial(Path.write_text, data=text))
    kept = outcomes[list(_COLUMNS)].reset_index(drop=True)
    atomic_files.write(folder / _DATA, partial(kept.to_parquet, index=False, compression="zstd"))
    hashes = {name: _hash(folder / name) for name in sorted([*files, _MADE, _DATA])}
    text = yaml.safe_dump(dict(about) | {"files": hashes}, sort_keys=False, allow_unicode=True)
    atomic_files.write(folder / _ABOUT, partial(Path.write_text, data=text))
    return folder


def _about(folder: Path) -> dict[str, Any]:
    """What ``entry.yaml`` says. Raises BadEntry."""
    path = folder / _ABOUT
    try:
        about = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise BadEntry(f"{folder} is no entry: it has no {_ABOUT}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadEntry(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    lacking = [key for key in (*_SAID, "files") if not isinstance(about, dict) or key not in about]
    if lacking:
        raise BadEntry(f"{path} lacks {', '.join(lacking)}")
    if about["standard"] != VERSION:
        raise BadEntry(f"{folder} is an entry of {about['standard']}, and this is the board of {VERSION}")
    files = about["files"]
    if not isinstance(files, dict) or not {_DATA, _MADE, _README} <= files.keys():
        raise BadEntry(f"{path} does not name {_DATA}, {_MADE} and {_README} with their hashes")
    if not identity.is_name(str(about["name"])) or not isinstance(about["tuned"], bool):
        raise BadEntry(f"{path}: name must be a name, and tuned true or false")
    return about


def _refuse_other_files(folder: Path, known: Mapping[str, Any]) -> None:
    """Raise BadEntry for a link, a large file, a file that is not named, a named one that is absent or outside."""
    found = set()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise BadEntry(f"{path} is a link")
        if path.is_file():
            found.add(path.relative_to(folder).as_posix())
            if path.stat().st_size > _LARGEST:
                raise BadEntry(f"{path} is larger than {_LARGEST // 2**20} MiB")
    if extra := sorted(found - {_ABOUT, *known}):
        raise BadEntry(f"{folder / extra[0]} is no file of the entry")
    if absent := sorted(set(map(str, known)) - found):
        raise BadEntry(f"{folder} lacks {absent[0]}")


def _refuse_other_data(folder: Path, outcomes: pd.DataFrame) -> None:
    """Raise BadEntry for data of another shape, of other seeds, or without an anchor."""
    path = folder / _DATA
    lacking = [name for name in _COLUMNS if name not in outcomes]
    if lacking:
        raise BadEntry(f"{path} lacks {', '.join(lacking)}")
    parts = {part.name: part for part in PARTS}
    if unknown := sorted(set(outcomes["part"]) - parts.keys()):
        raise BadEntry(f"{path}: there is no part {unknown[0]} in {VERSION}")
    for name, rows in outcomes.groupby("part"):
        part = parts[str(name)]
        by_arm = {str(arm): sorted(group["seed"]) for arm, group in rows.groupby("arm")}
        for arm in (OWN, *ANCHORS):
            if arm not in by_arm:
                raise BadEntry(f"{path}: {name} has no runs of {arm}")
            if by_arm[arm] != sorted(part.seeds):
                raise BadEntry(f"{path}: {name} has other seeds of {arm} than {VERSION}")
    numbers = outcomes["value"]
    if not pd.api.types.is_numeric_dtype(numbers):
        raise BadEntry(f"{path}: value is no number")


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadEntry(f"{path} cannot be read") from error
