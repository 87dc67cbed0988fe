"""The shipped configs: a name of a group is a file, ``conf/<group>/<name>.yaml``, or a row of ``conf/<group>.yaml``.

A row holds what a file of its name would hold. Rows are for what differs in a few numbers: engines, sizes of a model,
one loss in other trainers. Both may build on another config of their group, by Hydra's ``defaults: [<name>, _self_]``.
"""

import copy
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import yaml

ROOT = Path(__file__).parent
VARIABLE = "STEADYMOE_PATH"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML has it


def groups() -> list[str]:
    """Return the config groups, sorted."""
    tables = {path.stem for path in ROOT.glob("*.yaml")} - {"config"}
    return sorted(tables | {path.parent.name for path in ROOT.glob("*/*.yaml")})


def names(group: str) -> list[str]:
    """Return the names of a group, sorted."""
    files = (path.name.removesuffix(".yaml") for path in (ROOT / group).glob("*.yaml"))
    return sorted([*files, *rows(group)])


def path(group: str, name: str) -> Path:
    """Return the file that holds a config. Raises ValueError for an unknown name."""
    file = ROOT / group / f"{name}.yaml"
    if not file.exists() and name not in rows(group):
        raise ValueError(f"unknown {group} {name!r}; choose from {', '.join(names(group))}")
    return file if file.exists() else ROOT / f"{group}.yaml"


@functools.cache
def rows(group: str) -> Mapping[str, dict[str, Any]]:
    """Return name → row of a group's table; a key that begins with ``_`` is not a row, but holds what rows share."""
    table = ROOT / f"{group}.yaml"
    read = yaml.load(table.read_text(), _LOADER) if table.exists() else {}
    return {name: row for name, row in read.items() if not name.startswith("_")}


def text(group: str, name: str) -> str:
    """Return a config as its file has it, or would have it: first the comment above the row, then the row.

    Raises ValueError for an unknown name.
    """
    found = path(group, name).read_text()
    if name not in rows(group):
        return found
    row = re.search(rf'^((?:# .*\n)*)"?{re.escape(name)}"?:.*\n((?: .*\n|\n(?= ))*)', found, re.MULTILINE)
    assert row is not None
    return row[1] + dedent(row[2])


def named_folders() -> list[Path]:
    """Return the folders of a user's own code that STEADYMOE_PATH names, existing or not, as absolute paths."""
    entries = os.environ.get(VARIABLE, "").split(os.pathsep)
    return list(dict.fromkeys(Path(entry).expanduser().absolute() for entry in entries if entry))


def read(group: str, name: str) -> dict[str, Any]:
    """Return the content of a config, shipped or a user's own, with what it builds on.

    Raises ValueError for an unknown name.
    """
    own_files = [folder / "conf" / group / f"{name}.yaml" for folder in named_folders()]
    file = next((own for own in own_files if own.is_file()), None) or path(group, name)
    row = rows(group).get(name) if file.is_relative_to(ROOT) else None
    own = yaml.load(file.read_text(), _LOADER) if row is None else copy.deepcopy(row)  # whoever reads it may change it
    content: dict[str, Any] = {}
    for base in own.pop("defaults", ["_self_"]):
        content = _merged(content, own if base == "_self_" else read(group, base))
    return content


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _merged(below[key], value) for key, value in above.items() if isinstance(below.get(key), dict)}
    return {**below, **above, **both}
