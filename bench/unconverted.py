"""Verbs whose rooms have no ``command.main(words)`` yet. Each branch below goes when its room has one."""

import argparse
from collections.abc import Callable

from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.trainers import request as trainers_request


def main(words: list[str]) -> int:
    """Run the verb ``words[0]`` and return its exit code."""
    verb, *rest = words
    if verb == "calibrate":
        from steadymoe.bench.calibration import request as calibration

        return calibration.answer(rest)
    arguments = _parser().parse_args(words)
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {
        "import": trainers_request.answer,
    }
    if getattr(arguments, "page", None) is not None:
        atomic_files.replaceable(arguments.page)  # before the minutes that its content takes
    return verbs[verb](arguments)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the verbs below."""
    parser = Parser(prog="steadymoe", description="Is this RL algorithm stable on MoE models?")
    verbs = parser.add_subparsers(dest="verb", required=True)
    trainers_request.add(verbs)
    return parser


def _study(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.report import write
    from steadymoe.bench.study import command

    if arguments.list:
        print(command.listing())
        return 0
    return command.answer(arguments.results, arguments.pages or arguments.results, write.formats(arguments.format))
