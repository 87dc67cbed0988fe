"""Check that verl's processes have the losses: ``python -m steadymoe.integrations.verl.check [steadymoe/NAME …]``.

verl hides the error of a plugin. This command shows it in one line, and prints the arguments that choose the named
losses. Exit code 0; 1 if verl lacks the losses; 2 for a name that verl cannot feed.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points, version

from steadymoe.algorithms import load, names
from steadymoe.integrations.verl import losses as plugin

MODULE = "steadymoe.integrations.verl.plugin"
TESTED = "0.9"
# Prints the losses that a new process has after importing verl.
LIST_LOSSES = (
    "import json; from verl.trainer.ppo import core_algos; print(json.dumps(list(core_algos.POLICY_LOSS_REGISTRY)))"
)


class BrokenPlugin(RuntimeError):
    """verl does not have the losses; the message is one line and says why."""


def main(words: list[str]) -> int:
    """Check the plugin; print what verl can compute and the arguments for the losses named; return the exit code."""
    parser = argparse.ArgumentParser("python -m steadymoe.integrations.verl.check", description="Check verl's losses.")
    parser.add_argument("modes", nargs="*", metavar="steadymoe/NAME", help="a loss: print verl's arguments for it")
    try:
        arguments = [line for mode in parser.parse_args(words).modes for line in plugin.lines(mode)]
        check()
    except (ValueError, BrokenPlugin) as error:
        print(f"steadymoe: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, BrokenPlugin) else 2
    reasons = {name: plugin.refusal(load(name)) for name in names(presets=True)}
    computed = [name for name, reason in reasons.items() if reason is None]
    print(f"verl {version('verl')} has {len(computed)} losses: {', '.join(computed)}")
    print("".join(f"not in verl: {name} {reason}\n" for name, reason in reasons.items() if reason), end="")
    print("".join(f"{line}\n" for line in arguments), end="")
    return 0


def check() -> None:
    """Load the plugin as verl does, and list the losses of a separate process.

    Raises BrokenPlugin if verl would train without the losses, or is another version than the one that they equal.
    """
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    plugins = [point for point in entry_points(group="verl.plugins") if point.value == MODULE]
    if not plugins:
        raise BrokenPlugin(
            f"no installed package has the entry point {MODULE} of verl.plugins: pip install ./integrations/losses"
        )
    if policy != "auto" and plugins[0].name not in [name.strip() for name in policy.split(",")]:
        raise BrokenPlugin(
            f"VERL_USE_EXTERNAL_PLUGINS={policy} leaves {plugins[0].name} out; unset it, or add the name"
        )
    try:
        plugins[0].load()  # verl hides errors raised here
    except Exception as error:
        raise BrokenPlugin(f"the plugin cannot be loaded: {type(error).__name__}: {error}") from error
    if not version("verl").startswith(f"{TESTED}."):
        raise BrokenPlugin(f"the plugin is made for verl {TESTED}; this is verl {version('verl')}")
    listed = subprocess.run([sys.executable, "-c", LIST_LOSSES], capture_output=True, text=True)
    if listed.returncode:
        raise BrokenPlugin(f"verl cannot be imported in a separate process: {listed.stderr[-300:]}")
    registered = json.loads(listed.stdout.splitlines()[-1])
    absent = [plugin.PREFIX + name for name in names(presets=True) if plugin.PREFIX + name not in registered]
    if absent:
        raise BrokenPlugin(f"a process that imports verl lacks {', '.join(absent)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
