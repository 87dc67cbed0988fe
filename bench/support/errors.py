"""The errors that a user can act on, and the parser of every verb: one line, and exit code 2."""

import argparse
from collections.abc import Mapping, Set
from typing import Any, NoReturn

from steadymoe.bench.support.text import visible


class UserError(Exception):
    """A request cannot be met."""


class ConfigError(UserError):
    """The config cannot be run; the message names the valid choices."""


class Dense(ConfigError):
    """A setting of routers for a dense model."""


class Parser(argparse.ArgumentParser):
    """Show a description line by line, as it is written; report a bad argument in one line, with exit code 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter} | settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"steadymoe: {visible(message)}; see: {self.prog} --help\n")

    def mode(self, arguments: argparse.Namespace, modes: Mapping[str, Set[str]]) -> str:
        """Return what a verb of several modes is asked for; exit for an argument that belongs to another mode.

        ``modes``: the argument that chooses a mode → the arguments that go with it. The first is the mode without any.
        """
        plain, *chosen = modes
        mode = next((name for name in chosen if getattr(arguments, name)), plain)
        given = {name for name, value in vars(arguments).items() if value not in (self.get_default(name), [])}
        if wrong := sorted(given - modes[mode]):
            what = "key=value" if wrong[0] == "overrides" else f"--{wrong[0]}"
            other = next((name for name in chosen if wrong[0] in modes[name]), mode)
            self.error(f"{what} requires --{other}" if mode == plain else f"{what} cannot be combined with --{mode}")
        return mode
