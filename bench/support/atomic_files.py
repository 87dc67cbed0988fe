"""Files that appear whole or not at all: written beside their place, then renamed into it."""

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
    """Write ``content`` as indented JSON, atomically."""
    write(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n"))
