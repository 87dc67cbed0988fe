"""An entry of the board: a folder with a loss, its numbers, its README and the data of its runs.

``entry.json`` says what it is and holds the hash of every other file, so that a changed file is found. Reading an entry
imports none of its code. The folder is a stranger's: everything is checked before it is used.
"""

import hashlib
import json
import math
import re
import shlex
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.algorithms import names
from steadymoe.bench.config import identity
from steadymoe.bench.score.standard import ANCHORS, PARTS, VERSION, Part
from steadymoe.bench.support import atomic_files

_ABOUT, _DATA, _README = "entry.json", "outcomes.csv", "README.md"
# What ``entry.json`` says in words.
_TEXTS = ("standard", "name", "words", "paper", "equation", "tuning", "machine", "revision", "versions")
_COLUMNS = {"part": str, "arm": str, "seed": int, "value": float}
# The algorithm of an entry: its YAML, and modules of any depth.
_YAML = re.compile(r"conf/algorithm/([\w.@-]+)\.yaml")
_OWN_FILES = re.compile(rf"{_YAML.pattern}|([A-Za-z_]\w*/)*[A-Za-z_]\w*\.py")
# A word of the command line that chooses the algorithm or one of its numbers, and nothing else.
_WORD = re.compile(r"algorithm=[\w.@-]+|algorithm(\.[A-Za-z_]\w*)+=[\w.,+\[\]-]*")
# The name of the entry's own arm in its data.
OWN = "yours"
_LARGEST, _ROWS, _FILES, _LONGEST = 2**20, 10_000, 100, 1000
# Of a part of audits this many checkpoints at least must have a defined outcome.
_LEAST_DEFINED = 8


class BadEntry(Exception):
    """A folder is no entry of this standard; the message is one line."""


@dataclass(frozen=True)
class Entry:
    """One entry, read and verified."""

    folder: Path
    about: Mapping[str, Any]
    """What ``entry.json`` says."""
    outcomes: pd.DataFrame

    @property
    def name(self) -> str:
        """Its name on the board."""
        return str(self.about["name"])

    @property
    def words(self) -> list[str]:
        """The words of the command line that name its algorithm."""
        return shlex.split(self.about["words"])

    @property
    def algorithm(self) -> str:
        """The name of its algorithm as a word of the command line."""
        return _algorithm(self.words)

    @property
    def own_files(self) -> list[str]:
        """The files of its algorithm; none for an algorithm of the suite."""
        return [name for name in self.about["files"] if is_own(name)]

    @property
    def digest(self) -> str:
        """A hash of all that it holds."""
        return _hash(self.folder / _ABOUT)

    def by_seed(self, part: Part, arm: str = OWN) -> pd.Series:
        """The outcomes of one arm in a part, by seed; nan where one is undefined, empty for a part that was not run."""
        rows = self.outcomes[(self.outcomes["part"] == part.name) & (self.outcomes["arm"] == arm)]
        return rows.set_index("seed")["value"].sort_index()


def is_own(name: str) -> bool:
    """Whether a path within an entry is a file of its algorithm."""
    return _OWN_FILES.fullmatch(name) is not None


def read(folder: Path) -> Entry:
    """The entry in ``folder``. Raises BadEntry."""
    try:
        return _read(folder)
    except BadEntry:
        raise
    except Exception as error:  # a stranger's files
        raise BadEntry(f"{folder} is no entry: {' '.join(f'{type(error).__name__} {error}'.split())[:200]}") from error


def write(folder: Path, about: Mapping[str, Any], outcomes: pd.DataFrame, files: Mapping[str, str]) -> Path:
    """Write an entry to the new folder ``folder``; ``files`` are further texts by their path in it. Returns the folder.

    ``outcomes`` has part, arm, seed, value. Raises BadEntry, and writes nothing, if the folder exists or the entry
    would be refused.
    """
    if folder.exists():
        raise BadEntry(f"{folder} is there already, and an entry replaces none")
    begun = folder.parent / f".{folder.name}.begun"
    shutil.rmtree(begun, ignore_errors=True)
    try:
        for name, text in {**files, _DATA: outcomes[list(_COLUMNS)].to_csv(index=False)}.items():
            (begun / name).parent.mkdir(parents=True, exist_ok=True)
            (begun / name).write_text(text)
        hashes = {name: _hash(begun / name) for name in sorted([*files, _DATA])}
        text = json.dumps(dict(about) | {"files": hashes}, indent=1, ensure_ascii=False) + "\n"
        atomic_files.write(begun / _ABOUT, partial(Path.write_text, data=text))
        read(begun)
        return begun.rename(folder)
    finally:
        shutil.rmtree(begun, ignore_errors=True)


def _read(folder: Path) -> Entry:
    found, about = _files(folder), _about(folder)
    known = about["files"]
    if extra := sorted(found - {_ABOUT, *known}):
        raise BadEntry(f"{folder / extra[0]} is not named in {_ABOUT}")
    if absent := sorted(known.keys() - found):
        raise BadEntry(f"{folder} lacks {absent[0]}")
    for name, digest in known.items():
        if _hash(folder / name) != digest:
            raise BadEntry(f"{folder / name} is not the file that {_ABOUT} was written with")
    return Entry(folder, about, _outcomes(folder / _DATA))


def _files(folder: Path) -> set[str]:
    """The files below ``folder``. Raises BadEntry for a link, a pipe, a large file, and a file that no entry has."""
    if _ABOUT not in {path.name for path in folder.iterdir()}:
        raise BadEntry(f"{folder} is no entry: it has no {_ABOUT}")
    found: set[str] = set()
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            raise BadEntry(f"{path} is a link or no plain file")
        if path.stat().st_size > _LARGEST:
            raise BadEntry(f"{path} is larger than {_LARGEST // 2**20} MiB")
        name = path.relative_to(folder).as_posix()
        if name not in (_ABOUT, _DATA, _README) and not is_own(name):
            raise BadEntry(f"{path} is no file of an entry: docs/board.md")
        found.add(name)
        if len(found) > _FILES:
            raise BadEntry(f"{folder} has more than {_FILES} files")
    return found


def _about(folder: Path) -> dict[str, Any]:
    """What ``entry.json`` says. Raises BadEntry."""
    path = folder / _ABOUT
    try:
        about = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise BadEntry(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    needed = (*_TEXTS, "tuned", "first", "files")
    if lacking := [key for key in needed if not isinstance(about, dict) or key not in about]:
        raise BadEntry(f"{path} lacks {', '.join(lacking)}")
    for key in _TEXTS:
        if not isinstance(about[key], str) or len(about[key]) > _LONGEST:
            raise BadEntry(f"{path}: {key} must be a text of at most {_LONGEST} characters")
    if about["standard"] != VERSION:
        raise BadEntry(f"{folder} is an entry of {about['standard']}, and this is the board of {VERSION}")
    if not identity.is_name(about["name"]) or not isinstance(about["tuned"], bool):
        raise BadEntry(f"{path}: name must be a name, and tuned true or false")
    files = about["files"]
    if not isinstance(files, dict) or not {_DATA, _README} <= files.keys() or _ABOUT in files:
        raise BadEntry(f"{path} does not name {_DATA} and {_README} with their hashes")
    _refuse_words(path, about)
    _refuse_first(path, about["first"])
    return about


def _refuse_words(path: Path, about: Mapping[str, Any]) -> None:
    """Raise BadEntry for words that are not of the entry's algorithm: ``--run`` gives them to ``steadymoe run``."""
    try:
        words = shlex.split(about["words"])
    except ValueError as error:
        raise BadEntry(f"{path}: words cannot be read: {error}") from error
    if other := [word for word in words if not _WORD.fullmatch(word)]:
        raise BadEntry(f"{path}: {other[0]} names no algorithm and none of its numbers")
    if sum(word.startswith("algorithm=") for word in words) != 1:
        raise BadEntry(f"{path}: words must name one algorithm")
    yamls = [found[1] for name in about["files"] if (found := _YAML.fullmatch(name))]
    own = [name for name in about["files"] if is_own(name)]
    if own and yamls != [_algorithm(words)]:
        raise BadEntry(f"{path}: the entry has files of its own, and words must name the algorithm of its one YAML")
    if _algorithm(words) in names(presets=True):
        if own:
            raise BadEntry(f"{path}: the suite has an algorithm {_algorithm(words)}; give yours another name")
    elif not own:
        raise BadEntry(f"{path}: the suite has no algorithm {_algorithm(words)}, and the entry has no files of its own")
    if len(words) > 1 and not about["tuned"]:
        raise BadEntry(f"{path}: other numbers than the YAML's are tuned; numbers of a paper belong into a YAML")
    if about["tuned"] != bool(about["tuning"].strip()):
        raise BadEntry(f"{path}: tuning says what was chosen and on which seeds, if and only if tuned is true")


def _algorithm(words: list[str]) -> str:
    return next(word for word in words if word.startswith("algorithm=")).partition("=")[2]


def _refuse_first(path: Path, first: Any) -> None:
    """Raise BadEntry unless there are the first updates of every seed of the first part."""
    seeds = {str(seed) for seed in PARTS[0].seeds}
    if (
        not isinstance(first, dict)
        or first.keys() != seeds
        or not all(isinstance(each, dict) for each in first.values())
    ):
        raise BadEntry(f"{path} must have the first updates of seeds {', '.join(sorted(seeds))}")
    for each in first.values():
        if not isinstance(each.get("cold_start"), str) or not all(
            map(_are_numbers, map(each.get, ("loss", "grad_norm")))
        ):
            raise BadEntry(f"{path}: first updates are cold_start, a text, and lists of loss and of grad_norm")


def _are_numbers(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(number, float) and math.isfinite(number) for number in found)


def _outcomes(path: Path) -> pd.DataFrame:
    """The data, of the seeds of the standard, with both anchors. Raises BadEntry."""
    try:
        table = pd.read_csv(path, usecols=list(_COLUMNS), dtype=_COLUMNS, nrows=_ROWS + 1, keep_default_na=False,
                            na_values={"value": [""]})  # fmt: skip
    except ValueError as error:
        raise BadEntry(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if len(table) > _ROWS:
        raise BadEntry(f"{path} has more than {_ROWS} rows")
    parts = {part.name: part for part in PARTS}
    found = set(table["part"])
    if unknown := sorted(found - parts.keys()):
        raise BadEntry(f"{path}: there is no part {unknown[0]} in {VERSION}")
    if PARTS[0].name not in found:
        raise BadEntry(f"{path} lacks the part {PARTS[0].name}")
    for name in found:
        _refuse_part(path, parts[name], table[table["part"] == name])
    return table


def _refuse_part(path: Path, part: Part, rows: pd.DataFrame) -> None:
    """Raise BadEntry for other arms or seeds than the standard's, or for outcomes beyond their bounds."""
    by_arm = {str(arm): sorted(group["seed"]) for arm, group in rows.groupby("arm")}
    for arm in (OWN, *ANCHORS):
        if arm not in by_arm:
            raise BadEntry(f"{path}: {part.name} has no runs of {arm}")
        if by_arm[arm] != sorted(part.seeds):
            raise BadEntry(f"{path}: {part.name} has other seeds of {arm} than {VERSION}")
    if other := sorted(by_arm.keys() - {OWN, *ANCHORS}):
        raise BadEntry(f"{path}: {part.name} has runs of {other[0]}, and an entry has its own and the anchors'")
    defined = rows.groupby("arm")["value"].count().min()
    if defined < (len(part.seeds) if part.kind == "runs" else min(_LEAST_DEFINED, len(part.seeds))):
        raise BadEntry(f"{path}: {part.name} has too few defined values")
    values = rows["value"].dropna()
    if not np.isfinite(values).all():
        raise BadEntry(f"{path}: {part.outcome} is finite")
    if part.bounds is not None and not values.between(*part.bounds).all():
        raise BadEntry(f"{path}: {part.outcome} lies between {part.bounds[0]:g} and {part.bounds[1]:g}")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
