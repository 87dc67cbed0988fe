"""The rows of a JSONL or parquet file that another trainer wrote, as dictionaries; its size is bounded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from steadymoe.bench.bundles.bundle import BadBundle

# The most bytes of a file, and of what a parquet file says that it holds.
MOST_BYTES = 2**30


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file with their numbers, from 1. Raises BadBundle for a file that is none, or too large."""
    if not path.is_file():
        raise BadBundle(f"there is no file {path}")
    if path.stat().st_size > MOST_BYTES:
        raise BadBundle(f"{path.name} has {path.stat().st_size} bytes; at most {MOST_BYTES} are read")
    readers = {".jsonl": _of_jsonl, ".parquet": _of_parquet}
    if path.suffix not in readers:
        raise BadBundle(f"{path.name} must be a file .jsonl or .parquet")
    yield from enumerate(readers[path.suffix](path), start=1)


def _of_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate((line for line in file if line.strip()), start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise BadBundle(f"{path.name}, row {number}: no JSON ({error})") from error
            if not isinstance(row, dict):
                raise BadBundle(f"{path.name}, row {number}: must be an object with named columns")
            yield row


def _of_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        file = pq.ParquetFile(path)
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        if sum(group.total_byte_size for group in groups) > MOST_BYTES:
            raise BadBundle(f"{path.name} holds more than {MOST_BYTES} bytes; convert fewer rollouts")
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, BadBundle):
            raise
        raise BadBundle(f"{path.name} is no whole parquet file: {' '.join(str(error).split())[:200]}") from error
