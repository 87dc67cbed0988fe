"""Where a user keeps what is not part of this checkout: Python modules, and configs beside them in ``conf/``."""

import os
from pathlib import Path

VARIABLE = "STEADYMOE_PATH"


def folders() -> list[Path]:
    """The folders that the environment variable STEADYMOE_PATH names, absolute, in its order; those alone that exist.

    A folder holds modules (``my_losses.py``) and configs (``conf/algorithm/mine.yaml``). ``run``, ``status`` and
    ``report`` all look here and nowhere else.
    """
    named = [Path(name).expanduser().absolute() for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    return [folder for folder in dict.fromkeys(named) if folder.is_dir()]
