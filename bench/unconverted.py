"""Verbs whose rooms have no ``command.main(words)`` yet. Each branch below goes when its room has one."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steadymoe.bench.bundles import request as bundle_request
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.text import visible
from steadymoe.bench.trainers import request as trainers_request


def main(words: list[str]) -> int:
    """Run the verb ``words[0]`` and return its exit code."""
    verb, *rest = words
    if verb == "check":
        from steadymoe.bench.check import request as check

        return check.answer(rest)
    if verb == "score":
        from steadymoe.bench.score import arguments as score_arguments

        parsed = score_arguments.read(Parser(prog="steadymoe score", allow_abbrev=False), rest)
        from steadymoe.bench.score import command as score

        return score.main(parsed)
    if verb == "audit" and rest[:1] != ["report"]:
        from steadymoe.bench.audit import request as audit

        return audit.answer(rest)
    if words[:2] == ["study", "run"]:
        from steadymoe.bench.study import command as study

        return study.run(rest[1:])
    arguments = _parser().parse_args(words)
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {
        "report": _report,
        "figures": _figures,
        "study": _study,
        "bundle": bundle_request.answer,
        "import": trainers_request.answer,
        "audit": _audit_report,
    }
    if getattr(arguments, "page", None) is not None:
        atomic_files.replaceable(arguments.page)  # before the minutes that its content takes
    return verbs[verb](arguments)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the verbs below; ``audit report`` is a verb with arguments."""
    parser = Parser(prog="steadymoe", description="Is this RL algorithm stable on MoE models?")
    verbs = parser.add_subparsers(dest="verb", required=True)
    _add_audit_report(verbs.add_parser("audit").add_subparsers(required=True))
    for verb, what in (
        ("report", "tables, figures and report.html from recorded runs"),
        ("figures", "one or several figures: `steadymoe figures --list`, `steadymoe figures fig05`"),
        ("study", "verdicts of the reference study; `study run` and `study list` for its experiments"),
    ):
        sub = verbs.add_parser(verb, help=what)
        sub.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
        if verb == "report":
            sub.add_argument("--experiment", help="only this experiment (default: all)")
            instead = sub.add_mutually_exclusive_group()
            instead.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what figures need, without the runs")
            instead.add_argument(
                "--export", choices=("parquet", "csv"), help="write every number as one tidy table instead"
            )
        if verb == "figures":
            sub.add_argument("figures", nargs="*", metavar="figure", help="id or name")
            sub.add_argument("--list", action="store_true", help="every figure, and whether its data are on disk")
            sub.add_argument("--experiment", help="draw from this experiment (default: the figure's own)")
        if verb in ("report", "figures"):
            sub.add_argument("--arms", metavar="A,B", help="only these arms, by name or algorithm (default: all)")
        if verb in ("report", "figures", "study"):
            group = instead if verb == "report" else sub
            shown = {"report": "; svg always", "study": "; png always"}.get(verb, "")
            group.add_argument("--format", default="png,svg,pdf", help=f"some of png,svg,pdf{shown} (default: all)")
        if verb == "study":
            sub.add_argument("list", nargs="?", choices=("list",), help="list the experiments instead")
            sub.add_argument("--pages", type=Path, help="where claims.md and gates.md go (default: the results folder)")
    bundle_request.add(verbs)
    trainers_request.add(verbs)
    return parser


def _add_audit_report(verbs: Any) -> None:
    """Add ``report`` to the verbs of ``steadymoe audit``."""
    verb = verbs.add_parser("report", help="tables and figures over the checkpoints of an experiment: docs/audit.md")
    verb.add_argument("--experiment", default="audit", help="the experiment of the audits (default: audit)")
    verb.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    verb.add_argument("--losses", metavar="A,B", help="only these losses, by label (default: all)")
    verb.add_argument("--against", metavar="LOSS", help="the loss that the others are compared with (default: grpo)")
    verb.add_argument("--drift", type=int, metavar="K", help="the largest k that is shown (default: the largest)")
    verb.add_argument("--format", metavar="A,B", help="some of png,svg,pdf (default: all)")
    verb.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what these need, in one file, and draw nothing")


def _audit_report(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.audit import report

    return report.answer(arguments)


def _report(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.report import report_page
    from steadymoe.bench.study.experiments import COMPARED_ELSEWHERE

    results, experiment = arguments.results, arguments.experiment
    if arguments.export is not None:
        print(visible(f"wrote {report_page.export(results, experiment, arguments.export)}"))
    elif arguments.keep is not None:
        for path in report_page.keep(results, experiment, arguments.keep):
            print(visible(f"wrote {path}"))
    if arguments.export is not None or arguments.keep is not None:
        print("".join(f"{line}\n" for line in report_page.left_out(results, experiment)), end="")
        return 0
    made = report_page.make(results, experiment, _formats(arguments), _arms(arguments), COMPARED_ELSEWHERE)
    print(made.table)
    for path in made.files:
        print(visible(f"wrote {path}"))
    for line in [*made.missing, *made.left_out]:
        print(line)
    return 0


def _figures(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.report import draw, report_page

    if arguments.list or not arguments.figures:
        print(draw.listing(arguments.results).to_markdown(index=False))
        return 0
    formats = _formats(arguments)
    for spec in draw.find(arguments.figures):
        for path in draw.make(spec, arguments.results, arguments.experiment, formats, _arms(arguments)):
            print(visible(f"wrote {path}"))
        for line in report_page.left_out(arguments.results, arguments.experiment or spec.experiment):
            print(line)
    return 0


def _study(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.study import command

    if arguments.list:
        print(command.listing())
        return 0
    return command.answer(arguments.results, arguments.pages or arguments.results, _formats(arguments))


def _formats(arguments: argparse.Namespace) -> list[str]:
    """Of figures, in the order given. Raises CannotDraw for one that there is not."""
    from steadymoe.bench.report import draw, figures

    formats: list[str] = arguments.format.split(",")
    if not set(formats) <= set(figures.FORMATS):
        raise draw.CannotDraw(f"--format takes {', '.join(figures.FORMATS)}; got {arguments.format}")
    return formats


def _arms(arguments: argparse.Namespace) -> list[str] | None:
    """The arms that are asked for, None for all."""
    return None if arguments.arms is None else [name.strip() for name in arguments.arms.split(",")]
