"""``python -m study``: the verdicts with their page and figures, the experiments, and their runs."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from steadymoe.bench.audit import archive as audits
from steadymoe.bench.audit import command as audit
from steadymoe.bench.report import paper, report_page, tuning, write
from steadymoe.bench.support import atomic_files, processes
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import visible
from study import experiments, page
from study.arms import GRPO, GSPO
from study.gates import gates
from study.recorded import NotRun, Recorded
from study.verdicts import SPECS, Verdicts

_HELP = """Verdicts of the reference study on what papers claim, from its recorded runs and audits:

  python -m study                              from results/, as results/claims.md with tables and figures
  python -m study --results results/reference --pages docs
  python -m study list                         the experiments of the study
  python -m study run NAME ...                 run some of them: python -m study run --help"""
_RUN_HELP = """Run experiments of the reference study in order; without a NAME, all of them. `python -m study list` has
their names and the names of their parts. Rerunning the command skips finished runs and resumes interrupted ones. Other
flags and overrides are those of `steadymoe run`. An override replaces its key in every sweep of an experiment; sweeps
that fix it to another value are skipped. Overrides of all keys that a sweep varies select that sweep alone:

  python -m study run study study_paper --dry
  python -m study run gates_stale algorithm=gspo seed=200
  python -m study run reference --keep results/reference"""


def main(words: list[str]) -> int:
    """Run ``python -m study`` with these arguments and return the exit code. Raises UserError, OSError."""
    if words[:1] == ["run"]:
        return run(words[1:])
    if words == ["list"]:
        print(listing())
        return 0
    parser = Parser(prog="python -m study", description=_HELP)
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    parser.add_argument("--pages", type=Path, help="folder of claims.md (default: the results folder)")
    parser.add_argument(
        "--format",
        type=write.formats,
        default=list(write.FORMATS),
        metavar="A,B",
        help="some of png,svg,pdf; png always (default: all)",
    )
    given = parser.parse_args(words)
    try:
        summary, written = report(given.results, given.pages or given.results, given.format)
    except NotRun as missing:
        damaged = report_page.left_out(given.results)
        how = damaged[0] if damaged else "run them: python -m study run reference"
        raise UserError(f"no ended runs of {missing} below {given.results}; {how}") from missing
    print("\n".join([summary, *(visible(f"wrote {path}") for path in written), *report_page.left_out(given.results)]))
    return 0


def run(words: Sequence[str]) -> int:
    """Run the named experiments and return the exit code.

    A run that fails (1) stops nothing but ``--keep`` of its experiment; an invalid request or an interrupt stops all.
    Raises UserError for an unknown name, OSError where ``--keep`` names no folder.
    """
    usage = "%(prog)s [NAME ...] [KEY=VALUE ...] [--keep FOLDER] [--dry] [--redo] [--retry-failed]"
    parser = Parser(prog="python -m study run", usage=usage, description=_RUN_HELP, allow_abbrev=False)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="archive in this folder what a report needs")
    given, rest = parser.parse_known_args(words)
    names = [word for word in rest if "=" not in word and not word.startswith("-")]
    flags = [word for word in rest if word.startswith("-")]
    overrides = [word for word in rest if word not in (*names, *flags)]
    chosen = experiments.chosen(names)
    results = next((word.partition("=")[2] for word in overrides if word.startswith("results_dir=")), "results")
    _refuse_file(given.keep)
    experiments.register()
    failed = set()
    for experiment in chosen:
        launch: Callable[[list[str]], int] = audit.main if experiment.audits else tuning.main
        print(f"{experiment.name}: {experiment.purpose}", flush=True)
        if "--dry" in flags and experiment.trunk is not None and not Path("results/runs", experiment.trunk).exists():
            print(f"  starts from runs of {experiment.trunk}; planned once these exist")
            continue
        for command in experiment.commands(overrides):
            code = launch([*command, *flags])
            if code > 1:
                return code
            if code:
                failed.add(experiment.name)
        if given.keep is not None and "--dry" not in flags and experiment.name not in failed:
            unfinished: list[str] = []
            if experiment.audits:
                path, unfinished = audits.keep(Path(results), experiment.recorded_as, given.keep)
                kept = [path]
            else:
                kept = report_page.keep(Path(results), experiment.recorded_as, given.keep)
            for line in [*(f"wrote {path}" for path in kept), *unfinished]:
                print(visible(line))
    return int(bool(failed))


def listing() -> str:
    """Return the experiments by part: name, number of runs or audits, purpose."""
    rows = [
        {"part": part, "experiment": row.name}
        | {"runs": f"{row.runs} {'audits' if row.audits else 'runs'}", "purpose": row.purpose}
        for part, in_part in experiments.PARTS.items()
        for row in in_part
    ]
    return pd.DataFrame(rows).to_markdown(index=False)


def report(results: Path, pages: Path, formats: Sequence[str]) -> tuple[str, list[Path]]:
    """Write claims.md to ``pages``, its tables and figures below ``results``; return a summary and the paths.

    Figures are written in ``formats`` and as png, for the page. Without runs of the study the page has the gates alone.
    Raises NotRun if those have no runs either.
    """
    _refuse_file(pages)
    atomic_files.replaceable(pages / "claims.md")  # before the minutes that its content takes
    study = Recorded(results)
    verdicts = Verdicts(study) if any(study.has(arm) for arm in (GRPO, GSPO)) else None
    measured = list((gates(study) if verdicts is None else verdicts.gates).values())
    if verdicts is None and all(gate.state == "not measured" for gate in measured):
        raise NotRun(f"{GRPO.label} ({GRPO.experiment})")
    texts = write.table_texts("gates", page.validity(measured), kinds=("md", "csv"))
    summary, figures = [page.gate_counts(measured)], []
    if verdicts is not None:
        texts |= verdicts.texts()
        summary += [write.to_markdown(verdicts.summary()), verdicts.counts()]
        figures = verdicts.figures()
    to_figures = Path(os.path.relpath(results / "figures", pages)).as_posix()
    written = write.files(results, texts, "tables")
    written += write.files(pages, {"claims.md": page.text(study, verdicts, measured, to_figures)})
    draw_one = partial(_draw, results, tuple(dict.fromkeys((*formats, "png"))))
    drawn: list[list[Path]] = []
    if figures:
        specs, names, data = zip(*figures, strict=True)
        drawn = processes.in_processes(draw_one, [spec.id for spec in specs], names, data)  # a spec cannot be pickled
    return "\n\n".join(summary), [*written, *(path for paths in drawn for path in paths)]


def _draw(results: Path, formats: Sequence[str], id: str, named: str, data: dict[str, pd.DataFrame]) -> list[Path]:
    spec = SPECS[id]
    with paper.used(paper.Paper(caption=True)):
        return write.figure(results, spec.stem(named), spec.figure(data), spec.caption, formats)


def _refuse_file(folder: Path | None) -> None:
    if folder is not None and folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
