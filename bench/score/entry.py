"""An entry of the board: a folder with a loss, its numbers, its README and the outcomes of its runs.

``entry.json`` describes it and has the hash of every other file, so a changed file is noticed. Reading an entry imports
none of its code. The folder is a stranger's: everything is checked before it is used.
"""

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.algorithms import names
from steadymoe.bench.check import command as check
from steadymoe.bench.runs import identity
from steadymoe.bench.score.recorded import Arm, Recorded
from steadymoe.bench.score.standard import ANCHORS, PARTS, VERSION, Part
from steadymoe.bench.support import external, regular_files
from steadymoe.bench.support.errors import UserError

_ABOUT, _DATA, _README = "entry.json", "outcomes.csv", "README.md"
# The fields of ``entry.json`` that are text.
_TEXTS = ("standard", "name", "words", "paper", "equation", "tuning", "machine", "revision", "versions")
_COLUMNS = {"part": str, "arm": str, "seed": int, "value": float, "tokens": float}
# The algorithm of an entry: its YAML, and modules of any depth.
_YAML = re.compile(r"conf/algorithm/([\w.@-]+)\.yaml")
_OWN_FILES = re.compile(rf"{_YAML.pattern}|([A-Za-z_]\w*/)*[A-Za-z_]\w*\.py")
# An override that chooses the algorithm or one of its numbers.
_OVERRIDE = re.compile(r"algorithm=[\w.@-]+|algorithm(\.[A-Za-z_]\w*)+=[\w.,+\[\]-]*")
# The entry's own arm in its data.
OWN = "yours"
_LARGEST, _ROWS, _FILES, _LONGEST = 2**20, 10_000, 100, 1000
# Of a part of audits this many checkpoints at least must have a defined outcome.
_MIN_DEFINED = 8
# The updates that are kept for a rerun: later ones differ between machines by more than rounding.
_UPDATES = 2


class BadEntry(UserError):
    """A folder is not an entry of this standard."""


@dataclass(frozen=True)
class Entry:
    """One entry, read and verified."""

    folder: Path
    about: Mapping[str, Any]
    """The content of ``entry.json``."""
    outcomes: pd.DataFrame

    @property
    def name(self) -> str:
        """Its name on the board."""
        return str(self.about["name"])

    @property
    def overrides(self) -> list[str]:
        """The overrides that choose its algorithm."""
        return shlex.split(self.about["words"])

    @property
    def algorithm(self) -> str:
        """The name of its algorithm."""
        return _algorithm(self.overrides)

    @property
    def own_files(self) -> list[str]:
        """The files of its algorithm; none for an algorithm of the suite."""
        return [name for name in self.about["files"] if _OWN_FILES.fullmatch(name)]

    @property
    def digest(self) -> str:
        """A hash of the whole entry."""
        return _hash(self.folder / _ABOUT)

    def by_seed(self, part: Part, arm: str = OWN, column: str = "value") -> pd.Series:
        """Return the outcomes, or tokens, of one arm in a part by seed: nan if undefined, empty if it was not run."""
        rows = self.outcomes[(self.outcomes["part"] == part.name) & (self.outcomes["arm"] == arm)]
        return rows.set_index("seed")[column].sort_index()


# --- writing ----------------------------------------------------------------------------------------------------------


def submit(
    recorded: Recorded,
    arms: Mapping[str, Mapping[str, Any]],
    runs: Mapping[int, Path],
    about: Mapping[str, Any],
    files: Mapping[str, str],
    to: Path,
) -> Path:
    """Write an entry to the new folder ``to``.

    ``arms`` is part → arm of the entry → recorded arm, ``runs`` has the folders of its own runs by seed, ``about`` has
    name, words, paper, equation and tuning, ``files`` further texts by path. Raises NotRun if a part has not run,
    BadEntry if ``to`` exists or the entry would be refused.
    """
    last = recorded.tables([arms[PARTS[0].name][OWN]])["runs"].iloc[-1]
    content = {"standard": VERSION} | dict(about) | {key: str(last[key]) for key in ("machine", "revision", "versions")}
    content["first"] = {str(seed): first_updates(runs[seed]) for seed in PARTS[0].seeds}
    rows = []
    for part in PARTS:
        for name, arm in arms[part.name].items():
            table = pd.DataFrame({"part": part.name, "arm": name, "seed": part.seeds}).set_index("seed", drop=False)
            tokens = recorded.tokens(arm) if isinstance(arm, Arm) else math.nan
            rows.append(table.assign(value=part.measure(recorded, arm), tokens=tokens))
    return write(to, content, pd.concat(rows), files)


def first_updates(run: Path) -> dict[str, Any]:
    """Return a hash of the cold start's weights, and loss and gradient norm of the first updates, of a run's folder."""
    facts = regular_files.read_json(run / "run.json")
    results = next(parent for parent in run.parents if parent.name == "runs").parent
    weights = results / "cold_starts" / f"{facts['cold_start']['fingerprint']}.safetensors"
    updates = regular_files.read_parquet(run / "updates.parquet", ["loss", "grad_norm"]).head(_UPDATES)
    return {"cold_start": _hash(weights)[:16]} | {key: updates[key].tolist() for key in ("loss", "grad_norm")}


def own_files(overrides: Sequence[str]) -> dict[str, str]:
    """Return the files of an algorithm outside the suite, by path: its YAML and the modules this process has loaded.

    Empty for an algorithm of the suite. Raises ConfigError for overrides that choose no algorithm.
    """
    algorithm = check.read(overrides).name  # loads its modules
    loaded = [Path(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
    files: dict[str, str] = {}
    for folder in external.folders():
        yaml = folder / "conf" / "algorithm" / f"{algorithm}.yaml"
        for path in [*([yaml] if yaml.exists() else []), *(path for path in loaded if path.is_relative_to(folder))]:
            name = path.relative_to(folder).as_posix()
            if _OWN_FILES.fullmatch(name):  # not a virtual environment that lies there too
                files[name] = path.read_text()
    return files if any(name.endswith(".yaml") for name in files) else {}


def write(folder: Path, about: Mapping[str, Any], outcomes: pd.DataFrame, files: Mapping[str, str]) -> Path:
    """Write an entry to the new folder ``folder`` and return it; ``files`` are further texts by path.

    ``outcomes`` has part, arm, seed, value, tokens. Raises BadEntry, and writes nothing, if the folder exists or the
    entry would be refused.
    """
    if folder.exists():
        raise BadEntry(f"{folder} already exists; an entry needs a new folder")
    texts = {**files, _DATA: outcomes[list(_COLUMNS)].to_csv(index=False)}
    hashes = {name: hashlib.sha256(texts[name].encode()).hexdigest() for name in sorted(texts)}
    texts[_ABOUT] = json.dumps(dict(about) | {"files": hashes}, indent=1, ensure_ascii=False) + "\n"
    temporary = folder.parent / f".{folder.name}.begun"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        for name, text in texts.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(text.encode())
        read(temporary)
        return temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# --- reading ----------------------------------------------------------------------------------------------------------


def load(folders: Sequence[Path]) -> list[Entry]:
    """Read the entries in the folders, or below them. Raises BadEntry for a bad one and for two of one name."""
    entries: dict[str, Entry] = {}
    for folder in folders:
        if not folder.is_dir():
            raise BadEntry(f"{folder} is not a folder")
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        for path in below:
            regular_files.refuse_links(path, folder)
        for place in [folder] if os.path.lexists(folder / _ABOUT) or not below else below:
            entry = read(place)
            if entry.name in entries:
                raise BadEntry(f"{place} and {entries[entry.name].folder} are both entries of {entry.name}")
            entries[entry.name] = entry
    return list(entries.values())


def read(folder: Path) -> Entry:
    """Read and verify the entry in ``folder``. Raises BadEntry."""
    try:
        names_there, about = _files(folder), _about(folder)
        files = about["files"]
        if extra := sorted(names_there - {_ABOUT, *files}):
            raise BadEntry(f"{folder / extra[0]} is not named in {_ABOUT}")
        if absent := sorted(files.keys() - names_there):
            raise BadEntry(f"{folder} lacks {absent[0]}")
        if changed := [name for name, digest in files.items() if _hash(folder / name) != digest]:
            raise BadEntry(f"{folder / changed[0]} has changed since {_ABOUT} was written")
        return Entry(folder, about, _outcomes(folder / _DATA))
    except BadEntry:
        raise
    except Exception as error:  # a stranger's files
        text = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise BadEntry(f"{folder} is not an entry: {text}") from error


def _files(folder: Path) -> set[str]:
    """List the files below ``folder``. Raises BadEntry for a link, a pipe, a large or foreign file, and too many."""
    if _ABOUT not in {path.name for path in folder.iterdir()}:
        raise BadEntry(f"{folder} is not an entry: it has no {_ABOUT}")
    files: set[str] = set()
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        name = path.relative_to(folder).as_posix()
        if not stat.S_ISREG(mode):
            raise BadEntry(f"{path} is not a regular file")
        if path.stat().st_size > _LARGEST:
            raise BadEntry(f"{path} is larger than {_LARGEST // 2**20} MiB")
        if name not in (_ABOUT, _DATA, _README) and not _OWN_FILES.fullmatch(name):
            raise BadEntry(f"{path} does not belong in an entry: docs/your_algorithm.md")
        files.add(name)
        if len(files) > _FILES:
            raise BadEntry(f"{folder} has more than {_FILES} files")
    return files


def _about(folder: Path) -> dict[str, Any]:
    """Read ``entry.json``. Raises BadEntry."""
    path = folder / _ABOUT
    try:
        about = regular_files.read_json(path, _LARGEST)
    except ValueError as error:
        raise BadEntry(f"{path} is not JSON: {' '.join(str(error).split())}") from error
    if problem := next(_problems(about), None):
        raise BadEntry(f"{path}: {problem}")
    return dict(about)


def _problems(about: Any) -> Iterator[str]:
    """Yield everything wrong with an ``entry.json``; each problem may hide later ones."""
    for key in _TEXTS:
        if not isinstance(about, dict) or not isinstance(about.get(key), str) or len(about[key]) > _LONGEST:
            yield f"{key} must be a text of at most {_LONGEST} characters"
    files, first = about.get("files"), about.get("first")
    if about["standard"] != VERSION:
        yield f"standard must be {VERSION}, got {about['standard']}"
    if not identity.is_name(about["name"]):
        yield "name must be a name: letters, digits, - and _"
    if not isinstance(files, dict) or not {_DATA, _README} <= files.keys() or _ABOUT in files:
        yield f"files must hold the hashes of {_DATA} and {_README}"
    try:
        overrides = shlex.split(about["words"])
    except ValueError as error:
        yield f"words cannot be read: {error}"
    if other := [word for word in overrides if not _OVERRIDE.fullmatch(word)]:  # --run passes them to `steadymoe run`
        yield f"words may only choose an algorithm and its numbers, got {other[0]}"
    if sum(word.startswith("algorithm=") for word in overrides) != 1:
        yield "words must choose one algorithm"
    own, algorithm = [name for name in files if _OWN_FILES.fullmatch(name)], _algorithm(overrides)
    if own and [match[1] for name in files if (match := _YAML.fullmatch(name))] != [algorithm]:
        yield "an entry with files of its own must have one YAML, of the algorithm in words"
    if own and algorithm in names(presets=True):
        yield f"the suite has an algorithm {algorithm}; give yours another name"
    if not own and algorithm not in names(presets=True):
        yield f"the suite has no algorithm {algorithm}, and the entry has no files of its own"
    if len(overrides) > 1 and not about["tuning"].strip():
        yield "numbers in words are tuned: tuning must say what was chosen; numbers of a paper belong in a YAML"
    seeds = {str(seed) for seed in PARTS[0].seeds}
    if not isinstance(first, dict) or first.keys() != seeds or not all(map(_is_first_update, first.values())):
        yield f"first must hold cold_start, loss and grad_norm for each of the seeds {', '.join(sorted(seeds))}"


def _is_first_update(value: Any) -> bool:
    """Whether ``value`` has a hash of the cold start, and finite losses and gradient norms."""
    if not isinstance(value, dict) or not isinstance(value.get("cold_start"), str):
        return False
    lists = [value.get(key) for key in ("loss", "grad_norm")]
    return all(
        isinstance(numbers, list) and all(isinstance(number, float) and math.isfinite(number) for number in numbers)
        for numbers in lists
    )


def _outcomes(path: Path) -> pd.DataFrame:
    """Read the data: the seeds of the standard, with both anchors. Raises BadEntry."""
    missing = {"value": [""], "tokens": [""]}
    try:
        table = pd.read_csv(path, usecols=list(_COLUMNS), dtype=_COLUMNS, nrows=_ROWS + 1, keep_default_na=False,
                            na_values=missing)  # fmt: skip
    except ValueError as error:
        raise BadEntry(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if len(table) > _ROWS:
        raise BadEntry(f"{path} has more than {_ROWS} rows")
    parts, found = {part.name: part for part in PARTS}, set(table["part"])
    if unknown := sorted(found - parts.keys()):
        raise BadEntry(f"{path}: {VERSION} has no part {unknown[0]}")
    if PARTS[0].name not in found:
        raise BadEntry(f"{path} lacks the part {PARTS[0].name}")
    for name in sorted(found):
        if problem := _problem_of_part(parts[name], table[table["part"] == name]):
            raise BadEntry(f"{path}: {name} {problem}")
    return table


def _problem_of_part(part: Part, rows: pd.DataFrame) -> str | None:
    """Return what is wrong with the rows of a part: arms or seeds, undefined or unbounded values; None if nothing."""
    arms = (OWN, *ANCHORS)
    needed = Counter((arm, seed) for arm in arms for seed in part.seeds)
    found = Counter(zip(rows["arm"], rows["seed"], strict=True))
    if wrong := sorted(pair for pair in needed | found if needed[pair] != found[pair]):
        arm, seed = wrong[0]
        return f"must have one row for each seed of {VERSION} and each of {', '.join(arms)}; see {arm}, seed {seed}"
    least = len(part.seeds) if part.one == "run" else min(_MIN_DEFINED, len(part.seeds))
    if rows.groupby("arm")["value"].count().min() < least:
        return "has too few defined values"
    for column, (low, high) in (("value", part.bounds or (-math.inf, math.inf)), ("tokens", (0, math.inf))):
        values = rows[column].dropna()
        if not np.isfinite(values).all() or not values.between(low, high).all():
            return f"has a {column} that is not finite or not in [{low:g}, {high:g}]"
    return None


def _algorithm(overrides: Sequence[str]) -> str:
    return next(word for word in overrides if word.startswith("algorithm=")).partition("=")[2]


def _hash(path: Path) -> str:
    with regular_files.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
