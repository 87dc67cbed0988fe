"""The command ``steadymoe``: its verbs and their exit codes."""

import argparse
import codecs
import io
import locale
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from steadymoe.bench.bundles import request as bundle_request
from steadymoe.bench.score import arguments as score_arguments
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import visible
from steadymoe.bench.trainers import request as trainers_request

_RUN_HELP = (
    "train: `steadymoe run algorithm=gspo model=tiny seed=0`; arguments are Hydra overrides, -m sweeps, --dry prints "
    "the plan and an estimate without running anything"
)
_CHECK_HELP = "check a loss, built-in or your own, property by property: `steadymoe check algorithm=mine`"
_AUDIT_HELP = (
    "measure the gradients of many losses on the same rollouts: `steadymoe audit experiment=audit seed=300`; "
    "`steadymoe audit report` draws them"
)

# Verbs of earlier versions → what replaced them.
_REPLACED = {
    "board": "steadymoe score --verify FOLDER",
    "calibrate": "steadymoe run experiment=calibration, and steadymoe report",
    "claims": "steadymoe study",
    "gates": "steadymoe study",
    "speed": "make speed, or python -m steadymoe.bench.speed",
    "submit": "steadymoe score algorithm=NAME --submit FOLDER",
}


class _Version(argparse.Action):
    """Prints version and revision: asking git takes a moment, so only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from steadymoe.bench.support import revision

        print(revision.told())
        parser.exit()


def main() -> None:
    """Entry point: exit code 0, 1 if a run failed, 2 for a request that cannot be met, 130 if interrupted.

    141, as other programs have it, if nobody reads the output any more (``| head``).
    """
    if codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        print(
            "steadymoe: files are read and written in UTF-8, which this locale is not; set PYTHONUTF8=1",
            file=sys.stderr,
        )
        sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without π still gets the line
    try:
        try:
            _answer(sys.argv[1:])
        finally:
            if sys.stdout is not None:  # closed by the shell: >&-
                sys.stdout.flush()
    except BrokenPipeError:  # an OSError too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its exit
        sys.exit(141)
    except KeyboardInterrupt:  # in a verb that has nothing to resume
        print("steadymoe: interrupted", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError) as error:  # an OSError: a folder that cannot be written, a full disk
        print(f"steadymoe: {visible(error)}", file=sys.stderr)
        sys.exit(2)


def _answer(words: list[str]) -> None:
    """Let the verb of a command line answer it, and exit."""
    if words[:1] == ["run"]:  # the rest is Hydra's, also what argparse would take for its own
        from steadymoe.bench.runs import request

        sys.exit(request.answer(words[1:]))
    if words[:1] == ["check"]:
        from steadymoe.bench.check import request as check

        sys.exit(check.answer(words[1:]))
    if words[:1] == ["score"]:
        arguments = score_arguments.read(Parser(prog="steadymoe score", allow_abbrev=False), words[1:])
        from steadymoe.bench.score import command as score

        sys.exit(score.main(arguments))
    if words[:1] == ["audit"] and words[1:2] != ["report"]:
        from steadymoe.bench.audit import request as audit

        sys.exit(audit.answer(words[1:]))
    if words[:2] == ["study", "run"]:
        from steadymoe.bench.study import command as study

        sys.exit(study.run(words[2:]))
    if words[:1] and words[0] in _REPLACED:
        print(f"steadymoe: there is no verb {words[0]}; use {_REPLACED[words[0]]}", file=sys.stderr)
        sys.exit(2)
    arguments = _parser().parse_args(words)
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {
        "report": _report,
        "figures": _figures,
        "study": _study,
        "status": _status,
        "bundle": bundle_request.answer,
        "import": trainers_request.answer,
        "audit": _audit_report,
    }
    if getattr(arguments, "page", None) is not None:
        atomic_files.replaceable(arguments.page)  # before the minutes that its content takes
    sys.exit(verbs[arguments.verb](arguments))


def _parser() -> argparse.ArgumentParser:
    """Of every verb but the ones that take their words as they are: run, check, score, audit.

    ``audit report`` is a verb with arguments.
    """
    parser = Parser(prog="steadymoe", description="Is this RL algorithm stable on MoE models?")
    parser.add_argument("--version", action=_Version, nargs=0, help="version and, in a checkout, revision")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("run", help=_RUN_HELP)
    verbs.add_parser("check", help=_CHECK_HELP)
    verbs.add_parser("score", help=score_arguments.HELP)
    _add_audit_report(verbs.add_parser("audit", help=_AUDIT_HELP).add_subparsers(required=True))
    for verb, what in (
        ("report", "tables, figures and report.html from recorded runs"),
        ("figures", "one or several figures: `steadymoe figures --list`, `steadymoe figures fig05`"),
        ("study", "verdicts of the reference study; `study run` and `study list` for its experiments"),
        ("status", "finished and failed runs, and how to resume"),
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


def _status(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.runs import status

    if not arguments.results.is_dir():
        print(
            f"steadymoe: there is no folder {visible(arguments.results)}; "
            "start some runs with: steadymoe run experiment=quickstart",
            file=sys.stderr,
        )
        return 2
    print("\n".join(status.lines(arguments.results)))
    return 0


if __name__ == "__main__":
    main()
