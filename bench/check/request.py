"""``steadymoe check`` from its words to its exit code: what is refused, and a line for each property."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from steadymoe.algorithms import PolicyLoss, Traits, build
from steadymoe.algorithms.corrections import Uncorrected
from steadymoe.algorithms.objective import KL, Objective
from steadymoe.bench.check import fields, properties, share
from steadymoe.bench.config import compose, validate
from steadymoe.bench.config.compose import ConfigError
from steadymoe.bench.config.schema import RunConfig
from steadymoe.bench.support import blame
from steadymoe.bench.support.findings import Fails, ask
from steadymoe.bench.support.text import visible

HELP = """steadymoe check algorithm=NAME [algorithm.loss.KEY=VALUE …]

Check a loss, built-in or in a folder of STEADYMOE_PATH, for the properties that every loss of the suite has: one line
for each, with the reason where it fails. Writes nothing. docs/commands.md#check"""
# The model of the update in which the loss has its share, and the largest share; a shipped loss has at most 3 %.
_UPDATE = ("algorithm=grpo", "model=micro")
_ROUNDS, _LARGEST = 7, 0.1


@dataclass(frozen=True)
class Asked:
    """The algorithm that is checked.

    Attributes:
        name: its name as a word of the command line.
        sections: ``loss`` and ``advantage`` as they stand in its YAML.
        loss: the loss, without the keys of the YAML that are no fields of its class.
    """

    name: str
    sections: Mapping[str, Mapping[str, Any]]
    loss: PolicyLoss


def answer(words: list[str]) -> int:
    """Check the algorithm that ``words`` name and return the exit code.

    0: every property is there; 1: one is not; 2: the request is invalid; 130: interrupted.
    """
    if {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    try:
        asked, update = read(words), compose.plan(_UPDATE)[0].config
    except (ConfigError, ValueError, OSError) as error:
        print(f"steadymoe: {visible(error)}", file=sys.stderr)
        return 2
    torch.set_num_threads(update.threads)
    every, passed = questions(asked, update), []
    try:
        for finding in ask(every):
            print(finding.line, flush=True)
            passed.append(finding.passed)
    except KeyboardInterrupt:
        print("steadymoe: interrupted", file=sys.stderr)
        return 130
    skipped = f"; {len(every) - len(passed)} were not asked" if len(passed) < len(every) else ""
    count = f"all {len(every)}" if all(passed) else f"{sum(passed)} of {len(every)}{skipped}"
    print(visible(f"{asked.name} passes {count}"))
    return 0 if all(passed) else 1


def questions(asked: Asked, update: RunConfig) -> dict[str, Callable[[], str]]:
    """Every property by its name, in the order in which they are told; ``update`` is the config of an update."""
    loss = fields.known(asked.sections["loss"])
    config = replace(update, algorithm=replace(update.algorithm, loss=loss))
    return {
        "fields": partial(fields.check, asked.sections),
        **properties.of(asked.loss),
        "share of a step": partial(_share, config),
    }


def _share(config: RunConfig) -> str:
    """The share of the loss in an update. Raises Fails for a large one."""
    try:
        (found,) = share.shares({"": config}, _ROUNDS).values()
    except Exception as error:  # the loss is anybody's code
        raise Fails(blame.sentence(error)) from error
    told = f"forward and backward take {found:.1%} of an update of micro"
    if not found <= _LARGEST:
        raise Fails(f"{told}, and {_LARGEST:.0%} at most is asked")
    return told


def read(words: list[str], verb: str = "check") -> Asked:
    """The one algorithm that the words of ``verb`` name. Raises ConfigError for other words and for what is no loss."""
    _refuse(words, verb)
    plain, choices = compose.unchecked(words)
    validate.read(plain)
    sections = {part: plain["algorithm"].get(part) or {} for part in fields.SECTIONS}
    try:
        loss = build(fields.known(sections["loss"]))
        _refuse_other(loss)
        for numbers in sections.values():
            build(fields.known(numbers))
    except (Exception, SystemExit) as error:  # of the class that the YAML names, anybody's code
        told = str(error) if isinstance(error, (ConfigError, TypeError, ValueError)) else blame.sentence(error)
        raise ConfigError(" ".join(told.split())) from error
    return Asked(choices["algorithm"], sections, loss)


def _refuse(words: list[str], verb: str) -> None:
    """Raise ConfigError for a flag, for words that are no algorithm's, and unless one of them names the algorithm."""
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"{verb} has no flag {word}; see: steadymoe {verb} --help")
        key = word.partition("=")[0].lstrip("+~")
        if key != "algorithm" and not key.startswith("algorithm."):
            raise ConfigError(f"{verb} takes algorithm=NAME and algorithm.loss.KEY=VALUE, got {word}")
    named = [word for word in words if word.startswith("algorithm=")]
    if len(named) != 1:
        raise ConfigError(f"{verb} takes one algorithm, algorithm=NAME, got {len(named) or 'none'}")


def _refuse_other(loss: Any) -> None:
    """Raise ValueError for what is no loss, or what no run could train on."""
    if isinstance(loss, PolicyLoss) and not isinstance(loss.traits, Traits):
        raise ValueError(f"traits of {type(loss).__name__} must be a Traits; got {type(loss.traits).__name__}")
    Objective(loss=loss, correction=Uncorrected(), kl=KL())
