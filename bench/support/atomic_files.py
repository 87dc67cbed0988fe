"""Atomic files: a file is written under a temporary name beside its place, then renamed. It appears whole or never."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write(path: Path, writer: Callable[[Path], object]) -> None:
    """Let ``writer`` fill a temporary file next to ``path`` and rename it over ``path``.

    A crash at any moment leaves the old file, or none, and at most a stray ``*.tmp``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        writer(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as indented JSON, atomically. Raises TypeError for content that JSON cannot express."""
    write(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n"))
