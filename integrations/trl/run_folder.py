"""The run folder of another trainer: its facts, its place, and its rows while the trainer trains.

Such a run has an ``origin``, "trl 1.16.0". ``steadymoe status``, ``report`` and exports include it; scores and boards
leave it out (``Results.load``).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from steadymoe.bench.runs import identity, provenance, record, run_folder
from steadymoe.bench.runs.record import Record
from steadymoe.bench.statistics.collapse import Rule, judge
from steadymoe.bench.support import blame
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.training import columns
from steadymoe.bench.training.step_rows import Row

*_SHOWN, TOKENS_SAMPLED = columns.names("reward", "expert_change_rate", "tokens_sampled")


def facts(
    names: Mapping[str, str], version: str, axes: Mapping[str, Any], config: Mapping[str, Any], command: str
) -> dict[str, Any]:
    """Return the content of ``run.json`` before a run of another trainer starts.

    ``names`` holds trainer, experiment, algorithm, model, task, correction, routing and engine; ``version`` is
    the trainer's; ``config`` has at least the fields that ``run_folder.read_run`` requires.
    Raises UserError for a name that cannot be part of a folder's name.
    """
    for key, name in names.items():
        if not identity.is_name(name):
            raise UserError(f"{key} must be letters, digits, '.', '_', '-' or '@'; got {name!r}")
    # As for the suite's own runs, a group that is off is no axis.
    groups = {group: names[group] for group in ("correction", "routing", "engine")}
    groups = {group: name for group, name in groups.items() if name != identity.OFF[group]}
    axes = {**axes, **groups, "trainer": names["trainer"]}
    config = {"model": {}, **config, "cold_start": {"path": None}}  # the suite neither built nor trained the model
    return {
        "status": "running",
        "origin": f"{names['trainer']} {version}",
        **{key: name for key, name in names.items() if key != "trainer"},
        "axes": axes,
        "axes_name": identity.axes_name(axes),
        "seed": config["seed"],
        "config_hash": identity.config_hash(config),
        "config_hash_without_seed": identity.config_hash(config | {"seed": None}),
        "command": command,
        "cold_start": {},
        **provenance.facts(config, None, str(config["device"]), torch.get_num_threads()),
        "diverged": None,
        "error": None,
    }


def free_folder(results: Path, run: Mapping[str, Any]) -> Path:
    """Return the folder of a run with these facts. Raises UserError if it holds a run that must not be overwritten.

    A run that has ended or is running must not be, nor an interrupted run of another config.
    """
    names = [run[key] for key in ("experiment", "algorithm", "model", "task", "axes_name")]
    folder = results.joinpath("runs", *names, f"seed={run['seed']}")
    state = run_folder.read_state(folder)
    advice = "choose another experiment or axes, or remove that folder"
    if state.has_ended or state.status in ("damaged", "running"):
        raise UserError(f"{folder} holds a run that is {state.status}; {advice}")
    if state.facts and state.facts["config_hash"] != run["config_hash"]:
        difference = identity.difference(state.facts["config"], run["config"])
        raise UserError(f"{folder} holds an interrupted run of another config ({difference}); {advice}")
    return folder


class LiveRecord(Record):
    """The record of a run while another trainer makes it; it writes how the training ended when it is closed."""

    def __exit__(self, *error: object) -> None:
        _, raised, _ = error
        if self.run["status"] in run_folder.ENDED:
            pass  # an error after the end of the training does not change how the run ended
        elif isinstance(raised, Exception):
            self.update(status="failed", error=blame.failure(raised))
        elif raised is not None:
            self.update(status="interrupted")
        super().__exit__(*error)

    def start(self, after: int, steps: int, **facts: Any) -> None:
        """Begin with the step that follows ``after``, 0 for a new run, of ``steps``; ``facts`` go to ``run.json``.

        Raises UserError if the folder does not hold the steps up to ``after``.
        """
        if after and not self.holds(after):
            raise UserError(f"the trainer resumes after step {after}, whose rows are not in {self.folder}")
        self.run |= facts
        self.run["config"] = self.run["config"] | {"updates": steps * self.run["config"]["updates_per_rollout"]}
        self.begin(after or None)

    def add_step(self, rows: dict[str, list[Row]], **facts: Any) -> None:
        """Append a whole step, or evaluations before the first."""
        self.append(rows)
        progress = {name: row.get(name) for row in rows.get("steps", ()) for name in _SHOWN}
        if "steps" in rows:
            progress |= {"step": rows["steps"][0]["step"], "steps": run_folder.rollouts(self.run)}
        self.update(progress=progress, **facts)

    def close(self, is_whole: bool) -> None:
        """End the run as finished or collapsed, or as interrupted if it is not ``is_whole``."""
        if not is_whole:
            self.update(status="interrupted")
            return
        steps = record.read_table(self.folder, "steps")
        event = judge(steps, Rule(), self.run["config"]["updates_per_rollout"]).collapse
        ended = None if event is None else {"reason": event.reason, "step": event.step, "update": None}
        self.end(ended, tokens=int(steps[TOKENS_SAMPLED].sum()))
