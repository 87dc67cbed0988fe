"""``steadymoe study``: the verdicts with their pages and figures, the experiments, and their runs."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from steadymoe.bench.audit import report as audit_report
from steadymoe.bench.audit import request as audit
from steadymoe.bench.report import draw, report_page, tables
from steadymoe.bench.report.figures import FigureSpec
from steadymoe.bench.runs import command as runs
from steadymoe.bench.score.recorded import NotRun, Recorded
from steadymoe.bench.study import claims_page, experiments, gates_page
from steadymoe.bench.study.gates import gates
from steadymoe.bench.study.verdicts import SPECS, Verdicts
from steadymoe.bench.support import atomic_files, processes
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import visible

RUN_HELP = """steadymoe study run [NAME …] [key=value …] [--dry] [--redo] [--retry-failed] [--keep FOLDER]

Runs experiments of the reference study in order, all of them without a NAME. `steadymoe study list` has their names and
the names of their parts. Rerunning the command skips finished runs and resumes interrupted ones. Overrides and flags
are those of `steadymoe run`: `steadymoe study run gates_stale algorithm=gspo seed=200`. With --keep, FOLDER gets what
tables and figures need of each experiment, without the runs."""


def run(words: Sequence[str]) -> int:
    """Make the runs and audits of the named experiments and return the exit code, that of the first that fails.

    Raises UserError for an unknown name, OSError where ``--keep`` names no folder.
    """
    if {"-h", "--help"} & set(words):
        print(RUN_HELP)
        return 0
    rest, keep = list(words), None
    if "--keep" in rest:
        place = rest.index("--keep")
        if place + 1 == len(rest):
            raise UserError("--keep takes a folder")
        keep = Path(rest[place + 1])
        _refuse_file(keep)
        del rest[place : place + 2]
    names = [word for word in rest if "=" not in word and not word.startswith("-")]
    given = [word for word in rest if word not in names]
    results = next((word.partition("=")[2] for word in given if word.startswith("results_dir=")), "results")
    has_overrides = any("=" in word for word in given)
    every = experiments.chosen(names)
    experiments.register()
    for each in every:
        answer: Callable[[list[str]], int] = audit.answer if each.audits else runs.main
        print(f"{each.name}: {each.purpose}", flush=True)
        # Overrides name the runs that they mean, so they stand in place of the further sweeps.
        for command in each.commands[:1] if has_overrides else each.commands:
            if code := answer([*command, *given]):
                return code
        if keep is not None and "--dry" not in given:
            _keep(each, Path(results), keep)
    return 0


def _keep(experiment: experiments.Experiment, results: Path, to: Path) -> None:
    if experiment.audits:
        files = [audit_report.keep(results, experiment.recorded_as, to)[0]]
    else:
        files = report_page.keep(results, experiment.recorded_as, to)
    for path in files:
        print(visible(f"wrote {path}"))


def listing() -> str:
    """The experiments by part: name, number of runs or audits, purpose."""
    rows = [
        {"part": part, "experiment": each.name, "purpose": each.purpose}
        | {"runs": f"{each.runs} {'audits' if each.audits else 'runs'}"}
        for part, every in experiments.PARTS.items()
        for each in every
    ]
    return pd.DataFrame(rows)[["part", "experiment", "runs", "purpose"]].to_markdown(index=False)


def report(results: Path, pages: Path, formats: Sequence[str]) -> tuple[str, list[Path]]:
    """Write claims.md and gates.md to ``pages``, their tables and figures below ``results``; return verdicts and paths.

    Figures are written in ``formats`` and as png, for the page. A page whose runs are missing is left out. Raises
    NotRun if both are.
    """
    _refuse_file(pages)
    for name in ("claims.md", "gates.md"):
        atomic_files.replaceable(pages / name)  # before the minutes that its content takes
    study, lines = Recorded(results), []
    texts: dict[Path, str] = {}
    figures: list[tuple[FigureSpec, str, dict[str, pd.DataFrame]]] = []
    measured = list(gates(study).values())
    if any(gate.state != "not measured" for gate in measured):
        texts |= {results / "tables" / name: text for name, text in gates_page.texts(measured).items()}
        texts[pages / "gates.md"] = gates_page.text(study, measured)
        lines.append(gates_page.counts(measured))
    try:
        verdicts = Verdicts(study)
    except NotRun:
        if not texts:
            raise
    else:
        to_figures = Path(os.path.relpath(results / "figures", pages)).as_posix()
        texts |= {results / "tables" / name: text for name, text in verdicts.texts().items()}
        texts[pages / "claims.md"] = claims_page.text(verdicts, to_figures)
        lines += [tables.to_markdown(verdicts.summary()), verdicts.counts()]
        figures = verdicts.figures()
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(path, partial(Path.write_text, data=text))
    drawn: list[list[Path]] = []
    if figures:
        specs, *data = zip(*figures, strict=True)
        drawn_as = tuple(dict.fromkeys((*formats, "png")))
        drawn = processes.in_processes(partial(_draw, results, drawn_as), [spec.id for spec in specs], *data)
    return "\n\n".join(lines), [*texts, *(path for files in drawn for path in files)]


def _draw(results: Path, formats: Sequence[str], id: str, named: str, data: dict[str, pd.DataFrame]) -> list[Path]:
    spec = SPECS[id]
    return draw.write(spec, spec.figure(data), results, named, formats)


def answer(results: Path, pages: Path, formats: Sequence[str]) -> int:
    """Print the verdicts and what ``report`` has written; return the exit code, 0. Raises UserError without runs."""
    try:
        verdicts, written = report(results, pages, formats)
    except NotRun as missing:
        damaged = report_page.left_out(results)
        how = damaged[0] if damaged else "run them: steadymoe study run reference"
        raise UserError(f"no ended runs of {missing} below {results}; {how}") from missing
    print("\n".join([verdicts, *(visible(f"wrote {path}") for path in written), *report_page.left_out(results)]))
    return 0


def _refuse_file(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
