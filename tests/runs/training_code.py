"""The code that belongs to ``provenance.TRAINING_VERSION``, by the statements of its files.

``python tests/runs/training_code.py > tests/recorded/training_code.json`` records it anew. Comments, docstrings and
line breaks do not count, and every version of Python gives the same hashes.
"""

import ast
import hashlib
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from steadymoe.bench.runs import provenance
from steadymoe.bench.support import source


def training_code() -> dict[str, Any]:
    """``version``: TRAINING_VERSION. ``modules``: file → hash of every module that can change recorded numbers."""
    roots = [
        "training.trainer",
        "training.cold_start",
        *(f"tasks.{path.stem}" for path in (source.SUITE / "bench/tasks").glob("[a-z]*.py")),
    ]
    found = source.reachable(
        [*(f"steadymoe.bench.{name}" for name in roots), "steadymoe.models.pretrained"],
        # Not the way in from Python, whose functions import every folder.
        lambda module, file: module != "steadymoe.bench" and source.is_of_suite(file, "bench", "models"),
    )
    files = sorted((found or {}).values())
    return {
        "version": provenance.TRAINING_VERSION,
        "modules": {file.relative_to(source.SUITE).as_posix(): statements(file) for file in files},
    }


def statements(file: Path) -> str:
    return "ast1:" + hashlib.sha256(_canonical(ast.parse(file.read_bytes())).encode()).hexdigest()[:16]


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


if __name__ == "__main__":
    print(json.dumps(training_code(), indent=2))
