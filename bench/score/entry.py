"""An entry of the board: a folder with a loss, its README and the outcomes of its score, sent as a pull request.

The folder is a stranger's. Reading it imports none of its code, follows no link and takes small regular files only.
"""

import hashlib
import json
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.algorithms import names
from steadymoe.bench.check import command as check
from steadymoe.bench.runs import identity
from steadymoe.bench.score import standard
from steadymoe.bench.score.standard import ANCHORS, COLUMNS, DIALS, MOST_TUNED, RATE, VERSION
from steadymoe.bench.support import external, regular_files
from steadymoe.bench.support.errors import UserError

ABOUT, README, TUNING = "entry.json", "README.md", "tuning.csv"
_TEXTS = ("standard", "name", "words", "paper", "machine", "revision", "versions", "date")
# The algorithm of an entry: its YAML, and modules of any depth.
_OWN_FILES = re.compile(r"conf/algorithm/[\w.@-]+\.yaml|([A-Za-z_]\w*/)*[A-Za-z_]\w*\.py")
# An override that chooses the algorithm or one of its numbers.
_OVERRIDE = re.compile(r"algorithm=[\w.@-]+|algorithm(\.[A-Za-z_]\w*)+=[\w.,+\[\]-]*")
_LARGEST, _FILES, _LONGEST, _ROWS = 2**20, 100, 1000, 1000
_IDEA = "## Idea"


class BadEntry(UserError):
    """The folder is not an entry of this standard."""


@dataclass(frozen=True)
class Entry:
    """One entry."""

    folder: Path
    about: Mapping[str, Any]
    """The content of ``entry.json``."""
    files: Sequence[str]
    """Its algorithm's own files; none for an algorithm of the suite."""

    @property
    def name(self) -> str:
        """Its name on the board."""
        return str(self.about["name"])

    @property
    def overrides(self) -> list[str]:
        """The overrides that choose its algorithm."""
        return shlex.split(self.about["words"])

    @property
    def digest(self) -> str:
        """A hash of its algorithm: words, YAML and modules."""
        parts = [self.about["words"], *((self.folder / name).read_text() for name in sorted(self.files))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def outcomes(self) -> pd.DataFrame:
        """Return the outcomes that its author measured, under its name. Raises BadEntry."""
        path = self.folder / standard.OUTCOMES
        try:
            with regular_files.opened(path, _LARGEST) as file:
                table = pd.read_csv(file, usecols=list(COLUMNS), nrows=_ROWS)
            numbers = table[["rate", "value", "seed", "start", "sampled", "greedy"]].astype(float)
            table["loss"] = table["loss"].astype(str)
        except (OSError, ValueError) as error:
            raise BadEntry(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
        shares = numbers[["start", "sampled", "greedy"]]
        if not ((shares >= 0) & (shares <= 1)).all(axis=None) or not (numbers["value"] >= 0).all():
            raise BadEntry(f"{path} has numbers out of bounds")
        if set(table["dial"]) - {dial.name for dial in DIALS} or RATE.name not in set(table["dial"]):
            raise BadEntry(
                f"{path} must have the dial {RATE.name}, and no other than {', '.join(d.name for d in DIALS)}"
            )
        if not {*ANCHORS, self.name} >= set(table["loss"]) >= {ANCHORS[0], self.name}:
            raise BadEntry(f"{path} must have {self.name} and {ANCHORS[0]}, and no other loss")
        return table


def write(
    to: Path, about: Mapping[str, str], overrides: Sequence[str], outcomes: pd.DataFrame, tuned: Path | None
) -> Path:
    """Write an entry to the new folder ``to`` and return it. Raises BadEntry if it exists or would be refused.

    In ``outcomes`` the scored loss has its name on the board.
    """
    if to.exists():
        raise BadEntry(f"{to} already exists; an entry needs a new folder")
    name = about["name"]
    files = own_files(overrides) | {
        ABOUT: json.dumps({"standard": VERSION, **about}, indent=1, ensure_ascii=False) + "\n",
        README: f"# {name}\n\n{about['paper']}\n\n{_IDEA}\n\nWhat does it change, and why should it bear more?\n",
        standard.OUTCOMES: outcomes.to_csv(index=False),
    }
    if tuned is not None:
        try:
            files[TUNING] = regular_files.read_bytes(tuned, _LARGEST).decode()
        except UnicodeDecodeError as error:
            raise BadEntry(f"{tuned} is not a text file") from error
    temporary = to.parent / f".{to.name}.begun"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        for path, text in files.items():
            (temporary / path).parent.mkdir(parents=True, exist_ok=True)
            (temporary / path).write_text(text)
        read(temporary).outcomes()
        return temporary.rename(to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def read(folder: Path) -> Entry:
    """Read the entry in ``folder``. Raises BadEntry, in one line."""
    try:
        names_there = _files(folder)
        about = regular_files.read_json(folder / ABOUT, _LARGEST)
        _check(about, names_there, regular_files.read_bytes(folder / README, _LARGEST).decode())
    except BadEntry:
        raise
    except Exception as error:  # a stranger's files
        text = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise BadEntry(f"{folder} is not an entry: {text}") from error
    return Entry(folder, about, sorted(name for name in names_there if _OWN_FILES.fullmatch(name)))


def copy(entry: Entry, to: Path) -> None:
    """Copy the algorithm's files of an entry, none of them a link, to ``to``."""
    for name in entry.files:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(regular_files.read_bytes(entry.folder / name, _LARGEST))


def _files(folder: Path) -> set[str]:
    """List the files below ``folder``. Raises BadEntry for a link, a pipe, a large or foreign file, and too many."""
    files: set[str] = set()
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        name = path.relative_to(folder).as_posix()
        if not stat.S_ISREG(mode) or path.lstat().st_size > _LARGEST:
            raise BadEntry(f"{path} is not a regular file of at most {_LARGEST // 2**20} MiB")
        if name not in (ABOUT, README, TUNING, standard.OUTCOMES) and not _OWN_FILES.fullmatch(name):
            raise BadEntry(f"{path} does not belong in an entry: docs/your_algorithm.md")
        files.add(name)
        if len(files) > _FILES:
            raise BadEntry(f"{folder} has more than {_FILES} files")
    return files


def _check(about: Any, files: set[str], readme: str) -> None:
    """Raise BadEntry for an ``entry.json`` or a README that lacks something."""
    for key in _TEXTS:
        if not isinstance(about, dict) or not isinstance(about.get(key), str) or len(about[key]) > _LONGEST:
            raise BadEntry(f"{ABOUT}: {key} must be a string of at most {_LONGEST} characters")
    overrides = shlex.split(about["words"])
    chosen = [word.partition("=")[2] for word in overrides if word.startswith("algorithm=")]
    own = [name for name in files if _OWN_FILES.fullmatch(name)]
    yamls, suites = [name for name in own if name.endswith(".yaml")], names(presets=True)
    problems = {
        f"{ABOUT}: standard must be {VERSION}, got {about['standard']}": about["standard"] != VERSION,
        f"{ABOUT}: name must consist of letters, digits and -_.@": not identity.is_name(about["name"]),
        f"the board has a loss named {about['name']}": about["name"] in set(standard.recorded()["loss"]),
        f"{ABOUT}: words may only choose an algorithm and its numbers": not all(map(_OVERRIDE.fullmatch, overrides)),
        f"{ABOUT}: words must choose one algorithm": len(chosen) != 1,
        f"at most {MOST_TUNED} numbers may be tuned": len(overrides) > 1 + MOST_TUNED,
        f"tuned numbers need their table, {TUNING}": len(overrides) > 1 and TUNING not in files,
        f'{README} needs a section "{_IDEA}"': _IDEA not in readme,
        "an entry of your own algorithm needs conf/algorithm/<its name>.yaml and may hold modules; one of a built-in "
        "algorithm holds neither": yamls != [f"conf/algorithm/{name}.yaml" for name in chosen if name not in suites]
        or (bool(own) and not yamls),
    }
    for problem, is_so in problems.items():
        if is_so:
            raise BadEntry(problem)
