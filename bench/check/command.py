"""``steadymoe check``: parse its arguments, build the loss, and print a line for each property."""

from collections.abc import Sequence

import torch

from steadymoe.algorithms import PolicyLoss, Traits, build
from steadymoe.algorithms.corrections import Uncorrected
from steadymoe.algorithms.objective import KL, Objective
from steadymoe.bench import schema
from steadymoe.bench.check import properties
from steadymoe.bench.check.properties import ask
from steadymoe.bench.runs import compose
from steadymoe.bench.runs.compose import ConfigError
from steadymoe.bench.runs.overrides import key_of
from steadymoe.bench.support import blame, processes
from steadymoe.bench.support.errors import Parser
from steadymoe.bench.support.text import visible

_DESCRIPTION = """\
Check a loss, built-in or in a folder of STEADYMOE_PATH, for the properties that every loss must have:
one line for each, with the reason if it fails. Writes nothing. Exit code 1 if a property fails."""
_EXAMPLES = """\
examples:
  steadymoe check algorithm=gspo                                   a built-in loss
  steadymoe check algorithm=gspo algorithm.loss.clip_high=1e-3     with a changed number
  STEADYMOE_PATH=~/mine steadymoe check algorithm=half_clipped     your own

The properties: docs/commands.md#check; a loss of your own: docs/your_algorithm.md"""


def main(args: list[str]) -> int:
    """Run ``steadymoe check``. Returns 1 if a property fails, else 0. Raises UserError for invalid arguments."""
    parser = Parser(prog="steadymoe check", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="algorithm=NAME, algorithm.loss.KEY=VALUE")
    return check(parser.parse_args(args).overrides)


def check(overrides: Sequence[str]) -> int:
    """Check the algorithm that the overrides choose, print the findings, and return the exit code of ``main``."""
    torch.set_num_threads(1)
    name, loss = read(overrides)
    checks, passed = properties.of(loss), []
    for finding in ask(checks):
        print(finding.line, flush=True)
        passed.append(finding.passed)
    skipped = f"; {len(checks) - len(passed)} were skipped" if len(passed) < len(checks) else ""
    count = f"all {len(checks)}" if all(passed) else f"{sum(passed)} of {len(checks)}{skipped}"
    print(visible(f"{name} passes {count}"))
    return 0 if all(passed) else 1


def read(overrides: Sequence[str]) -> tuple[str, PolicyLoss]:
    """Return the name of the algorithm that the overrides choose, and its loss.

    Raises ConfigError unless they choose one algorithm, its numbers, and nothing else, and for what is not a loss.
    """
    for word in overrides:
        if key_of(word).partition(".")[0] != "algorithm":
            raise ConfigError(
                f"expected algorithm=NAME and its numbers, such as algorithm.loss.clip_low=0.1; got {word}"
            )
    if (count := sum(word.startswith("algorithm=") for word in overrides)) != 1:
        raise ConfigError(f"expected one algorithm, algorithm=NAME, got {count or 'none'}")
    try:
        plain, choices = compose.unchecked(overrides)
        schema.read(plain)
        loss, _ = (build(plain["algorithm"].get(section) or {}) for section in ("loss", "advantage"))
        if isinstance(loss, PolicyLoss) and not isinstance(loss.traits, Traits):
            raise TypeError(f"traits of {type(loss).__name__} must be a Traits, got {type(loss.traits).__name__}")
        Objective(loss=loss, correction=Uncorrected(), kl=KL())  # refuses what is not a loss
    except BaseException as error:  # a user's module can raise anything
        if processes.is_interrupt(error):
            raise
        plain_error = isinstance(error, (ConfigError, TypeError, ValueError))
        text = str(error) if plain_error else blame.one_line(error)
        raise ConfigError(" ".join(text.split())) from error
    return choices["algorithm"], loss
