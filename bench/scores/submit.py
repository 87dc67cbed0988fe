"""``steadymoe submit``: a scored algorithm as an entry of the board, a folder to look through and to send."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.check import request as check
from steadymoe.bench.claims.study import Arm, Audited, NotRun, Study
from steadymoe.bench.scores import entry, repeat
from steadymoe.bench.scores.entry import OWN
from steadymoe.bench.scores.standard import ANCHORS, PARTS, VERSION, Part
from steadymoe.bench.support import external

# The arm of the entry's own runs, and the arm of each anchor.
Arms = Mapping[str, Arm | Audited]


def submit(
    study: Study,
    arms: Mapping[str, Arms],
    runs: Mapping[int, Path],
    said: Mapping[str, Any],
    files: Mapping[str, str],
    to: Path,
) -> Path:
    """Write an entry to the new folder ``to``, from the runs and audits that ``arms`` names for each part.

    ``runs`` are the folders of its own runs by seed, ``said`` is what ``entry.yaml`` says of it: name, words, paper,
    equation, tuned, tuning. A part that has not run whole is left out. Raises NotRun if the first part is not there,
    BadEntry if ``to`` is.
    """
    found = {part.name: rows for part in PARTS if (rows := _outcomes(study, part, arms[part.name])) is not None}
    first = PARTS[0]
    if first.name not in found:
        raise NotRun(f"{said['name']} ({first.folder})")
    own = arms[first.name][OWN]
    assert isinstance(own, Arm)  # the first part is of runs
    last = study.tables([own])["runs"].iloc[-1]
    made = {key: str(last[key]) for key in ("machine", "revision", "versions")}
    begins = {str(seed): repeat.first_updates(runs[seed]) for seed in repeat.SEEDS}
    rows = pd.concat(found.values(), ignore_index=True)
    return entry.write(to, {"standard": VERSION} | dict(said), rows, made | {"first": begins}, files)


def _outcomes(study: Study, part: Part, arms: Arms) -> pd.DataFrame | None:
    """The outcomes of a part by arm and seed; None if runs are missing."""
    tables = []
    for name in (OWN, *ANCHORS):
        arm = arms[name]
        try:
            numbers = part.number(study, arm).reindex(list(part.seeds))
        except NotRun:
            return None
        if numbers.isna().any():
            return None
        table = pd.DataFrame({"part": part.name, "arm": name, "seed": numbers.index, "value": numbers.to_numpy()})
        starts = study.first(arm).reindex(numbers.index).to_numpy() if isinstance(arm, Arm) else float("nan")
        tables.append(table.assign(start=starts))
    return pd.concat(tables, ignore_index=True)


def own_files(words: Sequence[str]) -> dict[str, str]:
    """The files of an algorithm outside of the suite, by path: its YAML and the modules that this process has loaded
    from the YAML's folder; none for an algorithm of the suite.

    Raises ConfigError for words that name no algorithm.
    """
    asked = check.read(list(words))  # loads its modules
    for folder in external.folders():
        path = folder / "conf" / "algorithm" / f"{asked.name}.yaml"
        if path.exists():
            loaded = [Path(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
            own = [path, *(each for each in loaded if each.suffix == ".py" and each.is_relative_to(folder))]
            return {each.relative_to(folder).as_posix(): each.read_text() for each in own}
    return {}


def readme(name: str, paper: str, equation: str) -> str:
    """The README of an entry, for its author to complete."""
    return f"""# {name}

{paper}

Equation: {equation}

What is it for, and what is known of it? Which numbers were chosen, on which seeds?
"""
