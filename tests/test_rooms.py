"""Imports between the folders of the suite go in one direction (CONTRIBUTING.md)."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
ORDER = (
    ("conf",),
    ("support", "algorithms", "models", "statistics"),
    ("tasks",),
    ("schema",),
    ("training",),
    ("runs",),
    ("report", "check"),
    ("score",),
    ("cli",),
)
ONE_FILE = ("cli", "schema")
AT_THE_ROOT = ("algorithms", "conf", "models")
LEFT_OF = {
    room: {left for rooms in ORDER[:place] for left in rooms} for place, rooms in enumerate(ORDER) for room in rooms
}


def imported(path: Path) -> set[str]:
    """The dotted names below ``steadymoe`` that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith("steadymoe.")}


def room_of(name: str) -> str:
    parts = name.split(".")[1:]
    return parts[1] if parts[0] == "bench" and len(parts) > 1 else parts[0]


@pytest.mark.parametrize("room", sorted(LEFT_OF))
def test_folder_imports_only_from_folders_to_its_left(room: str) -> None:
    place = ROOT / room if room in AT_THE_ROOT else BENCH / room
    files = [BENCH / f"{room}.py"] if room in ONE_FILE else sorted(place.rglob("*.py"))
    assert files
    allowed = LEFT_OF[room] | {room}
    assert not {(path.name, name) for path in files for name in imported(path) if room_of(name) not in allowed}


def test_every_folder_has_a_place_in_the_order() -> None:
    assert {path.parent.name for path in BENCH.glob("*/__init__.py")} == set(LEFT_OF) - {*AT_THE_ROOT, *ONE_FILE}


def test_python_api_comes_last_and_imports_lazily() -> None:
    assert {path.name for path in BENCH.glob("*.py")} == {"__init__.py", *(f"{room}.py" for room in ONE_FILE)}
    top = BENCH / "__init__.py"
    assert {room_of(name) for name in imported(top)} <= set(LEFT_OF)
    at_once = [node for node in ast.parse(top.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {node.module for node in at_once if isinstance(node, ast.ImportFrom)} == {"pathlib", "typing"}
    assert all(isinstance(node, ast.ImportFrom) for node in at_once)


def test_verl_losses_import_only_the_standalone_losses() -> None:
    names = {name for path in (ROOT / "integrations" / "verl").glob("*.py") for name in imported(path)}
    assert all(name.startswith(("steadymoe.algorithms.", "steadymoe.integrations.verl.")) for name in names)


def test_tests_do_not_import_tests() -> None:
    files = [path for folder in ("tests", "integrations/tests") for path in (ROOT / folder).rglob("*.py")]
    tests = re.compile(r"^\s*(from|import) test_\w+", re.MULTILINE)
    assert files
    assert not [path for path in files if tests.search(path.read_text())]
