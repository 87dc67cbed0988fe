"""The tables of collapse that reports and figures take, from runs made by hand."""

import itertools

import numpy as np
import pandas as pd
import pytest

from steadymoe.bench.report import collapses, tables
from steadymoe.bench.statistics import survival


def runs_of(collapses: dict[str, list[float | None]], **keys: object) -> pd.DataFrame:
    """A row per run: an arm's seeds with the step of their collapse."""
    rows = [
        {"arm": arm, "algorithm": arm, "seed": seed, "steps": 40, "collapsed_step": step} | keys
        for arm, steps in collapses.items()
        for seed, step in enumerate(steps)
    ]
    usual = {"routing": "off", "correction": "none", "engine": "exact", "optimizer": "adamw", "model": "micro"}
    usual |= {
        "judged_until": 40,
        "falling_since": np.nan,
        "learning_rate": 1e-3,
        "updates_per_rollout": 4,
        "prompts": 16,
        "status": "finished",
    }
    return pd.DataFrame([usual | row for row in rows]).astype({"collapsed_step": float})


def steps_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Rewards that end at 0.5, and a gradient norm that is high before every collapse and nowhere else."""
    rows = []
    for run, step in itertools.product(runs.to_dict("records"), range(1, 41)):
        loud = run["collapsed_step"] == run["collapsed_step"] and step >= run["collapsed_step"] - 5
        for metric, value in (("reward", 0.5), ("grad_norm", 100.0 if loud else 1.0), ("entropy", 1.0)):
            rows.append({key: run[key] for key in run} | {"step": step, "metric": metric, "value": value})
    return pd.DataFrame(rows)


NO_STEPS = pd.DataFrame(columns=["arm", "seed", "step", "metric", "value"])
RUNS = runs_of({"grpo": [10, 20, None], "gspo": [None, None, None]})


def test_survival_curves_extend_to_the_last_judged_step() -> None:
    curves = collapses.survival_curves(RUNS)
    grpo = curves[curves["arm"] == "grpo"]
    assert grpo["step"].tolist() == [0, 10, 20, 40]
    np.testing.assert_allclose(grpo["survival"], [1, 2 / 3, 1 / 3, 1 / 3])
    gone = collapses.survival_curves(runs_of({"grpo": [10, 20, 30]}))
    assert gone["step"].tolist() == [0, 10, 20, 30, 40]
    assert gone["survival"].tolist()[-2:] == [0, 0]
    assert (curves[curves["arm"] == "gspo"]["survival"] == 1).all()
    assert set(curves["n"]) == {3}
    assert collapses.survival_curves(runs_of({"gspo": [None] * 3})).empty


def grid() -> pd.DataFrame:
    """GRPO collapses where the rate is high and there are many updates; GSPO nowhere."""
    parts = []
    for rate, updates in itertools.product((1e-3, 4e-3), (2, 4, 8)):
        falls = 10.0 if rate == 4e-3 and updates > 2 else None
        part = runs_of(
            {"grpo": [falls] * 3, "gspo": [None] * 3},
            learning_rate=rate,
            updates_per_rollout=updates,
            prompts=4 * updates,
        )
        parts.append(part.assign(arm=part["algorithm"] + f" {rate:g} {updates}"))
    return pd.concat(parts, ignore_index=True)


def test_each_algorithm_with_a_full_grid_has_a_frontier() -> None:
    cells, lines = collapses.frontiers(grid(), NO_STEPS)
    assert len(cells) == 12
    assert cells[cells["stable"] == 0][["arm", "x"]].drop_duplicates().to_numpy().tolist() == [["grpo", 4e-3]]
    assert of_lines(lines) == {"grpo": [8, 2 * np.sqrt(2)], "gspo": [8, 8]}
    runs = grid()
    holes = runs[~((runs["learning_rate"] == 4e-3) & (runs["updates_per_rollout"] == 8))]
    for none in (holes, RUNS):
        assert all(table.empty for table in collapses.frontiers(none, NO_STEPS))


def of_lines(lines: pd.DataFrame) -> dict[str, object]:
    """Arm → the frontier at each learning rate, ascending."""
    return {str(arm): pytest.approx(own.sort_values("x")["y"].tolist()) for arm, own in lines.groupby("arm")}


def test_runs_that_differ_in_a_third_axis_are_not_averaged_into_one_frontier() -> None:
    runs = grid()
    wide = runs[runs["algorithm"] == "grpo"].assign(collapsed_step=np.nan)
    _, lines = collapses.frontiers(pd.concat([runs, wide.assign(arm=wide["arm"] + " clip_high=0.4")]), NO_STEPS)
    assert of_lines(lines) == {"grpo": [8, 2 * np.sqrt(2)], "grpo clip_high=0.4": [8, 8], "gspo": [8, 8]}


def test_replay_has_a_frontier_of_its_own() -> None:
    off, replayed = grid(), grid().assign(routing="r3", collapsed_step=np.nan)
    runs = pd.concat([off, replayed], ignore_index=True)
    is_hole = (runs["algorithm"] == "gspo") & (runs["routing"] == "r3") & (runs["updates_per_rollout"] == 8)
    _, lines = collapses.frontiers(runs[~is_hole | (runs["learning_rate"] < 4e-3)], NO_STEPS)
    assert of_lines(lines) == {"grpo": [8, 2 * np.sqrt(2)], "grpo routing=r3": [8, 8], "gspo": [8, 8]}


def test_frontier_of_short_runs_uses_a_shorter_rule() -> None:
    """Two, four and eight updates a rollout: at two, 80 updates are no patience of 160."""
    runs = grid().assign(steps=40, judged_until=0)
    runs["seed"] += 10 * runs["learning_rate"].rank(method="dense").astype(int)  # one number a run
    steps = [
        {"arm": run["arm"], "seed": run["seed"], "step": step, "metric": "reward"}
        | {"value": 0.0 if run["collapsed_step"] <= step else 0.8}
        for run in runs.to_dict("records")
        for step in range(1, 41)
    ]
    _, lines = collapses.frontiers(runs, pd.DataFrame(steps))
    assert of_lines(lines) == {"grpo": [8, 2 * np.sqrt(2)], "gspo": [8, 8]}
    few = pd.DataFrame(steps).query("step <= 10")  # ten steps of two updates are too few for that too
    assert all(table.empty for table in collapses.frontiers(runs, few))


def test_unjudged_run_is_neither_stable_nor_collapsed() -> None:
    """All runs are censored where a collapse could last be seen, step 31, and not those that fall alone."""
    runs = runs_of({"grpo": [10, 20, None, None]}, judged_until=31)
    runs["falling_since"] = [np.nan, np.nan, 35.0, np.nan]
    time, ended = survival.of_runs(runs)
    assert (time.tolist(), ended.tolist()) == ([10, 20, 31, 31], [True, True, False, False])
    curve = collapses.survival_curves(runs)
    assert curve["step"].tolist() == [0, 10, 20, 31]
    assert curve[["n", "collapsed"]].drop_duplicates().to_numpy().tolist() == [[4, 2]]
    summary = tables.summary(steps_of(runs), runs)
    assert summary[["collapsed", "falling"]].to_numpy().tolist() == [[2, 1]]
    short = runs.assign(judged_until=0, collapsed_step=np.nan)
    assert collapses.survival_curves(short).empty
    assert tables.summary(steps_of(short), short)["collapsed"].isna().all()
    late = runs_of({"grpo": [36.0, None, None]}, judged_until=31)  # not finite, seen where nothing else would be
    assert not survival.of_runs(late)[1].any()
