"""The parts of a score: what was run here and what is recorded, side by side."""

import pandas as pd

from steadymoe.bench.score import kept, standing
from steadymoe.bench.score.asked import SHOWN, Asked
from steadymoe.bench.score.kept import Kept
from steadymoe.bench.score.page import Shown
from steadymoe.bench.score.recorded import Arm, Audited, Recorded
from steadymoe.bench.score.standard import Part


def of(part: Part, asked: Asked, study: Recorded, recorded: Kept) -> tuple[Shown, list[str]]:
    """One part of the score, and remarks on it. Raises NotRun if something of this machine is missing."""
    arms, seeds = asked.here(part), list(asked.seeds(part))
    here = {arm.label: _at(part.number(study, arm), seeds) for arm in arms}
    rows = recorded.of(part)
    rows = rows[rows["seed"].isin(seeds)]
    theirs = {str(arm): group.set_index("seed")["value"] for arm, group in rows.groupby("arm", sort=False)}
    agree, told = standing.agreement(here, theirs, [SHOWN[name] for name in asked.anchors])
    found = standing.rows(asked.mine, here, theirs, part, pooled=agree)
    starts = {str(arm): float(start) for arm, start in rows.groupby("arm")["start"].mean().dropna().items()}
    tokens = {str(arm): float(each) for arm, each in rows.groupby("arm")["tokens"].mean().items()}
    runs = [arm for arm in arms if isinstance(arm, Arm)]
    starts |= {arm.label: float(study.first(arm).mean()) for arm in runs}
    tokens |= {arm.label: float(_at(kept.tokens(study, arm), seeds).mean()) for arm in runs}
    curves = _curves(part, runs, study, recorded, seeds)
    remarks = [told, *_of_machines(study, arms)]
    return Shown(part, found, asked.mine, curves, starts, tokens), [f"{part.name}: {each}" for each in remarks]


def _at(numbers: pd.Series, seeds: list[int]) -> pd.Series:
    return numbers[numbers.index.isin(seeds)]


def _curves(part: Part, arms: list[Arm], study: Recorded, recorded: Kept, seeds: list[int]) -> pd.DataFrame:
    """arm, seed, step, metric, value: rewards over updates, of this machine and recorded; empty without runs."""
    if not arms:
        return pd.DataFrame(columns=["arm", "seed", "step", "metric", "value"])
    own = pd.concat([kept.curve(study, arm).assign(arm=arm.label) for arm in arms])
    labels = [arm.label for arm in arms]
    others = recorded.curves[(recorded.curves["part"] == part.name) & ~recorded.curves["arm"].isin(labels)]
    both = pd.concat([own, others], ignore_index=True)
    return both[both["seed"].isin(seeds)].rename(columns={"update": "step"}).assign(metric="reward")


def _of_machines(study: Recorded, arms: list[Arm | Audited]) -> list[str]:
    """A remark if the runs of this machine were made by several machines or versions of libraries: they are paired."""
    runs = [arm for arm in arms if isinstance(arm, Arm)]
    if not runs:
        return []
    return [f"runs of several kinds are compared seed by seed: {each}" for each in several(study, runs)]


def several(study: Recorded, arms: list[Arm]) -> list[str]:
    """For machine and versions of libraries: the values, where the runs of ``arms`` have more than one."""
    made = study.tables(arms)["runs"]
    return ["; ".join(sorted(set(made[key]))) for key in ("machine", "versions") if made[key].nunique() > 1]
