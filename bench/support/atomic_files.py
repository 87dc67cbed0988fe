"""Atomic files: a file is written under a temporary name beside its place, then renamed. It appears whole or never."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steadymoe.bench.support import regular_files


def write(path: Path, writer: Callable[[Path], object]) -> None:
    """Let ``writer`` fill a temporary file next to ``path`` and rename it over ``path``.

    A crash at any moment leaves the old file, or none, and at most a stray ``*.tmp``. Raises as ``replaceable`` does;
    ``path.resolve()`` writes through a link that the user has named.
    """
    replaceable(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # a writer would follow a link
    try:
        writer(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as indented JSON, atomically. Raises TypeError for content that JSON cannot express."""
    write(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n"))


def replaceable(path: Path) -> Path:
    """Return ``path``, which need not exist.

    Raises FileExistsError for what must not be written over: a link, a device, a folder, a pipe, a socket.
    """
    regular_files.refuse_links(path, path.parent)
    if path.exists() and not path.is_file():
        raise regular_files.NotRegular(f"{path} is not a regular file and is not overwritten; choose another path")
    return path
