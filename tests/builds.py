"""Build and install wheels of the project."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("algorithms", "models", "bench", "conf")


def pip(*words: str | Path) -> str:
    """What one command of pip writes."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def build_wheel(source: Path, place: Path) -> Path:
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", place, source)
    return next(place.glob("*.whl"))
