"""The arguments of ``steadymoe score``. Importing this file is cheap; the work is ``command``'s."""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "compare a loss, built-in or your own, with the recorded ones: `steadymoe score algorithm=mine --quick`"
_DESCRIPTION = """\
Score an algorithm: check it, train it next to GRPO and GSPO at the settings of the standard,
and compare it with the recorded algorithms. Only what is missing runs, so the same command
resumes an interrupted score. Prints a table for each part and writes a page to results/scores/."""
_EXAMPLES = """\
examples:
  steadymoe score algorithm=vespo --quick      ten minutes on two cores: three seeds next to GRPO
  steadymoe score algorithm=vespo --dry        what has run, what is missing, how long it takes
  steadymoe score algorithm=vespo              the whole score, an hour and a half
  steadymoe score algorithm=vespo --submit entries/vespo --paper 2602.10693 --equation 5
  steadymoe score --verify results/board       check submitted scores and print the board

A loss of your own: docs/your_algorithm.md"""
# Mode → the arguments that go with it.
_MODES = {
    "score": {"overrides", "quick", "dry", "redo"},
    "submit": {"overrides", "submit", "paper", "equation", "name", "tuned"},
    "verify": {"verify", "run", "board"},
}


def read(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments with a bare ``parser``, which exits for invalid ones and for --help."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="algorithm=NAME, and algorithm.loss.KEY=VALUE for other numbers than in its YAML",
    )
    parser.add_argument("--quick", action="store_true", help="a first look: yours and GRPO at three seeds, one audit")
    parser.add_argument("--dry", action="store_true", help="print what would run and how long it takes, and stop")
    parser.add_argument("--redo", action="store_true", help="replace runs of other code, or of other numbers of yours")
    submit = parser.add_argument_group("submit a finished score")
    submit.add_argument("--submit", type=Path, metavar="FOLDER", help="write an entry of the board to this new folder")
    submit.add_argument("--paper", metavar="TEXT", help="where the algorithm comes from (required)")
    submit.add_argument("--equation", metavar="TEXT", help="the equation of the loss (required)")
    submit.add_argument("--name", help="the name on the board (default: the algorithm's)")
    submit.add_argument("--tuned", default="", metavar="TEXT", help="what you tuned, and on which seeds")
    verify = parser.add_argument_group("verify submitted scores")
    verify.add_argument("--verify", nargs="+", type=Path, metavar="FOLDER", help="entries, or folders of entries")
    verify.add_argument("--run", action="store_true", help="run their code: check the loss and repeat two seeds")
    verify.add_argument("--board", type=Path, metavar="FOLDER", help="write board.md and board.html to this folder")
    arguments = parser.parse_intermixed_args(words)
    mode = next((mode for mode in ("verify", "submit") if getattr(arguments, mode)), "score")
    given = {name for name, value in vars(arguments).items() if value}
    if wrong := sorted(given - _MODES[mode]):
        other = "submit" if wrong[0] in _MODES["submit"] else "verify"
        what = "key=value" if wrong[0] == "overrides" else f"--{wrong[0]}"
        parser.error(f"{what} requires --{other}" if mode == "score" else f"{what} does not go with --{mode}")
    if mode != "verify" and not arguments.overrides:
        parser.error("choose an algorithm: algorithm=NAME")
    if mode == "submit" and not {"paper", "equation"} <= given:
        parser.error("--submit requires --paper and --equation")
    return arguments
