"""What a parquet file made elsewhere may decode to."""

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steadymoe.bench.support import regular_files

LONG = "x" * 1000


@pytest.fixture(autouse=True)
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_files, "MAX_BYTES", 100_000)


@pytest.mark.parametrize(
    "column",
    [
        [LONG] * 1000,
        [[LONG]] * 1000,
        [0] * 20_000,
        pa.array([LONG.encode()] * 1000, pa.binary(1000)),
        pa.array([LONG] * 1000).dictionary_encode(),
    ],
    ids=["text", "lists of text", "integers", "text of one length", "categories"],
)
def test_a_small_file_that_decodes_to_too_much_is_refused(tmp_path: Path, column: object) -> None:
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"some": column}), path)
    assert path.stat().st_size < 10_000
    with pytest.raises(OSError, match=r"bomb.parquet decodes to \d{6,} bytes; at most 100000 are read"):
        regular_files.read_parquet(path)


def test_text_counts_once_for_each_value(tmp_path: Path) -> None:
    """One long value among many short ones: their number times the longest would be too much."""
    path, table = tmp_path / "text.parquet", pd.DataFrame({"a.b": [LONG, *["x"] * 1000, None], "c": range(1002)})
    table.to_parquet(path)
    pd.testing.assert_frame_equal(regular_files.read_parquet(path), table)
