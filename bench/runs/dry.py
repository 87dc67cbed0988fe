"""``steadymoe run --dry``: the runs that a command makes."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from steadymoe.bench.runs import compose, run_folder
from steadymoe.bench.runs.compose import Run
from steadymoe.bench.runs.run_folder import States
from steadymoe.bench.support.text import shortened

# Status → what the command does about such runs.
_ACTIONS = {
    "missing": "to run",
    "failed": "failed (rerun)",
    "damaged": "damaged (rerun; the old files are kept)",
    "interrupted": "interrupted (resume)",
    "running": "running in another process (skipped)",
    **{status: f"{status} (skipped)" for status in run_folder.ENDED},
}


def lines(runs: Sequence[Run], states: States, skipped: int) -> list[str]:
    """Return the runs of a command by status, the cold starts to train, and their plan; nothing on disk is touched.

    ``skipped`` is the number of runs that ``--retry-failed`` leaves out.
    """
    to_make = [run for run in runs if states[run.folder].status not in (*run_folder.ENDED, "running")]
    first = summary([states[run.folder] for run in runs], skipped)
    if not to_make:
        return [first]
    unchecked = "losses, models and memory are checked when the command runs, before anything is written"
    return [first, *_cold_starts(to_make), unchecked, *shortened(_plan(to_make))]


def summary(states: Sequence[run_folder.State], skipped: int = 0) -> str:
    """Return how many runs there are, and what a command does about them."""
    counts = Counter(state.status for state in states)
    parts = [f"{counts[status]} {_ACTIONS[status]}" for status in sorted(counts)]
    parts += [f"{skipped} skipped"] if skipped else []
    return f"{len(states) + skipped} runs: {', '.join(parts)}"


def _plan(runs: Sequence[Run]) -> list[str]:
    names, here = compose.labels(runs), Path.cwd()
    return [
        f"  {name}, learning rate {run.config.optimizer.learning_rate:g}: "
        f"{run.folder.relative_to(here) if run.folder.is_relative_to(here) else run.folder}"
        for name, run in zip(names, runs, strict=True)
    ]


def _cold_starts(runs: Sequence[Run]) -> list[str]:
    configs = [run.config for run in runs if run.config.has_own_cold_start]
    files = {Path(config.results_dir) / "cold_starts" / f"{config.cold_start_fingerprint}.json" for config in configs}
    absent = sum(not file.exists() for file in files)
    return [f"cold starts: {absent} to train; {len(files) - absent} cached"] if files else []
