"""The version of the running code: the package's version and the commit of its checkout."""

import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def revision() -> dict[str, Any] | None:
    """``commit`` (a hash) and ``changed`` (whether tracked files differ from it); None outside a git checkout."""
    here = Path(__file__)

    def git(*words: str) -> str | None:
        try:
            answer = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=True)
        except (FileNotFoundError, subprocess.CalledProcessError):
            return None
        return answer.stdout.strip()

    # The code may be installed inside the checkout of another project, whose commit says nothing of this code.
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}


def version_line() -> str:
    """Return version and, in a checkout, revision, in one line."""
    checkout = revision()
    commit = f" (revision {checkout['commit']}{', changed since' if checkout['changed'] else ''})" if checkout else ""
    return f"steadymoe {version('steadymoe')}{commit}"
