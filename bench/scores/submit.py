"""``steadymoe submit``: a scored algorithm as an entry of the board, a folder to look through and to send."""

import inspect
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import steadymoe.algorithms
from steadymoe.bench.check import request as check
from steadymoe.bench.claims.study import Arm, Audited, NotRun, Study
from steadymoe.bench.scores import entry, repeat
from steadymoe.bench.scores.entry import OWN, BadEntry
from steadymoe.bench.scores.standard import ANCHORS, PARTS, VERSION, Part
from steadymoe.bench.support import external

# An arm of this machine for the entry's own runs and for each anchor.
Arms = Mapping[str, Arm | Audited]


def submit(
    study: Study,
    arms: Mapping[str, Arms],
    words: Sequence[str],
    said: Mapping[str, Any],
    files: Mapping[str, str],
    to: Path,
) -> Path:
    """Write the entry of ``words`` to the new folder ``to``, from the runs that ``arms`` names for each part.

    ``said`` is what ``entry.yaml`` says of it: name, paper, equation, tuned, tuning. A part whose runs are not all
    there is left out. Raises NotRun if the first part is not there, BadEntry if ``to`` is.
    """
    rows = [
        found for part in PARTS if part.name in arms and (found := _outcomes(study, part, arms[part.name])) is not None
    ]
    first = PARTS[0]
    if not rows or rows[0]["part"].iloc[0] != first.name:
        raise NotRun(f"{said['name']} ({first.folder})")
    own = arms[first.name][OWN]
    assert isinstance(own, Arm)  # the first part is of runs
    runs = study.tables([own])["runs"].iloc[-1]
    made = {key: str(runs[key]) for key in ("machine", "revision", "versions")} | {"first": repeat.firsts(study, own)}
    about = {"standard": VERSION, "name": said["name"], "words": shlex.join(words)} | {
        key: said[key] for key in ("paper", "equation", "tuned", "tuning")
    }
    return entry.write(to, about, pd.concat(rows, ignore_index=True), made, files)


def _outcomes(study: Study, part: Part, arms: Arms) -> pd.DataFrame | None:
    """The outcomes of a part by arm and seed; None if runs are missing."""
    tables = []
    for name in (OWN, *ANCHORS):
        try:
            numbers = part.number(study, arms[name]).reindex(list(part.seeds))
        except NotRun:
            return None
        if numbers.isna().any():
            return None
        arm = arms[name]
        starts = study.first(arm).reindex(numbers.index) if isinstance(arm, Arm) else float("nan")
        tables.append(
            pd.DataFrame({"part": part.name, "arm": name, "seed": numbers.index, "value": numbers.to_numpy()})
        )
        tables[-1]["start"] = starts.to_numpy() if isinstance(starts, pd.Series) else starts
    return pd.concat(tables, ignore_index=True)


def own_files(words: Sequence[str]) -> dict[str, str]:
    """The files of an algorithm outside of the suite: its YAML and the module of its loss; none for one of the suite.

    Raises ConfigError for words that name no algorithm, BadEntry if the files cannot be found.
    """
    asked = check.read(list(words))
    module = inspect.getmodule(type(asked.loss))
    of_suite = type(asked.loss).__module__.startswith(steadymoe.algorithms.__name__)
    yamls = [folder / "conf" / "algorithm" / f"{asked.name}.yaml" for folder in external.folders()]
    found = {path.relative_to(path.parents[2]).as_posix(): path.read_text() for path in yamls if path.exists()}
    if of_suite:
        return found
    if module is None or module.__file__ is None or not found:
        raise BadEntry(f"the files of {asked.name} are not in a folder of {external.VARIABLE}")
    return found | {Path(module.__file__).name: Path(module.__file__).read_text()}


def readme(name: str, paper: str, equation: str) -> str:
    """The README of an entry, for its author to complete."""
    return f"""# {name}

{paper}

Equation: {equation}

What is it for, and what is known of it? Which numbers were chosen, on which seeds?
"""
