"""Which code this is: the commit of the checkout that it runs from."""

import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def revision() -> dict[str, Any] | None:
    """The commit that the code is at and whether it was changed since; None where it is no part of a git checkout."""
    here = Path(__file__)

    def git(*words: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", "-C", str(here.parent), *words], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    # An environment may lie in the checkout of something else, which says nothing of this code.
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}


def told() -> str:
    """Version and revision in one line."""
    found = revision()
    of_checkout = f" (revision {found['commit']}{', changed since' if found['changed'] else ''})" if found else ""
    return f"steadymoe {version('steadymoe')}{of_checkout}"
