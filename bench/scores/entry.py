"""An entry of the board: a folder with a loss, its numbers, its README and the data of its runs.

``entry.yaml`` says what it is and holds the hash of every other file, so that a changed file is found. Reading an entry
imports none of its code. The folder is a stranger's: everything is checked before it is used.
"""

import hashlib
import json
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import yaml

from steadymoe.bench.config import identity
from steadymoe.bench.scores.standard import ANCHORS, PARTS, VERSION, Part
from steadymoe.bench.support import atomic_files

_ABOUT, _DATA, _MADE, _README = "entry.yaml", "outcomes.parquet", "made.json", "README.md"
# What ``entry.yaml`` says in words, beside ``tuned`` and the hashes of the files.
_TEXTS = ("standard", "name", "words", "paper", "equation", "tuning")
_COLUMNS = ("part", "arm", "seed", "value", "start")
# The algorithm of an entry: its YAML, and modules of any depth.
_OWN_FILES = re.compile(r"conf/algorithm/[\w.-]+\.yaml|([A-Za-z_]\w*/)*[A-Za-z_]\w*\.py")
# A word of the command line that chooses the algorithm or one of its numbers, and nothing else.
_WORD = re.compile(r"algorithm=[\w.-]+|algorithm(\.[A-Za-z_]\w*)+=[\w.,+\[\]-]*")
# The name of the entry's own arm in its data.
OWN = "yours"
_LARGEST, _ROWS = 2**20, 10_000


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

    @property
    def words(self) -> list[str]:
        """The words of the command line that name its algorithm."""
        return shlex.split(self.about["words"])

    @property
    def own_files(self) -> list[str]:
        """The files of its algorithm; none for an algorithm of the suite."""
        return [name for name in self.about["files"] if _OWN_FILES.fullmatch(name)]

    def by_seed(self, part: Part, arm: str = OWN) -> pd.Series:
        """The outcomes of one arm in a part, by seed; empty for a part that was not run."""
        rows = self.outcomes[(self.outcomes["part"] == part.name) & (self.outcomes["arm"] == arm)]
        return rows.set_index("seed")["value"].sort_index()


def read(folder: Path) -> Entry:
    """The entry in ``folder``. Raises BadEntry."""
    found = _files(folder)
    about = _about(folder)
    known = about["files"]
    if extra := sorted(found - {_ABOUT, *known}):
        raise BadEntry(f"{folder / extra[0]} is not named in {_ABOUT}")
    if absent := sorted(known.keys() - found):
        raise BadEntry(f"{folder} lacks {absent[0]}")
    for name, digest in known.items():
        if _hash(folder / name) != digest:
            raise BadEntry(f"{folder / name} is not the file that {_ABOUT} was written with")
    return Entry(folder, about, _outcomes(folder / _DATA), _made(folder / _MADE))


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


def _files(folder: Path) -> set[str]:
    """The files below ``folder``. Raises BadEntry for a link, a pipe, a large file, and a file that no entry has."""
    if _ABOUT not in {path.name for path in folder.iterdir()}:
        raise BadEntry(f"{folder} is no entry: it has no {_ABOUT}")
    found = set()
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            raise BadEntry(f"{path} is a link or no plain file")
        if path.stat().st_size > _LARGEST:
            raise BadEntry(f"{path} is larger than {_LARGEST // 2**20} MiB")
        name = path.relative_to(folder).as_posix()
        if name not in (_ABOUT, _DATA, _MADE, _README) and not _OWN_FILES.fullmatch(name):
            raise BadEntry(f"{path} is no file of an entry: docs/board.md")
        found.add(name)
    return found


def _about(folder: Path) -> dict[str, Any]:
    """What ``entry.yaml`` says. Raises BadEntry."""
    path = folder / _ABOUT
    try:
        about = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise BadEntry(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    lacking = [key for key in (*_TEXTS, "tuned", "files") if not isinstance(about, dict) or key not in about]
    if lacking:
        raise BadEntry(f"{path} lacks {', '.join(lacking)}")
    for key in _TEXTS:
        if not isinstance(about[key], str) or len(about[key]) > 1000:
            raise BadEntry(f"{path}: {key} must be a text of at most 1000 characters")
    if about["standard"] != VERSION:
        raise BadEntry(f"{folder} is an entry of {about['standard']}, and this is the board of {VERSION}")
    if not identity.is_name(about["name"]) or not isinstance(about["tuned"], bool):
        raise BadEntry(f"{path}: name must be a name, and tuned true or false")
    files = about["files"]
    if not isinstance(files, dict) or not {_DATA, _MADE, _README} <= files.keys() or _ABOUT in files:
        raise BadEntry(f"{path} does not name {_DATA}, {_MADE} and {_README} with their hashes")
    _refuse_words(path, about["words"])
    return about


def _refuse_words(path: Path, words: str) -> None:
    """Raise BadEntry for words that are no algorithm's: ``--run`` gives them to ``steadymoe run``."""
    try:
        each = shlex.split(words)
    except ValueError as error:
        raise BadEntry(f"{path}: words cannot be read: {error}") from error
    if other := [word for word in each if not _WORD.fullmatch(word)]:
        raise BadEntry(f"{path}: {other[0]} names no algorithm and none of its numbers")
    if sum(word.startswith("algorithm=") for word in each) != 1:
        raise BadEntry(f"{path}: words must name one algorithm")


def _made(path: Path) -> dict[str, Any]:
    """What made the runs: machine, revision, versions, and the first updates. Raises BadEntry."""
    try:
        made = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadEntry(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    texts = ("machine", "revision", "versions")
    if not isinstance(made, dict) or not all(isinstance(made.get(key), str) for key in texts):
        raise BadEntry(f"{path} must have {', '.join(texts)} as texts")
    first = made.get("first")
    if not isinstance(first, dict) or not all(isinstance(each, dict) for each in first.values()):
        raise BadEntry(f"{path} must have the first updates by seed")
    for each in first.values():
        numbers = [each.get("loss"), each.get("grad_norm")]
        if not isinstance(each.get("cold_start"), str) or not all(_are_numbers(found) for found in numbers):
            raise BadEntry(f"{path}: first updates are cold_start, a text, and lists of loss and of grad_norm")
    return made


def _are_numbers(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(number, int | float) for number in found)


def _outcomes(path: Path) -> pd.DataFrame:
    """The data, of the seeds of the standard, with both anchors. Raises BadEntry."""
    try:
        if pq.read_metadata(path).num_rows > _ROWS:
            raise BadEntry(f"{path} has more than {_ROWS} rows")
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise BadEntry(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if lacking := [name for name in _COLUMNS if name not in table]:
        raise BadEntry(f"{path} lacks {', '.join(lacking)}")
    if not pd.api.types.is_numeric_dtype(table["value"]) or not np.isfinite(table["value"]).all():
        raise BadEntry(f"{path}: a value is no finite number")
    parts = {part.name: part for part in PARTS}
    names = set(table["part"].astype(str))
    if unknown := sorted(names - parts.keys()):
        raise BadEntry(f"{path}: there is no part {unknown[0]} in {VERSION}")
    if PARTS[0].name not in names:
        raise BadEntry(f"{path} lacks the part {PARTS[0].name}")
    for name in names:
        _refuse_part(path, parts[name], table[table["part"] == name])
    return table


def _refuse_part(path: Path, part: Part, rows: pd.DataFrame) -> None:
    """Raise BadEntry for other arms or seeds than the standard's, or for outcomes beyond their bounds."""
    by_arm = {str(arm): sorted(group["seed"].tolist()) for arm, group in rows.groupby("arm")}
    for arm in (OWN, *ANCHORS):
        if arm not in by_arm:
            raise BadEntry(f"{path}: {part.name} has no runs of {arm}")
        if by_arm[arm] != sorted(part.seeds):
            raise BadEntry(f"{path}: {part.name} has other seeds of {arm} than {VERSION}")
    if other := sorted(by_arm.keys() - {OWN, *ANCHORS}):
        raise BadEntry(f"{path}: {part.name} has runs of {other[0]}, and an entry has its own and the anchors'")
    low, high = part.bounds
    if not rows["value"].between(low, high).all():
        raise BadEntry(f"{path}: {part.outcome} lies between {low:g} and {high:g}")


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadEntry(f"{path} cannot be read") from error
