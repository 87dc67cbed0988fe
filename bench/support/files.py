"""Files of a folder that may have been made elsewhere: no link is followed, only regular files are opened or replaced.

A file is written under a temporary name next to its place, then renamed. It appears whole or never.

A folder that the user names may itself be a link; nothing below it may be one. Sizes are bounded before anything is
read, and so are the depth of JSON and what a parquet file decodes to.
"""

import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

# The most bytes of a file of facts, of any other file, and of what a parquet file decodes to.
MAX_FACTS, MAX_BYTES = 2**24, 2**30
# The most levels of JSON: a config has about five.
_DEEPEST = 32
# Arrow's names of types of text.
_TEXTS = ("string", "large_string", "binary", "large_binary", "dictionary<values=string")


class NotRegular(FileExistsError):
    """A path below a folder is, or leads through, a link, or is no regular file; the message is one line."""


def refuse_links(path: Path, root: Path) -> Path:
    """Return ``path``. Raises NotRegular if it, or a folder between ``root`` and it, is a link."""
    below = root
    for part in path.relative_to(root).parts:
        below /= part
        if below.is_symlink():
            raise NotRegular(f"{below} is a link; no link below {root} is followed: remove it, or name its target")
    return path


def folder(root: Path, *names: str) -> Path:
    """Create the folder ``root/…`` and return it. Raises as ``refuse_links`` does."""
    below = root.joinpath(*names)
    root.mkdir(parents=True, exist_ok=True)
    refuse_links(below, root).mkdir(parents=True, exist_ok=True)
    return below


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
    refuse_links(path, path.parent)
    if path.exists() and not path.is_file():
        raise NotRegular(f"{path} is not a regular file and is not overwritten; choose another path")
    return path


def opened(path: Path, most: int = MAX_BYTES) -> io.BufferedReader:
    """Open a regular file for reading. Raises NotRegular, FileNotFoundError or, above ``most`` bytes, OSError."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise NotRegular(f"{path} is {'a link' if stat.S_ISLNK(found.st_mode) else 'not a regular file'}")
    if found.st_size > most:
        raise OSError(f"{path} has {found.st_size} bytes; at most {most} are read")
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the content of a file. Raises as ``opened`` does."""
    with opened(path, most) as file:
        return file.read(min(most, os.fstat(file.fileno()).st_size))  # ``read`` asks for all its bytes beforehand


def read_json(path: Path, most: int = MAX_FACTS) -> Any:
    """Return the content of a JSON file. Raises as ``opened`` and ``parse_json`` do."""
    return parse_json(read_bytes(path, most))


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text. Raises ValueError for anything else, and for more than a few levels."""
    try:
        value = json.loads(text)
        levels = _levels(value)
    except RecursionError as error:
        raise ValueError("it has too many levels") from error
    if levels > _DEEPEST:
        raise ValueError(f"it has more than {_DEEPEST} levels")
    return value


def _levels(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(_levels, inside), default=0)


def read_parquet(path: Path) -> "pd.DataFrame":
    """Return a parquet file as pandas writes and reads it.

    Raises as ``opened`` does, OSError for one that decodes to too much, and pyarrow's errors (ValueError, OSError).
    """
    import pandas as pd

    with opened(path) as file:
        refuse_large(path, file)
        return pd.read_parquet(file)


def refuse_large(path: Path, file: io.BufferedReader) -> None:
    """Raise OSError if the opened parquet file decodes to more than ``MAX_BYTES``.

    A few bytes can encode a long run of one value, so the size of the file does not bound what it decodes to.
    """
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    plain = [field.name for field in parquet.schema_arrow if str(field.type).startswith(_TEXTS)]
    size, most = 0, dict.fromkeys(plain, 0)
    for group in map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups)):
        for number, part in enumerate(map(group.column, range(group.num_columns))):
            longest = part.total_uncompressed_size if part.physical_type == "BYTE_ARRAY" else 8
            bytes_ = part.num_values * max(longest, parquet.schema.column(number).length)
            if part.path_in_schema in most:
                most[part.path_in_schema] += bytes_
            else:
                size += max(bytes_, part.total_uncompressed_size)
    if size <= MAX_BYTES < size + sum(most.values()):
        texts = pq.ParquetFile(file, read_dictionary=plain).iter_batches(columns=plain)
        size += sum(_bytes_of_text(column) for batch in texts for column in batch.columns)
    if size > MAX_BYTES:
        raise OSError(f"{path} decodes to {size} bytes; at most {MAX_BYTES} are read")
    file.seek(0)


def _bytes_of_text(column: Any) -> int:
    """Return the bytes of a dictionary-encoded column's text, with a pointer for each value."""
    import pyarrow.compute as pc

    lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
    return 8 * len(column) + (pc.sum(lengths).as_py() or 0)
