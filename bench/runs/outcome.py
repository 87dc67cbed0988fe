"""The end of a run in words: why it diverged, and whether it can have learned anything."""

from collections.abc import Sequence

import pandas as pd

from steadymoe.bench.config import compose
from steadymoe.bench.runs import record

_REASONS = {
    "not finite": "not finite",
    "reward": "collapsed: reward",
    "entropy": "collapsed: entropy",
    "gradient norm": "collapsed: gradient norm",
}


def lines(runs: Sequence[compose.Run]) -> list[str]:
    """One line for each run that diverged (with reason and step), and for each run that had nothing to learn from."""
    said = []
    for label, run in zip(compose.labels(runs), runs, strict=True):
        try:
            facts = record.read_run(run.folder) or {}
            ended = facts.get("status") in record.ENDED
            why = silent(record.read_table(run.folder, "steps")) if ended else None
        except (OSError, ValueError):  # a damaged run is named by `steadymoe status`
            continue
        if ended and facts.get("diverged"):
            said.append(f"diverged: {label}: {diverged(facts['diverged'])}")
        if why is not None:
            said.append(f"nothing to learn from: {label}: {why}")
    return said


def diverged(how: dict[str, object]) -> str:
    """The field ``diverged`` of a ``run.json`` in words: reason, step, update."""
    update = "" if how.get("update") is None else f", update {how['update']}"
    return f"{_REASONS.get(str(how.get('reason')), 'for an unknown reason')} at step {how.get('step')}{update}"


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
    """``silent`` for every run of the long ``steps`` of ``collect``: one line for each arm and reason."""
    metrics = steps[steps["metric"].isin(("reward", "grad_norm"))]
    seeds: dict[tuple[str, str], list[str]] = {}
    for (arm, seed), rows in metrics.groupby(["arm", "seed"], sort=False, observed=True):
        wide = rows.pivot_table(index="step", columns="metric", values="value").reindex(columns=["reward", "grad_norm"])
        if (why := silent(wide)) is not None:
            seeds.setdefault((str(arm), why), []).append(str(seed))
    return [f"{arm} (seed {', '.join(found)}): {why}" for (arm, why), found in seeds.items()]
