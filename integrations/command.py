"""The command ``steadymoe-integrations``: what the suite does with another trainer's log, rollouts and tensors."""

import importlib

from steadymoe.bench import cli
from steadymoe.bench.support.errors import UserError

# Command → its module and function, and its line in the help.
COMMANDS = {
    "import": ("logs.command", "main", "turn the log of another trainer into a run that status and report include"),
    "audit": ("rollouts.command", "audit_main", "each loss's gradient on another trainer's rollouts"),
    "conformance": ("rollouts.command", "conformance_main", "does another trainer replay routes?"),
}


def main() -> None:
    """Run the command line's arguments and exit, as ``cli.main`` does."""
    cli.main(_run)


def _run(words: list[str]) -> int:
    name, *rest = words or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {each:13}{line}" for each, (*_, line) in COMMANDS.items()]
        print("usage: steadymoe-integrations COMMAND ...\n", *lines, sep="\n")
        print("\nsteadymoe-integrations COMMAND --help explains a command")
        return 0
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}; choose from {', '.join(COMMANDS)}")
    module, function, _ = COMMANDS[name]
    code: int = getattr(importlib.import_module(f"steadymoe.integrations.{module}"), function)(rest)
    return code


if __name__ == "__main__":
    main()
