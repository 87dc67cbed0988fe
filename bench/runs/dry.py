"""``steadymoe run --dry``: the runs that a command makes, and an estimate of their time from recorded runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.runs import compose, provenance, record
from steadymoe.bench.runs.compose import Run
from steadymoe.bench.runs.identity import flatten

# The settings that decide the time of a step. Losses cost little next to a forward, so an algorithm counts only with
# its ``sampling``.
_COSTS = ["model", "task", "rollout", "savings", "probe", "evaluation", "routing", "engine", "correction"]
_COSTS += ["updates_per_rollout", "device", "precision", "experts", "threads", "measure", "microbatch"]
# The committed runs of the reference study, with their times; a wheel does not carry them.
_REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "data"
# Status → what the command does about such runs.
_ACTIONS = {
    "missing": "to run",
    "failed": "failed (rerun)",
    "damaged": "damaged (rerun; the old files are kept)",
    "interrupted": "interrupted (resume)",
    "running": "running (left to their process)",
    **{status: f"{status} (skipped)" for status in record.ENDED},
}


def lines(runs: Sequence[Run], skipped: int, processes: int | None) -> list[str]:
    """Return the runs of a command by status, the minutes of their steps, and the cold starts to train.

    ``skipped`` is the number of runs that ``--retry-failed`` leaves out; ``processes`` is the number of runs at once,
    None for a cluster. Nothing on disk is touched.
    """
    states = {run.folder: record.read_state(run.folder) for run in runs}
    counts = Counter(state.status for state in states.values())
    parts = [f"{counts[status]} {_ACTIONS[status]}" for status in sorted(counts)]
    parts += [f"{skipped} skipped"] if skipped else []
    to_make = [run for run in runs if states[run.folder].status not in (*record.ENDED, "running")]
    summary = f"{len(runs) + skipped} runs: {', '.join(parts)}"
    if not to_make:
        return [summary]
    unchecked = "losses, models and memory are checked when the command runs, before anything is written"
    return [summary, _minutes(to_make, states, processes), *_cold_starts(to_make), unchecked]


def plan(runs: Sequence[Run], states: Mapping[Path, record.State]) -> list[str]:
    """Return a line for each run to make: what it is, its learning rate, its folder."""
    runs = [run for run in runs if states[run.folder].status not in (*record.ENDED, "running")]
    names, here = compose.labels(runs), Path.cwd()
    return [
        f"  {name}, learning rate {run.config.optimizer.learning_rate:g}: "
        f"{run.folder.relative_to(here) if run.folder.is_relative_to(here) else run.folder}"
        for name, run in zip(names, runs, strict=True)
    ]


def _minutes(runs: Sequence[Run], states: Mapping[Path, record.State], processes: int | None) -> str:
    """Return the time of all remaining steps, at the pace of finished runs here or, failing that, of reference runs."""
    paces, reference = _paces(Path(runs[0].config.results_dir)), _reference()
    guesses: dict[tuple[Any, ...], float | None] = {}
    seconds, guessed = 0.0, 0
    for run in runs:
        alike = paces.get(_cost(run.plain), [])
        size = _size(run)
        if not alike and size not in guesses:
            guesses[size] = _guess(*size, reference)
        pace = sum(alike) / len(alike) if alike else guesses[size]
        if pace is None:
            return f"minutes: unknown; no run of model={run.choices['model']} on {run.config.device} is recorded"
        state = states[run.folder]
        done = (state.facts.get("progress") or {}).get("step", 0) if state.status == "interrupted" else 0
        seconds += (run.config.steps - done) * pace
        guessed += not alike
    at_once = min(len(runs), processes or 1)
    how = f"{at_once} at once" if processes is not None else "one after another"
    source = "at the pace of finished runs with these settings"
    if guessed:
        source = f"a rough estimate: {guessed} of {len(runs)} runs at the pace of reference runs on other machines"
    return f"minutes: about {seconds / at_once / 60:.1f}, {how}, {source}"


def _reference() -> pd.DataFrame:
    """Return the runs of the reference study: model, task, sizes of a rollout, seconds per step (``pace``)."""
    columns = ["model", "task", "prompts", "responses", "updates_per_rollout", "steps", "wall_seconds"]
    files = sorted(_REFERENCE.glob("*/runs.parquet"))
    runs = pd.concat([pd.DataFrame(columns=columns), *(pd.read_parquet(file, columns=columns) for file in files)])
    return runs.assign(pace=runs["wall_seconds"] / runs["steps"])


def _size(run: Run) -> tuple[str, str, str, int, int, int]:
    """Return what ``_guess`` looks at: device, model, task, prompts, responses, updates per rollout."""
    config = run.config
    sizes = (config.rollout.prompts, config.rollout.responses, config.updates_per_rollout)
    return (config.device, run.choices["model"], run.choices["task"], *sizes)


def _guess(
    device: str, model: str, task: str, prompts: int, responses: int, updates: int, reference: pd.DataFrame
) -> float | None:
    """Return seconds per step: the median of the reference runs most like ``_size``; None if none is of its model.

    Of the same model they are, if possible, of the same task, then of the same rollout and updates. The time of a step
    grows with its responses.
    """
    alike = reference[(reference["model"] == model) & (device == "cpu")]
    sizes = {"prompts": prompts, "responses": responses, "updates_per_rollout": updates}
    for wanted in ({"task": task}, sizes):
        same = alike[(alike[list(wanted)] == pd.Series(wanted)).all(axis=1)]
        alike = same if len(same) else alike
    if alike.empty:
        return None
    per_response = alike["pace"] / (alike["prompts"] * alike["responses"])
    return float(per_response.median() * prompts * responses)


def _cold_starts(runs: Sequence[Run]) -> list[str]:
    """Return a line with the number of cold starts that must be trained before the steps, if there are any."""
    configs = [run.config for run in runs if run.config.has_own_cold_start]
    files = {Path(config.results_dir) / "cold_starts" / f"{config.cold_start_fingerprint}.json" for config in configs}
    absent = sum(not file.exists() for file in files)
    return [f"cold starts: {absent} to train, not in this estimate; {len(files) - absent} cached"] if files else []


def _paces(results: Path) -> dict[str, list[float]]:
    """Return ``_cost`` of a config → seconds per step of its runs that ended on this kind of processor."""
    paces: dict[str, list[float]] = {}
    for path in (results / "runs").glob("**/run.json"):
        facts = record.known(path.parent)
        pace = (facts.get("progress") or {}).get("seconds_per_step")
        is_ours = facts.get("status") in record.ENDED and facts["machine"]["cpu"] == provenance.processor()
        if is_ours and isinstance(pace, float):
            paces.setdefault(_cost(facts["config"]), []).append(pace)
    return paces


def _cost(plain: Mapping[str, Any]) -> str:
    """Return the numbers of a config, planned or recorded, that decide the time of a step."""
    numbers = flatten({"sampling": plain["algorithm"].get("sampling")} | {key: plain.get(key) for key in _COSTS})
    return repr(sorted((key, str(value)) for key, value in numbers.items() if value is not None))
