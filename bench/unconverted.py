"""Verbs whose rooms have no ``command.main(words)`` yet. Each branch below goes when its room has one."""

import argparse
from collections.abc import Callable
from pathlib import Path

from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.arguments import Parser


def main(words: list[str]) -> int:
    """Run the verb ``words[0]`` and return its exit code."""
    verb, *rest = words
    if verb == "calibrate":
        from steadymoe.bench.calibration import request as calibration

        return calibration.answer(rest)
    if words[:2] == ["study", "run"]:
        from steadymoe.bench.study import command as study

        return study.run(rest[1:])
    arguments = _parser().parse_args(words)
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {
        "study": _study,
    }
    if getattr(arguments, "page", None) is not None:
        atomic_files.replaceable(arguments.page)  # before the minutes that its content takes
    return verbs[verb](arguments)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the verbs below."""
    parser = Parser(prog="steadymoe", description="Is this RL algorithm stable on MoE models?")
    verbs = parser.add_subparsers(dest="verb", required=True)
    sub = verbs.add_parser("study")
    sub.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    sub.add_argument("--format", default="png,svg,pdf", help="some of png,svg,pdf; png always (default: all)")
    sub.add_argument("list", nargs="?", choices=("list",), help="list the experiments instead")
    sub.add_argument("--pages", type=Path, help="where claims.md and gates.md go (default: the results folder)")
    return parser




def _study(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.report import write
    from steadymoe.bench.study import command

    if arguments.list:
        print(command.listing())
        return 0
    return command.answer(arguments.results, arguments.pages or arguments.results, write.formats(arguments.format))
