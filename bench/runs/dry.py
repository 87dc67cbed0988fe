"""``steadymoe run --dry``: the runs that a command makes, and their time at the pace of finished ones."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steadymoe.bench.runs import compose, provenance, run_folder
from steadymoe.bench.runs.compose import Run
from steadymoe.bench.runs.identity import flatten
from steadymoe.bench.runs.run_folder import States
from steadymoe.bench.support.text import shortened

# What decides the time of a step. Losses cost little next to a forward: of an algorithm, only ``sampling`` counts.
_COSTS = ["model", "task", "rollout", "savings", "probe", "evaluation", "routing", "engine", "correction", "device"]
_COSTS += ["updates_per_rollout", "minibatch_prompts", "precision", "experts", "threads", "measure", "microbatch"]
# Status → what the command does about such runs.
_ACTIONS = {
    "missing": "to run",
    "failed": "failed (rerun)",
    "damaged": "damaged (rerun; the old files are kept)",
    "interrupted": "interrupted (resume)",
    "running": "running in another process (skipped)",
    **{status: f"{status} (skipped)" for status in run_folder.ENDED},
}


def lines(runs: Sequence[Run], states: States, skipped: int, processes: int | None) -> list[str]:
    """Return the runs of a command by status, the minutes of their steps, the cold starts to train, and their plan.

    ``skipped`` is the number of runs that ``--retry-failed`` leaves out; ``processes`` is the number of runs at once,
    None for a cluster. Nothing on disk is touched.
    """
    to_make = [run for run in runs if states[run.folder].status not in (*run_folder.ENDED, "running")]
    first = summary([states[run.folder] for run in runs], skipped)
    if not to_make:
        return [first]
    unchecked = "losses, models and memory are checked when the command runs, before anything is written"
    return [first, _minutes(to_make, states, processes), *_cold_starts(to_make), unchecked, *shortened(_plan(to_make))]


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


def _minutes(runs: Sequence[Run], states: States, processes: int | None) -> str:
    paces = _paces(Path(runs[0].config.results_dir))
    seconds = 0.0
    for run in runs:
        alike = paces.get(_cost(run.plain))
        if alike is None:
            return f"time: unknown; no run like those in {run.folder.parent} has finished here on this kind of CPU"
        state = states[run.folder]
        done = (state.facts.get("progress") or {}).get("step", 0) if state.status == "interrupted" else 0
        seconds += (run.config.rollouts - done) * sum(alike) / len(alike)
    at_once = min(len(runs), processes or 1)
    how = f"{at_once} at once" if processes is not None else "one after another"
    return f"time: about {seconds / at_once / 60:.1f} minutes, {how}, at the pace of finished runs with these settings"


def _cold_starts(runs: Sequence[Run]) -> list[str]:
    configs = [run.config for run in runs if run.config.has_own_cold_start]
    files = {Path(config.results_dir) / "cold_starts" / f"{config.cold_start_fingerprint}.json" for config in configs}
    absent = sum(not file.exists() for file in files)
    return [f"cold starts: {absent} to train, not in this estimate; {len(files) - absent} cached"] if files else []


def _paces(results: Path) -> dict[str, list[float]]:
    """Return ``_cost`` of a config → seconds per step of its runs that ended on this kind of processor."""
    paces: dict[str, list[float]] = {}
    for path in (results / "runs").glob("**/run.json"):
        facts = run_folder.known(path.parent)
        pace = (facts.get("progress") or {}).get("seconds_per_step")
        is_ours = facts.get("status") in run_folder.ENDED and facts["machine"]["cpu"] == provenance.processor()
        if is_ours and isinstance(pace, float):
            paces.setdefault(_cost(facts["config"]), []).append(pace)
    return paces


def _cost(plain: Mapping[str, Any]) -> str:
    """Return the numbers of a config, planned or recorded, that decide the time of a step."""
    algorithm = plain.get("algorithm") or {}  # other trainers have none
    numbers = flatten({key: plain.get(key) for key in _COSTS} | {"sampling": algorithm.get("sampling")})
    return repr(sorted((key, str(value)) for key, value in numbers.items() if value is not None))
