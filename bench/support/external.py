"""The folders of a user's own code, outside this checkout: Python modules, with configs next to them in ``conf/``."""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from steadymoe import conf

VARIABLE = conf.VARIABLE


def folders() -> list[Path]:
    """Return the existing folders that the environment variable STEADYMOE_PATH names, as absolute paths, in its order.

    A folder holds modules (``my_losses.py``) and configs (``conf/algorithm/mine.yaml``). ``run``, ``status`` and
    ``report`` all look here and nowhere else.
    """
    return [folder for folder in conf.named_folders() if folder.is_dir()]


def versions() -> tuple[tuple[str, int], ...]:
    """Return the configs of the folders with the times of their last changes, a key for caches."""
    files = [path for folder in confs() for path in sorted(folder.rglob("*.yaml")) if path.is_file()]
    return tuple((str(path), path.stat().st_mtime_ns) for path in files)


def activate() -> None:
    """Let this process import the folders' modules, after all others.

    Raises ValueError for a folder that does not exist, and for two configs of one name, in two of the folders or in a
    folder and the suite.
    """
    absent = [folder for folder in conf.named_folders() if not folder.is_dir()]
    if absent:
        raise ValueError(f"{VARIABLE} names {absent[0]}, which does not exist")
    seen: dict[Path, Path] = {}
    for folder in confs():
        for config in sorted(folder.rglob("*.yaml")):
            name = config.relative_to(folder)
            is_suites = config.stem in conf.names(name.parent.as_posix())
            if is_suites or seen.setdefault(name, config) != config:
                whose = "the suite" if is_suites else str(seen[name])
                raise ValueError(f"{config} has the name of a config of {whose}; give it another name")
    make_importable()


def make_importable() -> None:
    """Let this process import the folders' modules, after all others."""
    sys.path += [str(folder) for folder in folders() if str(folder) not in sys.path]


def prefix(choices: Mapping[str, str], modules: Iterable[str]) -> str:
    """Return what goes before a command that uses these configs and modules: ``STEADYMOE_PATH=… ``, or nothing.

    ``choices`` maps a config group to the chosen name. The words are needed if one of the folders holds a chosen config
    or module.
    """
    files = [f"conf/{group}/{name}.yaml" for group, name in choices.items()]
    files += [name for module in modules for name in (module.partition(".")[0], f"{module.partition('.')[0]}.py")]
    if not any((folder / file).exists() for folder in folders() for file in files):
        return ""
    return f"{VARIABLE}={shlex.quote(os.environ[VARIABLE])} "


def confs() -> list[Path]:
    """Return the folders of the configs."""
    return [folder / "conf" for folder in folders() if (folder / "conf").is_dir()]
