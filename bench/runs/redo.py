"""Stale runs: ended runs that the same command would make differently today. They are refused or made anew."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from steadymoe.bench.config import branch, compose, identity
from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.runs import provenance, record


def refuse_other_code(runs: Sequence[compose.Run]) -> None:
    """Raise ConfigError if an ended run among ``runs`` was made by other code; library versions do not matter."""
    different = {run.folder: _difference(record.look(run.folder)) for run in runs}
    found = {folder: each.code for folder, each in different.items() if each is not None and each.code}
    if found:
        (first, code), others = next(iter(found.items())), len(found) - 1
        beside = f", and so were {others} more of these {len(runs)} runs" if others else ""
        raise ConfigError(
            f"{first} was made by {code}{beside}; add --redo to make anew what is stale (what is there is kept in "
            f"{_aside(runs[0])}), or choose another experiment_name"
        )


def set_aside(runs: Sequence[compose.Run]) -> list[str]:
    """Move the stale runs among ``runs`` away, so that they are made anew; return one line for each.

    A run is stale if it has ended and was made by other code, other training code or other library versions, as in
    ``steadymoe status``, or if it lacks the checkpoint that ``checkpoint_keep`` asks for; also if it is of another
    config (``steadymoe run`` has refused such a run before). Its folder moves to
    ``results/replaced/`` under its own name and a number; no command reads that place.
    """
    lines = []
    for run in runs:
        if (why := _why(run)) is None:
            continue
        try:
            with FileLock(run.folder / ".lock", timeout=0):
                if _why(run) == why:  # False if another process has begun it anew meanwhile
                    lines.append(f"made anew: {run.folder}, {why}; the run that was there: {_move(run)}")
        except Timeout:
            continue
    return lines or ["none of these runs is stale; nothing is made anew"]


def left(runs: Sequence[compose.Run], states: Mapping[Path, record.State]) -> list[str]:
    """Lines on ended runs that are left as they are: code that cannot be compared, or a checkpoint that is not kept."""
    lines = []
    different = [_difference(states[run.folder]) for run in runs]
    unknown = [each.unknown for each in different if each is not None and each.unknown]
    if unknown:
        why = "; ".join(dict.fromkeys(unknown))
        lines.append(
            f"{len(unknown)} of {len(runs)} runs with code that cannot be compared are left as they are ({why})"
        )
    lacking = sum(_lacks_checkpoint(run, states[run.folder]) for run in runs)
    if lacking:
        step = runs[0].config.checkpoint_keep
        lines.append(
            f"{lacking} of {len(runs)} runs ended without a kept checkpoint of step {step}; --redo makes them anew"
        )
    return lines


def _why(run: compose.Run) -> str | None:
    """The reason to make a run anew; None if there is none, or if the run has not ended.

    A run of another config is one too: only ``steadymoe score`` asks to make such a run anew.
    """
    state = record.look(run.folder)
    if state.facts and state.facts["config_hash"] != run.config_hash:
        return f"another config ({identity.difference(state.facts['config'], run.plain)})"
    if (found := _difference(state)) is not None and found.said is not None:
        return found.said
    return f"checkpoint {run.config.checkpoint_keep} was not kept" if _lacks_checkpoint(run, state) else None


def _lacks_checkpoint(run: compose.Run, state: record.State) -> bool:
    """Whether a run has ended without the checkpoint that its config keeps."""
    step = run.config.checkpoint_keep
    return step is not None and state.has_ended and not branch.kept(run.folder, step).exists()


def _difference(state: record.State) -> provenance.Difference | None:
    """The difference of an ended run; None for a run that has not ended."""
    return provenance.difference(state.facts) if state.has_ended else None


def _results(run: compose.Run) -> Path:
    return Path(run.config.results_dir).absolute()


def _aside(run: compose.Run) -> Path:
    return _results(run) / "replaced"


def _move(run: compose.Run) -> Path:
    place, number = _aside(run) / run.folder.relative_to(_results(run) / "runs"), 1
    place.mkdir(parents=True, exist_ok=True)
    while (place / str(number)).exists():
        number += 1
    return run.folder.rename(place / str(number))
