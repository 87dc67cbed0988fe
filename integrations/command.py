"""The command ``steadymoe-integrations``."""

from steadymoe.bench import cli
from steadymoe.bench.support.errors import UserError
from steadymoe.integrations import inspect

_HELP = """usage: steadymoe-integrations COMMAND ...

  inspect  how far an optimizer's step moves the routers of a checkpoint, relative to their size

steadymoe-integrations COMMAND --help explains a command"""


def main() -> None:
    """Run the command line's arguments and exit, as ``cli.main`` does."""
    cli.main(_run)


def _run(words: list[str]) -> int:
    name, *rest = words or ["--help"]
    if name in ("-h", "--help"):
        print(_HELP)
        return 0
    if name != "inspect":
        raise UserError(f"unknown command {name!r}; choose from inspect")
    return inspect.main(rest)


if __name__ == "__main__":
    main()
