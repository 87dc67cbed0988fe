"""``steadymoe run --dry``: the runs that a command makes, and an estimate of their time from recorded runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.config.compose import Run
from steadymoe.bench.config.identity import flatten
from steadymoe.bench.runs import execute, provenance, record
from steadymoe.bench.training import cold_start

# The settings that decide the time of a step. Losses cost little beside a forward, so an algorithm counts only with
# its ``sampling``.
_COSTS = ["model", "task", "rollout", "savings", "probe", "evaluation", "routing", "engine", "correction"]
_COSTS += ["updates_per_rollout", "device", "precision", "experts", "compile", "threads", "measure", "microbatch"]
# The committed runs of the reference study, with their times; a wheel does not carry them.
_REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "data"


def lines(runs: Sequence[Run], skipped: int, processes: int | None) -> list[str]:
    """The number of runs of each status, what the command does about them, and the minutes of their steps.

    ``skipped`` is the number of runs that ``--retry-failed`` leaves out; ``processes`` is the number of runs at once,
    None for a cluster. Nothing on disk is touched.
    """
    states = {each.folder: record.look(each.folder) for each in runs}
    counts = Counter("waiting" if state.status == "missing" else state.status for state in states.values())
    does = {"waiting": "", "failed": " (made again)", "damaged": " (made again, what is there is kept)"}
    does |= {"interrupted": " (go on)", "running": " (left to the process that is at them)"}
    does |= dict.fromkeys(record.ENDED, " (left as they are)")
    said = [f"{counts[status]} {status}{does[status]}" for status in sorted(counts)]
    answer = [f"{len(runs) + skipped} runs: " + ", ".join([*said, *([f"{skipped} skipped"] if skipped else [])])]
    to_make = [each for each in runs if states[each.folder].status not in (*record.ENDED, "running")]
    return answer + ([_minutes(to_make, states, processes)] if to_make else [])


def _minutes(runs: Sequence[Run], states: Mapping[Path, record.State], processes: int | None) -> str:
    """The time of all remaining steps, at the pace of ended runs here or, failing that, of the reference runs."""
    paces, reference = _paces(Path(runs[0].config.results_dir)), _reference()
    seconds, guessed = 0.0, 0
    for each in runs:
        like = paces.get(_cost(each.plain), [])
        pace = sum(like) / len(like) if like else _guess(each, reference)
        if pace is None:
            return (
                f"minutes: unknown; no run with these settings has ended here, and no reference run is of {_what(each)}"
            )
        state = states[each.folder]
        done = (state.facts.get("progress") or {}).get("step", 0) if state.status == "interrupted" else 0
        seconds += (each.config.steps - done) * pace
        guessed += not like
    at_once = min(len(runs), processes or 1)
    how = f"{at_once} at once" if processes is not None else "one after another"
    source = "at the pace of ended runs with such settings"
    if guessed:
        source = f"a rough estimate: {guessed} of {len(runs)} runs at the pace of reference runs on other machines"
    return f"minutes: about {seconds / at_once / 60:.1f}, {how}, {source}{_cold_starts(runs)}"


def _what(run: Run) -> str:
    return f"model={run.choices['model']} on {run.config.device}"


def _reference() -> pd.DataFrame:
    """The runs of the reference study: model, task, sizes of a rollout, seconds per step (``pace``)."""
    columns = ["model", "task", "prompts", "responses", "updates_per_rollout", "steps", "wall_seconds"]
    files = sorted(_REFERENCE.glob("*/runs.parquet"))
    runs = pd.concat([pd.DataFrame(columns=columns), *(pd.read_parquet(each, columns=columns) for each in files)])
    return runs.assign(pace=runs["wall_seconds"] / runs["steps"])


def _guess(run: Run, reference: pd.DataFrame) -> float | None:
    """Return seconds per step: the median of the reference runs most like ``run``; None if none is of its model.

    Of the same model they are, if possible, of the same task, then of the same rollout and updates. The time of a step
    grows with its responses.
    """
    config = run.config
    like = reference[(reference["model"] == run.choices["model"]) & (config.device == "cpu")]
    sizes = {"prompts": config.rollout.prompts, "responses": config.rollout.responses}
    for wanted in ({"task": run.choices["task"]}, sizes | {"updates_per_rollout": config.updates_per_rollout}):
        same = like[(like[list(wanted)] == pd.Series(wanted)).all(axis=1)]
        like = same if len(same) else like
    if like.empty:
        return None
    each = like["pace"] / (like["prompts"] * like["responses"])
    return float(each.median() * config.rollout.prompts * config.rollout.responses)


def _cold_starts(runs: Sequence[Run]) -> str:
    """The words for the cold starts that must be trained before the steps; the pace does not contain them."""
    configs = [each.config for each in runs if execute.makes_cold_start(each.config)]
    files = {Path(each.results_dir) / "cold_starts" / f"{cold_start.fingerprint(each)}.json" for each in configs}
    absent = sum(not file.exists() for file in files)
    return f"; cold starts come on top, {absent} of them" if absent else ""


def _paces(results: Path) -> dict[str, list[float]]:
    """``_cost`` of a config → seconds per step of its runs that ended on this kind of processor."""
    found: dict[str, list[float]] = {}
    for path in (results / "runs").glob("**/run.json"):
        facts = record.known(path.parent)
        pace = (facts.get("progress") or {}).get("seconds_per_step")
        is_ours = facts.get("status") in record.ENDED and facts["machine"]["cpu"] == provenance.processor()
        if is_ours and isinstance(pace, float):
            found.setdefault(_cost(facts["config"]), []).append(pace)
    return found


def _cost(plain: Mapping[str, Any]) -> str:
    """The numbers of a planned or a recorded config that the time of a step hangs on."""
    sampling = plain["algorithm"].get("sampling")
    numbers = flatten({"sampling": sampling} | {key: plain.get(key) for key in _COSTS})
    given = {key: value for key, value in numbers.items() if value is not None}
    return repr(sorted((key, str(value)) for key, value in given.items()))
