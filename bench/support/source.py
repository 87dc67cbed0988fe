"""Python source, read and never executed: the file of a module, its imports, and a hash of its statements."""

import ast
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

from steadymoe.bench.support import external

SUITE = Path(__file__).parents[2]
_PACKAGES = ("algorithms", "bench", "models")
_INSTALLED = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


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
    """Return whether a file belongs to Python or to an installed package; the recorded versions identify such code."""
    return any(file.is_relative_to(place) for place in _INSTALLED) or bool(
        {"site-packages", "dist-packages"} & set(file.parts)
    )


def reachable(modules: Iterable[str], follow: Callable[[str, Path], bool]) -> dict[str, Path] | None:
    """Module → file for ``modules``, their imports, the imports of these imports, and so on.

    An import is followed if ``follow(module, file)`` is true. Imports count wherever they stand in a file; a call of
    ``importlib.import_module`` is not seen. Returns None if one of ``modules`` has no file. Raises ValueError for a
    file that is not valid Python here.
    """
    found: dict[str, Path] = {}
    waiting = list(modules)
    for module in waiting:
        file = find(module)
        if file is None:
            return None
        found[module] = file
    while waiting:
        module = waiting.pop()
        for name in _imports(_content(found[module]), module, found[module].name == "__init__.py"):
            if name not in found and (file := find(name)) is not None and follow(name, file):
                found[name] = file
                waiting.append(name)
    return found


def digest(files: Iterable[Path]) -> str:
    """Return a hash of the syntax trees of ``files``, wherever they lie: ``ast1:`` and 16 hex digits.

    The hash ignores comments, docstrings, blank lines, line breaks and the version of Python. It changes with every
    name. Raises ValueError for a file that is not valid Python here, and OSError for a file that cannot be read.
    """
    each = sorted(_hash(_content(file)) for file in set(files))
    return "ast1:" + hashlib.sha256("".join(each).encode()).hexdigest()[:16]


def _content(file: Path) -> bytes:
    """Return what a file holds, once it is known to be Python."""
    content = file.read_bytes()
    try:
        _parsed(content)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{file} is not valid Python {sys.version_info.major}.{sys.version_info.minor}") from error
    return content


# Whoever asks about one run asks about the next, whose code is mostly the same: each content is read into a tree once.
_parsed = functools.cache(ast.parse)


@functools.cache
def _hash(content: bytes) -> str:
    return hashlib.sha256(_canonical(_parsed(content)).encode()).hexdigest()


def _canonical(node: object) -> str:
    """Return a syntax tree as text, without no-op statements and empty fields (some Pythons add some)."""
    if isinstance(node, list):
        return "[" + ",".join(_canonical(each) for each in node if not _does_nothing(each)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty text, and may split what others join
        parts = [each.value if isinstance(each, ast.Constant) else each for each in node.values]
        texts = [
            "".join(map(str, run)) if is_text else _canonical(list(run))
            for is_text, run in groupby((part for part in parts if part != ""), lambda part: isinstance(part, str))
        ]
        return f"JoinedStr({texts!r})"
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, []) and name != "kind"]
    if isinstance(node, ast.Constant) and node.value is None:
        fields = [("value", None)]
    return type(node).__name__ + "(" + ",".join(f"{name}={_canonical(value)}" for name, value in fields) + ")"


def _does_nothing(node: object) -> bool:
    """Return whether a statement is a docstring, another bare string, or ``pass``."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return is_text or isinstance(node, ast.Pass)


@functools.cache
def _imports(content: bytes, module: str, is_package: bool) -> frozenset[str]:
    """Return every module but Python's own that a file may import: ``from a import b`` may import ``a`` and ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(_parsed(content)):
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
