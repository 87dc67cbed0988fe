"""``steadymoe board`` and ``submit``: the words of both verbs. Their work is imported when it is asked for."""

import argparse
from pathlib import Path
from typing import Any

from steadymoe.bench.support.text import visible


def add(verbs: Any) -> None:
    """Add both verbs to the parser of the command line."""
    board = verbs.add_parser("board", help="entries of the board verified, as a table and a page: docs/board.md")
    board.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="an entry, or a folder of entries")
    board.add_argument("--run", action="store_true", help="import each entry's code, check it, and repeat two seeds")
    board.add_argument("--page", type=Path, help="write an HTML page too, to this file")
    submit = verbs.add_parser("submit", help="a scored algorithm as an entry of the board: docs/board.md")
    submit.add_argument("words", nargs="+", metavar="algorithm=NAME", help="the words that were scored")
    submit.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="the new folder of the entry")
    submit.add_argument("--name", help="its name on the board (default: the algorithm's)")
    submit.add_argument("--paper", required=True, help="where the algorithm comes from")
    submit.add_argument("--equation", required=True, help="which equation of it the loss is")
    submit.add_argument(
        "--tuned", default="", metavar="HOW", help="what was chosen, and on which seeds; none: as published"
    )


def answer(arguments: argparse.Namespace) -> int:
    """The exit code of the verb in ``arguments``. Raises BadEntry, ConfigError, Damaged, NotRun, ValueError."""
    if arguments.verb == "board":
        from steadymoe.bench.score import board

        return board.answer(arguments)
    from steadymoe.bench.score import request

    print(visible(f"wrote {request.submit(arguments)}"))
    return 0
