"""Which loggers a run can be watched in, and whether one is installed here."""

from importlib.metadata import PackageNotFoundError, version

TOOLS = ("tensorboard", "wandb")


def reason_against(tool: str | None) -> str | None:
    """Why a run cannot log to ``tool``; None if it can."""
    if tool is None:
        return None
    if tool not in TOOLS:
        return f"log must be null, {' or '.join(TOOLS)}; got {tool!r}"
    try:
        version(tool)  # a folder of that name would do for an import
    except PackageNotFoundError:
        return f"log={tool} needs its package: pip install 'steadymoe[{tool}]'"
    return None
