"""The version of the running code: the package's version and the commit of its checkout."""

import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


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
