"""What was recorded with the standard: its gates, its seeds, and the board that is committed."""

from pathlib import Path

import gates
import pandas as pd
import pytest
from committed import assert_same

from steadymoe.bench.report.results import Results
from steadymoe.bench.runs import compose
from steadymoe.bench.score import board, outcomes, standard
from steadymoe.bench.score.standard import CHEAP, SIDES
from steadymoe.bench.statistics.tolerance import REFERENCE

ROOT = Path(__file__).parents[2]
RULER = ROOT / "results" / "ruler"
SEARCHED = ("search", "controls")


def cheap() -> pd.DataFrame:
    """The outcomes of 7 tokens."""
    return standard.blocks()["7 tokens"].query("side == @CHEAP").reset_index(drop=True)


def test_gate_v8_grpo_learns_and_the_controls_do_not() -> None:
    table = cheap()
    grpo = table[table["loss"] == REFERENCE].assign(arm=lambda each: each["rate"], value=lambda each: each["rate"])
    controls = Results.load(RULER, "controls512")
    assert set(controls.runs["algorithm"]) == {"grpo", "sharpening"}
    measured = gates.learns(grpo, gates.ends(controls.wide("eval_accuracy", "eval_greedy")))
    assert measured.passes
    best = grpo[grpo["value"] == outcomes.best_rate(table, REFERENCE, CHEAP)]
    assert measured.greedy_gain == pytest.approx((best["greedy"] - best["start_greedy"]).mean())


@pytest.mark.parametrize(("name", "passes"), [("selection", False), ("long", False), ("larger", True)])
def test_gate_v8_fails_where_sharpening_alone_gains_too_much(name: str, passes: bool) -> None:
    gains, wide = {}, {}
    for kind in ("controls", "tolerance"):
        wide[kind] = Results.load(RULER, f"{kind}_{name}").wide("eval_accuracy", "eval_greedy")
        ends = wide[kind].groupby(["algorithm", "learning_rate", "seed"])["eval_accuracy"]
        gains[kind] = (ends.last() - ends.first()).groupby(["algorithm", "learning_rate"]).mean()
    at_1e_4 = wide["tolerance"].query("algorithm == 'grpo' and learning_rate == 1e-4")
    measured = gates.learns(gates.ends(at_1e_4), gates.ends(wide["controls"]))
    assert measured.share == pytest.approx(gains["controls"].max() / gains["tolerance"]["grpo", 1e-4])
    assert measured.passes == passes


def one_seed(free: list[float], pinned: list[float], seed: int = 0) -> pd.DataFrame:
    """GRPO's levels at three rates, from a start of .4."""
    rates = [1e-4, 2e-4, 4e-4]
    runs = [("grpo", rate, level) for rate, level in zip(rates, free, strict=True)]
    runs += [("grpo pinned", rate, level) for rate, level in zip(rates, pinned, strict=True)]
    table = pd.DataFrame(runs, columns=["arm", "value", "sampled"]).assign(algorithm="grpo", seed=seed, start=0.4)
    return table.assign(start_greedy=0.6, greedy=0.8)


def test_gate_v9_asks_for_a_routing_cost_or_a_gap_to_a_matched_twin() -> None:
    # The threshold is .5: free crosses it half way between 1e-4 and 2e-4, pinned between 2e-4 and 4e-4.
    moe = one_seed([0.6, 0.4, 0.3], [0.5, 0.6, 0.4])
    twin = one_seed([0.5, 0.5, 0.5], [0.0, 0.0, 0.0])
    twin = twin[twin["arm"] == "grpo"]
    (row,) = gates.experts_matter(moe, twin).to_dict("records")
    assert row["routing_cost"] == pytest.approx(2.0)
    assert (row["beyond"], row["matched"], row["passes"]) == (False, True, True)
    assert row["gap"] == pytest.approx(-0.1)
    alike = one_seed([0.6, 0.4, 0.3], [0.6, 0.4, 0.3])
    for level, greedy, passes in ((0.71, 0.6, True), (0.69, 0.6, False), (0.71, 0.7, False)):
        (row,) = gates.experts_matter(alike, twin.assign(sampled=level, start_greedy=greedy)).to_dict("records")
        assert (row["routing_cost"], row["passes"]) == (pytest.approx(1.0), passes)
    (row,) = gates.experts_matter(one_seed([0.6, 0.4, 0.3], [0.6, 0.6, 0.6]), twin).to_dict("records")
    assert row["beyond"]


def test_recorded_search_chooses_the_cell() -> None:
    search, controls = (Results.load(RULER, f"cell_{name}") for name in SEARCHED)
    measured = {"search": gates.cells(search), "sharpening": gates.sharpening(search, controls)}
    tables = {name: pd.read_csv(RULER / f"cell_{name}.csv") for name in measured}
    for name, table in tables.items():
        pd.testing.assert_frame_equal(measured[name], table, check_dtype=False, atol=1e-5)
    cell = ["layers", "fillers", "experts"]
    matters = tables["search"].groupby(cell)["passes"].all()
    assert matters[matters].index.tolist() == [(4, 0, 4), (4, 0, 8), (4, 0, 32), (4, 4, 32), (4, 14, 32), (8, 0, 32)]
    assert not tables["search"]["matched"].any()
    # GRPO's gain holds the gate on learning nowhere, so the least share of sharpening decides.
    learning = tables["sharpening"].set_index(cell)
    assert not learning["passes"].any()
    unjudged = tables["search"].set_index(cell).index.difference(learning.index)
    assert unjudged.tolist() == [(4, 0, 64), (4, 14, 32)]  # they have no control
    assert learning["share"].reindex(matters.index[matters]).idxmin() == (4, 0, 32)
    plain = compose.plan(["setting=cell"])[0].plain
    model = plain["model"]["config"]
    assert (model["num_hidden_layers"], plain["task"]["fillers"], model["num_experts"]) == (4, 0, 32)


def test_gate_v3_stale_data_harm_the_control_without_a_clip_at_four_times_the_best_rate() -> None:
    """Where it passes, GRPO without a clip ends at least .1 below GRPO."""
    table = cheap()
    ends = table[table["seed"] < 5].set_index(["loss", "rate", "seed"])["sampled"]
    apart = (ends[REFERENCE] - ends["grpo_unclipped"]).groupby("rate").mean()
    best = outcomes.best_rate(table, REFERENCE, CHEAP)
    assert apart[2 * best] < 0.1 <= apart[4 * best]


def test_committed_board_matches_the_recorded_outcomes(tmp_path: Path) -> None:
    paths = board.write_board(tmp_path)
    assert {path.name for path in paths} == {"board.md", "board.html", "board.png", "board.svg"}
    made, committed = ((folder / "board.md").read_text() for folder in (tmp_path, ROOT / "results" / "board"))
    assert_same(made, committed, "board.md")


def test_recorded_runs_use_the_standards_seeds() -> None:
    tables = [*standard.blocks().values()]
    of_cell = pd.concat(tables).query("side in @names", local_dict={"names": [side.name for side in SIDES]})
    assert set(of_cell.groupby(["side", "loss", "rate"])["seed"].agg(frozenset)) == {frozenset(range(1000, 1005))}
    for table in tables:
        assert table[["sampled", "greedy", "start"]].stack().between(0, 1).all()
        first, repeated = frozenset(range(5)), frozenset(range(10, 15))
        by_loss = table[table["side"] == CHEAP].groupby("loss")["seed"].agg(frozenset)
        assert set(by_loss) <= {first, first | repeated}
