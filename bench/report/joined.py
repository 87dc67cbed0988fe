"""Several experiments as one table: a loss of yours next to a recorded baseline.

``--experiment mine,quickstart`` joins two experiments of the results folder, ``mine,results/reference/quickstart`` one
of another folder.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.report.folders import experiments
from steadymoe.bench.report.results import Results, concatenated
from steadymoe.bench.runs.identity import LONGEST_NAME, NO_NUMBERS, OFF, flatten, is_name
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import nearest, visible

# Config groups of which the choice alone is named, where it differs: the column of ``runs`` has its name.
_GROUPS = ("task", "model", *(group for group in OFF if group != "advantage"))
# What makes arms of one name one arm, if besides they share no seed.
_ALIKE = ["config_without_seed", "algorithm_code", "origin"]


def places(results: Path, experiment: str) -> dict[str, tuple[Path, str]]:
    """Return label → (results folder, name) of each experiment in ``a,folder/b``.

    The label is the name, or, if two folders hold the same name, what was typed. Raises UserError for an unknown or a
    repeated experiment.
    """
    words = [word.strip() for word in experiment.split(",")]
    split = [(Path(folder) if slash else results, name) for folder, slash, name in (w.rpartition("/") for w in words)]
    names = [name for _, name in split]
    for word, (folder, name) in zip(words, split, strict=True):
        known = [visible(each) for each in experiments(folder)]
        if not is_name(name) or name not in known:
            hint = nearest(name, known, f"`ls {visible(folder)}/*`") if known else f"none is in {visible(folder)}"
            raise UserError(f"--experiment: there is no experiment {visible(word)!r}; {hint}")
        if words.count(word) > 1:
            raise UserError(f"--experiment names {visible(word)!r} twice")
    return {
        name if names.count(name) == 1 else word: place for word, name, place in zip(words, names, split, strict=True)
    }


def name(labels: Sequence[str]) -> str:
    """Return the name of the joined experiment's files: ``a-and-b``, in letters that a file name can have."""
    joined = re.sub(r"[^A-Za-z0-9._@-]+", "-", "-and-".join(labels)).lstrip(".-")
    return joined if is_name(joined) else f"{joined[: LONGEST_NAME - 9]}-{zlib.crc32(joined.encode()):08x}"


def join(recorded: Mapping[str, Results]) -> Results:
    """Return several experiments (by label) as one.

    An arm keeps its name. If another experiment has one of this name, both are named by experiment, ``grpo (mine)``;
    but runs of equal config and code, on other seeds, are one arm.
    """
    whole = concatenated([replace(its, runs=its.runs.assign(experiment=label)) for label, its in recorded.items()])
    runs = whole.runs
    apart = {
        str(arm)
        for arm, rows in runs.groupby("arm")
        if rows["experiment"].nunique() > 1
        and (rows["seed"].duplicated().any() or any(rows[key].fillna("").nunique() > 1 for key in _ALIKE))
    }
    named = runs["arm"] + " (" + runs["experiment"].map(visible) + ")"
    return replace(whole, runs=runs.assign(arm=runs["arm"].where(~runs["arm"].isin(apart), named)))


def difference(runs: pd.DataFrame) -> str:
    """Return the settings in which joined experiments differ, in one line; "" for one experiment or no difference.

    Settings are what changes numbers, besides the algorithm and the seed.
    """
    values = {str(label): _values(rows) for label, rows in runs.groupby("experiment", sort=False)}
    if len(values) < 2:
        return ""
    keys = list(dict.fromkeys(key for each in values.values() for key in each))
    differing = [key for key in keys if len({tuple(each.get(key, ())) for each in values.values()}) > 1]
    # Of a group with other choices its fields say no more.
    named = [key for key in differing if key in _GROUPS or "." not in key or key.partition(".")[0] not in differing]
    if not named:
        return ""
    listed = []
    for key in named:
        texts = {label: " and ".join(each.get(key) or ["unknown"]) for label, each in values.items()}
        listed.append(f"{key} {', '.join(f'{text} ({label})' for label, text in texts.items())}")
    return visible(f"These experiments differ in more than algorithm and seed: {'; '.join(listed)}.")


def _values(runs: pd.DataFrame) -> dict[str, list[str]]:
    """Return setting → its values in the runs of one experiment, as text, the choices of groups first."""
    from steadymoe.bench.schema import ADDED  # a field that a recorded config lacks has this value

    found: dict[str, set[str]] = {key: set(runs[key].dropna().astype(str)) for key in _GROUPS}
    configs: list[dict[str, Any]] = [ADDED | flatten(json.loads(text)) for text in runs["config"].dropna().unique()]
    for key in sorted({key for config in configs for key in config}):
        if key not in (*NO_NUMBERS, "seed") and key.partition(".")[0] not in ("algorithm", "advantage"):
            found[key] = {_short(config.get(key)) for config in configs}
    return {key: sorted(values) for key, values in found.items()}


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
