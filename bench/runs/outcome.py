"""The end of a run in words: how it ended, and whether it can have learned anything."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from steadymoe.bench.config import compose
from steadymoe.bench.runs import record

# How a run ends, and what the rule of collapse says of it; docs/glossary.md has the same table.
TERMS = {
    "finished": "Reached its last step without a collapse.",
    "collapsed": "The reward fell below half of its best, or entropy or gradient norm ran away, and did not recover "
    "within the patience of the rule. The run goes on to its last step.",
    "diverged": "Loss, gradient or sampling distribution stopped being finite. The run ends there; tables count it as "
    "collapsed.",
    "falling": "Falling when it ended, but not for long enough to be called collapsed. Tables do not count it as "
    "collapsed.",
    "not judged": "Too short for the rule of collapse; tables show –.",
}
_REASONS = ("not finite", "reward", "entropy", "gradient norm")
# Algorithms that are meant to break.
_CONTROLS = ("grpo_unclipped",)


def lines(runs: Sequence[compose.Run]) -> list[str]:
    """One line for each run that collapsed or diverged, with reason and step, and for each that could not learn."""
    said = []
    for label, run in zip(compose.labels(runs), runs, strict=True):
        try:
            facts = record.read_run(run.folder) or {}
            ended = facts.get("status") in record.ENDED
            why = silent(record.read_table(run.folder, "steps")) if ended else None
        except (OSError, ValueError):  # a damaged run is named by `steadymoe status`
            continue
        if ended and facts.get("diverged"):
            how = facts["diverged"]
            expected = " (expected: this is the control without a clip)" if facts["algorithm"] in _CONTROLS else ""
            said.append(f"{record.ended(how)}: {label}: {reason(how)}{expected}")
        if why is not None:
            said.append(f"nothing to learn from: {label}: {why}")
    return said


def reason(how: Mapping[str, Any]) -> str:
    """Return the field ``diverged`` of a ``run.json`` in words: "reward at step 10"."""
    update = "" if how.get("update") is None else f", update {how['update']}"
    return f"{how['reason'] if how['reason'] in _REASONS else 'unknown reason'} at step {how['step']}{update}"


def recorded(run: Mapping[str, Any]) -> str:
    """Return the status of a row of ``archive.runs``, with reason and step if the run collapsed or diverged."""
    return (
        run["status"] if pd.isna(run["diverged_reason"]) else _with_reason(run["diverged_reason"], run["diverged_step"])
    )


def judged(run: Mapping[str, Any]) -> str:
    """Return what today's rule says of a row of ``collapse.judged``."""
    if run["collapsed_step"] > 0:
        return _with_reason(run["collapsed_reason"], run["collapsed_step"])
    if run["falling_since"] > 0:
        return f"falling since step {run['falling_since']:.0f}"
    return f"no collapse up to step {run['judged_until']:.0f}" if run["judged_until"] > 0 else "not judged"


def _with_reason(why: str, step: float) -> str:
    how = {"reason": why, "step": int(step)}
    return f"{record.ended(how)} ({reason(how)})"


def silent(steps: pd.DataFrame) -> str | None:
    """Why a run with this ``steps`` table cannot have learned from its rewards, or None.

    The column ``grad_norm`` is the mean over the updates of a step, so it is 0 only if every update's norm is 0.
    """
    found = []
    for name, said in (("reward", "reward 0 in every step"), ("grad_norm", "gradient norm 0 in every update")):
        values = steps[name].dropna()
        if len(values) and (values == 0).all():
            found.append(said)
    return ", ".join(found) or None


def silent_arms(steps: pd.DataFrame) -> list[str]:
    """``silent`` for every run of the long ``steps`` of ``archive``: one line for each arm and reason."""
    metrics = steps[steps["metric"].isin(("reward", "grad_norm"))]
    seeds: dict[tuple[str, str], list[str]] = {}
    for (arm, seed), rows in metrics.groupby(["arm", "seed"], sort=False, observed=True):
        wide = rows.pivot_table(index="step", columns="metric", values="value").reindex(columns=["reward", "grad_norm"])
        if (why := silent(wide)) is not None:
            seeds.setdefault((str(arm), why), []).append(str(seed))
    return [f"{arm} (seed {', '.join(found)}): {why}" for (arm, why), found in seeds.items()]
