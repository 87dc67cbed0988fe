"""A file is replaced whole or not at all, only if it is regular; a parquet file must not decode to too much."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fixtures import make_socket

from steadymoe.bench.support import files


def device(path: Path) -> None:
    """Make a node in the test's own folder, never one of the machine's."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes a device, and not in every container")


def linked_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


MAKE: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "socket": make_socket,
    "device": device,
    "folder": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a fifo": linked_to_a_fifo,
}


@pytest.mark.parametrize("kind", MAKE)
def test_non_regular_file_is_refused_and_kept(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "claims.md"
    MAKE[kind](place)
    before, names = place.lstat(), sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError, match=r"not a regular file|is a link"):
        files.write_json(place, 1)
    after = place.lstat()
    assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)
    assert sorted(tmp_path.iterdir()) == names


@pytest.mark.parametrize("there", [True, False])
def test_link_is_followed_only_if_the_user_names_it(there: bool, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "page.json", tmp_path / "link"
    if there:
        target.write_text("old")
    link.symlink_to(target)
    with pytest.raises(FileExistsError, match="is a link"):
        files.write_json(link, 1)
    assert link.is_symlink()
    assert (target.read_text() if target.exists() else None) == ("old" if there else None)
    files.write_json(link.resolve(), 1)
    assert target.read_text() == "1\n"
    assert sorted(tmp_path.rglob("*")) == [target.parent, target, link]


def test_linked_folder_is_followed_only_as_a_root(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").symlink_to("elsewhere")
    assert files.folder(tmp_path / "root", "tables").is_dir()
    (tmp_path / "root" / "figures").symlink_to(tmp_path)
    with pytest.raises(FileExistsError, match="figures is a link"):
        files.folder(tmp_path / "root", "figures", "deeper")
    assert not (tmp_path / "deeper").exists()


def test_linked_temporary_file_is_replaced(tmp_path: Path) -> None:
    target, place = tmp_path / "target", tmp_path / "page.json"
    target.write_text("mine")
    (tmp_path / f".page.json.{os.getpid()}.tmp").symlink_to(target)
    files.write_json(place, 1)
    assert (target.read_text(), place.read_text()) == ("mine", "1\n")


LONG = "x" * 1000


@pytest.fixture
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 100_000)


@pytest.mark.usefixtures("small_bound")
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
        files.read_parquet(path)


@pytest.mark.usefixtures("small_bound")
def test_text_counts_once_for_each_value(tmp_path: Path) -> None:
    """One long value among many short ones: their number times the longest would be too much."""
    path, table = tmp_path / "text.parquet", pd.DataFrame({"a.b": [LONG, *["x"] * 1000, None], "c": range(1002)})
    table.to_parquet(path)
    pd.testing.assert_frame_equal(files.read_parquet(path), table)
