"""The argument parser of every verb."""

import argparse
from typing import NoReturn

from steadymoe.bench.support.text import visible


class Parser(argparse.ArgumentParser):
    """Report a bad argument in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"steadymoe: {visible(message)}; see: {self.prog} --help\n")
