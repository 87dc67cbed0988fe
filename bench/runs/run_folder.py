"""The state of run folders: which runs may not be touched, which are stale, and what is rerun."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import Timeout

from steadymoe.bench.runs import identity, lifecycle, provenance, record
from steadymoe.bench.runs.record import States

if TYPE_CHECKING:
    from steadymoe.bench.runs.compose import Run


def refuse_others(runs: Sequence["Run"], may_redo: bool = False) -> States:
    """Return run folder → state.

    Raises ConfigError where a folder holds a run of another config or, without ``may_redo``, ended by other code.
    """
    with provenance.unchanging():
        return {run.folder: record.state_of(run, may_redo) for run in runs}


def redo(runs: Sequence["Run"]) -> list[str]:
    """Move the stale runs among ``runs`` to ``results/replaced``, so that they are rerun; return a line for each.

    A run is stale if it has ended with other code, other training code, other library versions or another config, or
    without the weights that ``checkpoint_keep`` asks for. No command reads the place where it goes.
    """
    lines = []
    for run in runs:
        if (why := stale(run)) is None:
            continue
        try:
            with lifecycle.hold(run.folder):
                if stale(run) == why:  # False if another process has begun it again meanwhile
                    place = lifecycle.archive_old_run(run.folder, Path(run.config.results_dir), "replaced")
                    lines.append(f"rerunning {run.folder} ({why}); the old run is in {place}")
        except Timeout:
            continue
    return lines


def stale(run: "Run") -> str | None:
    """Return why to rerun a run; None if there is no reason, or if it has not ended.

    Another config is a reason too: only ``steadymoe score`` redoes such a run.
    """
    state = record.read_state(run.folder)
    if state.facts and state.facts["config_hash"] != run.config_hash:
        return f"another config ({identity.difference(state.facts['config'], run.plain)})"
    if not state.has_ended:
        return None
    lacking = f"the weights of step {run.config.kept_rollout} were not kept" if _lacks_weights(run) else None
    return provenance.difference(state.facts).stale or lacking


def _lacks_weights(run: "Run") -> bool:
    step = run.config.kept_rollout
    return step is not None and not record.weights_path(run.folder, step).exists()


def describe(runs: Sequence["Run"], states: States) -> list[str]:
    """Return lines on the runs that are skipped because they have finished, and on those rerun because of damage."""
    lines = []
    if ended := [run for run in runs if states[run.folder].has_ended]:
        lines.append(f"{len(ended)} of {len(runs)} runs have already finished and are skipped")
        with provenance.unchanging():
            unknown = [why for run in ended if (why := provenance.difference(states[run.folder].facts).unknown)]
        if unknown:
            reasons = "; ".join(dict.fromkeys(unknown))
            lines.append(f"the code of {len(unknown)} of them cannot be compared ({reasons})")
        if lacking := sum(map(_lacks_weights, ended)):
            step = runs[0].config.kept_rollout
            lines.append(f"{lacking} of them lack the weights of step {step}; --redo creates them")
    damages = {run.folder: states[run.folder].damage for run in runs}
    return lines + [f"rerunning damaged {folder} ({why})" for folder, why in damages.items() if why is not None]
