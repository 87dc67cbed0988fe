"""Atomic files: a file is written under a temporary name beside its place, then renamed. It appears whole or never."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write(path: Path, writer: Callable[[Path], object]) -> None:
    """Let ``writer`` fill a temporary file next to ``path`` and rename it over ``path``.

    A crash at any moment leaves the old file, or none, and at most a stray ``*.tmp``. A symlink stays; the file it
    points to is replaced. Raises FileExistsError where ``replaceable`` does.
    """
    path = replaceable(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        writer(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as indented JSON, atomically. Raises TypeError for content that JSON cannot express."""
    write(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n"))


def replaceable(path: Path) -> Path:
    """Return the file that ``path`` names, links followed; it need not exist.

    Raises FileExistsError for what a rename would destroy: a device, a folder, a pipe, a socket, a link to itself.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink() or (path.exists() and not path.is_file()):
        raise FileExistsError(f"{path} is not a regular file and is not overwritten; choose another path")
    return target
