"""Python source, read and never executed: the file of a module, its imports, a hash of files, the commit."""

import ast
import functools
import hashlib
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from steadymoe.bench.support import external

SUITE = Path(__file__).parents[2]
_PACKAGES = ("algorithms", "bench", "conf", "models")
_INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_first: dict[Path, str] = {}
_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}  # also of another environment that this one sees


def find(module: str) -> Path | None:
    """Return the file of a module; None if there is no such file. Nothing is imported.

    The places are Python's own path, then the folders of STEADYMOE_PATH, then the file of a module already imported.
    A package that only an import hook of its installer knows is found once it has been imported.
    """
    *packages, last = module.split(".")
    if not all(part.isidentifier() for part in (*packages, last)):
        return None
    places = [*(Path(entry or ".").absolute() for entry in sys.path), *external.folders()]
    if packages[:1] == ["steadymoe"]:
        packages, places = packages[1:], [SUITE]
    for part in packages:
        inside = [place / part for place in places]
        regular = [folder for folder in inside if (folder / "__init__.py").is_file()]
        places = regular[:1] or [folder for folder in inside if folder.is_dir()]
    files = (file for place in places for file in (place / last / "__init__.py", place / f"{last}.py"))
    imported = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    return next((file for file in (*files, imported) if file.suffix == ".py" and file.is_file()), None)


def is_of_suite(file: Path, *packages: str) -> bool:
    """Return whether a file belongs to the suite; with ``packages``, whether it belongs to one of these packages."""
    return any(file.is_relative_to(SUITE / package) for package in packages or _PACKAGES)


def is_installed(file: Path) -> bool:
    """Return whether a file belongs to Python or to an installed package."""
    return any(map(file.is_relative_to, _INSTALLED)) or not _PACKAGE_FOLDERS.isdisjoint(file.parts)


def reachable(modules: Iterable[str], follow: Callable[[str, Path], bool]) -> dict[str, Path] | None:
    """Module → file for ``modules``, their imports, the imports of these imports, and so on.

    An import is followed if ``follow(module, file)`` is true. Imports count wherever they stand in a file; a call of
    ``importlib.import_module`` is not seen. Returns None if one of ``modules`` has no file. Raises ValueError for a
    file that is not valid Python here.
    """
    found: dict[str, Path] = {}
    for module in modules:
        if (file := find(module)) is None:
            return None
        found[module] = file
    waiting = list(found)
    while waiting:
        module = waiting.pop()
        try:
            imported = _imports(found[module].read_bytes(), module, found[module].name == "__init__.py")
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"{found[module]} is not valid Python {sysconfig.get_python_version()}") from error
        for name in imported:
            if name not in found and (file := find(name)) is not None and follow(name, file):
                found[name] = file
                waiting.append(name)
    return found


def digest(files: Iterable[Path], first: bool = False) -> str:
    """Return a hash of what ``files`` hold, wherever they lie: ``files:`` and 16 hex digits. Raises OSError.

    With ``first`` a file counts as it was when this process first asked so, or, if it had imported the
    file before, as it was then; a file that has changed in between counts as another one.
    """
    each = sorted(_imported(file) if first else _content(file) for file in set(files))
    return "files:" + hashlib.sha256("".join(each).encode()).hexdigest()[:16]


def _imported(file: Path) -> str:
    if file not in _first:
        modules = [each for each in list(sys.modules.values()) if getattr(each, "__file__", None) == str(file)]
        compiled = [getattr(each, "__cached__", None) for each in modules if not is_of_suite(file)]
        _first[file] = "edited" if any(_is_edited(file, each) for each in compiled) else _content(file)
    return _first[file]


def _is_edited(file: Path, compiled: str | None) -> bool:
    """Return whether a file differs from the one that Python compiled, by the time and size that it notes (PEP 552).

    Not known where Python writes no bytecode.
    """
    try:
        with open(compiled or "", "rb") as content:
            header, now = content.read(16), file.stat()
    except OSError:
        return False
    by_time, changed, size = (int.from_bytes(header[at : at + 4], "little") for at in (4, 8, 12))
    return by_time == 0 and (changed, size) != (int(now.st_mtime) & 0xFFFFFFFF, now.st_size & 0xFFFFFFFF)


def _content(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@functools.cache
def _imports(content: bytes, module: str, is_package: bool) -> frozenset[str]:
    """Return every module but Python's own that a file may import: ``from a import b`` may import ``a`` and ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")
            above = parents[: len(parents) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    packages = {".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 1)}
    # Python's own modules lie before all others on its path: none of them is followed.
    return frozenset(each for each in names | packages if each.partition(".")[0] not in {"", *sys.stdlib_module_names})


def revision() -> dict[str, Any] | None:
    """``commit`` (a hash) and ``changed`` (whether tracked files differ from it); None outside a git checkout."""
    here = Path(__file__)
    # The code may be installed inside the checkout of another project, whose commit says nothing of this code.
    if not is_tracked(here):
        return None
    changed = _git(here.parent, "status", "--porcelain", "-uno")
    return {"commit": _git(here.parent, "rev-parse", "HEAD"), "changed": bool(changed)}


def is_tracked(path: Path) -> bool:
    """Return whether a file is tracked in a git checkout."""
    return _git(path.parent, "ls-files", "--error-unmatch", path.name) is not None


def _git(folder: Path, *words: str) -> str | None:
    try:
        answer = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def version_line() -> str:
    """Return version and, in a checkout, revision, in one line."""
    checkout = revision()
    commit = f" (revision {checkout['commit']}{', changed since' if checkout['changed'] else ''})" if checkout else ""
    return f"steadymoe {version('steadymoe')}{commit}"
