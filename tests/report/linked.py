"""Print ``results/reference/.gitignore``: git keeps the figures and tables that a page links, and the figures' numbers.

The last step of ``make figures``. The rest is drawn and left out of git.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results" / "reference"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"]
PAGES += (ROOT / "docs").glob("*.md")
_HEAD = """\
# By `make figures` (tests/report/linked.py): git keeps what a page links, and the numbers of each figure.
/report.html
/figures/*
/tables/*
"""


def kept() -> set[Path]:
    """Return the kept files of ``figures/`` and ``tables/``, relative to ``REFERENCE``.

    A figure's numbers are the CSV of its name, or the shorter one that several figures share: ``a-clips.csv`` has the
    numbers of ``a-clips-sampler.png``, also where a report has left ``a-clips-sampler.csv``.
    """
    linked = {
        (page.parent / link).resolve() for page in PAGES for link in re.findall(r"\]\(([^)#\s]+)", page.read_text())
    }
    found = {
        path.relative_to(REFERENCE) for path in linked if path.parent in (REFERENCE / "figures", REFERENCE / "tables")
    }
    for figure in [path for path in found if path.suffix == ".png"]:
        words = figure.stem.split("-")
        names = ["-".join(words[:count]) for count in range(1, len(words) + 1)]
        tables = [Path("tables", f"{name}.csv") for name in names]
        found.add(next(table for table in tables if (REFERENCE / table).exists()))
    return found


def ignored() -> str:
    """Return the text of ``results/reference/.gitignore``."""
    return _HEAD + "".join(f"!/{path.as_posix()}\n" for path in sorted(kept()))


if __name__ == "__main__":
    print(ignored(), end="")
