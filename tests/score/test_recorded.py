"""What was recorded with the standard: its numbers, its gates, and the board that is committed."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from committed import assert_same
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from steadymoe.bench.report import archive, joined, write
from steadymoe.bench.report.figures import bearable, find
from steadymoe.bench.score import board, outcomes, standard
from steadymoe.bench.score.standard import MISMATCH, RATE, REFERENCE
from steadymoe.bench.statistics import gates
from steadymoe.bench.statistics.bearable import SHARE, crossings
from steadymoe.bench.statistics.comparisons import holm, is_decided
from steadymoe.bench.statistics.estimates import Estimate, over_seeds

ROOT = Path(__file__).parents[2]
RULER = ROOT / "results" / "ruler"
README, QUESTIONS, PAGE = (
    (ROOT / page).read_text() for page in ("README.md", "docs/questions.md", "results/ruler/README.md")
)


# What tells the arms of a gate apart.
ARM = ["algorithm", "shuffled", "learning_rate"]


def section(begins: str, ends: str = "\n## ") -> str:
    """The part of the ruler's page from these words on."""
    return PAGE.partition(begins)[2].partition(ends)[0]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")[1:-1]]


def row_of(text: str, begins: str) -> list[str]:
    """The cells of the one row that begins so."""
    (row,) = [line for line in text.splitlines() if line.startswith(begins)]
    return cells(row)


def interval(each: Estimate, digits: int = 3) -> str:
    """As pages write it."""
    return f"{each.mean:.{digits}f} [{each.low:.{digits}f}, {each.high:.{digits}f}]".replace("-", "−")


def crossing_by(gain: pd.DataFrame, ours: pd.DataFrame) -> float:
    """Where GRPO's curve in one panel falls below the line that its gain draws in another, both ``levels``."""
    wide = [each[each["algorithm"] == REFERENCE].pivot(index="dial", columns="seed") for each in (gain, ours)]
    start, best = wide[0]["start"].to_numpy().mean(), wide[0]["sampled"].mean(axis=1).max()
    curve = wide[1]["sampled"].mean(axis=1)
    (found,) = crossings(
        curve.to_numpy()[None], curve.index.to_numpy(float), np.array([start + SHARE * (best - start)])
    )
    return float(found)


def at_best(loss: str) -> pd.DataFrame:
    table = standard.recorded()
    ours = table[(table["dial"] == RATE.name) & (table["loss"] == loss)]
    return ours[ours["value"] == outcomes.best_rate(table, loss)].set_index("seed")


def test_gate_v8_grpo_learns_and_the_controls_do_not() -> None:
    table = standard.recorded()
    grpo = table[(table["dial"] == RATE.name) & (table["loss"] == REFERENCE)].assign(arm=lambda each: each["value"])
    steps = archive.load(RULER, "controls512")["steps"]
    assert set(steps["algorithm"]) == {"grpo", "sharpening"}
    measured = gates.learns(grpo, gates.ends(steps))
    assert measured.passes
    best = at_best(REFERENCE)
    assert measured.greedy_gain == pytest.approx((best["greedy"] - best["start_greedy"]).mean())


def test_gate_v3_stale_data_harm_the_control_without_a_clip_at_four_times_the_best_rate() -> None:
    """Where it passes, GRPO without a clip ends at least .1 below GRPO."""
    table = standard.recorded()
    ends = table[(table["dial"] == RATE.name) & (table["seed"] < 5)].set_index(["loss", "value", "seed"])["sampled"]
    apart = (ends[REFERENCE] - ends["grpo_unclipped"]).groupby("value").mean()
    best = outcomes.best_rate(table, REFERENCE)
    assert f"{apart[2 * best]:.3f} below at 2e-4, {apart[4 * best]:.3f} at 4e-4" in row_of(PAGE, "| V3")[2]
    assert apart[2 * best] < 0.1 <= apart[4 * best]


@pytest.mark.parametrize(("name", "place"), [("selection", 0), ("long", 1), ("larger", 2)])
def test_gate_v8_fails_where_sharpening_alone_gains_too_much(name: str, place: int) -> None:
    text = section("**V8 passes on")
    gains = {}
    for experiment in (f"controls_{name}", f"bearable_{name}"):
        steps = archive.load(RULER, experiment)["steps"]
        steps = steps[(steps["algorithm"] != "grpo") | (steps["learning_rate"] == 1e-4)].sort_values("step")
        for metric in ("eval_accuracy", "eval_greedy"):
            ends = steps[steps["metric"] == metric].groupby(["algorithm", "learning_rate", "seed"])["value"]
            by_arm = (ends.last() - ends.first()).groupby(["algorithm", "learning_rate"]).mean()
            gains |= {(experiment.partition("_")[0], metric, *arm): gain for arm, gain in by_arm.items()}
    rows = {"GRPO": ("bearable", "grpo", 1e-4), "shuffled rewards": ("controls", "grpo", 1e-4)}
    rows |= {f"sharpening, {rate}": ("controls", "sharpening", float(rate)) for rate in ("1e-6", "4e-6", "1.6e-5")}
    for words, (kind, algorithm, rate) in rows.items():
        found = [f"{gains[kind, metric, algorithm, rate]:.3f}" for metric in ("eval_accuracy", "eval_greedy")]
        row = row_of(text, f"| {words} |")
        assert row[1 + 2 * place : 3 + 2 * place] == [each.replace("-", "−") for each in found]
    most = max(gain for (kind, metric, *_), gain in gains.items() if (kind, metric) == ("controls", "eval_accuracy"))
    share = most / gains["bearable", "eval_accuracy", "grpo", 1e-4]
    at_1e_4 = archive.load(RULER, f"bearable_{name}")["steps"].query("algorithm == 'grpo' and learning_rate == 1e-4")
    measured = gates.learns(gates.ends(at_1e_4), gates.ends(archive.load(RULER, f"controls_{name}")["steps"]))
    assert measured.share == pytest.approx(share)
    assert measured.passes == (name == "larger")
    assert measured.passes or f"{share:.0%}".replace("%", " %") in text


def test_shorter_starts_match_their_runs() -> None:
    runs, text = pd.read_csv(RULER / "shorter_starts.csv"), section("### Starts on shorter inputs")
    runs = runs.assign(gain=runs["sampled"] - runs["start"], greedy_gain=runs["greedy"] - runs["start_greedy"])
    arms = [("grpo", False, 1e-4), ("grpo", True, 1e-4), ("sharpening", False, 4e-6), ("sharpening", False, 1.6e-5)]
    gains = runs.groupby(["task", "algorithm", "shuffled", "learning_rate"])[["gain", "greedy_gain"]].mean()
    starts = runs.drop_duplicates(["task", "seed"]).groupby("task")[["start", "start_greedy"]].mean()
    for task, start in starts.iterrows():
        expected = [*start, *(gain for arm in arms for gain in gains.reindex([(task, *arm)]).iloc[0])]
        shown = ["" if np.isnan(each) else f"{each:.3f}".replace("-", "−") for each in expected]
        assert row_of(text, f"| `{task}` |") == [f"`{task}`", *shown]
    for task, share in (("sort", "13 %"), ("ledger", "28 %")):
        most = gains.loc[task, "sharpening"]["gain"].max() / gains.loc[(task, *arms[0]), "gain"]
        assert f"{most:.0%}".replace("%", " %") == share
        assert f"{share}" in text


@pytest.mark.parametrize(
    ("name", "place"), [("lower_long", 0), ("lower_selection", 1), ("middle_selection", 2)], ids=str
)
def test_lower_starts_match_their_runs(name: str, place: int) -> None:
    text, tables = section("### Lower starts"), archive.load(RULER, name)
    row = [cells(line) for line in text.splitlines() if line.startswith(("| 61", "| `sel"))][place]
    runs = tables["runs"].assign(shuffled=tables["runs"]["config"].str.contains('"shuffle_rewards": true'))
    ends = tables["steps"][tables["steps"]["metric"].isin(["eval_accuracy", "eval_greedy"])].sort_values("step")
    both = ends.groupby(["arm", "seed", "metric"], observed=True)["value"].agg(["first", "last"]).unstack()
    gains = (both["last"] - both["first"]).reset_index().merge(runs[["arm", "seed", *ARM]])
    means = gains.groupby(ARM)[["eval_accuracy", "eval_greedy"]].mean()
    start = both["first"].groupby("seed").first().mean()
    arms = [("grpo", False, 1e-4), ("grpo", True, 1e-4), ("sharpening", False, 4e-6), ("sharpening", False, 1.6e-5)]
    numbers = [*start, *(gain for arm in arms for gain in means.loc[arm])]
    assert row[1:] == [str(runs["seed"].nunique()), *(f"{each:.3f}".replace("-", "−") for each in numbers)]
    if name == "middle_selection":
        assert f"{means.loc[('grpo', False, 1e-4), 'eval_greedy']:.3f} from the higher" in text
        assert f"less at 2e-4 ({means.loc[('grpo', False, 2e-4), 'eval_greedy']:.3f})" in text


def test_advantage_table_matches_the_runs() -> None:
    """Of ``experiment=advantage``: mean at the end, and the paired difference from GRPO's own advantage."""
    steps = archive.load(RULER, "advantage")["steps"]
    steps = steps[(steps["metric"] == "eval_accuracy") & (steps["algorithm"] == REFERENCE)].sort_values("step")
    name = steps["axes"].str.extract("advantage=([a-z_]+)")[0].where(~steps["axes"].str.contains("max_rollouts"), "4")
    ends = steps.groupby(["learning_rate", name, "seed"])["value"].last().unstack()
    rows = {
        "group_mean_std": "| GRPO's: ",
        "plus_minus": "(`plus_minus`)",
        "plus_minus_mixed": "(`plus_minus_mixed`)",
        "reward": "(`reward`)",
        "4": "max_rollouts=4",
    }
    for each, words in rows.items():
        (row,) = [line for line in PAGE.splitlines() if line.startswith("|") and words in line]
        for place, rate in enumerate((1e-4, 4e-4)):
            mean, difference = row.split("|")[2 * place + 2 : 2 * place + 4]
            assert ends.loc[rate, each].count() == 10
            assert mean.strip() == f"{ends.loc[rate, each].mean():.3f}"
            if each != "group_mean_std":
                apart = (ends.loc[rate, each] - ends.loc[rate, "group_mean_std"]).mean()
                assert difference.split()[0].replace("−", "-") == f"{apart:.3f}"


def test_repeated_mismatch_matches_its_runs() -> None:
    """Columns: what was recorded first, the repetition, both. SAPO's first seeds are paired with GRPO's there."""
    table = standard.recorded()
    table = table[table["dial"] == MISMATCH.name]
    is_repeated = table["seed"].isin(standard.REPEATED)
    columns = [MISMATCH.levels(ours) for ours in (table[~is_repeated], table[is_repeated], table)]
    text = section("## Does the mismatch repeat?")
    rows = {"gspo": "GSPO", "vespo": "VESPO", "grpo_unclipped": "GRPO without a clip", "cispo": "CISPO"}
    found = [
        {loss: bearable.borne(ours, loss, MISMATCH.at)[0] for loss in (*rows, "sapo") if loss in set(ours["line"])}
        for ours in columns
    ]
    for loss, name in rows.items():
        assert f"| {name} | {' | '.join(str(numbers[loss]) for numbers in found)} |" in text
    assert f"| SAPO | | {found[1]['sapo']} | |" in text
    decided = []
    for numbers in found:
        known = {loss: number for loss, number in numbers.items() if number is not None}
        corrected = dict(zip(known, holm([number.p for number in known.values()]), strict=True))
        decided.append({loss for loss, p in corrected.items() if is_decided(p, known[loss].n)})
    assert decided == [{"cispo"}, set(), set()]
    assert round(corrected["cispo"], 2) == 0.06
    steps = archive.load(RULER, "bearable_mismatch")["steps"]
    steps = steps[~steps["seed"].isin(standard.REPEATED)]
    xeon = pd.concat([outcomes.of_steps(ours, MISMATCH, loss) for loss, ours in steps.groupby("algorithm")])
    assert (xeon.groupby("seed")["start"].nunique() == 1).all()
    all_xeon = archive.load(RULER, "bearable_mismatch")["steps"]
    every = pd.concat([outcomes.of_steps(ours, MISMATCH, loss) for loss, ours in all_xeon.groupby("algorithm")])
    first, whole = (bearable.borne(MISMATCH.levels(runs), "sapo", MISMATCH.at)[0] for runs in (xeon, every))
    assert f"{first} there, {whole} on all ten" in text
    assert whole is not None
    corrected_whole = holm([whole.p, *(number.p for loss, number in known.items() if loss != "sapo")])[0]
    assert (is_decided(corrected_whole, whole.n), round(corrected_whole, 3)) == (True, 0.003)


def test_router_table_matches_its_runs() -> None:
    steps = archive.load(RULER, "bearable_routers")["steps"].sort_values("step")
    of = {
        metric: steps[steps["metric"] == metric].groupby(["arm", "seed"])["value"].agg(["first", "last"]).unstack(0)
        for metric in ("eval_accuracy", "eval_greedy", "eval_accuracy_permuted")
    }
    measured = archive.load(RULER, "bearable_routers_measured")["steps"]
    relative = measured.groupby(["metric", "arm"])["value"].mean()
    text = section("## How fast may routers step?")
    rows = [cells(row) for row in text.splitlines() if " | 0." in row]
    assert len(rows) == 6
    base, pvalues = "", []
    for size, factor, rate, step, start, sampled, apart, greedy, apart_greedy, n in rows:
        scale = {"flat": "0.1", "natural": "1.0"}[size]
        arm = f"grpo router_scale={scale} learning_rate={float(rate)} router_factor={float(factor)}"
        base = base if apart else arm
        assert f"{of['eval_accuracy']['first'][arm].mean():.3f}" == start
        for metric, level, difference in (("eval_accuracy", sampled, apart), ("eval_greedy", greedy, apart_greedy)):
            ends = of[metric]["last"]
            assert f"{ends[arm].mean():.3f}" == level
            assert str(ends[arm].count()) == n
            if difference:
                paired = over_seeds((ends[arm] - ends[base]).dropna().tolist())
                assert interval(paired) == difference
                cost = interval(Estimate(-paired.mean, -paired.high, -paired.low, paired.n))
                assert metric == "eval_greedy" or rate != "1e-4" or cost in QUESTIONS
        if apart:
            ends = of["eval_accuracy"]["last"]
            pvalues.append(ttest_1samp((ends[arm] - ends[base]).dropna(), 0).pvalue)
        if step:
            routers, others = (relative[f"relative_step_{name}"] for name in ("routers", "others"))
            alike = f"grpo router_scale={scale} router_factor={float(factor)}"
            assert f"{routers[alike] / others[alike]:.2g}" == step
    assert all(is_decided(p, 5) for p in holm(pvalues))
    ends = of["eval_accuracy"]["last"]
    arms = [f"grpo router_scale={scale} learning_rate=0.0001 router_factor={scale}" for scale in ("1.0", "0.1")]
    apart = over_seeds((ends[arms[0]] - ends[arms[1]]).tolist())
    assert f"natural minus flat {interval(apart)}" in text
    permuted = of["eval_accuracy_permuted"]["last"].mean()
    assert f"{permuted.min():.3f} to {permuted.max():.3f}" in text


def first_seeds() -> pd.DataFrame:
    """The recorded outcomes without the repetition."""
    table = standard.recorded()
    return table[~table["seed"].isin(standard.REPEATED)]


SETTINGS = ("bearable", "bearable_selection", "bearable_long", "bearable_larger")
SIX = {"rspo_gspo": "RSPO on GSPO", "gspo": "GSPO", "vespo": "VESPO", "grpo": "GRPO"}
SIX |= {"grpo_unclipped": "GRPO without a clip", "cispo": "CISPO"}


def test_six_losses_in_four_settings_match_the_runs() -> None:
    text = section("### Six losses in four settings", "\n### ")
    rows = {loss: row_of(text, f"| {name} |") for loss, name in SIX.items()}
    for place, setting in enumerate(SETTINGS):
        levels = bearable.levels(archive.load(RULER, setting)["steps"])
        found = {loss: bearable.borne(levels, loss) for loss in SIX}
        others = {loss: number for loss, (number, _) in found.items() if loss != REFERENCE}
        p = holm([number.p for number in others.values()])  # type: ignore[union-attr]
        decided = {loss for loss, each in zip(others, p, strict=True) if is_decided(each, 5)}
        for loss, (number, best) in found.items():
            assert rows[loss][1 + place] == (f"{number} *" if loss in decided else str(number))
            ours = levels[(levels["line"] == loss) & (levels["dial"] == best)]
            assert rows[loss][5 + place] == f"{ours['sampled'].mean():.3f}"


def test_agreement_of_settings_matches_the_pages() -> None:
    """Kendall's τ of sort with each other setting: of what six losses bear, and of their accuracy at the best rates."""
    text, others = section("### Six losses in four settings", "\n### "), [loss for loss in SIX if loss != REFERENCE]
    for setting in SETTINGS[1:]:
        both = {name: archive.load(RULER, name) for name in (SETTINGS[0], setting)}
        taus = bearable.agreement(bearable.levels(joined.join(both)["steps"]), others)
        assert row_of(text, f"| `{setting}` |")[1:] == [interval(tau, 2) for tau in taus]
    every = {name: archive.load(RULER, name) for name in SETTINGS}
    taus = bearable.agreement(bearable.levels(joined.join(every)["steps"]), others)
    assert all(interval(tau, 2) in page for tau in taus for page in (text, QUESTIONS, README))


def test_twelve_losses_short_and_long_match_the_runs() -> None:
    text = section("### Twelve losses, short and long")
    names = SIX | {"topr": "TOPR", "gmpo": "GMPO", "dppo": "DPPO", "minirl": "MiniRL", "sapo": "SAPO"}
    names |= {"reinforce": "REINFORCE"}
    short = RATE.levels(first_seeds()).assign(panel="short")
    long = bearable.levels(archive.load(RULER, "bearable_long")["steps"]).assign(panel="long")
    for place, levels in enumerate((short, long)):
        found = {loss: bearable.borne(levels, loss) for loss in names}
        others = {loss: number for loss, (number, _) in found.items() if loss != REFERENCE}
        p = holm([number.p for number in others.values()])  # type: ignore[union-attr]
        decided = {loss for loss, each in zip(others, p, strict=True) if is_decided(each, 5)}
        for loss, (number, best) in found.items():
            row, ours = row_of(text, f"| {names[loss]} |"), levels[levels["line"] == loss]
            assert row[1 + place] == (f"{number} *" if loss in decided else str(number))
            assert row[3 + place] == f"{ours.loc[ours['dial'] == best, 'sampled'].mean():.3f}"
            assert set(ours.groupby("dial")["seed"].nunique()) == {5}
            assert place == 0 or ours["dial"].min() < best < ours["dial"].max()
            assert place == 0 or ours["dial"].nunique() in (4, 5)
    ends = {}
    for loss in ("topr", REFERENCE):
        ours = long[(long["line"] == loss) & (long["dial"] == bearable.borne(long, loss)[1])]
        ends[loss] = ours.set_index("seed")["sampled"]
    apart = interval(over_seeds((ends["topr"] - ends[REFERENCE]).tolist()))
    assert all(f"{apart} above GRPO" in page for page in (text, QUESTIONS))
    taus = bearable.agreement(pd.concat([short, long]), [loss for loss in names if loss != REFERENCE])
    assert all(interval(tau, 2) in page for tau in taus for page in (text, QUESTIONS))


def test_settings_table_matches_the_runs() -> None:
    text = section("## Does the number carry over?", "### Six losses")
    rows = [cells(row) for row in text.splitlines() if row.startswith("| `bear")]
    names = [row[0].partition("`, ")[0].strip("`") for row in rows]
    assert len(names) >= 3
    data = {name: archive.load(RULER, name) for name in names}
    (spec,) = find(["carry_over"])
    numbers = spec.figure(joined.join(data)).numbers.set_index(["panel", "series"])
    assert len({machine for tables in data.values() for machine in tables["runs"]["machine"]}) == 1
    for name, row in zip(names, rows, strict=True):
        assert float(row[2].split()[0]) == pytest.approx(data[name]["runs"]["parameters"].iloc[0] / 1e6, abs=0.05)
        levels = bearable.levels(data[name]["steps"])
        of_reference = levels[levels["line"] == REFERENCE]
        best = bearable.borne(levels, REFERENCE)[1]
        there = of_reference[of_reference["dial"] == best]["sampled"].mean()
        assert [float(cell) for cell in row[3:5]] == pytest.approx([of_reference["start"].mean(), there], abs=6e-4)
        for place, (panel, loss) in enumerate(
            itertools.product(("multiple", "difference"), ("gspo", "grpo_unclipped"))
        ):
            number, digits = numbers.loc[(panel, f"{loss}, {name}")], 2 if panel == "multiple" else 3
            cell = f"{number['mean']:.{digits}f} [{number['low']:.{digits}f}, {number['high']:.{digits}f}]"
            assert row[5 + place] == cell.replace("-", "−")
    losses = list(itertools.product(names, ("gspo", "grpo_unclipped")))
    borne = [bearable.borne(bearable.levels(data[name]["steps"]), loss)[0] for name, loss in losses]
    corrected = holm([each.p for each in borne if each is not None])
    decided = {pair for pair, p in zip(losses, corrected, strict=True) if is_decided(p, 5)}
    of_gspo, unclipped = {"bearable", "bearable_larger"}, {"bearable_selection", "bearable_larger"}
    assert decided == {(name, "gspo") for name in of_gspo} | {(name, "grpo_unclipped") for name in unclipped}
    larger = bearable.borne(bearable.levels(data["bearable_larger"]["steps"]), "gspo")[0]
    assert larger is not None
    for factor in (larger.own_best, larger.headroom):
        assert interval(factor, digits=2) in text
    assert all(row[5] in QUESTIONS for row in rows[1:])


def test_decaying_rate_table_matches_the_runs() -> None:
    text = section("## A rate that falls")
    constant, falling = (bearable.levels(archive.load(RULER, name)["steps"]) for name in ("bearable", "bearable_decay"))
    for rate in ("1e-4", "2e-4", "4e-4", "8e-4"):
        said = []
        for loss in (REFERENCE, "gspo"):
            before, after = (
                runs[(runs["algorithm"] == loss) & (runs["dial"] == float(rate))].set_index("seed")["sampled"]
                for runs in (constant, falling)
            )
            apart = over_seeds((after - before).tolist())
            said += [f"{before.mean():.3f}", f"{after.mean():.3f}", interval(apart)]
        assert row_of(text, f"| {rate} |")[1:7] == said
        assert rate == "8e-4" or said[2] in QUESTIONS
    ours = {loss: bearable.borne(falling, loss)[0] for loss in (REFERENCE, "gspo")}
    assert f"{ours[REFERENCE].crossing * 1e4:.1f}e-4 in place of" in text  # type: ignore[union-attr]
    usual = constant[constant["seed"].isin(falling["seed"])]
    assert f"by that of the constant rate, {crossing_by(usual, falling) * 1e4:.1f}e-4" in text
    assert f"more than {ours['gspo'].ratio:.2f} times" in text  # type: ignore[union-attr]
    assert np.isinf(ours["gspo"].crossing)  # type: ignore[union-attr]


@pytest.mark.check
def test_norm_cut_table_matches_the_runs() -> None:
    text = section("## The cut of the gradient's norm")
    names = {"GRPO": "grpo", "GSPO": "gspo", "GRPO without a clip": "grpo_unclipped"}
    steps = {
        name: archive.load(RULER, name)["steps"] for name in ("bearable", "bearable_norm_cut", "bearable_autoclip")
    }
    levels = {name: bearable.levels(table).set_index(["algorithm", "dial", "seed"]) for name, table in steps.items()}
    rows = [cells(line) for line in text.splitlines() if line.startswith("| G")]
    assert len(rows) == len(levels["bearable_norm_cut"]) / 5 == 11
    for label, rate, *shown in rows:
        arm = (names[label], float(rate))
        uncut = levels["bearable_norm_cut"]["sampled"].loc[arm]
        usual = levels["bearable"]["sampled"].loc[arm].reindex(uncut.index)
        shares = steps["bearable"].query("metric == 'norm_cut' and algorithm == @arm[0] and learning_rate == @arm[1]")
        said = [f"{shares[shares['seed'].isin(uncut.index)]['value'].mean():.2f}", f"{usual.mean():.3f}"]
        for name in ("bearable_norm_cut", "bearable_autoclip"):
            if arm not in levels[name].index.droplevel("seed"):
                said += ["", ""]
                continue
            other = levels[name]["sampled"].loc[arm]
            said += [f"{other.mean():.3f}", interval(over_seeds((other - usual).tolist()))]
        assert shown == said
    changes = {}
    for label, loss in names.items():
        uncut, usual = (at_three_rates(name, loss) for name in ("bearable_norm_cut", "bearable"))
        changes[label] = (uncut - usual.reindex(uncut.index)).tolist()
    corrected = holm([ttest_1samp(each, 0).pvalue for each in changes.values()])
    assert [round(p, 3) for p in corrected] == pytest.approx([0.002, 0.927, 0.082], abs=1e-3)
    for label in ("GRPO", "GRPO without a clip"):
        assert interval(over_seeds([-change for change in changes[label]])) in text
    kept, lost = over_seeds(changes["GSPO"]), over_seeds([-change for change in changes["GRPO"]])
    assert all(interval(kept) in page for page in (text, QUESTIONS, README))
    assert all(interval(lost) in page for page in (QUESTIONS, README))
    apart = over_seeds([theirs - ours for ours, theirs in zip(changes["GRPO"], changes["GSPO"], strict=True)])
    usual, uncut = (at_three_rates(name, outcome="greedy") for name in ("bearable", "bearable_norm_cut"))
    of_greedy = over_seeds((usual.reindex(uncut.index) - uncut).tolist())
    best = levels["bearable_norm_cut"]["sampled"].loc["grpo", 5e-5]
    retuned = over_seeds((levels["bearable"]["sampled"].loc["grpo", 1e-4].reindex(best.index) - best).tolist())
    assert all(interval(each) in text for each in (apart, of_greedy, retuned))
    assert interval(retuned) in QUESTIONS
    uncut = levels["bearable_norm_cut"].reset_index()
    borne = {loss: bearable.borne(uncut, loss)[0] for loss in names.values()}
    assert borne["grpo"].crossing == pytest.approx(1.4e-4, abs=5e-6)  # type: ignore[union-attr]
    assert np.isinf(borne["gspo"].crossing)  # type: ignore[union-attr]
    of_cut = levels["bearable"].reset_index().query("seed in @uncut.seed")
    assert f"by the gain with the cut, {crossing_by(of_cut, uncut) * 1e4:.1f}e-4" in text
    assert f"{borne['grpo_unclipped']} times that" in text
    assert all(f"more than {borne['gspo'].ratio:.2f} times" in page for page in (text, QUESTIONS))  # type: ignore[union-attr]


def test_dual_clip_numbers_match_the_pages() -> None:
    names = ("bearable", "bearable_norm_cut", "bearable_dual_clip", "bearable_dual_clip_uncut")
    usual, uncut, dual, dual_uncut = (at_three_rates(name) for name in names)
    pages = [section("**A dual clip can", ends="\n\n"), QUESTIONS]
    for with_it, without, places in ((dual_uncut, uncut, pages), (dual, usual, pages), (dual_uncut, usual, pages[:1])):
        added = over_seeds((with_it - without.reindex(with_it.index)).tolist())
        assert all(interval(added) in page for page in places)
    assert ttest_1samp(dual_uncut - uncut.reindex(dual_uncut.index), 0).pvalue == pytest.approx(0.0045, abs=5e-4)


def at_three_rates(experiment: str, loss: str = REFERENCE, outcome: str = "sampled") -> pd.Series:
    """A loss's accuracy at the end by seed, the mean over GRPO's best rate, twice and four times that rate."""
    levels = bearable.levels(archive.load(RULER, experiment)["steps"])
    ours = levels[(levels["algorithm"] == loss) & levels["dial"].isin([1e-4, 2e-4, 4e-4])]
    return ours.groupby("seed")[outcome].mean()


def test_factors_match_the_board() -> None:
    """Their best rates and headrooms over GRPO's; two headrooms are decided after Holm's correction."""
    borne = {each.loss: each.borne[RATE.name] for each in outcomes.scores(standard.recorded())}
    p = {}
    for loss, number in borne.items():
        assert number is not None
        if loss != REFERENCE and np.isfinite(number.headroom.low):
            log, half = np.log(number.headroom.mean), np.log(number.headroom.high / number.headroom.mean)
            p[loss] = 2 * student.sf(abs(log) / (half / student.ppf(0.975, number.n - 1)), number.n - 1)
    assert len(p) >= 7
    decided = {loss for loss, each in zip(p, holm(list(p.values())), strict=True) if is_decided(each, 5)}
    assert decided == {"rspo_gspo", "gmpo"}


def test_repetition_table_matches_the_runs() -> None:
    text = section("## Does the number repeat?")
    again = standard.recorded()[lambda table: (table["dial"] == RATE.name) & table["seed"].isin(standard.REPEATED)]
    repeated = standard.recorded()[lambda table: (table["dial"] == RATE.name) & table["loss"].isin(set(again["loss"]))]
    first = repeated[~repeated["seed"].isin(standard.REPEATED)]
    columns = [{each.loss: each for each in outcomes.scores(table)} for table in (first, again, repeated)]
    rows = {"topr": "| TOPR", "rspo_gspo": "| RSPO on GSPO", "gmpo": "| GMPO", "gspo": "| GSPO", "vespo": "| VESPO"}
    rows |= {"grpo_unclipped": "| GRPO without", "cispo": "| CISPO"}
    assert rows.keys() == set(again["loss"]) - {REFERENCE}
    for loss, begins in rows.items():
        assert row_of(text, begins)[1:4] == [str(scores[loss].borne[RATE.name]) for scores in columns]
        assert columns[1][loss].decided[RATE.name] == (loss not in ("vespo", "grpo_unclipped", "cispo"))
        assert (columns[1][loss].seeds, columns[2][loss].seeds) == (5, 10)
    for loss in ("rspo_gspo", "gmpo", "gspo"):
        number = columns[2][loss].borne[RATE.name]
        assert f"{number.own_best.mean:.2f}" in text  # type: ignore[union-attr]
        assert str(number.headroom) in text  # type: ignore[union-attr]
    of = {loss: again[(again["loss"] == loss) & (again["value"] == columns[0][loss].best_rate)] for loss in columns[0]}
    ends = {loss: ours.set_index("seed")["sampled"] for loss, ours in of.items()}
    apart = {loss: interval(over_seeds((ends[loss] - ends[REFERENCE]).tolist())) for loss in rows}
    assert all(each in text for each in apart.values())
    assert apart["topr"] in README


def test_levels_at_the_best_rates_match_the_pages() -> None:
    scores = {each.loss: each for each in outcomes.scores(standard.recorded())}
    alike = [scores[loss].sampled.mean for loss in (REFERENCE, "gspo", "rspo_gspo", "vespo", "dppo", "minirl")]
    alike.append(scores["grpo_unclipped"].sampled.mean)
    assert (round(min(alike), 2), round(max(alike), 2)) == (0.64, 0.68)
    assert max(alike) - min(alike) < 0.04
    rounded = {"gmpo": 0.70, "topr": 0.74, "cispo": 0.59, "sapo": 0.58}
    assert {loss: round(scores[loss].sampled.mean, 2) for loss in rounded} == rounded
    assert all(f"{level:.2f}" in README for level in rounded.values())
    assert np.isnan(scores["reinforce"].borne[RATE.name].crossing)  # type: ignore[union-attr]
    table = standard.recorded()
    at = first_seeds()[
        lambda first: (first["dial"] == RATE.name) & (first["value"] == outcomes.best_rate(table, REFERENCE))
    ]
    means = at.groupby("loss")["sampled"].mean()
    bear_more = [loss for loss, each in scores.items() if each.borne[RATE.name].ratio > 1]  # type: ignore[union-attr]
    assert {loss for loss in bear_more if means[loss] < means[REFERENCE] - 0.01} == {"gspo", "rspo_gspo"}


def test_noise_at_the_best_rates_matches_the_page() -> None:
    """Of GSPO less GRPO in the last evaluation, on fresh seeds."""
    levels = bearable.levels(archive.load(RULER, "bearable")["steps"]).query("10 <= seed <= 14")
    ends = {}
    for loss in (REFERENCE, "gspo"):
        ours = levels[(levels["line"] == loss) & (levels["dial"] == bearable.borne(levels, loss)[1])]
        ends[loss] = ours.set_index("seed")["sampled"]
    assert f"it is smaller: {(ends['gspo'] - ends[REFERENCE]).std():.3f} in the last evaluation" in QUESTIONS


def test_optimizer_table_matches_the_runs() -> None:
    table = bearable.table(archive.load(RULER, "optimizers")["steps"]).set_index(["setting", "loss"])
    rows = {"adamw": "| AdamW", "muon": "| Muon", "sign": "| sign descent", "sgd": "| SGD"}
    for name, begins in rows.items():
        row = row_of(PAGE, begins)
        for loss, (rate, sampled, greedy) in {"grpo": row[1:4], "gspo": row[4:7]}.items():
            ours = table.loc[(name, loss)]
            assert float(rate) == float(ours["best learning rate"])
            assert float(sampled) == float(str(ours["sampled at best"]).split()[0])
            assert float(greedy) == float(str(ours["greedy at best"]).split()[0])
    text, said = section("## Optimizers"), []
    for name, loss in (("sgd", "grpo"), ("adamw", "grpo"), ("muon", "grpo"), ("sgd", "gspo"), ("adamw", "gspo")):
        said.append(float(table.loc[(name, loss), "bearable"]) / float(table.loc[(name, loss), "best learning rate"]))
    assert [f"{each:.1f}" for each in said] == ["2.5", "3.6", "3.6", "5.9", "2.8"]
    assert all(f"{each:.1f} times" in text for each in said)


def test_routing_table_matches_the_runs() -> None:
    """``experiment=routing_mismatch``: means at the end, and paired differences from GRPO with free routes."""
    steps = archive.load(RULER, "routing_mismatch")["steps"].sort_values("step")
    ends = {
        metric: steps[steps["metric"] == metric].groupby(["algorithm", "routing", "seed"])["value"].last().unstack()
        for metric in ("eval_accuracy", "eval_greedy")
    }
    arms = [("grpo", "off"), ("grpo", "r2"), ("grpo", "r3"), ("grpo", "r3_filtered"), ("grpo", "r3_gates")]
    arms += [("grpo", "lagged"), ("up_grpo", "off")]
    text = section("## Routing against a mismatch")
    rows = [line for line in text.splitlines() if line.startswith("|")][2 : 2 + len(arms)]
    for arm, row in zip(arms, rows, strict=True):
        _, sampled, difference, greedy = cells(row)
        assert sampled == f"{ends['eval_accuracy'].loc[arm].mean():.3f}"
        assert greedy == f"{ends['eval_greedy'].loc[arm].mean():.3f}"
        if arm != arms[0]:
            apart = (ends["eval_accuracy"].loc[arm] - ends["eval_accuracy"].loc[arms[0]]).mean()
            assert difference.split()[0].replace("−", "-") == f"{apart:.3f}"


def test_committed_board_matches_the_recorded_outcomes(tmp_path: Path) -> None:
    paths = board.write_board(tmp_path)
    assert {path.name for path in paths} == {"board.md", "board.html", "profile.png", "profile.svg"}
    made, committed = ((folder / "board.md").read_text() for folder in (tmp_path, ROOT / "results" / "board"))
    assert_same(made, committed, "board.md")


def test_readme_numbers_match_the_board() -> None:
    section_of_losses = QUESTIONS.partition("## Which loss on stale data?")[2].partition("\n## ")[0]
    scores = {each.loss: each for each in outcomes.scores(standard.recorded())}
    for loss in ("topr", "rspo_gspo", "gmpo", "gspo", "grpo_unclipped", "cispo", "sapo"):
        number = scores[loss].borne[RATE.name]
        assert number is not None
        assert f"{number.ratio:.2f}" in section_of_losses
        assert scores[loss].decided[RATE.name]
        assert loss not in ("gspo", "grpo_unclipped") or str(number) in README
    assert f"TOPR ([reconstructed](#limits)) at {scores['topr'].borne[RATE.name].ratio:.2f}" in README  # type: ignore[union-attr]
    assert max(scores.values(), key=lambda each: each.borne[RATE.name].ratio).loss == "topr"  # type: ignore[union-attr]
    number = scores["gspo"].borne["mismatch"]
    assert number is not None
    assert str(number) in README
    assert not scores["gspo"].decided["mismatch"]


def test_recorded_runs_use_the_standards_seeds() -> None:
    table = standard.recorded()
    seeds = table.groupby(["dial", "loss", "rate", "value"])["seed"].agg(frozenset)
    first = frozenset(range(5))
    assert set(seeds["rate"]) == {first, first | set(standard.REPEATED)}
    second, repeated = frozenset(range(5, 10)), frozenset(standard.REPEATED)
    assert set(seeds["staleness"]) == {second}
    assert set(seeds["mismatch"]) == {repeated, second | repeated}
    assert seeds["rate"].groupby("loss").nunique().max() == 1
    for _, ours in table.groupby(["dial", "loss"]):
        assert ours[["sampled", "greedy", "start"]].stack().between(0, 1).all()
    assert write.to_markdown(outcomes.table(outcomes.scores(table))).count("\n") > 4
