"""An entry of the board: a folder with a loss, its numbers, its README and the outcomes of its runs.

``entry.json`` describes it and holds the hash of every other file, so that a changed file is found. Reading an entry
imports none of its code. The folder is a stranger's: everything is checked before it is used.
"""

import hashlib
import json
import math
import re
import shlex
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.algorithms import names
from steadymoe.bench.check import request as check
from steadymoe.bench.config import identity
from steadymoe.bench.score.recorded import Arm, Audited, Recorded
from steadymoe.bench.score.standard import ANCHORS, PARTS, VERSION, Part
from steadymoe.bench.support import atomic_files, external
from steadymoe.bench.support.errors import UserError

_ABOUT, _DATA, _README = "entry.json", "outcomes.csv", "README.md"
# The fields of ``entry.json`` that are text.
_TEXTS = ("standard", "name", "words", "paper", "equation", "tuning", "machine", "revision", "versions")
_COLUMNS = {"part": str, "arm": str, "seed": int, "value": float}
# The algorithm of an entry: its YAML, and modules of any depth.
_YAML = re.compile(r"conf/algorithm/([\w.@-]+)\.yaml")
_OWN_FILES = re.compile(rf"{_YAML.pattern}|([A-Za-z_]\w*/)*[A-Za-z_]\w*\.py")
# An override that chooses the algorithm or one of its numbers.
_OVERRIDE = re.compile(r"algorithm=[\w.@-]+|algorithm(\.[A-Za-z_]\w*)+=[\w.,+\[\]-]*")
# The entry's own arm in its data.
OWN = "yours"
_LARGEST, _ROWS, _FILES, _LONGEST = 2**20, 10_000, 100, 1000
# Of a part of audits this many checkpoints at least must have a defined outcome.
_LEAST_DEFINED = 8
# The updates that are kept for a rerun: later ones differ between machines by more than rounding.
_UPDATES = 2
# The arm of an entry's own runs, and of each anchor.
Arms = Mapping[str, Arm | Audited]


class BadEntry(UserError):
    """A folder is not an entry of this standard; the message is one line."""


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
        return [name for name in self.about["files"] if _is_own(name)]

    @property
    def digest(self) -> str:
        """A hash of all that it holds."""
        return _hash(self.folder / _ABOUT)

    def by_seed(self, part: Part, arm: str = OWN) -> pd.Series:
        """The outcomes of one arm in a part, by seed; nan where one is undefined, empty for a part that was not run."""
        rows = self.outcomes[(self.outcomes["part"] == part.name) & (self.outcomes["arm"] == arm)]
        return rows.set_index("seed")["value"].sort_index()


# --- writing ----------------------------------------------------------------------------------------------------------


def submit(
    recorded: Recorded,
    arms: Mapping[str, Arms],
    runs: Mapping[int, Path],
    about: Mapping[str, Any],
    files: Mapping[str, str],
    to: Path,
) -> Path:
    """Write an entry to the new folder ``to``, from the runs and audits that ``arms`` names for each part.

    ``runs`` are the folders of its own runs by seed, ``about`` has name, words, paper, equation, tuned and tuning.
    Raises NotRun if a part has not run, BadEntry if ``to`` exists or the entry would be refused.
    """
    own = arms[PARTS[0].name][OWN]
    assert isinstance(own, Arm)  # the first part is of runs
    last = recorded.tables([own])["runs"].iloc[-1]
    made = {key: str(last[key]) for key in ("machine", "revision", "versions")}
    first = {str(seed): first_updates(runs[seed]) for seed in PARTS[0].seeds}
    rows = [
        pd.DataFrame({"part": part.name, "arm": arm, "seed": part.seeds}).assign(
            value=part.measure(recorded, arms[part.name][arm]).reindex(list(part.seeds)).to_numpy()
        )
        for part in PARTS
        for arm in (OWN, *ANCHORS)
    ]
    content = {"standard": VERSION} | dict(about) | made | {"first": first}
    return write(to, content, pd.concat(rows, ignore_index=True), files)


def first_updates(run: Path) -> dict[str, Any]:
    """Return a hash of the cold start's weights, and loss and gradient norm of the first updates, of a run's folder."""
    facts = json.loads((run / "run.json").read_text())
    results = next(each for each in run.parents if each.name == "runs").parent
    weights = results / "cold_starts" / f"{facts['cold_start']['fingerprint']}.safetensors"
    updates = pd.read_parquet(run / "updates.parquet", columns=["loss", "grad_norm"]).head(_UPDATES)
    return {"cold_start": hashlib.sha256(weights.read_bytes()).hexdigest()[:16]} | {
        key: updates[key].tolist() for key in ("loss", "grad_norm")
    }


def own_files(overrides: Sequence[str]) -> dict[str, str]:
    """Return the files of an algorithm outside the suite, by path: its YAML and the modules this process has loaded.

    Empty for an algorithm of the suite. Raises ConfigError for overrides that choose no algorithm.
    """
    algorithm = check.read(list(overrides)).name  # loads its modules
    loaded = [Path(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
    found: dict[str, str] = {}
    for folder in external.folders():
        yaml = folder / "conf" / "algorithm" / f"{algorithm}.yaml"
        for path in [*([yaml] if yaml.exists() else []), *(path for path in loaded if path.is_relative_to(folder))]:
            name = path.relative_to(folder).as_posix()
            if _is_own(name):  # not a virtual environment that lies there too
                found[name] = path.read_text()
    return found if any(name.endswith(".yaml") for name in found) else {}


def write(folder: Path, about: Mapping[str, Any], outcomes: pd.DataFrame, files: Mapping[str, str]) -> Path:
    """Write an entry to the new folder ``folder`` and return it; ``files`` are further texts by path.

    ``outcomes`` has part, arm, seed, value. Raises BadEntry, and writes nothing, if the folder exists or the entry
    would be refused.
    """
    if folder.exists():
        raise BadEntry(f"{folder} already exists; an entry needs a new folder")
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


# --- reading ----------------------------------------------------------------------------------------------------------


def load(folders: Sequence[Path]) -> list[Entry]:
    """Read the entries in the folders, or below them. Raises BadEntry for a bad one and for two of one name."""
    found: dict[str, Entry] = {}
    for folder in folders:
        if not folder.is_dir():
            raise BadEntry(f"{folder} is not a folder")
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        for place in [folder] if (folder / _ABOUT).exists() or not below else below:
            entry = read(place)
            if entry.name in found:
                raise BadEntry(f"{place} and {found[entry.name].folder} are both entries of {entry.name}")
            found[entry.name] = entry
    return list(found.values())


def read(folder: Path) -> Entry:
    """Read and verify the entry in ``folder``. Raises BadEntry."""
    try:
        found, about = _files(folder), _about(folder)
        files = about["files"]
        if extra := sorted(found - {_ABOUT, *files}):
            raise BadEntry(f"{folder / extra[0]} is not named in {_ABOUT}")
        if absent := sorted(files.keys() - found):
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
    """The files below ``folder``. Raises BadEntry for a link, a pipe, a large file, and a file that no entry has."""
    if _ABOUT not in {path.name for path in folder.iterdir()}:
        raise BadEntry(f"{folder} is not an entry: it has no {_ABOUT}")
    found: set[str] = set()
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        name = path.relative_to(folder).as_posix()
        if not stat.S_ISREG(mode):
            raise BadEntry(f"{path} is not a regular file")
        if path.stat().st_size > _LARGEST:
            raise BadEntry(f"{path} is larger than {_LARGEST // 2**20} MiB")
        if name not in (_ABOUT, _DATA, _README) and not _is_own(name):
            raise BadEntry(f"{path} does not belong in an entry: docs/your_algorithm.md")
        found.add(name)
        if len(found) > _FILES:
            raise BadEntry(f"{folder} has more than {_FILES} files")
    return found


def _about(folder: Path) -> dict[str, Any]:
    """The content of ``entry.json``. Raises BadEntry."""
    path = folder / _ABOUT
    try:
        about = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise BadEntry(f"{path} is not JSON: {' '.join(str(error).split())}") from error
    needed = (*_TEXTS, "tuned", "first", "files")
    if missing := [key for key in needed if not isinstance(about, dict) or key not in about]:
        raise BadEntry(f"{path} lacks {', '.join(missing)}")
    for key in _TEXTS:
        if not isinstance(about[key], str) or len(about[key]) > _LONGEST:
            raise BadEntry(f"{path}: {key} must be a text of at most {_LONGEST} characters")
    if problem := next(_problems(about), None):
        raise BadEntry(f"{path}: {problem}")
    return about


def _problems(about: Mapping[str, Any]) -> Iterator[str]:
    """Everything wrong with an ``entry.json`` whose fields are there; each problem may hide later ones."""
    files = about["files"]
    if about["standard"] != VERSION:
        yield f"standard must be {VERSION}, got {about['standard']}"
    if not identity.is_name(about["name"]) or not isinstance(about["tuned"], bool):
        yield "name must be a name, and tuned true or false"
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
    own, algorithm = [name for name in files if _is_own(name)], _algorithm(overrides)
    if own and [found[1] for name in files if (found := _YAML.fullmatch(name))] != [algorithm]:
        yield "an entry with files of its own must have one YAML, of the algorithm in words"
    if own and algorithm in names(presets=True):
        yield f"the suite has an algorithm {algorithm}; give yours another name"
    if not own and algorithm not in names(presets=True):
        yield f"the suite has no algorithm {algorithm}, and the entry has no files of its own"
    if len(overrides) > 1 and not about["tuned"]:
        yield "numbers in words are tuned; numbers of a paper belong in a YAML"
    if about["tuned"] != bool(about["tuning"].strip()):
        yield "tuning must say what was chosen, and on which seeds, if and only if tuned is true"
    first, seeds = about["first"], {str(seed) for seed in PARTS[0].seeds}
    if not isinstance(first, dict) or first.keys() != seeds or not all(map(_is_first_update, first.values())):
        yield f"first must hold cold_start, loss and grad_norm for each of the seeds {', '.join(sorted(seeds))}"


def _is_first_update(found: Any) -> bool:
    """Whether ``found`` has a hash of the cold start, and finite losses and gradient norms."""
    return (
        isinstance(found, dict)
        and isinstance(found.get("cold_start"), str)
        and all(
            isinstance(numbers, list) and all(isinstance(one, float) and math.isfinite(one) for one in numbers)
            for numbers in map(found.get, ("loss", "grad_norm"))
        )
    )


def _outcomes(path: Path) -> pd.DataFrame:
    """The data, of the seeds of the standard, with both anchors. Raises BadEntry."""
    try:
        table = pd.read_csv(path, usecols=list(_COLUMNS), dtype=_COLUMNS, nrows=_ROWS + 1, keep_default_na=False,
                            na_values={"value": [""]})  # fmt: skip
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
    """What is wrong with the rows of a part: other arms or seeds, undefined values, values out of bounds; or None."""
    arms = (OWN, *ANCHORS)
    needed = Counter((arm, seed) for arm in arms for seed in part.seeds)
    found = Counter(zip(rows["arm"], rows["seed"], strict=True))
    if wrong := sorted(pair for pair in needed | found if needed[pair] != found[pair]):
        arm, seed = wrong[0]
        return f"must have one row for each seed of {VERSION} and each of {', '.join(arms)}; see {arm}, seed {seed}"
    least = len(part.seeds) if part.kind == "runs" else min(_LEAST_DEFINED, len(part.seeds))
    if rows.groupby("arm")["value"].count().min() < least:
        return "has too few defined values"
    values, (low, high) = rows["value"].dropna(), part.bounds or (-math.inf, math.inf)
    if not np.isfinite(values).all() or not values.between(low, high).all():
        return f"has a {part.outcome} that is not finite or not in [{low:g}, {high:g}]"
    return None


def _algorithm(overrides: Sequence[str]) -> str:
    return next(word for word in overrides if word.startswith("algorithm=")).partition("=")[2]


def _is_own(name: str) -> bool:
    """Whether a path within an entry is a file of its algorithm."""
    return _OWN_FILES.fullmatch(name) is not None


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
