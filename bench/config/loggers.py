"""The loggers that can show a run while it trains, and whether a logger is installed."""

from importlib.metadata import PackageNotFoundError, version

TOOLS = ("tensorboard", "wandb")


def reason_against(tool: str | None) -> str | None:
    """Why a run cannot log to ``tool``; None if it can."""
    if tool is None:
        return None
    if tool not in TOOLS:
        return f"log must be null, {' or '.join(TOOLS)}; got {tool!r}"
    try:
        version(tool)  # an import would also accept a folder of this name
    except PackageNotFoundError:
        return f"log={tool} needs its package: pip install 'steadymoe[{tool}]'"
    return None
