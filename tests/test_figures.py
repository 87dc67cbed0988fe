"""Figures over an axis and the table of models, from long tables made by hand with known numbers."""

import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from test_families import DOCUMENTED
from test_models import make, shipped

from steadymoe.bench import figures, stats, tables
from steadymoe.models import build


def long_table(values: dict[str, object], arms: list[dict[str, object]], seeds: int = 3) -> pd.DataFrame:
    """Two steps of each metric for each arm and seed; a value is a function of the arm and the seed."""
    usual = {"algorithm": "grpo", "routing": "off", "correction": "none", "engine": "exact", "strength": 0.0}
    usual |= {"moe_layers": 4, "experts": 8}
    rows = []
    for arm, seed, step in itertools.product(arms, range(seeds), (1, 2)):
        keys = usual | arm | {"arm": " ".join(map(str, arm.values())), "seed": seed, "step": step}
        rows += [keys | {"metric": name, "value": of(arm, seed)} for name, of in values.items()]  # type: ignore[operator]
    return pd.DataFrame(rows)


def points(figure: Figure, panel: int) -> dict[str, list[float]]:
    """What each line of a panel shows, by its label."""
    handles, labels = figure.axes[panel].get_legend_handles_labels()
    return {label: handle.lines[0].get_ydata().tolist() for handle, label in zip(handles, labels, strict=True)}


DOSES = [
    {"algorithm": algorithm, "routing": routing, "engine": "router_noise", "strength": strength}
    for algorithm, routing, strength in itertools.product(("grpo", "gspo"), ("off", "r3"), (0.0, 0.5, 2.0))
]


def test_dose_and_response_are_means_over_seeds_at_each_strength() -> None:
    def reward(arm: dict[str, float], seed: int) -> float:
        return 0.8 - 0.1 * arm["strength"] + 0.01 * seed + 0.1 * (arm["routing"] == "r3")

    steps = long_table(
        {
            "reward": reward,
            "rollout_kl_k3": lambda arm, seed: 10.0 ** (arm["strength"] + seed),
            "token_ratio_variance": lambda arm, seed: 1e-3,
        },
        DOSES,
    )
    figure = figures.dose_response(steps)
    assert figure is not None
    shown = points(figure, 0)
    assert list(shown) == ["grpo off", "grpo r3", "gspo off", "gspo r3"]
    np.testing.assert_allclose(shown["grpo off"], [0.81, 0.76, 0.61])
    np.testing.assert_allclose(shown["gspo r3"], [0.91, 0.86, 0.71])
    np.testing.assert_allclose(points(figure, 1)["grpo off"], [10.0, 10.0**1.5, 1000.0])  # geometric
    assert [axis.get_yscale() for axis in figure.axes] == ["linear", "log", "log"]
    assert {axis.get_xlabel() for axis in figure.axes} == {"strength of router_noise"}
    assert all(axis.get_ylabel() for axis in figure.axes)
    handle = figure.axes[0].get_legend_handles_labels()[0][0]
    (low, high), *_ = [segment[:, 1] for segment in handle.lines[2][0].get_segments()]
    estimate = stats.mean_over_seeds([0.8, 0.81, 0.82])
    np.testing.assert_allclose([low, high], [estimate.low, estimate.high])
    assert "n = 3" in " ".join(figure.texts[-1].get_text().split())
    assert figures.dose_response(steps[steps["strength"] == 0]) is None


def test_below_three_seeds_there_are_points_and_no_bars() -> None:
    figure = figures.dose_response(long_table({"reward": lambda arm, seed: 0.5}, DOSES, seeds=2))
    assert figure is not None
    handle = figure.axes[0].get_legend_handles_labels()[0][0]
    assert all(segment[0, 1] == segment[1, 1] for segment in handle.lines[2][0].get_segments())
    assert "interval" not in figure.texts[-1].get_text()


def test_attribution_is_drawn_against_depth_with_a_line_for_each_number_of_experts() -> None:
    arms: list[dict[str, object]] = [
        {"moe_layers": layers, "experts": experts} for layers, experts in itertools.product((2, 12), (8, 32))
    ]
    steps = long_table(
        {
            "routing_share": lambda arm, seed: arm["moe_layers"] / 20 + arm["experts"] / 100,
            "log_ratio_moment_changed": lambda arm, seed: 1e-2 * arm["moe_layers"],
            "log_ratio_moment_unchanged": lambda arm, seed: 1e-4,
        },
        arms,
    )
    figure = figures.attribution(steps)
    assert figure is not None
    shared, ratio = points(figure, 0), points(figure, 1)
    assert list(shared) == ["32 experts", "8 experts"]
    np.testing.assert_allclose(shared["8 experts"], [0.18, 0.68])
    np.testing.assert_allclose(shared["32 experts"], [0.42, 0.92])
    np.testing.assert_allclose(ratio["8 experts"], [200, 1200])
    assert figures.attribution(steps[steps["moe_layers"] == 2]) is None


def test_steps_without_changed_tokens_have_no_ratio() -> None:
    arms: list[dict[str, object]] = [{"moe_layers": layers} for layers in (2, 4)]
    steps = long_table(
        {"routing_share": lambda arm, seed: 0.1, "log_ratio_moment_changed": lambda arm, seed: 0.1}, arms
    )
    figure = figures.attribution(steps)
    assert figure is not None
    assert points(figure, 1) == {}


def test_the_table_of_models_has_sizes_and_estimates() -> None:
    arms: list[dict[str, object]] = [{"model": "micro"}, {"model": "olmoe_micro"}, {"model": "dense_micro"}]
    steps = long_table(
        {
            "rollout_expert_disagreement": lambda arm, seed: 0.1 * (seed + (arm["model"] == "micro")),
            "log_ratio_moment_free": lambda arm, seed: 4.0,
            "log_ratio_moment_pinned": lambda arm, seed: 1.0 + seed,
        },
        arms,
    )
    # One step in which routing did it all outweighs one in which nothing moved.
    steps.loc[(steps["metric"] == "log_ratio_moment_free") & (steps["step"] == 2), "value"] = 0.0
    steps.loc[(steps["metric"] == "log_ratio_moment_pinned") & (steps["step"] == 2), "value"] = 0.0
    runs = steps.drop_duplicates(["arm", "seed"]).assign(parameters=400, active_parameters=100, top_k=2)
    runs.loc[runs["model"] == "dense_micro", "experts"] = 0
    made = tables.models(steps, runs)
    assert made is not None
    assert made["arm"].tolist() == ["micro", "olmoe_micro"]
    assert made["experts"].tolist() == ["2 of 8", "2 of 8"]
    assert made["active parameters"].tolist() == [100, 100]
    np.testing.assert_allclose(made["sampler–trainer disagreement"].iloc[0].mean, 0.2)
    share = made["share of routing"].iloc[0]
    np.testing.assert_allclose([share.mean, share.n], [np.mean([0.75, 0.5, 0.25]), 3])
    assert "0.2 [" in tables.to_markdown(made)
    np.testing.assert_allclose(tables.to_numbers(made)["sampler–trainer disagreement mean"].iloc[1], 0.1)
    assert tables.models(steps, runs[runs["model"] != "olmoe_micro"]) is None


@pytest.mark.parametrize("row", DOCUMENTED, ids=lambda row: row[0].strip("`"))
def test_the_size_of_a_model_is_what_is_documented(row: list[str]) -> None:
    name, _, layers, shape, parameters, active, _ = row
    size = build.size(make(shipped(name.strip("`"))))
    assert [size["parameters"], size["active_parameters"]] == [
        int(each.replace(",", "")) for each in (parameters, active)
    ]
    assert size["moe_layers"] == (int(layers.split(", ")[1].removesuffix(" MoE")) if "MoE" in layers else 0)
    assert shape == (f"{size['top_k']} of {size['experts']}" if size["experts"] else "")
