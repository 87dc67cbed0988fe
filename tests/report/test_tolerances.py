"""The table and the figures of tolerance, on made-up sweeps whose tolerance is known."""

import numpy as np
import pandas as pd
import pytest
from small_figures import USUAL, results_of

from steadymoe.bench.report import tolerances
from steadymoe.bench.report.figures import find, tolerance
from steadymoe.bench.report.tables import for_terminal
from steadymoe.bench.statistics.tolerance import SHARE, Tolerance, of_arm

RATES = (1e-4, 2e-4, 4e-4, 8e-4)
(FIGURE,) = find(["tolerance"])
OCTAVES = {"grpo": 0.0, "gspo": 1.0, "grpo_unclipped": -1.0}
FIXED = USUAL | {"model": "flat", "task": "sort", "axes": "", "learning_rate": 2e-4, "updates_per_rollout": 16}


def sweep(
    dial: str = "learning_rate", values: tuple[float, ...] = RATES, seeds: int = 5, **more: object
) -> pd.DataFrame:
    """A level of 0.8 that falls by 0.3 an octave of the dial, from 2e-4 (or the second value) times 2 ** OCTAVES on."""
    generator, rows = np.random.default_rng(0), []
    for algorithm, octaves in OCTAVES.items():
        for value in values:
            fall = max(0.0, np.log2(max(value, 1e-9) / values[1]) - octaves) if values[0] > 0 else 3 * value
            for seed in range(seeds):
                run = FIXED | {"algorithm": algorithm, dial: value, "seed": seed} | more
                run["arm"] = f"{algorithm} {dial}={value}"
                level = 0.8 - 0.3 * fall + 0.01 * generator.standard_normal()
                measured = {("eval_accuracy", 0): 0.4, ("eval_accuracy", 30): level, ("reward", 30): level}
                measured |= {("eval_greedy", 0): 0.6, ("eval_greedy", 30): level + 0.05}
                rows += [run | {"metric": metric, "step": step, "value": v} for (metric, step), v in measured.items()]
    return pd.DataFrame(rows)


def test_a_dense_twin_has_a_start_a_threshold_and_a_reference_of_its_own() -> None:
    moe, dense = sweep(), sweep(model="dense_flat")
    of_accuracy = dense["metric"] == "eval_accuracy"
    dense.loc[of_accuracy, "value"] = dense["value"] + 0.1  # the start too
    table = tolerances.table(pd.concat([moe, dense]))
    numbers = table.set_index(["setting", "loss"])["× grpo"]
    assert numbers["flat"].tolist() == tolerances.table(moe)["× grpo"].tolist()
    assert numbers["dense_flat"]["grpo"] == "1.00"
    assert float(numbers["dense_flat"]["gspo"].split()[0]) == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(
    ("dial", "values"), [("learning_rate", RATES), ("updates_per_rollout", (8.0, 16.0, 32.0, 64.0))]
)
def test_table_lists_losses_best_first(dial: str, values: tuple[float, ...]) -> None:
    table = tolerances.table(sweep(dial, values))
    assert table["loss"].tolist() == ["gspo", "grpo", "grpo_unclipped"]
    numbers = {loss: text.split()[0] for loss, text in zip(table["loss"], table["× grpo"], strict=True)}
    assert float(numbers["gspo"]) == pytest.approx(2, rel=0.05)
    assert numbers["grpo"] == "1.00"
    assert float(numbers["grpo_unclipped"]) == pytest.approx(0.5, rel=0.05)
    assert (table["n"] == 5).all()
    assert "greedy at best" in table


def with_pinned(octaves: dict[str, float], rates: tuple[float, ...] = (*RATES, 1.6e-3, 3.2e-3)) -> pd.DataFrame:
    """A sweep, and runs of each loss in ``octaves`` with pinned routes, whose curve lies so many octaves later."""
    free = sweep(values=rates)
    parts = [free]
    for algorithm, later in octaves.items():
        pinned = free[free["algorithm"] == algorithm].copy()
        is_end = pinned["metric"].isin(["eval_accuracy", "eval_greedy"]) & (pinned["step"] == 30)
        falls = [max(0.0, np.log2(rate / 2e-4) - OCTAVES[algorithm]) for rate in pinned["learning_rate"]]
        pinned["value"] += 0.3 * np.minimum(falls, later) * is_end
        parts.append(pinned.assign(routing="pinned", arm=pinned["arm"] + " routing=pinned"))
    return pd.concat(parts)


def test_routing_cost_is_over_the_free_runs_of_the_same_loss() -> None:
    table = tolerances.table(with_pinned({"grpo": 1.0, "gspo": 0.5})).set_index("loss")
    cost = table["routing cost ×"]
    for loss, expected in (("grpo", 2.0), ("gspo", 2**0.5)):
        assert float(cost[loss].split()[0]) == pytest.approx(expected, rel=0.05)
    assert (cost["grpo_unclipped"], cost["gspo routing=pinned"]) == ("–", "–")
    assert "routing cost ×" not in tolerances.table(sweep())


def test_gap_closed_is_what_a_loss_does_not_pay_of_the_references_cost() -> None:
    both = tolerances.table(with_pinned({"grpo": 1.0, "gspo": 0.5})).set_index("loss")["gap closed"]
    assert both["gspo"].mean == pytest.approx(0.5, abs=0.05)
    assert both["gspo"].low < 0.5 < both["gspo"].high
    assert both["grpo"] == "–"
    alike = tolerances.table(with_pinned({"grpo": 1.0, "gspo": 1.0})).set_index("loss")["gap closed"]
    assert alike["gspo"].mean == pytest.approx(0.0, abs=0.05), "GSPO tolerates twice GRPO's rate with pinned routes too"
    # GRPO with R2, which tolerates half an octave more, and means nothing with pinned routes.
    steps = with_pinned({"grpo": 1.0})
    replayed = with_pinned({"grpo": 0.5})
    replayed = replayed[replayed["routing"] == "pinned"].assign(routing="r2")
    replayed["arm"] = replayed["arm"].str.replace("pinned", "r2")
    raw = tolerances.table(pd.concat([steps, replayed])).set_index("loss")["gap closed"]
    share, *_, word = raw["grpo routing=r2"].split()
    assert (float(share), word) == (pytest.approx(0.5, abs=0.05), "raw")
    corrected = replayed.assign(routing="off", correction="tis", arm=replayed["arm"].str.replace("routing=r2", "tis"))
    assert "gap closed" not in tolerances.table(pd.concat([steps, corrected])), "it means something with pinned routes"
    nothing = tolerances.table(with_pinned({"grpo": 0.0, "gspo": 0.5})).set_index("loss")["gap closed"]
    assert not np.isfinite(nothing["gspo"].low), "no gap to close"


def test_terminal_names_the_setting_of_each_row() -> None:
    table = tolerances.table(pd.concat([sweep(), sweep(model="dense_flat")]))
    shown = for_terminal({"tolerance": (table, "")})
    assert list(shown) == ["setting", "loss", "n", "× grpo", "sampled at best"]
    assert set(shown["setting"]) == {"flat", "dense_flat"}
    alone = for_terminal({"tolerance": (tolerances.table(sweep()), "")})
    assert list(alone) == ["loss", "n", "× grpo", "best learning rate", "sampled at best"]


def test_a_sentence_says_which_loss_tolerates_most() -> None:
    table = tolerances.table(sweep())
    multiple = table["× grpo"].iloc[0]
    assert tolerances.sentences(table) == [
        f"Tolerated learning rate: gspo has the highest, {multiple} times grpo's, n = 5."
    ]
    others = sweep()[lambda runs: runs["algorithm"] != "gspo"]
    assert tolerances.sentences(tolerances.table(others)) == [
        "Tolerated learning rate: no loss has a higher one than grpo."
    ]
    joined = pd.concat([others, sweep(experiment="other", values=RATES[:2])])
    assert tolerances.sentences(tolerances.table(joined)) == [
        "Tolerated learning rate, made: no loss has a higher one than grpo.",
        "Tolerated learning rate, other: grpo never falls below the threshold on this grid; extend it.",
    ]


def test_second_dial_divides_the_table() -> None:
    both = pd.concat([sweep(updates_per_rollout=updates) for updates in (16, 64)])
    table = tolerances.table(both)
    assert table["setting"].unique().tolist() == ["updates per rollout 16", "updates per rollout 64"]
    assert len(table) == 2 * len(OCTAVES)


def test_settings_of_joined_experiments_are_not_dials() -> None:
    joined = pd.concat([sweep(), sweep(experiment="other", updates_per_rollout=32)])
    table = tolerances.table(joined)
    assert table["setting"].unique().tolist() == ["made", "other"]
    assert {"× grpo", "best learning rate"} <= set(table)


def test_runs_with_another_setting_get_their_own_arm() -> None:
    """Two advantages are not averaged, and the one with the fewest further words is the reference."""
    plain, other = sweep(), sweep()
    other["arm"] = other["arm"].str.replace(" ", " advantage=reward ", n=1)
    other["axes"] = "advantage=reward"
    falls = (other["metric"] == "eval_accuracy") & (other["step"] == 30)
    other.loc[falls & (other["algorithm"] == "grpo"), "value"] -= 0.1
    table = tolerances.table(pd.concat([plain, other]))
    assert set(table["loss"]) == {name + word for name in OCTAVES for word in ("", " advantage=reward")}
    numbers = table.set_index("loss")["× grpo"]
    assert numbers["grpo"] == "1.00"
    assert float(numbers["grpo advantage=reward"].split()[0]) < 0.9


def test_losses_at_their_own_rates_are_a_staleness_sweep() -> None:
    """A rate that differs between losses is no dial: no run of a loss differs in it."""
    runs = sweep("updates_per_rollout", (8.0, 16.0, 32.0, 64.0))
    runs["learning_rate"] = runs["algorithm"].map({"grpo": 2e-4, "gspo": 4e-4, "grpo_unclipped": 1e-4})
    table = tolerances.table(runs)
    assert "best updates per rollout" in table
    assert "setting" not in table


def test_missing_data_is_named() -> None:
    one = sweep(values=RATES[:1] * 2).drop_duplicates(["arm", "seed", "metric", "step"])
    assert tolerances.lacks(one) == "runs of one loss at 2 values of learning_rate or updates_per_rollout or strength"
    without = sweep()[lambda runs: runs["algorithm"] != "grpo"]
    assert tolerances.lacks(without) == "runs of grpo, the reference"
    assert tolerances.table(without).empty
    unevaluated = sweep()[lambda runs: runs["metric"] == "reward"]
    assert tolerances.lacks(unevaluated) == "runs whose start and end were evaluated"


def test_the_figure_notes_curves_and_crossings() -> None:
    runs = sweep()
    assert FIGURE.lacks(results_of(runs)) is None
    figure = FIGURE.figure(results_of(runs))
    assert len({axis.get_ylim() for axis in figure.axes}) == 1, "sampled and greedy are compared by height"
    numbers = figure.numbers
    curve = numbers[(numbers["series"] == "gspo") & (numbers["panel"] == "held-out accuracy")]
    assert curve["x"].tolist() == list(RATES)
    assert curve["n"].tolist() == [5] * 4
    crossings = numbers[numbers["panel"] == "crossing"].set_index("series")
    assert crossings["x"]["gspo"] == pytest.approx(2 * crossings["x"]["grpo"], rel=0.05)
    assert crossings["mean"].tolist() == pytest.approx([0.4 + SHARE * 0.4] * len(crossings), abs=0.02)


def test_legend_names_an_arm_that_the_first_panel_lacks() -> None:
    pinned = sweep(routing="pinned")
    pinned["arm"] += " routing=pinned"
    figure = FIGURE.figure(results_of(pd.concat([sweep(model="dense_flat"), sweep(), pinned])))
    shown = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    assert {"grpo", "grpo routing=pinned", "gspo routing=pinned"} <= {text.lower().replace("\n", " ") for text in shown}


def test_engines_of_a_dial_of_strength_divide_the_table() -> None:
    """The second engine lowers every level, so a mean over both would show."""
    strengths = (0.0, 0.1, 0.2, 0.4)
    first, second = (sweep("strength", strengths, engine=name) for name in ("router_noise", "weight_noise"))
    second["arm"] += " weight_noise"
    second.loc[second["metric"].eq("eval_accuracy") & second["step"].eq(30), "value"] -= 0.2
    levels = tolerances.levels(pd.concat([first, second])).set_index(["panel", "arm", "value"])
    assert set(levels.index.get_level_values("panel")) == {"router_noise", "weight_noise"}
    means = levels["sampled"].groupby(level="panel").mean()
    assert means["router_noise"] - means["weight_noise"] == pytest.approx(0.2)


def test_runs_that_no_arm_tells_apart_are_refused() -> None:
    other = sweep(responses=16)
    other["arm"] += " responses=16"
    lack = tolerances.lacks(pd.concat([sweep(), other]))
    assert lack is not None
    assert "would be one" in lack
    assert tolerances.table(pd.concat([sweep(), other])).empty


def test_reference_that_gains_nothing_sets_no_threshold() -> None:
    flat = sweep()
    flat.loc[flat["algorithm"].eq("grpo") & flat["metric"].eq("eval_accuracy"), "value"] = 0.4
    table = tolerances.table(flat)
    assert (table["n"] == 5).all()
    assert "no threshold, because grpo gains nothing" in tolerances.sentences(table)[0]


def test_best_value_is_of_the_seeds_that_ran_everywhere() -> None:
    more = sweep(seeds=9)[lambda runs: (runs["seed"] >= 5) & (runs["learning_rate"] == RATES[-1])]
    more.loc[more["metric"] == "eval_accuracy", "value"] = 0.95
    levels = tolerances.levels(pd.concat([sweep(), more]))
    number, best = of_arm(levels, "gspo")
    assert number is not None
    assert best < number.crossing


def test_numbers_of_the_figure_name_their_setting() -> None:
    both = pd.concat([sweep(updates_per_rollout=updates) for updates in (16, 64)])
    numbers = FIGURE.figure(results_of(both)).numbers
    assert not numbers.duplicated(["panel", "series", "x"]).any()


def test_interval_without_an_upper_end_is_drawn_to_its_mark() -> None:
    known = {"a": Tolerance(1.0, 2.0, 1.5, np.inf, 0.01, 5), "b": Tolerance(1.0, 1.0, 1.0, 1.0, 1.0, 5)}
    axis = tolerance.routing_costs({"free": known, "pinned": {}, "dense": {}}, {}).axes[0]
    assert [2.0 in line.get_xdata() and 1.5 in line.get_xdata() for line in axis.lines].count(True) == 1
