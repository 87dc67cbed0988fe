"""Figures from recorded runs: the list of figures, the data that a figure lacks, and the files of a figure."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pandas as pd

from steadymoe.bench.config.compose import CONF
from steadymoe.bench.report import archive, collapse_tables
from steadymoe.bench.report import write as write_files
from steadymoe.bench.report.figures import FIGURES, FORMATS, DataFigure, FigureSpec
from steadymoe.bench.support import external
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import nearest, visible


class CannotDraw(UserError):
    """The figure or its data do not exist; the message is one line and says what to do."""


def data(recorded: dict[str, pd.DataFrame], takes: Sequence[str] | None = None) -> dict[str, pd.DataFrame]:
    """The tables that figures take: the tables of ``archive.load`` for an experiment, and tables derived from them.

    With ``takes`` only the derived tables of these names are computed, because intervals take time.
    """
    runs, steps = recorded["runs"], recorded["steps"]
    if runs.empty:
        return recorded
    frontiers = cache(lambda: collapse_tables.frontiers(runs, steps))
    grid_and_line = cache(lambda: collapse_tables.frontier_tables(frontiers()))
    roc_and_warnings = cache(lambda: collapse_tables.early_warnings(steps, runs))
    follow: dict[str, Callable[[], pd.DataFrame]] = {
        "by_arm": lambda: collapse_tables.by_arm(steps, runs, frontiers()),
        "survival_curves": lambda: collapse_tables.survival_curves(runs),
        "collapse_steps": lambda: collapse_tables.collapse_steps(runs),
        "frontier_grid": lambda: grid_and_line()[0],
        "frontier_line": lambda: grid_and_line()[1],
        "roc": lambda: roc_and_warnings()[0],
        "warnings": lambda: roc_and_warnings()[1],
    }
    return recorded | {name: table() for name, table in follow.items() if takes is None or name in takes}


def choose(recorded: dict[str, pd.DataFrame], arms: Sequence[str] | None) -> dict[str, pd.DataFrame]:
    """The tables of the named arms alone; a name is an arm or an algorithm. None keeps all arms.

    Raises CannotDraw for a name that is neither.
    """
    if arms is None:
        return recorded
    runs = recorded["runs"]
    there = runs[["arm", "algorithm"]].astype(str)
    unknown = [name for name in arms if not (there == name).any(axis=None)]
    if unknown:
        raise CannotDraw(f"there is no arm {unknown[0]!r}; choose from {', '.join(sorted(set(there['arm'])))}")
    kept = set(there.loc[there.isin(arms).any(axis=1), "arm"])
    return {name: table[table["arm"].isin(kept)] for name, table in recorded.items()}


def every() -> dict[str, FigureSpec]:
    """The figures by id: the shipped ones, then a user's own.

    A user's own figures stand in modules ``*figures.py`` of the folders that ``external.folders`` names, each a
    ``FigureSpec`` of the module's list ``FIGURES``. Raises CannotDraw where such a module cannot be used.
    """
    return FIGURES | own(tuple(external.folders()))


@cache
def own(folders: tuple[Path, ...]) -> dict[str, FigureSpec]:
    """The figures that modules of ``folders`` define, by id."""
    found: dict[str, FigureSpec] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*figures.py"))):
        for spec in _defined(path):
            names = {name for each in (FIGURES | found).values() for name in (each.id, each.name)}
            if not isinstance(spec, FigureSpec) or {spec.id, spec.name} & names:
                raise CannotDraw(f"{path}: FIGURES must hold a FigureSpec of an id and a name of its own; got {spec!r}")
            found[spec.id] = spec
    return found


def _defined(path: Path) -> list[FigureSpec]:
    """The list ``FIGURES`` of a module; the module may import the modules beside it."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"steadymoe_own_{path.stem}_{len(sys.modules)}", path)
    assert spec is not None  # the file ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return list(module.FIGURES)
    except (Exception, SystemExit) as error:  # a user's own code
        raise CannotDraw(f"{path}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def find(words: Sequence[str]) -> list[FigureSpec]:
    """The figures with these ids or names. Raises CannotDraw for an unknown word."""
    known = every()
    names = {each.name: each for each in known.values()} | known
    for word in words:
        if word not in names:
            raise CannotDraw(f"there is no figure {word!r}; {nearest(word, list(names), '`steadymoe figures --list`')}")
    return [names[word] for word in words]


def command(spec: FigureSpec) -> str:
    """The command that makes the data of a figure."""
    of_study = spec.id in FIGURES and not (CONF / "experiment" / f"{spec.experiment}.yaml").exists()
    return f"steadymoe study run {spec.experiment}" if of_study else f"steadymoe run experiment={spec.experiment}"


def listing(results: Path) -> pd.DataFrame:
    """Every figure: id, name, experiment, and whether its data are on disk or else what is missing."""
    rows = []
    known: dict[str, dict[str, pd.DataFrame]] = {}
    for spec in every().values():
        if spec.experiment not in known:
            known[spec.experiment] = data(archive.load(results, spec.experiment))
        found = known[spec.experiment]
        said = "no ended runs" if found["steps"].empty else spec.lacks(found)
        rows.append((spec.id, spec.name, spec.experiment, "yes" if said is None else f"no: {said}"))
    return pd.DataFrame(rows, columns=["id", "name", "experiment", "data on disk"])


def make(
    spec: FigureSpec,
    results: Path,
    experiment: str | None,
    formats: Sequence[str] = FORMATS,
    arms: Sequence[str] | None = None,
) -> list[Path]:
    """Draw a figure from the runs of ``experiment`` (default: the figure's own) and ``arms``; return the files.

    Runs of other trainers are drawn where the experiment is named.

    Raises CannotDraw if the data of the figure are missing.
    """
    name = experiment or spec.experiment
    recorded = archive.load(results, name, foreign=experiment is not None)
    if recorded["runs"].empty:
        raise CannotDraw(
            f"{spec.id} lacks ended runs of {visible(name)} below {results / 'runs'}; start some: {command(spec)}"
        )
    return write(spec, figure_of(spec, recorded, arms), results, name, formats)


def figure_of(spec: FigureSpec, recorded: dict[str, pd.DataFrame], arms: Sequence[str] | None = None) -> DataFigure:
    """One figure from the tables of ``archive.load`` of an experiment, of all arms or of some; nothing is written.

    Raises CannotDraw for an arm that is not there, and where the tables lack what the figure shows.
    """
    found = data(choose(recorded, arms), spec.takes)
    if missing := spec.lacks(found):
        names = ", ".join(sorted(set(recorded["runs"]["experiment"])))
        raise CannotDraw(f"{spec.id} lacks {missing} in {names}; its own experiment is: {command(spec)}")
    return spec.figure(found)


def stem(spec: FigureSpec, experiment: str) -> str:
    """The name of a figure's files, without suffix."""
    return "-".join(dict.fromkeys([experiment, spec.id, spec.name]))


def texts(spec: FigureSpec, figure: DataFigure, experiment: str) -> dict[str, str]:
    """Return file name → text of a figure's numbers."""
    return write_files.figure_texts(stem(spec, experiment), figure, spec.caption)


def write(
    spec: FigureSpec, figure: DataFigure, results: Path, experiment: str, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write a figure in each format to ``figures/`` and its numbers to ``tables/``; return the paths."""
    return write_files.figure(results, stem(spec, experiment), figure, spec.caption, formats)
