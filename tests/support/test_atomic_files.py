"""A file is replaced whole or not at all, and nothing but a regular file is replaced."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import steadymoe

from steadymoe.bench.support import atomic_files


def device(path: Path) -> None:
    """Make a node in the test's own folder, never one of the machine's."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes a device, and not in every container")


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # a socket's path may have 107 bytes


def linked_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


MAKE: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "socket": bound,
    "device": device,
    "folder": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a fifo": linked_to_a_fifo,
}


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_not_a_regular_file_is_refused_and_stays(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "claims.md"
    MAKE[kind](place)
    before, names = place.lstat(), sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError, match="not a regular file"):
        atomic_files.write_json(place, 1)
    assert steadymoe(monkeypatch, "study", "--pages", ".") == 2  # before it looks for anything to show
    said = capsys.readouterr().err
    assert (said.count("\n"), "not a regular file" in said) == (1, True)
    after = place.lstat()
    assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)
    assert sorted(tmp_path.iterdir()) == names


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_file_that_it_names_is_written(there: bool, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "page.json", tmp_path / "link"
    if there:
        target.write_text("old")
    link.symlink_to(target)
    atomic_files.write_json(link, 1)
    assert link.is_symlink()
    assert target.read_text() == "1\n"
    assert sorted(tmp_path.rglob("*")) == [target.parent, target, link]
