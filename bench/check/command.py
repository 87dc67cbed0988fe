"""``steadymoe check``: parse its arguments, build the loss, and print a line for each property."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from steadymoe.algorithms import PolicyLoss, Traits, build, class_of, meant
from steadymoe.algorithms.corrections import Uncorrected
from steadymoe.algorithms.objective import KL, Objective
from steadymoe.bench import schema
from steadymoe.bench.check import properties
from steadymoe.bench.check.properties import CheckFailed, ask
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
SECTIONS = ("loss", "advantage")


@dataclass(frozen=True)
class CheckedAlgorithm:
    """The algorithm to check."""

    name: str
    sections: Mapping[str, Mapping[str, Any]]
    """``loss`` and ``advantage`` as in its YAML."""
    loss: PolicyLoss
    """The loss, built without the keys that are no fields of its class."""


def main(args: list[str]) -> int:
    """Run ``steadymoe check``. Returns 1 if a property fails, else 0. Raises UserError for invalid arguments."""
    parser = Parser(prog="steadymoe check", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="algorithm=NAME, algorithm.loss.KEY=VALUE")
    return check(parser.parse_args(args).overrides)


def check(overrides: Sequence[str]) -> int:
    """Check the algorithm that the overrides choose, print the findings, and return the exit code of ``main``."""
    torch.set_num_threads(1)
    algorithm = read(overrides)
    checks: dict[str, Callable[[], str]] = {"fields": partial(check_fields, algorithm.sections)}
    checks |= properties.of(algorithm.loss)
    passed = []
    for finding in ask(checks):
        print(finding.line, flush=True)
        passed.append(finding.passed)
    skipped = f"; {len(checks) - len(passed)} were skipped" if len(passed) < len(checks) else ""
    count = f"all {len(checks)}" if all(passed) else f"{sum(passed)} of {len(checks)}{skipped}"
    print(visible(f"{algorithm.name} passes {count}"))
    return 0 if all(passed) else 1


def read(overrides: Sequence[str]) -> CheckedAlgorithm:
    """Build the algorithm that the overrides choose.

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
        sections = {name: plain["algorithm"].get(name) or {} for name in SECTIONS}
        loss, _ = (build(known_fields(sections[name])) for name in SECTIONS)
        if isinstance(loss, PolicyLoss) and not isinstance(loss.traits, Traits):
            raise TypeError(f"traits of {type(loss).__name__} must be a Traits, got {type(loss.traits).__name__}")
        Objective(loss=loss, correction=Uncorrected(), kl=KL())  # refuses what is not a loss
    except BaseException as error:  # a user's module can raise anything
        if processes.is_interrupt(error):
            raise
        plain_error = isinstance(error, (ConfigError, TypeError, ValueError))
        text = str(error) if plain_error else blame.one_line(error)
        raise ConfigError(" ".join(text.split())) from error
    return CheckedAlgorithm(choices["algorithm"], sections, loss)


def check_fields(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Look for keys of an algorithm's YAML that are no fields of its classes. Raises CheckFailed if there is one."""
    if faults := [fault for name, numbers in sections.items() for fault in _field_faults(numbers, name)]:
        raise CheckFailed("; ".join(faults))
    return "every key of the YAML is a field"


def known_fields(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the keys of a section that are no fields of its class. Raises ValueError if the class is not found."""
    names = [*_field_names(numbers), "_target_"]
    return {
        key: known_fields(value) if isinstance(value, Mapping) else value
        for key, value in numbers.items()
        if key in names
    }


def _field_faults(numbers: Mapping[str, Any], section: str) -> Iterator[str]:
    names, cls = _field_names(numbers), class_of(numbers).__name__
    for key, value in numbers.items():
        if key not in (*names, "_target_"):
            yield f"the YAML has {section}.{key}, but {cls} has no such field: {meant(key, names)}"
        elif isinstance(value, Mapping):
            yield from _field_faults(value, f"{section}.{key}")


def _field_names(numbers: Mapping[str, Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(class_of(numbers)) if field.init]
