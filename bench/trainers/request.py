"""``steadymoe import``: the words of the verb. The work is ``import_log``'s, and is imported when it is asked for."""

import argparse
from pathlib import Path
from typing import Any

from steadymoe.bench.support.text import visible


def add(verbs: Any) -> None:
    """Add the verb to the parser of the command line."""
    verb = verbs.add_parser("import", help="a log of another trainer as a run folder: docs/on_your_trainer.md")
    verb.add_argument(
        "file", type=Path, help="verl's file logger (.jsonl), or a .csv or .jsonl with a row for each step"
    )
    verb.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="OURS=THEIRS",
        help="the column of the log that is ours; repeat it",
    )
    for name, what in (("algorithm", "the algorithm"), ("model", "the model"), ("task", "the task")):
        verb.add_argument(f"--{name}", required=True, help=f"the name of {what}")
    verb.add_argument("--updates", type=int, required=True, metavar="N", help="gradient updates in a step")
    verb.add_argument("--experiment", default="imported", help="the name of the experiment (default: imported)")
    verb.add_argument("--seed", type=int, default=0, help="the seed (default: 0)")
    verb.add_argument(
        "--axis", action="append", default=[], metavar="NAME=VALUE", help="what tells the run from others"
    )
    verb.add_argument("--trainer", help="the name of the trainer (default: verl for its log, else log)")
    for name in ("correction", "routing", "engine"):
        verb.add_argument(f"--{name}", default="unknown", help=f"the name of the {name} (default: unknown)")
    for name, what in (("prompts", "prompts in a step"), ("responses", "responses to a prompt")):
        verb.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} (default: not known)")
    verb.add_argument("--learning-rate", type=float, metavar="X", help="the learning rate (default: not known)")
    verb.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")


def answer(arguments: argparse.Namespace) -> int:
    """Write the run folder of a log and say what it holds. Raises ConfigError for bad input, with nothing written."""
    from steadymoe.bench.trainers import import_log

    for line in import_log.write(arguments):
        print(visible(line))
    return 0
