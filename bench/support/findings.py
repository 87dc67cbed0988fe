"""Properties checked one after another: each passes, or a sentence says why not."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from steadymoe.bench.support.text import visible


class CheckFailed(Exception):
    """A property does not hold; the message says why, in one line."""


class Ends(CheckFailed):
    """A property does not hold, and without it no further property can be checked."""


@dataclass(frozen=True)
class Finding:
    """Whether a property holds."""

    name: str
    passed: bool
    sentence: str = ""
    """What was found, or why the property does not hold; may be empty if it holds."""

    @property
    def line(self) -> str:
        """The finding in one line of a terminal."""
        told = f": {self.sentence}" if self.sentence else ""
        return visible(f"{'passes' if self.passed else 'FAILS '}  {self.name}{told}")


def ask(properties: Mapping[str, Callable[[], str | None]]) -> Iterator[Finding]:
    """Yield a finding for each property, in order. A property returns what it found, or raises ``CheckFailed``.

    ``Ends`` makes the finding the last one.
    """
    for name, holds in properties.items():
        try:
            yield Finding(name, True, holds() or "")
        except CheckFailed as why:
            yield Finding(name, False, str(why))
            if isinstance(why, Ends):
                return
