"""Figures from long tables made by hand with known numbers: lines, labels and values, not only that a file appears."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from small_figures import arms, long_table, results_of, said, shown

from steadymoe import conf
from steadymoe.bench.report import figures, tables, write
from steadymoe.bench.report.figures import FIGURES, colours, curves, points, routing, style
from steadymoe.bench.statistics import estimates
from steadymoe.bench.training import columns


# Of every figure: one line has a known value at the second step.
def reward(arm: dict[str, float], seed: int) -> float:
    return 0.5 + 0.1 * seed + 0.05 * (arm["step"] - 1)


COMPARED = arms(algorithm=["grpo", "gspo"])


def test_reward_is_drawn_over_the_sampled_tokens() -> None:
    values = {
        "reward": reward,
        "eval_accuracy": lambda arm, seed: 0.4 + 0.1 * seed,
        "tokens_sampled": lambda arm, seed: 100.0 * (seed + 1),
    }
    figure = curves.reward_compute(long_table(values, COMPARED))
    line = next(each for each in figure.axes[0].lines if each.get_label() == "grpo")
    np.testing.assert_allclose(line.get_xdata(), [200, 400])
    np.testing.assert_allclose(line.get_ydata(), [0.6, 0.65])  # too few steps to smooth
    np.testing.assert_allclose(shown(figure, 1)["gspo"], [0.5, 0.5])
    assert figure.axes[-1].get_xlabel() == "sampled tokens"


def test_differences_are_at_equal_compute_where_curves_are_over_compute() -> None:
    values = dict.fromkeys(("reward", "eval_accuracy"), lambda arm, seed: 0.1 * arm["step"])
    # GSPO's responses are longer by half.
    values["tokens_sampled"] = lambda arm, seed: 100.0 if arm["algorithm"] == "grpo" else 150.0
    figure = curves.reward_compute(long_table(values, COMPARED, seeds=1, steps=4))
    assert "Δ at equal sampled tokens" in said(figure)
    assert [axis.get_xlabel() for axis in figure.axes] == ["sampled tokens"] * 3
    apart = figure.numbers.query("series == 'gspo − grpo'")
    assert apart["x"].tolist() == [150, 300]  # GRPO ends at 400
    # At 150 tokens GRPO is half-way between its first two steps.
    np.testing.assert_allclose(apart["mean"], [-0.05, -0.1], atol=1e-12)


def test_curves_are_smoothed_over_a_tenth_of_their_steps_at_most() -> None:
    values = dict.fromkeys(("reward", "token_ratio_variance"), lambda arm, seed: float(arm["step"]))
    figure = curves.replay(long_table(values, COMPARED, steps=30))
    drawn = figure.numbers.query("panel == 'training reward' and series == 'grpo'")["mean"].tolist()
    assert drawn[:4] == [1.0, 1.5, 2.0, 3.0]
    assert "smoothed over 3 steps" in said(figure)


def test_caption_names_lines_that_coincide() -> None:
    equal = long_table(
        {"reward": reward, "token_ratio_variance": reward}, arms(algorithm=["grpo"], routing=["r2", "r3"])
    )
    other = long_table({"reward": lambda arm, seed: 0.1}, arms(algorithm=["grpo"], routing=["off"]))
    assert "Equal to the bit, in one line: grpo r2 and grpo r3." in said(
        curves.replay(pd.concat([equal, other], ignore_index=True))
    )
    assert "Equal" not in said(curves.replay(other))


def test_seed_that_ended_early_counts_its_spent_tokens() -> None:
    steps = long_table({"reward": reward, "tokens_sampled": lambda arm, seed: 100.0}, COMPARED)
    steps = steps[~((steps["metric"] == "tokens_sampled") & (steps["seed"] == 0) & (steps["step"] == 2))]
    np.testing.assert_allclose(curves.sampled_tokens(steps)["grpo"], [100, (100 + 200 + 200) / 3])


def test_clip_bars_are_means_over_seeds_and_a_loss_without_a_clip_has_none() -> None:
    steps = long_table(
        {"clip_fraction": lambda arm, seed: 0.1 * (seed + 1) / (1 + (arm["algorithm"] == "gspo"))}, COMPARED
    )
    without = long_table({"reward": reward}, arms(algorithm=["reinforce"]))
    figure = points.clip_fraction(pd.concat([steps, without]))
    (axis,) = figure.axes
    np.testing.assert_allclose([bar.get_width() for bar in axis.patches], [0.2, 0.1])
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["grpo", "gspo"]
    assert len([x for line in axis.lines for x in line.get_xdata()]) == 6
    assert "No clip: reinforce" in said(figure)


def test_replay_compares_only_routing() -> None:
    values = {"reward": reward, "token_ratio_variance": lambda arm, seed: 10.0 ** -(seed + 2)}
    figure = curves.replay(long_table(values, arms(algorithm=["grpo"], routing=["off", "r2", "r3"])))
    assert list(shown(figure, 0)) == ["grpo off", "grpo r2", "grpo r3"]
    np.testing.assert_allclose(shown(figure, 1)["grpo r2"], [1e-3, 1e-3])  # geometric
    assert [axis.get_yscale() for axis in figure.axes] == ["linear", "log", "linear"]


def test_captions_set_a_difference_beside_the_papers() -> None:
    """GSPO ends .1 above GRPO on one model, below it on another, and on neither side on a third."""
    ends = {"up": [0.1, 0.11, 0.09], "down": [-0.1, -0.11, -0.09], "wide": [0.3, -0.2, 0.0]}
    rows = [
        {"arm": f"{algorithm} {model}", "algorithm": algorithm, "model": model, "seed": seed, "step": step}
        | {"metric": curves.ACCURACY, "value": 0.5 if step == 0 or algorithm == "grpo" else 0.5 + apart}
        for model, its in ends.items()
        for seed, apart in enumerate(its)
        for algorithm, step in itertools.product(("grpo", "gspo"), (0, 1))
    ]
    steps = pd.DataFrame(rows).assign(routing="off", correction="off")
    said = curves.effect(steps, curves.ACCURACY, "end", curves.LEAD, "above 0")
    assert "Held-out accuracy, gspo − grpo (the paper: above 0): down -0.1 [" in said
    parts = {each.split()[0]: each.rpartition(", ")[2] for each in said.rpartition(": ")[2].rstrip(".").split("; ")}
    assert parts == {"up": "above 0", "down": "below 0", "wide": "not told from 0"}
    assert curves.effect(steps[steps["algorithm"] == "grpo"], curves.ACCURACY, "end", curves.LEAD, "above 0") == ""
    elsewhere = steps.assign(start=np.where(steps["algorithm"] == "grpo", 0.4, 0.5))  # other starts are not paired
    assert curves.effect(elsewhere, curves.ACCURACY, "end", curves.LEAD, "above 0") == ""
    replay = curves.effect(
        pd.concat([steps.assign(arm=steps["arm"] + " r2", routing="r2", value=0.7), steps]),
        *(curves.ACCURACY, "end", {"routing": ("r2", "off")}, "0"),
        algorithm="grpo",
    )
    # Equal differences have no interval.
    assert "grpo r2 − off (the paper: 0): down 0.2, n = 3, not told from 0" in replay


def test_a_metric_that_no_run_recorded_has_no_panel() -> None:
    three = ("reward", "token_ratio_variance", "clip_fraction")
    for metrics in (three, three[:1]):
        figure = curves.overview(long_table(dict.fromkeys(metrics, reward), arms(algorithm=["grpo"])))
        assert [axis.get_ylabel() for axis in figure.axes] == [columns.label(metric) for metric in metrics]
        assert ("Clipped shares" in said(figure)) is (metrics == three)


def stale(grow: bool) -> list[dict[str, object]]:
    made = arms(algorithm=["grpo", "gspo", "vespo"], updates_per_rollout=[4, 8])
    return [each | {"minibatch_prompts": 4 if grow else 32 // each["updates_per_rollout"]} for each in made]  # type: ignore[operator]


@pytest.mark.parametrize("grow", [True, False])
def test_staleness_grid_has_a_panel_per_method_and_a_line_per_staleness(grow: bool) -> None:
    steps = long_table({"reward": lambda arm, seed: 0.1 * arm["updates_per_rollout"]}, stale(grow), seeds=10)
    figure = curves.staleness_grid(steps)
    assert [axis.get_title() for axis in figure.axes] == ["grpo", "gspo", "vespo"]
    for axis in figure.axes:
        for line, updates in zip(axis.lines, (4, 8), strict=True):
            assert line.get_label() == f"N = {updates}"
            np.testing.assert_allclose(line.get_xdata(), [0, updates])  # before its rollouts
            np.testing.assert_allclose(line.get_ydata(), [0.1 * updates] * 2)
    design = "Mini-batch fixed at 4 prompts" if grow else "Rollout fixed at 32 prompts"
    assert design in said(figure)
    neither = pd.DataFrame({"updates_per_rollout": [2, 4, 8], "minibatch_prompts": [4, 4, 2]})
    assert "Neither" in style.design(neither)
    assert style.design(neither[:1]) == ""
    assert len({line.get_color() for line in figure.axes[0].lines}) == 2


def test_distributions_are_shares_of_all_counts() -> None:
    rows = []
    for model, seed in itertools.product(("micro", "dense_micro"), range(2)):
        for metric, bins in (("token_ratio_histogram", 42), ("sequence_log_ratio_variance_histogram", 34)):
            counts = np.zeros(bins, dtype=int)
            counts[20], counts[21] = 1, 3 if model == "micro" else 1
            keys = {"arm": model, "model": model, "algorithm": "grpo", "seed": seed, "metric": metric}
            rows += [keys | {"bin": place, "count": count} for place, count in enumerate(counts)]
    figure = routing.ratio_distributions(pd.DataFrame(rows))
    for axis in figure.axes:
        dense, moe = axis.patches
        assert (dense.get_label(), moe.get_label()) == ("dense_micro", "micro")
        np.testing.assert_allclose(moe.get_data().values[[20, 21]], [0.25, 0.75])
        np.testing.assert_allclose(dense.get_data().values[[20, 21]], [0.5, 0.5])
    edges = [axis.patches[0].get_data().edges for axis in figure.axes]
    np.testing.assert_allclose(edges[0][1:-1], columns.LOG_RATIO_EDGES)
    np.testing.assert_allclose(10 ** edges[1][1:-1], columns.VARIANCE_EDGES, rtol=1e-5)
    assert "n = 2" in said(figure)


def test_drift_is_drawn_against_each_varying_axis() -> None:
    grid = arms(updates_per_rollout=[2, 4, 8], learning_rate=[1e-4, 2e-4, 4e-4], moe_layers=[2, 4, 8])
    grid = [each | {"minibatch_prompts": 4} for each in grid]  # type: ignore[operator]
    product = {"expert_change_rate": lambda arm, seed: math.prod(arm[axis] for axis in routing.AXES)}
    figure = routing.drift(long_table(product, grid))
    assert [axis.get_xlabel() for axis in figure.axes] == ["updates per rollout", "learning rate", "MoE layers"]
    np.testing.assert_allclose(shown(figure, 0)["1e-4 learning rate"], [8e-4, 16e-4, 32e-4])  # at 4 layers
    np.testing.assert_allclose(shown(figure, 1)["8 MoE layers"], [32e-4, 64e-4, 128e-4])  # at 4 updates
    np.testing.assert_allclose(shown(figure, 2)["2 updates per rollout"], [8e-4, 16e-4, 32e-4])  # at 2e-4
    assert "Mini-batch fixed at 4 prompts" in said(figure)
    alone = long_table(product, [each for each in grid if each["moe_layers"] == 4])
    assert len(routing.drift(alone).axes) == 2


@pytest.mark.parametrize(("draw", "metric"), [(curves.staleness_grid, "reward"), (routing.drift, "expert_change_rate")])
@pytest.mark.parametrize(
    ("key", "values"), [("model", ["flat", "micro"]), ("engine", ["exact", "fp8"]), ("num_experts", [8, 32])]
)
def test_arms_that_differ_in_more_than_the_dials_are_not_averaged(
    draw: Callable[[pd.DataFrame], style.DataFigure], metric: str, key: str, values: list[object]
) -> None:
    apart = arms(**{key: values}, updates_per_rollout=[4, 8])
    steps = long_table({metric: lambda arm, seed: 0.2 if arm[key] == values[0] else 0.6}, apart)
    steps["arm"] = "grpo " + (f"{key}=" if key != "model" else "") + steps[key].astype(str)
    steps["arm"] += " updates_per_rollout=" + steps["updates_per_rollout"].astype(str)
    numbers = draw(steps.assign(minibatch_prompts=4)).numbers
    numbers = numbers[~numbers["series"].str.contains("seed|−")]
    assert sorted(numbers["mean"].round(9).unique()) == [0.2, 0.6]


DOSES = arms(algorithm=["grpo", "gspo"], routing=["off", "r3"], engine=["router_noise"], strength=[0.0, 0.5, 2.0])


def test_dose_response_averages_over_seeds_at_each_strength() -> None:
    values = {
        "reward": lambda arm, seed: 0.8 - 0.1 * arm["strength"] + 0.01 * seed + 0.1 * (arm["routing"] == "r3"),
        "rollout_kl_k3": lambda arm, seed: 10.0 ** (arm["strength"] + seed),
        "token_ratio_variance": lambda arm, seed: 1e-3,
    }
    figure = points.dose_response(long_table(values, DOSES, seeds=10))
    lines = shown(figure, 0)
    assert list(lines) == ["grpo", "grpo routing=r3", "gspo", "gspo routing=r3"]
    np.testing.assert_allclose(lines["grpo"], [0.845, 0.795, 0.645])
    np.testing.assert_allclose(lines["gspo routing=r3"], [0.945, 0.895, 0.745])
    np.testing.assert_allclose(shown(figure, 1)["grpo"], [10.0**4.5, 10.0**5, 10.0**6.5])  # geometric
    assert [axis.get_yscale() for axis in figure.axes] == ["linear", "log", "log"]
    assert figure.axes[-1].get_xlabel() == "strength of router_noise"
    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]  # of grpo off, highest at strength 0
    estimate = estimates.over_seeds([0.8 + 0.01 * seed for seed in range(10)], bounds=(0.0, 1.0))
    assert estimate.high == pytest.approx(max(band))
    assert estimate.low in band
    assert "n = 10" in said(figure)


def test_dose_response_below_ten_seeds_shows_each_seed() -> None:
    values = {"reward": lambda arm, seed: 0.5 + 0.1 * seed + 0.01 * (seed + 1) * (arm["algorithm"] == "gspo")}
    figure = points.dose_response(long_table(values, DOSES, seeds=2))
    assert not figure.axes[0].collections
    numbers = figure.numbers.groupby(["panel", "series"])["mean"].first()
    np.testing.assert_allclose(numbers["final reward", "gspo routing=r3, seed 1"], 0.62)
    np.testing.assert_allclose(numbers["Δ final reward", "gspo routing=r3 − grpo, seed 1"], 0.02)
    np.testing.assert_allclose(numbers["Δ final reward", "gspo routing=r3 − grpo"], 0.015)
    assert "interval" not in said(figure)


@pytest.mark.parametrize("draw", [curves.replay, curves.reward_compute])
def test_curves_below_ten_seeds_show_each_seed_without_a_band(draw: Any) -> None:
    metrics = ("reward", "eval_accuracy", "token_ratio_variance", "tokens_sampled")
    gains = {"grpo": 0.0, "gspo": 0.02}
    value = dict.fromkeys(metrics, lambda arm, seed: 0.3 + 0.1 * seed + (seed + 1) * gains[arm["algorithm"]])
    few = draw(long_table(value, COMPARED))
    assert all(not axis.collections for axis in few.axes)
    label = few.axes[0].get_ylabel()
    thin = [line for line in few.axes[0].lines if line.get_linewidth() < 1]
    assert len(thin) == 6
    np.testing.assert_allclose(thin[-1].get_ydata(), 0.56)
    numbers = few.numbers.groupby(["panel", "series"])["mean"].first()
    np.testing.assert_allclose(numbers[label, "gspo, seed 2"], 0.56)
    np.testing.assert_allclose(numbers["Δ training reward", "gspo − grpo, seed 2"], 0.06)
    np.testing.assert_allclose(numbers["Δ training reward", "gspo − grpo"], 0.04)
    assert "thin lines: seeds; Δ: arm − grpo, of the same seed and cold start" in said(few)


def test_each_model_has_a_row_and_arms_that_do_not_name_it() -> None:
    models = [{"algorithm": name, "model": model} for model in ("dense_micro", "micro") for name in ("grpo", "gspo")]
    steps = long_table(dict.fromkeys(("reward", "token_ratio_variance"), reward), models)
    steps["arm"] = steps["algorithm"] + " " + steps["model"]
    steps["experts"] = steps["model"].map({"micro": 8, "dense_micro": 0})
    figure = curves.replay(steps)
    titles = ["MoE, 8 experts (micro)", "dense (dense_micro)"]
    assert [axes[0].get_title(loc="left") for axes in figure.blocks] == titles
    series = figure.numbers.groupby("panel")["series"].agg(set)
    for title in titles:
        assert {"grpo", "gspo"} <= series[f"{title}, training reward"]
    assert len(figure.legends) + sum(len(part.legends) for part in figure.subfigs) == 1  # lines look alike
    moe_only = steps[(steps["metric"] == "reward") | (steps["model"] == "micro")]
    drawn, empty = (axes[1] for axes in curves.replay(moe_only).blocks)
    assert [text.get_text() for text in empty.texts] == ["none"]
    assert (empty.get_yscale(), empty.get_ylim()) == (drawn.get_yscale(), drawn.get_ylim())


def test_a_line_looks_the_same_beside_variants_that_only_one_model_has() -> None:
    variants = {"micro": ("", " routing=pinned", " seed_data=1"), "dense_micro": ("", " seed_data=1")}
    pairs = [{"algorithm": "grpo", "model": model, "variant": v} for model, its in variants.items() for v in its]
    steps = long_table({"reward": reward}, pairs)
    steps["arm"] = steps["algorithm"] + " " + steps["model"] + steps["variant"]
    steps["experts"] = steps["model"].map({"micro": 8, "dense_micro": 0})
    moe, dense = (
        {line.get_label(): (line.get_color(), line.get_linestyle()) for line in axes[0].lines}
        for axes in curves.overview(steps).blocks
    )
    for name in ("grpo", "grpo seed_data=1"):
        assert moe[name] == dense[name]


def test_curves_from_ten_seeds_on_have_a_band() -> None:
    figure = curves.replay(long_table({"reward": reward, "token_ratio_variance": reward}, COMPARED, seeds=10))
    assert [len(axis.collections) for axis in figure.axes] == [len(axis.lines) for axis in figure.axes] == [2, 2]
    assert "shaded: nominal 95 %" in said(figure)


def test_staleness_below_ten_seeds_is_compared_at_equal_updates() -> None:
    steps = long_table(
        {"reward": lambda arm, seed: 0.01 * arm["updates_per_rollout"] * arm["step"] + 0.1 * (seed + 1)},
        arms(algorithm=["grpo", "gspo"], updates_per_rollout=[2, 4]),
        steps=8,
    )
    numbers = curves.staleness_grid(steps).numbers
    numbers = numbers[numbers["series"] == "N = 4 − N = 2, seed 1"]
    assert numbers["x"].tolist() == [0, 4, 8, 12, 0, 4, 8, 12]  # where both have been


@pytest.mark.parametrize(
    ("staleness", "updates"),
    [((8, 32), 192), ((32, 48), 192), ((8, 12), 960), ((4, 40, 64), 512), ((4, 256), 512), ((1, 200), 1000)],
)
def test_policies_of_one_training_do_not_differ_by_their_staleness(staleness: tuple[int, ...], updates: int) -> None:
    """The reward follows from the updates before a rollout alone."""
    parts = [
        long_table(
            {"reward": lambda arm, seed: (arm["step"] - 1) * arm["updates_per_rollout"] / updates},
            arms(updates_per_rollout=[each]),
            steps=updates // each,
        )
        for each in staleness
    ]
    figure = curves.staleness_grid(pd.concat(parts))
    drawn = figure.numbers[~figure.numbers["series"].str.contains("seed")].set_index("series")
    least = min(staleness)
    for each in staleness:
        begun = np.arange(updates // each) * each
        line = drawn.loc[f"N = {each}"]
        np.testing.assert_allclose(line[["x", "mean"]], np.column_stack([begun, begun / updates]), atol=1e-12)
        if each > least:
            apart = drawn.loc[f"N = {each} − N = {least}"]
            assert apart["x"].tolist() == begun[begun <= updates - least].tolist()
            np.testing.assert_allclose(apart["mean"], 0, atol=1e-12)
    assert (f"within {updates / 32:g} updates" in said(figure)) == (updates / 32 >= least)


def test_a_point_of_a_staleness_grid_averages_rollouts_on_both_sides_alike() -> None:
    run = pd.DataFrame({"value": [0.0, 3.0, 6.0, 0.0, 9.0]})
    np.testing.assert_allclose(curves._centred(run, 2)["value"], [0, 3, 18 / 5, 5, 9])


# Looks


def test_user_algorithm_never_has_grpos_colour() -> None:
    of_users = {colours.of_algorithm(f"mine{number}").colour for number in range(200)}
    assert of_users == set(colours.COLOURS) - {colours.of_algorithm("grpo").colour}


def test_every_shipped_algorithm_has_a_unique_look() -> None:
    shipped_ones = {name.partition("@")[0] for name in conf.names("algorithm")}
    assert shipped_ones == set(colours.ALGORITHMS), "a new algorithm goes to the end of colours.ALGORITHMS"
    drawn = [colours.of_algorithm(name) for name in colours.ALGORITHMS]
    for kind in ("dashes", "marker"):  # in curves, and in figures of points
        assert len({(each.colour, getattr(each, kind)) for each in drawn}) == len(drawn), kind
    rows = [
        (f"{name}{more}", name)
        for name in conf.names("algorithm")
        for more in ("", " routing=r2", " routing=r3", " lr=1", " lr=2")
    ]
    of_lines = colours.of_lines(pd.DataFrame(rows, columns=["arm", "algorithm"])).values()
    assert len(set(of_lines)) == len(rows)
    assert len({(each.colour, each.marker) for each in map(colours.of_algorithm, ("topr", "minirl", "vespo"))}) == 3
    assert all(colours.of_algorithm(f"mine{number}") not in of_lines for number in range(100))
    values = {"reward": reward, "token_ratio_variance": reward}
    for others in (["cispo", "gspo"], ["gspo", "reinforce", "vespo"]):
        figure = curves.replay(long_table(values, arms(algorithm=others)))
        line = next(each for each in figure.axes[0].lines if each.get_label() == "gspo")
        assert (line.get_color(), line.get_linestyle()) == (colours.COLOURS[1], "--")


def test_variants_share_a_hue_but_differ_in_shade_line_and_mark() -> None:
    arms_of = {"grpo": ["grpo", "grpo routing=r3"], "grpo@verl-0.9": ["grpo@verl-0.9"], "gspo": ["gspo routing=r3"]}
    rows = [(arm, algorithm) for algorithm, named in (arms_of | {"mine": ["mine"]}).items() for arm in named]
    table = pd.DataFrame(rows, columns=["arm", "algorithm"])
    found = colours.of_lines(table)
    grpo, r3, verl = (found[name] for name in ("grpo", "grpo routing=r3", "grpo@verl-0.9"))
    assert grpo == colours.of_algorithm("grpo")
    hues = [mpl.colors.rgb_to_hsv(mpl.colors.to_rgb(each.colour))[0] for each in (grpo, r3, verl)]
    assert hues == pytest.approx([hues[0]] * 3, abs=0.01)
    assert len({each.colour for each in (grpo, r3, verl)}) == 3
    assert len({(each.dashes, each.marker) for each in (grpo, r3, verl)}) == 3
    assert (grpo.marked, r3.marked, verl.marked) == (False, True, True)
    assert found["mine"] == colours.of_lines(table[-1:])["mine"], "by its name alone"
    assert colours.reference(found) == "grpo"


def test_sweep_over_a_number_is_ordered_by_it_and_its_least_value_is_the_reference() -> None:
    arms_of = [f"gspo learning_rate={rate}" for rate in ("0.001", "2e-05", "0.0002")]
    table = pd.DataFrame({"arm": arms_of, "algorithm": "gspo"})
    found = colours.of_lines(table)
    assert list(found) == [arms_of[1], arms_of[2], arms_of[0]]
    assert colours.reference(found) == arms_of[1]
    assert len({(each.dashes, each.colour) for each in found.values()}) == 3


def test_ticks_share_one_notation_and_steps_are_whole() -> None:
    assert style.numbers([4e-4, 1.6e-3]) == ["4e-4", "1.6e-3"]
    assert style.numbers([0, 0.01, 10, -2.5]) == ["0", "0.01", "10", "−2.5"]
    assert style.numbers([10.0**power for power in (-6, 0, 1)]) == ["1e-6", "1e0", "1e1"]
    values = {"reward": reward, "token_ratio_variance": lambda arm, seed: 10.0 ** -(seed + 1)}
    figure = curves.replay(long_table(values, COMPARED, steps=3))
    figure.draw_without_rendering()
    for axis in figure.axes:
        assert not any("$" in label.get_text() for label in [*axis.get_xticklabels(), *axis.get_yticklabels()])
        assert all(tick == round(tick) for tick in axis.get_xticks())


def test_attribution_is_drawn_against_depth() -> None:
    values = {
        "log_ratio_moment_free": lambda arm, seed: 2.0,
        "log_ratio_moment_pinned": lambda arm, seed: 2.0 - arm["moe_layers"] / 10 - arm["experts"] / 50,
        "log_ratio_moment_changed": lambda arm, seed: 1e-2 * arm["moe_layers"],
        "log_ratio_moment_unchanged": lambda arm, seed: 1e-4,
    }
    figure = routing.attribution(long_table(values, arms(moe_layers=[2, 12], experts=[8, 32])))
    shared, ratio = shown(figure, 0), shown(figure, 1)
    assert list(shared) == ["8 experts", "32 experts"]
    np.testing.assert_allclose(shared["8 experts"], [0.18, 0.68])
    np.testing.assert_allclose(shared["32 experts"], [0.42, 0.92])
    np.testing.assert_allclose(ratio["8 experts"], [200, 1200])


def test_attribution_at_one_depth_is_drawn_against_experts() -> None:
    values = {
        "log_ratio_moment_free": lambda arm, seed: 2.0,
        "log_ratio_moment_pinned": lambda arm, seed: 2.0 - arm["experts"] / 64,
    }
    figure = routing.attribution(long_table(values, arms(experts=[2, 8, 32], algorithm=["grpo"])))
    np.testing.assert_allclose(shown(figure, 0)["grpo"], [count / 128 for count in (2, 8, 32)])
    assert figure.axes[1].get_xscale() == "log"
    assert figure.axes[1].get_xlabel() == "experts of a layer"
    names = ("log_ratio_moment_free", "log_ratio_moment_pinned", "log_ratio_moment_changed")
    unchanged = {name: lambda arm, seed: 0.1 for name in names}  # steps without changed tokens have no ratio
    assert shown(routing.attribution(long_table(unchanged, arms(moe_layers=[2, 4]))), 1) == {}


# What is missing


def test_figure_says_what_it_lacks_and_unknown_names_get_a_hint() -> None:
    found = results_of(long_table({"reward": reward}, COMPARED))
    assert FIGURES["fig14"].lacks(found) == "runs with 2 values of strength"
    assert FIGURES["fig02"].lacks(found) == "runs that record clip_fraction"
    assert FIGURES["fig08"].lacks(found) == "the table histograms"
    assert FIGURES["fig01"].lacks(found) is None
    many = long_table({"reward": reward}, arms(algorithm=[f"a{k}" for k in range(9)]))
    assert FIGURES["overview"].lacks(results_of(many)) is None
    with pytest.raises(figures.CannotDraw, match=r"did you mean .*clip_fraction"):
        figures.find(["clip_fractoin"])
    assert [each.id for each in figures.find(["fig05", "clip_fraction"])] == ["fig05", "fig02"]


# Files


@pytest.mark.parametrize("suffix", write.FORMATS)
def test_equal_data_gives_equal_bytes(suffix: str, tmp_path: Path) -> None:
    steps = long_table({"clip_fraction": lambda arm, seed: 0.1}, COMPARED)
    files = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path in files:
        points.clip_fraction(steps).write(path, suffix)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")


@pytest.mark.parametrize("scale", [{"value": "log"}, {"value": "symlog", "linthresh": 1e-3}])
@pytest.mark.parametrize(("low", "high"), [(0.021, 0.034), (0.05, 0.5), (0.012, 0.9), (0.004, 2.0)])
def test_logarithmic_axis_always_has_two_labels(scale: dict[str, Any], low: float, high: float) -> None:
    figure, (axis,) = style.panels(1, 1, 2.0)
    axis.plot([0, 1], [low, high])
    axis.set_yscale(**scale)
    axis.set_ylim(low, high)
    style.finish(figure, None, "")
    figure.draw_without_rendering()
    ticks = zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)
    assert len([at for at, label in ticks if low <= at <= high and label.get_text()]) >= 2


def test_figure_numbers_are_those_drawn(tmp_path: Path) -> None:
    figure = points.clip_fraction(long_table({"clip_fraction": lambda arm, seed: 0.1 * (seed + 1)}, COMPARED))
    files = write.figure(tmp_path, FIGURES["fig02"].stem("small"), figure, "", ["svg"])
    assert {path.suffix for path in files} == {".svg", ".txt", ".csv", ".md", ".tex"}
    written = pd.read_csv(tmp_path / "tables" / "small-fig02-clip_fraction.csv")
    np.testing.assert_allclose(written["mean"], [bar.get_width() for bar in figure.axes[0].patches])
    assert written["n"].tolist() == [3, 3]


# Tables


def test_model_table_has_sizes_and_estimates() -> None:
    compared = arms(model=["micro", "olmoe_micro", "dense_micro"])
    steps = long_table(
        {
            "rollout_expert_disagreement": lambda arm, seed: 0.1 * (seed + (arm["model"] == "micro")),
            "log_ratio_moment_free": lambda arm, seed: 4.0,
            "log_ratio_moment_pinned": lambda arm, seed: 1.0 + seed,
            "tokens_sampled": lambda arm, seed: 800.0,
            "eval_accuracy": lambda arm, seed: 0.1 * arm["step"],
        },
        compared,
    )
    # One step in which routing did it all outweighs one in which nothing moved.
    steps.loc[(steps["metric"] == "log_ratio_moment_free") & (steps["step"] == 2), "value"] = 0.0
    steps.loc[(steps["metric"] == "log_ratio_moment_pinned") & (steps["step"] == 2), "value"] = 0.0
    runs = steps.drop_duplicates(["arm", "seed"]).assign(parameters=400, active_parameters=100, top_k=2)
    runs.loc[runs["model"] == "dense_micro", "experts"] = 0
    made = tables.models(steps, runs)
    assert made["arm"].tolist() == ["dense_micro", "micro", "olmoe_micro"]
    assert made["experts"].tolist() == ["dense", "2 of 8", "2 of 8"]
    assert made["active parameters"].tolist() == [100, 100, 100]
    per_update = 800 / runs["updates_per_rollout"].iloc[0]
    assert made["tokens per expert"].tolist() == pytest.approx([per_update, per_update / 4, per_update / 4])
    assert made["gain"].iloc[0].mean == pytest.approx(0.1)
    np.testing.assert_allclose(made["sampler–trainer disagreement"].iloc[1].mean, 0.2)
    share = made["share of routing"].iloc[1]
    np.testing.assert_allclose([share.mean, share.n], [np.mean([0.75, 0.5, 0.25]), 3])
    assert "0.2 [" in write.to_markdown(made)
    np.testing.assert_allclose(write.to_numbers(made)["sampler–trainer disagreement mean"].iloc[2], 0.1)
    assert tables.models(steps, runs[runs["model"] == "olmoe_micro"]).empty
    assert tables.models(steps, runs.assign(experts=0)).empty
