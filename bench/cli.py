"""The command ``steadymoe``: one table of verbs. A verb is a module with ``main(args) -> exit code``."""

import codecs
import importlib
import io
import locale
import os
import sys
from collections.abc import Callable

from steadymoe.bench.support import blame, processes
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import nearest, visible

# Verb → the module that runs it, and its line in the help. The module is imported when its verb is called.
VERBS = {
    "run": ("runs.command", "train: steadymoe run algorithm=gspo model=tiny seed=0; -m sweeps, --dry prints the plan"),
    "status": ("runs.status", "finished and failed runs, and how to resume"),
    "report": ("report.command", "tables, figures and report.html from recorded runs"),
    "check": ("check.command", "check a loss, built-in or your own, property by property"),
    "score": ("score.command", "how much stress an algorithm tolerates, in multiples of GRPO's"),
}


def main(run: Callable[[list[str]], int] | None = None) -> None:
    """Run the command line's arguments, by ``run`` if it is given, and exit.

    Exit codes: 0, 1 if a run failed, 2 for a request that cannot be met, 130 if interrupted, and 141, as other programs
    have it, if nobody reads the output any more (``| head``).
    """
    if codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        _fail("files are read and written as UTF-8, which this locale does not use; set PYTHONUTF8=1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without π still gets the line
    try:
        try:
            with processes.interruptible():
                code = (run or _run)(sys.argv[1:])
        finally:
            if sys.stdout is not None:  # closed by the shell: >&-
                sys.stdout.flush()
    except BrokenPipeError:  # an OSError too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its exit
        code = 141
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except (UserError, OSError) as error:  # an OSError: a folder that cannot be written, a full disk
        _fail(str(error))
    except SystemExit as error:
        if run is None and blame.users_code(error) is not None:  # sys.exit() in a user's loss is no success
            _fail(blame.one_line(error), 1)
        raise
    sys.exit(code)


def _fail(message: str, code: int = 2) -> None:
    print(f"steadymoe: {visible(message)}", file=sys.stderr)
    sys.exit(code)


def _run(args: list[str]) -> int:
    if not args:
        raise UserError(f"missing command: {', '.join(VERBS)}; see: steadymoe --help")
    verb, *rest = args
    if verb in ("-h", "--help"):
        lines = [f"  {name:8}{help_line}" for name, (_, help_line) in VERBS.items()]
        print("usage: steadymoe COMMAND ...\n\nIs this RL algorithm stable on MoE models?\n", *lines, sep="\n")
        print("\nsteadymoe COMMAND --help explains a command; steadymoe --version prints version and revision")
        return 0
    if verb == "--version":
        from steadymoe.bench.support import source  # asking git takes a moment

        print(source.version_line())
        return 0
    if verb not in VERBS:
        raise UserError(f"unknown command {verb!r}; {nearest(verb, list(VERBS), 'steadymoe --help')}")
    code: int = importlib.import_module(f"steadymoe.bench.{VERBS[verb][0]}").main(rest)
    return code


if __name__ == "__main__":
    main()
