"""The table Realism: numbers of an experiment's arms next to the published ranges."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from steadymoe.bench.report import realism
from steadymoe.bench.report.realism import OVER_DENSE, ROWS, Realism
from steadymoe.bench.runs import compose
from steadymoe.bench.statistics.estimates import Estimate
from steadymoe.bench.training import columns

SEEDS, RESPONSES = (0, 1, 2), 4
# Every column of the table, constant over steps and seeds.
VALUES = {
    "expert_change_per_update": 0.2,
    "token_any_layer_change_rate": 0.25,
    "rollout_kl_k3": 1e-3,
    "rollout_set_disagreement": 0.1,
    "clip_fraction": 0.01,
    "router_margin_over_spread": 0.04,
    "tokens_sampled": 480.0,
    "prompts_sampled": 6.0,
    "log_ratio_moment_free": 0.4,
    "log_ratio_moment_pinned": 0.1,
    "log_ratio_moment_top": 0.3,
    "eval_accuracy": 0.8,
    "eval_accuracy_permuted": 0.2,
    "relative_step_routers": 6e-4,
    "relative_step_others": 1e-4,
    "token_ratio_variance": 0.12,
    "rollout_any_layer_disagreement": 0.95,
    "rollout_top1_disagreement": 0.102,
    "rollout_extreme_share": 3e-4,
    "ess": 0.6,
}


def experiment(**arms: dict[str, object]) -> dict[str, pd.DataFrame]:
    """The tables of an experiment: each arm's facts, and its columns where they differ from ``VALUES``."""
    runs, steps = [], []
    for arm, facts in arms.items():
        of_run = {"algorithm": "grpo", "model": "flat", "engine": "fp8", "moe_layers": 4, "config": "{}"} | facts
        metrics = VALUES | {name: of_run.pop(name) for name in VALUES if name in of_run}
        runs += [{"arm": arm, "seed": seed, **of_run} for seed in SEEDS]
        steps += [
            {"arm": arm, "seed": seed, "step": step, "metric": metric, "value": value, "responses": RESPONSES}
            for seed in SEEDS
            for step in (1, 2)
            for metric, value in metrics.items()
            if value is not None
        ]
    return {"runs": pd.DataFrame(runs), "steps": pd.DataFrame(steps)}


def factors(data: dict[str, pd.DataFrame], arm: str) -> dict[tuple[str, str], float]:
    return {(each.row.gate, each.row.what): each.factor for each in realism.measure(data) if each.arm == arm}


@pytest.mark.parametrize(("number", "factor"), [(0.5, 0.25), (2.0, 1.0), (3.0, 1.0), (4.0, 1.0), (10.0, 2.5)])
def test_factor_is_relative_to_the_nearer_end_of_the_range(number: float, factor: float) -> None:
    row = replace(ROWS[0], low=2.0, high=4.0)
    assert Realism(row, "", "", Estimate(number, np.nan, np.nan, 1)).factor == factor
    assert np.isnan(Realism(replace(row, low=np.nan, high=np.nan), "", "", Estimate(number, 0, 9, 3)).factor)


def test_every_row_is_computed_from_its_own_columns() -> None:
    found = factors(experiment(ours={}), "ours")
    expected = {"R1": 0.2 / 0.15, "R2": 0.5, "R4": 2.0, "R6": 2.0, "R7": 0.2, "R8": 1.0, "R9": 1.0, "R10": 2.0}
    assert {gate: factor for (gate, _), factor in found.items() if gate in expected} == pytest.approx(expected)
    assert [factor for (gate, _), factor in found.items() if gate == "R3"] == [1.0, 1.0]
    assert found["", "routers whose strongest expert differs"] == pytest.approx(2.0)
    assert found["", "effective sample size per token"] == pytest.approx(0.6 / 0.7)
    assert found["", "tokens with a ratio beyond 2, F(2)"] == pytest.approx(0.5)
    numbers = {each.row.what: each.number.mean for each in realism.measure(experiment(ours={}))}
    assert numbers["accuracy with routes permuted among tokens, over accuracy"] == pytest.approx(0.25)
    assert numbers["response length times E[f²]"] == pytest.approx(480 / (6 * RESPONSES) * 0.4)
    assert numbers["routing's share of the log-ratio"] == pytest.approx(0.75)
    assert not any(each.row.gate == "R5" for each in realism.measure(experiment(ours={})))


def test_range_is_shown_only_for_its_engine_and_algorithm() -> None:
    data = experiment(exact={"engine": "exact"}, gspo={"algorithm": "gspo"}, cispo={"algorithm": "cispo"})
    assert not any(gate == "R3" for gate, _ in factors(data, "exact"))
    assert factors(data, "exact")["", "KL of sampler from trainer (k3, nats)"] == pytest.approx(1e-3 / 8.4e-4)
    assert factors(data, "gspo")["R4", "clipped tokens"] == pytest.approx(0.1)
    assert not any(gate == "R4" for gate, _ in factors(data, "cispo"))


def test_an_moe_is_compared_with_its_dense_twin() -> None:
    dense = {"model": "dense_flat", "moe_layers": 0, "token_ratio_variance": 0.02, "expert_change_per_update": None}
    data = experiment(moe={}, dense=dense)
    assert factors(data, "moe")["R5", OVER_DENSE.what] == pytest.approx(6 / 2.4)
    assert not any(gate in ("R1", "R5") for gate, _ in factors(data, "dense"))


@pytest.mark.parametrize(
    ("moe", "is_twin"),
    [
        ({"optimizer": {"router_factor": 0.1, "learning_rate": 1.0}}, True),
        ({"cold_start": {"router_factor": 0.02, "aux_loss": 0.02}, "routing": {"replay": "r2"}, "seed": 7}, True),
        ({"model": {"config": {"num_experts": 32, "hidden_size": 64, "intermediate_size": 32}}}, True),
        ({"model": {"config": {"hidden_size": 128}}}, False),
        ({"optimizer": {"learning_rate": 2.0}}, False),
        ({"name": "micro"}, False),
        ({"algorithm": "gspo"}, False),
    ],
    ids=str,
)
def test_dense_twin_differs_only_in_routers_and_experts(moe: dict[str, Any], is_twin: bool) -> None:
    config = {
        "optimizer": {"router_factor": 1.0, "learning_rate": 1.0},
        "cold_start": {"router_factor": 1.0, "aux_loss": 0.0},
        "routing": {"replay": "none"},
        "model": {"config": {"hidden_size": 64, "intermediate_size": 64}},
        "seed": 0,
    }
    keys = {"model": moe.get("name", "flat"), "algorithm": moe.get("algorithm", "grpo")}
    ours = keys | {"config": json.dumps(config | moe)}
    dense = {"model": "dense_flat", "moe_layers": 0, "config": json.dumps(config)}
    assert any(gate == "R5" for gate, _ in factors(experiment(moe=ours, dense=dense), "moe")) is is_twin


@pytest.mark.parametrize("moe", ["flat", "deepseek_v3_tiny", "mixtral_micro"])  # their feed-forwards differ otherwise
def test_shipped_dense_models_are_twins_of_their_moe(moe: str) -> None:
    def run(model: str, *words: str) -> pd.Series:
        (planned,) = compose.plan(["algorithm=grpo", f"model={model}", "seed=0", *words])
        return pd.Series({"model": model, "algorithm": "grpo", "config": json.dumps(planned.plain)})

    dense = run(f"dense_{moe}")
    assert realism.is_twin(dense, run(moe, "optimizer.router_factor=0.1", "cold_start.aux_loss=0.02"))
    assert not realism.is_twin(dense, run(moe, "updates_per_rollout=4"))


def test_unrecorded_quantities_are_left_out() -> None:
    missing = dict.fromkeys(VALUES)
    assert realism.table(experiment(ours={}) | {"steps": pd.DataFrame()}).empty
    table = realism.table(experiment(ours=missing | {"expert_change_per_update": 0.1, "clip_fraction": 0.001}))
    assert table["gate"].tolist() == ["R1", "R4"]
    assert (table["n"].tolist(), table["published"].tolist()) == ([3, 3], ["0.05 to 0.15", "0.0005 to 0.005"])


def test_gates_are_ordered_and_archives_keep_all_they_read() -> None:
    gates = [int(each.row.gate[1:]) for each in realism.measure(experiment(ours={})) if each.row.gate]
    assert gates == sorted(gates)
    assert set(VALUES) <= columns.kept()
