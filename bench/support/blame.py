"""The place in a user's own file that raised an error, for messages of one line."""

import traceback
from pathlib import Path

from steadymoe.bench.support import source


def failure(error: BaseException) -> str:
    """Return the traceback of an error; its last line also names the place in the user's own code, if any.

    The place is the deepest frame outside the suite, Python and installed packages. A SyntaxError names a file and a
    line by itself.
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    place = users_code(error)
    return text if place is None else f"{text} ({place})"


def one_line(error: BaseException) -> str:
    """Return an error in one line, with the place in the user's own code, if there is such a place."""
    text, place = f"{type(error).__name__}: {' '.join(str(error).split())}", users_code(error)
    return text if place is None else f"{text} ({place})"


def users_code(error: BaseException) -> str | None:
    """``file, line n`` of the deepest frame of an error outside the suite, Python and installed packages."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        spec = frame.f_globals.get("__spec__")  # has the name of a module that is run with ``python -m``
        file, module = Path(frame.f_code.co_filename), str(getattr(spec, "name", frame.f_globals.get("__name__")))
        if module.split(".")[0] != "steadymoe" and file.is_file() and not source.is_installed(file):
            place = f"{file}, line {line}"
    return place
