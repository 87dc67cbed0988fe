"""A file is replaced whole or not at all, and nothing but a regular file is replaced."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import make_socket

from steadymoe.bench.support import atomic_files, regular_files


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
        atomic_files.write_json(place, 1)
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
        atomic_files.write_json(link, 1)
    assert link.is_symlink()
    assert (target.read_text() if target.exists() else None) == ("old" if there else None)
    atomic_files.write_json(link.resolve(), 1)
    assert target.read_text() == "1\n"
    assert sorted(tmp_path.rglob("*")) == [target.parent, target, link]


def test_linked_folder_is_followed_only_as_a_root(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").symlink_to("elsewhere")
    assert regular_files.folder(tmp_path / "root", "tables").is_dir()
    (tmp_path / "root" / "figures").symlink_to(tmp_path)
    with pytest.raises(FileExistsError, match="figures is a link"):
        regular_files.folder(tmp_path / "root", "figures", "deeper")
    assert not (tmp_path / "deeper").exists()


def test_linked_temporary_file_is_replaced(tmp_path: Path) -> None:
    target, place = tmp_path / "target", tmp_path / "page.json"
    target.write_text("mine")
    (tmp_path / f".page.json.{os.getpid()}.tmp").symlink_to(target)
    atomic_files.write_json(place, 1)
    assert (target.read_text(), place.read_text()) == ("mine", "1\n")
