"""``steadymoe submit``: a scored algorithm as an entry of the board, a folder to look through and to send."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.check import request as check
from steadymoe.bench.score import entry, repeat
from steadymoe.bench.score.entry import OWN
from steadymoe.bench.score.recorded import Arm, Audited, Recorded
from steadymoe.bench.score.standard import ANCHORS, PARTS, VERSION, Part
from steadymoe.bench.support import external

# The arm of the entry's own runs, and the arm of each anchor.
Arms = Mapping[str, Arm | Audited]


def submit(
    study: Recorded,
    arms: Mapping[str, Arms],
    runs: Mapping[int, Path],
    said: Mapping[str, Any],
    files: Mapping[str, str],
    to: Path,
) -> Path:
    """Write an entry to the new folder ``to``, from the runs and audits that ``arms`` names for each part.

    ``runs`` are the folders of its own runs by seed, ``said`` is what ``entry.json`` says of it: name, words, paper,
    equation, tuned, tuning. Raises NotRun if a part has not run, BadEntry if ``to`` is there or would be refused.
    """
    own = arms[PARTS[0].name][OWN]
    assert isinstance(own, Arm)  # the first part is of runs
    last = study.tables([own])["runs"].iloc[-1]
    made = {key: str(last[key]) for key in ("machine", "revision", "versions")}
    first = {str(seed): repeat.first_updates(runs[seed]) for seed in PARTS[0].seeds}
    rows = pd.concat([_outcomes(study, part, arms[part.name]) for part in PARTS], ignore_index=True)
    return entry.write(to, {"standard": VERSION} | dict(said) | made | {"first": first}, rows, files)


def _outcomes(study: Recorded, part: Part, arms: Arms) -> pd.DataFrame:
    """The outcomes of a part by arm and seed; nan where one is undefined."""
    return pd.concat(
        [
            pd.DataFrame({"part": part.name, "arm": name, "seed": part.seeds}).assign(
                value=part.number(study, arms[name]).reindex(list(part.seeds)).to_numpy()
            )
            for name in (OWN, *ANCHORS)
        ],
        ignore_index=True,
    )


def own_files(words: Sequence[str]) -> dict[str, str]:
    """The files of an algorithm outside of the suite, by path: its YAML and the modules that this process has loaded.

    None for an algorithm of the suite. Raises ConfigError for words that name no algorithm.
    """
    asked = check.read(list(words))  # loads its modules
    loaded = [Path(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
    found: dict[str, str] = {}
    for folder in external.folders():
        yaml = folder / "conf" / "algorithm" / f"{asked.name}.yaml"
        for path in [*([yaml] if yaml.exists() else []), *(each for each in loaded if each.is_relative_to(folder))]:
            name = path.relative_to(folder).as_posix()
            if entry.is_own(name):  # no virtual environment that lies there too
                found[name] = path.read_text()
    return found if any(name.endswith(".yaml") for name in found) else {}


def readme(name: str, paper: str, equation: str) -> str:
    """The README of an entry, for its author to complete."""
    return f"""# {name}

{paper}

Equation: {equation}

What is it for, and what is known of it? Which numbers were chosen, on which seeds?
"""
