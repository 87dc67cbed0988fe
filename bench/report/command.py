"""``steadymoe report``: tables, figures and ``report.html`` from recorded runs."""

import argparse
from pathlib import Path

from steadymoe.bench.report import paper
from steadymoe.bench.support.errors import Parser, UserError
from steadymoe.bench.support.text import visible

DESCRIPTION = """\
Report recorded runs: tables in results/tables, figures in results/figures, and one page, results/report.html.

  steadymoe report                                  # every experiment
  steadymoe report --experiment quickstart          # one experiment, with every figure that its runs allow
  steadymoe report --experiment mine,quickstart     # joined in one table; or results/reference/quickstart
  steadymoe report --list                           # every figure, and whether its data are on disk
  steadymoe report --figure fig05 --format pdf      # one figure, from its own experiment
  steadymoe report --figure overview --experiment first --arms grpo,gspo
  steadymoe report --experiment first --export csv  # every number of every step as one table
  steadymoe report --claims results/claims.yaml     # verdicts on claims that were fixed before their runs
  steadymoe report --experiment first --keep kept   # archive in kept/data what a report needs, without the runs
"""
_EVERYWHERE = {"results", "experiment"}
_MODES = {
    "report": {*_EVERYWHERE, "figure", "arms", "format", "out", "verbose", *paper.OPTIONS},
    "claims": {"results", "claims", "format", "out", *paper.OPTIONS},
    **{instead: {*_EVERYWHERE, instead} for instead in ("list", "keep", "export")},
}


def main(args: list[str]) -> int:
    """Run the verb and return the exit code, 0. Raises UserError for what cannot be reported."""
    parser = _parser()
    given = parser.parse_args(args)
    parser.mode(given, _MODES)
    from steadymoe.bench.report import report_page, write

    results, experiment = given.results, given.experiment
    formats = write.formats(given.format)
    if given.list:
        print(report_page.listing(results).to_markdown(index=False))
        return 0
    if (given.keep or given.export) and report_page.is_joined(experiment):
        raise UserError("--keep and --export take one experiment at a time")
    with paper.used(paper.Paper() if given.keep or given.export else paper.given(given)):  # data keep their names
        return _report(given, formats)


def _report(given: argparse.Namespace, formats: list[str]) -> int:
    """Write what is asked for, print it, and return the exit code, 0."""
    from steadymoe.bench.report import claims, figures, joined, report_page

    results, experiment = given.results, given.experiment
    lines: list[str] = []
    names = [experiment]
    if given.export is not None:
        paths = [report_page.export(results, experiment, given.export)]
    elif given.keep is not None:
        paths = report_page.keep(results, experiment, given.keep)
    elif given.claims is not None:
        paths = claims.write(given.claims, results, formats, given.out or results)
    elif given.figure:
        specs = figures.find(given.figure)
        if report_page.is_joined(experiment):
            (recorded,) = report_page.ended(results, experiment).values()
            print(joined.difference(recorded.runs) or "These experiments differ only in algorithm and seed.")
        names = [experiment or spec.experiment for spec in specs]
        wanted = (results, experiment, formats, given.arms, given.out)
        paths = [path for spec in specs for path in report_page.draw(spec, *wanted)]
    else:
        report = report_page.make(results, experiment, formats, given.arms, given.out)
        print(report.text)
        paths, lines = (report.files, report.missing) if given.verbose else ([], report.lost)
    lines += [line for name in dict.fromkeys(names) for line in report_page.left_out(results, name)]
    lines = [*(visible(f"wrote {path}") for path in paths), *lines]
    opened = [] if paths else [visible(f"open {(given.out or results) / 'report.html'}")]
    print("\n".join([*lines, *opened]))
    return 0


def _parser() -> Parser:
    parser = Parser(prog="steadymoe report", description=DESCRIPTION)
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    parser.add_argument(
        "--experiment", help="only this experiment, or several, joined: A,B (default: all; with --figure, its own)"
    )
    parser.add_argument("--arms", type=_names, metavar="A,B", help="only these arms, by name or by algorithm")
    parser.add_argument("--format", metavar="A,B", help="some of png,svg,pdf (default: all); a report adds svg")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write here, not to the results folder")
    parser.add_argument("-v", "--verbose", action="store_true", help="list the files, and figures without data")
    paper.add_options(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--figure", nargs="+", metavar="NAME", help="draw only these figures, by id or name")
    instead.add_argument("--list", action="store_true", help="list the figures, and whether their data are on disk")
    instead.add_argument("--claims", type=Path, metavar="FILE", help="judge the claims of this file instead")
    instead.add_argument("--keep", type=Path, metavar="FOLDER", help="archive the data of the report instead")
    instead.add_argument("--export", choices=("parquet", "csv"), help="write every number as one tidy table instead")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
