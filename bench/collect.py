"""From run folders to one tidy table: a row for each run, step and metric."""

from pathlib import Path

import pandas as pd
from steadymoe.bench import record
from steadymoe.bench.status import run_folders

# What tells one run from another, besides its seed.
ARM_KEYS = ["experiment", "algorithm", "model", "task", "axes"]


def runs(results: Path, experiment: str | None = None) -> pd.DataFrame:
    """One row per run folder: its keys, seed, status, and what ``run.json`` says of it."""
    rows = []
    for folder in run_folders(results, experiment):
        facts = record.read_run(folder) or {}
        revision = facts["revision"] or {"commit": "", "changed": False}
        rows.append(
            {key: facts[key] for key in ("experiment", "algorithm", "model", "task", "seed")}
            | {
                "axes": facts["axes_name"],
                "status": record.status(folder),
                "diverged_reason": (facts["diverged"] or {}).get("reason"),
                "diverged_step": (facts["diverged"] or {}).get("step"),
                "wall_seconds": facts.get("wall_seconds"),
                "response_tokens": facts.get("tokens"),
                "parameters": facts.get("parameters"),
                "config_hash": facts["config_hash"],
                "versions": " ".join(f"{name} {number}" for name, number in facts["versions"].items()),
                "revision": revision["commit"] + ("+changes" if revision["changed"] else ""),
                "machine": f"{facts['machine']['cpu']}, {facts['machine'].get('gpu', facts['config']['device'])}",
                "command": facts["command"],
                "folder": str(folder),
            }
        )
    columns = [*ARM_KEYS, "seed", "status", "folder"]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)


def steps(runs: pd.DataFrame) -> pd.DataFrame:
    """The ``steps`` tables of ``runs`` in long form: their keys and seed, step, metric, value.

    A metric that a run does not have (routing of a dense model, the clip of a loss without one) has no rows.
    """
    tables = []
    for run in runs.to_dict("records"):
        table = record.read_table(Path(run["folder"]), "steps").drop(columns="token_ratio_histogram")
        long = table.melt(id_vars="step", var_name="metric", value_name="value").dropna(subset="value")
        tables.append(long.assign(**{key: run[key] for key in [*ARM_KEYS, "seed"]}))
    columns = [*ARM_KEYS, "seed", "step", "metric", "value"]
    return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)


def name_arms(frame: pd.DataFrame) -> pd.Series:
    """A short name for what each row compares: its algorithm, and what else differs within ``frame``."""
    varying = [key for key in ARM_KEYS if key == "algorithm" or frame[key].nunique() > 1]
    return frame[varying].apply(lambda row: " ".join(part for part in row if part), axis=1)
