"""What papers claim: thresholds, verdicts, and the numbers they stand on."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from steadymoe import conf
from steadymoe.bench import cli
from steadymoe.bench.audit.archive import ADDED
from steadymoe.bench.audit.measure import COLUMNS
from steadymoe.bench.report import archive
from steadymoe.bench.report.realism import Realism
from steadymoe.bench.runs import record
from steadymoe.bench.runs.identity import axes_name
from steadymoe.bench.statistics.collapse import Rule
from steadymoe.bench.statistics.estimates import Estimate
from study import arms, claims, command, early_warning, effects, exploratory, figures, gates, page
from study.arms import WIDE
from study.claims import CLAIMS, CONTRASTS, Dose, Outcome, OutcomeFinding, Verdict, findings, leg_verdict
from study.effects import Measurement
from study.gates import Gate, Need, State, blocking
from study.recorded import NONE, Arm, Audited, NotRun, Recorded
from study.verdicts import dose_rows, outcome_rows

ROOT = Path(__file__).parents[2]
REFERENCE = Recorded(ROOT / "results" / "reference")
NOWHERE = Recorded(Path("nowhere"))
NAN = float("nan")
TEN = tuple(0.5 + np.sqrt(0.9) * np.array([1, -1] * 5))  # mean 0.5, standard deviation 1


def outcome(side: str = "above", threshold: float = 0, upper: float = NAN, seen: Measurement | None = None) -> Outcome:
    return Outcome("x", lambda study: seen or Measurement(NONE), side, threshold, upper)  # type: ignore[arg-type]


def estimate(low: float, high: float) -> Estimate:
    return Estimate((low + high) / 2, low, high, 10)


def of_runs(*verdicts: Verdict) -> list[OutcomeFinding]:
    return [OutcomeFinding(outcome(), Measurement(NONE), NAN, NAN, verdict) for verdict in verdicts]


def gate(name: str, state: State) -> Gate:
    return Gate(Need(name, "stale"), state, "measured")


# --- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "low", "high", "verdict"),
    [
        ("above 0", 0.1, 0.3, "supported"),
        ("above 0", -0.3, -0.1, "contradicted"),
        ("above 0", -0.1, 0.1, "not decided"),
        ("above 0", 0.0, 0.1, "not decided"),  # the threshold itself is on neither side
        ("above 0", 1e-17, 0.1, "not decided"),  # nor is one that rounding has moved
        ("above 0", NAN, NAN, "not decided"),
        ("above 0", 0.1, np.inf, "supported"),  # a cost that was never reached
        ("below 0", -0.3, -0.1, "supported"),
        ("below 0", 0.1, 0.3, "contradicted"),
        ("below 0", -0.1, 0.3, "not decided"),
        ("between 0.05 0.2", 0.06, 0.1, "supported"),
        ("between 0.05 0.2", 0.01, 0.04, "contradicted"),
        ("between 0.05 0.2", 0.3, 0.4, "contradicted"),
        ("between 0.05 0.2", 0.04, 0.1, "not decided"),
        ("between 0.05 0.2", 0.1, 0.3, "not decided"),
        ("between 0.05 0.2", 0.01, 0.3, "not decided"),
    ],
)
def test_outcome_is_decided_by_its_whole_interval(side: str, low: float, high: float, verdict: str) -> None:
    name, *bounds = side.split()
    claimed = outcome(name, *map(float, bounds))
    seen = Measurement(estimate(low, high))
    assert claimed.verdict(seen, 0.05) == verdict
    assert claimed.verdict(seen, NAN) == claimed.verdict(seen, 0.0501) == "not decided"


@pytest.mark.parametrize(
    ("verdicts", "whole", "without_moe_effect"),
    [
        (["supported", "supported"], "supported", "under stress only"),
        (["supported", "not decided"], "not decided", "under stress only"),
        (["supported", "contradicted", "not decided"], "mixed", "under stress only"),
        (["contradicted", "not decided"], "contradicted", "under stress only"),
        (["not testable here", "not testable here"], "not testable here", "not testable here"),
        (["not run", "not run"], "not run", "not run"),
        (["not run", "supported"], "not decided", "under stress only"),
        (["not run", "contradicted"], "contradicted", "under stress only"),
    ],
)
def test_leg_verdict_combines_its_outcomes(verdicts: list[Verdict], whole: str, without_moe_effect: str) -> None:
    runs = of_runs(*verdicts)
    gradients = [replace(each, outcome=replace(each.outcome, leg="mechanism")) for each in of_runs("contradicted")]
    assert leg_verdict([*runs, *gradients], "trajectory") == whole
    assert leg_verdict([*runs, *gradients], "trajectory", gate("R5 or R8", "passed")) == whole
    for state in ("failed", "not measured"):
        absent = gate("R5 or R8", state)  # type: ignore[arg-type]
        assert leg_verdict([*runs, *gradients], "trajectory", absent) == without_moe_effect
        assert leg_verdict([*runs, *gradients], "mechanism", absent) == "contradicted"
    assert leg_verdict(runs, "mechanism") is None


@pytest.mark.parametrize(
    ("setting", "numbers", "state"),
    [
        ("stale", {"R5": 1.08, "R8": 0.3}, "failed"),
        ("stale", {"R5": 2.04, "R8": 0.3}, "passed"),
        ("stale", {"R5": NAN, "R8": 0.554}, "passed"),
        ("stale", {"R5": NAN, "R8": 0.3}, "failed"),
        ("stale", {"R5": NAN, "R8": NAN}, "not measured"),
        ("stale", {}, "not measured"),
        # At *long* routes also carry function (R9), and routers move as other weights do (R10).
        ("long", {"R8": 0.8, "R9": 0.05, "R10": 1.1}, "passed"),
        ("long", {"R8": 0.3, "R9": 0.05, "R10": 1.1}, "failed"),
        ("long", {"R8": 0.8, "R9": 0.8, "R10": 1.1}, "failed"),
        ("long", {"R8": 0.8, "R9": 0.05, "R10": 11.0}, "failed"),
        ("long", {"R8": 0.8, "R9": 0.05, "R10": 0.1}, "failed"),
        ("long", {"R8": 0.8, "R9": NAN, "R10": 1.1}, "not measured"),
        ("long", {"R8": NAN, "R9": 0.05, "R10": 1.1}, "not measured"),
    ],
)
def test_realism_gates_decide_the_moe_effect(
    setting: str, numbers: dict[str, float], state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(name: str, setting: str, number: float) -> Realism:
        measured = Estimate(number, NAN, NAN, 0 if np.isnan(number) else 5)
        of_report = next(each for each in (*gates.ROWS, gates.OVER_DENSE) if each.gate == name)
        return Realism(of_report, setting, "", measured)

    rows = [row(name, setting, number) for name, number in numbers.items()]
    rows += [row("R8", "learning", 0.9), row("R1", setting, 9.0)]  # another setting's, another gate
    # Of a second arm, which does not count.
    rows += [row(name, setting, 1.1 if number > 9 else 11.0) for name, number in numbers.items() if name == "R10"]
    monkeypatch.setattr(gates, "realism", lambda study: rows)
    assert gates.moe_effect(NOWHERE, setting).state == state


def test_detectable_difference_depends_only_on_the_spread() -> None:
    # With n = 34 a paired t test finds half of a standard deviation (Cohen 1988, table 2.4.1).
    claimed = outcome()
    seeds = tuple(0.5 + np.sqrt(33 / 34) * np.array([1, -1] * 17))  # a standard deviation of 1
    half = claimed.detectable(Measurement(NONE, seeds), 0.05)
    assert half == pytest.approx(0.5, abs=0.01)
    assert claimed.detectable(Measurement(NONE, tuple(x + 9 for x in seeds)), 0.05) == pytest.approx(half)
    assert replace(claimed, unit="ratio").detectable(Measurement(NONE, seeds), 0.05) == pytest.approx(np.exp(half))
    welch = Measurement(NONE, error=1 / np.sqrt(34), degrees=33)  # an effect with a standard error alone
    assert claimed.detectable(welch, 0.05) == pytest.approx(half)
    assert np.isnan(claimed.detectable(Measurement(NONE), 0.05))
    # With five seeds the exact p is at least 1/16, so nothing is.
    assert np.isnan(claimed.detectable(Measurement(NONE, seeds[:5]), 0.05))
    assert not np.isnan(claimed.detectable(Measurement(NONE, seeds[:6]), 0.05))
    # More outcomes, a stricter level: the protocol's table has 0.041 for one and 0.057 for six.
    there = outcome(seen=Measurement(Estimate(0.5, 0.1, 0.9, 10), TEN))
    one, six = (findings(NOWHERE, [there] * n)[0].detectable for n in (1, 6))
    assert six / one == pytest.approx(0.057 / 0.041, abs=0.02)


def test_p_tests_the_effect_against_the_threshold() -> None:
    ten = Measurement(NONE, tuple(np.arange(1.0, 11.0)))
    least = 2 / 2**10
    assert outcome("above", 0).p(ten) == outcome("above", 11).p(ten) == least  # all of ten on one side
    assert outcome("above", 5.5).p(ten) == 1  # the mean itself
    assert outcome("between", 0, 20).p(ten) == least
    assert outcome("between", 0, 5.5).p(ten) == 1  # the end that is not rejected
    assert replace(outcome("above", np.exp(5.5)), unit="ratio").p(ten) == 1  # seeds are logarithms
    assert np.isnan(outcome().p(Measurement(NONE)))
    # An effect with a standard error alone has Student's p: t = 2.262 with 9 degrees of freedom is 5 % (Student 1908).
    nine = Measurement(Estimate(2.262, 0, 4.5, 10), error=1.0, degrees=9)
    assert outcome().p(nine) == pytest.approx(0.05, abs=1e-4)
    assert outcome().p(replace(nine, degrees=18)) == pytest.approx(0.0363, abs=1e-4)  # two samples of ten


def test_holm_counts_all_outcomes_of_a_claim() -> None:
    # Nine of ten on one side, all of one size: 22 of 1024 patterns are as far off, twice and thrice that is 4 and 6 %.
    there = outcome(seen=Measurement(Estimate(0.8, 0.1, 1.2, 10), (1.0,) * 9 + (-1.0,)))

    def missing(study: Recorded) -> Measurement:
        raise NotRun("C (made)")

    absent = replace(outcome(), effect=missing)
    for outcomes, verdict in (([there], "supported"), ([there] * 2, "supported"), ([there] * 3, "not decided")):
        first, *others = findings(NOWHERE, outcomes)
        assert (first.p, first.corrected) == pytest.approx((22 / 1024, len(outcomes) * 22 / 1024))
        assert {each.verdict for each in (first, *others)} == {verdict}
        first, *_, last = findings(NOWHERE, [there, *[absent] * len(outcomes)])
        assert first.corrected == pytest.approx((len(outcomes) + 1) * 22 / 1024)
        assert (last.verdict, last.decides) == ("not run", "to be run: C (made)")


def test_claim_is_answered_if_its_gates_are_passed() -> None:
    passed, waiting, failed = (gate("A", "passed"), gate("B", "not measured"), gate("C", "failed"))
    known = {each.need: each for each in (passed, waiting, failed)}
    assert blocking([passed.need], known) == []
    assert blocking([*known], known) == [failed, waiting]
    with pytest.raises(KeyError):
        blocking([Need("A", "learning")], known)
    seen = Measurement(Estimate(0.8, 0.1, 1.2, 10), (1.0,) * 10)
    runs = outcome(seen=seen)
    gradients = replace(runs, leg="mechanism")
    for blocked, lost, verdicts in (
        ([], [], ("supported", "supported")),
        ([waiting], [], ("not testable here", "supported")),
        ([], [failed], ("supported", "not testable here")),
    ):
        rows = findings(NOWHERE, [runs, gradients], blocked, lost)
        assert tuple(row.verdict for row in rows) == verdicts
        assert all(row.measured == seen and row.p == 2 / 2**10 for row in rows)  # what was seen stays
        assert {bool(row.decides) for row in rows if row.verdict == "supported"} == {False}
        assert all("testbed that passes" in row.decides for row in rows if row.verdict == "not testable here")
    assert of_runs("not decided")[0].decides == "more seeds"


def test_zero_share_is_noted_instead_of_an_infinite_ratio() -> None:
    shares, zero = pd.Series({0: 0.1, 1: 0.2, 2: 0.4}), pd.Series({0: 0.1, 1: 0.0, 2: 0.0})
    whole = effects.factor(shares, shares * 2)
    assert (whole.estimate.mean, whole.seeds, whole.note) == (pytest.approx(0.5), pytest.approx([np.log(0.5)] * 3), "")
    for above, below, mean in ((shares, zero, 7), (zero, shares, 1 / 7)):
        ratio = effects.factor(above, below)
        assert ratio.estimate.mean == pytest.approx(mean)
        assert (ratio.seeds, ratio.note) == ((), "ratio of means, a share is 0 in 2 of 3 seeds")
    undefined = replace(outcome("above", 1), effect=lambda study: effects.factor(shares, zero * 0), unit="ratio")
    (row,) = findings(NOWHERE, [undefined])
    assert (row.verdict, row.measured.estimate.n) == ("not decided", 0)
    assert row.decides == row.measured.note != ""


# --- the tables of the protocol ---------------------------------------------------------------------------------------


def test_claims_match_the_protocol() -> None:
    rows = {}
    for line in (ROOT / "study" / "protocol.md").read_text().splitlines():
        if cells := re.match(r"\| (\d+) (.*?) \| .*? \| (.*?) \| (.*) \|$", line):
            rows[int(cells[1])] = (f"{cells[2]}.", set(re.findall(r"`(\w+)`", cells[3])), cells[4])
    assert rows.keys() == {claim.number for claim in CLAIMS}
    for claim in CLAIMS:
        statement, experiments, outcomes = rows[claim.number]
        outcomes = re.sub(r"[\d.e-]+/[\d.e-]+", "", outcomes)  # bands are no thresholds
        assert claim.statement == statement
        assert experiments == set(claim.experiments)
        groups = re.findall(r"\(([a-em-o](?:, [m-o])*)\)", outcomes)
        letters = sorted(letter for group in groups for letter in group.split(", "))
        shown = sorted(row["letter"] for row in outcome_rows(claim.number, findings(NOWHERE, claim.outcomes)))
        assert shown == (letters or ["a"]), claim.number
        for each in claim.outcomes:
            for number in (each.threshold, each.upper):
                assert np.isnan(number) or re.search(rf"(?<![\d.]){abs(number):g}(?![\d])", outcomes), each.what
    assert {claim.number for claim in CLAIMS if claim.about_moe} == {1, 3, 5, 7, 10, 15, 17, 18, 19, 20, 25, 26, 27}
    by_reward = {claim.number for claim in CLAIMS if claim.figure == "answer" and not claim.by_accuracy}
    assert by_reward == {1, 3, 5, 7, 10, 15, 16, 27}  # the protocol: mean reward decides at *stale*, but 26 is tuned


def test_gates_of_claims_match_the_protocol_and_are_measured() -> None:
    section = (ROOT / "study" / "protocol.md").read_text().partition("\n## Gates\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([\d, ]+) \| (.*?) \|$", section, re.MULTILINE))
    numbers = {claim.number: claim for claim in CLAIMS}
    needs = {words: {numbers[int(n)].needs for n in of.split(", ")} for of, words in rows.items()}
    assert needs == {
        "V1; V2, V3, V5, V7 at *stale*": {gates.NEEDS["stress"]},
        "the same, and V2 dense": {gates.NEEDS["stress and dense twin"]},
        "V1; V4, V7 at *mismatch*": {gates.NEEDS["mismatch"]},
        "V1": {gates.NEEDS["learning"]},
        next(words for words in rows.values() if words.startswith("V2 at *long*")): {gates.NEEDS["long"]},
        "V2 at *longer*": {gates.NEEDS["longer"]},
        next(words for words in rows.values() if words.startswith("none")): {(), gates.NEEDS["stress"]},
    }
    assert numbers[16].needs == gates.NEEDS["stress"]
    assert sorted(int(n) for of in rows for n in of.split(", ")) == sorted(numbers)
    assert {need for claim in CLAIMS for need in claim.needs} <= gates.gates(NOWHERE).keys()


def test_unknown_arm_or_effect_raises() -> None:
    with pytest.raises(KeyError, match="GSPQ"):
        claims.effect({"mean reward": ["GSPQ", "GRPO"]})
    with pytest.raises(KeyError, match="mean rewards"):
        claims.effect({"mean rewards": ["GSPO", "GRPO"]})
    assert len(CONTRASTS) == 12
    assert {contrast.sign(NOWHERE)[1] for contrast in CONTRASTS} == {"not run"}


# --- numbers, from runs made by hand -------------------------------------------------------------------------------

SEEDS, STEPS = range(10), 20
A, B = Arm("A", "made", "grpo"), Arm("B", "made", "gspo", {"optimizer.learning_rate": 0.001})


def rewards(arm: Arm, seed: int) -> np.ndarray:
    """A falls from 0.6 to 0.2; B rises to 0.7 and a bit by seed."""
    end = 0.2 if arm is A else 0.7 + seed / 100
    return np.linspace(0.6, end, STEPS - 4).tolist() + [end] * 4  # type: ignore[return-value]


@pytest.fixture
def made(tmp_path: Path) -> Recorded:
    runs, steps, answers = [], [], []
    for arm in (A, B):
        for seed in SEEDS:
            collapsed = arm is A and seed > 0
            runs.append(
                {"arm": arm.label.lower(), "algorithm": arm.algorithm, "axes": axes_name(arm.axes), "seed": seed}
                | {"status": "diverged" if collapsed else "finished", "diverged_step": 15 if collapsed else None}
                | {"diverged_reason": "not finite" if collapsed else None}
                | {"steps": STEPS, "updates_per_rollout": 16, "responses": 8, "origin": ""}
                | {"collapse_rule": Rule().text()}
            )
            curves = {"reward": rewards(arm, seed), "tokens_sampled": [100.0 if arm is A else 50.0] * STEPS}
            curves |= {"clip_fraction": [0.01 * (seed + 1) * (20 if arm is B else 1)] * STEPS}
            curves |= {"grad_norm": [seed + 1.0] * STEPS, "prompts_sampled": [4.0] * STEPS}
            curves |= {"eval_accuracy": [0.01 * step for step in range(1, STEPS + 1)]}
            curves |= {f"{stage}_seconds": [1.0] * STEPS for stage in ("rollout", "old_policy", "update")}
            curves |= {"log_ratio_moment_free": [4.0] * STEPS, "log_ratio_moment_pinned": [1.0] * STEPS}
            for metric, values in curves.items():
                steps += [(arm.label.lower(), seed, step, metric, value) for step, value in enumerate(values, 1)]
            answers += [(arm.label.lower(), seed, f"{prompt}", float(arm is B or prompt < 3)) for prompt in range(4)]
    tables = {
        "runs": pd.DataFrame(runs),
        "steps": pd.DataFrame(steps, columns=["arm", "seed", "step", "metric", "value"]),
        **{name: pd.DataFrame({"arm": []}) for name in ("histograms", "tails")},
        "evaluations": pd.DataFrame(answers, columns=["arm", "seed", "prompt", "score"]),
    }
    for name, table in tables.items():
        for column in archive._COLUMNS[name]:
            if column not in table:
                table[column] = None if column == "config" else 0 if column in archive._NUMBERS else ""
    archive.keep(tables, "made", tmp_path)
    tables["steps"].to_parquet(tmp_path / "data" / "made" / "steps.parquet")  # what archive keeps leaves some out
    archive.bind(tmp_path / "data" / "made")
    return Recorded(tmp_path)


def test_doses_are_levels_of_arms_in_a_table_and_a_figure(made: Recorded) -> None:
    never = Arm("C", "made", "cispo")
    clipped = [partial(effects.level, arm=arm, metric="clip_fraction") for arm in (A, B)]
    doses = [Dose("clipped", dial, value, clipped[value]) for dial in ("layers", "experts") for value in (0, 1)]
    shares = [partial(effects.routed, arms=each) for each in ((B,), (A, never))]
    doses += [Dose("share", "layers", value, share) for value, share in enumerate(shares, 1)]
    rows = dose_rows(made, doses)
    assert [each.mean for each in rows["number"]] == pytest.approx([0.055, 1.1, 0.055, 1.1, 0.75])
    shown = page.shown_doses(rows)
    assert (shown["dial"] + " " + shown["value"]).tolist() == ["layers 0", "layers 1", "experts 0", "experts 1"]
    assert shown["share"].map(str).tolist() == ["–", "0.75", "–", "–"]  # of equal seeds
    assert shown["n"].tolist() == [10] * 4
    drawn = figures.dose(rows)
    numbers = drawn.numbers
    assert numbers.loc[numbers["series"] == "clipped", "mean"].tolist() == pytest.approx([0.055, 1.1, 0.055, 1.1])
    places = [list(line.get_xdata()) for line in drawn.axes[0].get_lines() if len(line.get_xdata())]
    assert places == [[0, 1], [1]]  # share has the second value alone


def test_arm_numbers_match_their_runs_paired_by_seed(made: Recorded) -> None:
    assert made.final(A).tolist() == pytest.approx([0.2] * 10)
    assert made.collapsed(A) == (9, 10)
    counted = [np.mean(rewards(B, seed)[:11]) - np.mean(rewards(A, seed)[:11]) for seed in SEEDS]
    gain = effects.paired(made, "mean reward", B, A)
    assert gain.seeds == pytest.approx(counted)  # the last nine of 20 steps only confirm
    assert gain.estimate.low < gain.estimate.mean < gain.estimate.high
    twice = effects.interaction(made, "mean reward", (B, A), (A, B))
    assert twice.estimate.mean == pytest.approx(2 * np.mean(counted))
    assert twice.error == pytest.approx(np.sqrt(2 * np.var(counted, ddof=1) / 10))  # the variances add
    assert (twice.seeds, twice.degrees) == ((), pytest.approx(18))
    assert effects.fall(made, A).seeds == pytest.approx([0.4] * 10)
    assert made.held_out(A).tolist() == pytest.approx([0.2] * 10)  # the last evaluation
    assert made.late_accuracy(A).tolist() == pytest.approx([0.18] * 10)  # the mean of the last five
    assert made.routing_share(A).tolist() == pytest.approx([0.75] * 10)
    assert effects.routed(made, (A, B)).estimate.mean == pytest.approx(0.75)
    assert effects.routed(made, (A,), (B,)).estimate.mean == pytest.approx(0)
    assert made.tables([B, A])["runs"]["arm"].unique().tolist() == ["B", "A"]
    with pytest.raises(NotRun, match=r"C \(made\)"):
        made.final(Arm("C", "made", "cispo"))


def test_a_run_with_one_evaluation_in_its_second_half_has_no_late_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("eval_accuracy", step, seed, step / 10) for step in (0, 4, 8) for seed in range(10)]
    steps = pd.DataFrame(rows, columns=["metric", "step", "seed", "value"])
    monkeypatch.setattr(Recorded, "tables", lambda study, arms: {"steps": steps})
    assert NOWHERE.held_out(A).tolist() == [0.8] * 10
    assert effects.paired(NOWHERE, "late accuracy", A, B).estimate.n == 0


def standing(arm: str, n: int, low: float = 0.4) -> dict[str, object]:
    numbers = {"start": Estimate(0.3, NAN, NAN, n), "end": Estimate(0.5, low, low + 0.2, n)}
    return {"arm": arm, "outcome": "held-out accuracy", "metric": "eval_accuracy", "curve": arm != "beside"} | numbers


def test_figure_names_differing_n_and_unpaired_arms() -> None:
    of_arms = {"A": range(10), "B": range(10), "C": range(6), "other seeds": range(200, 210), "beside": range(2)}
    rows = [
        {"arm": arm, "seed": seed, "algorithm": "grpo", "step": step, "metric": "eval_accuracy", "value": seed / 999}
        | {"updates_per_rollout": 1, "prompts": 8}
        for arm, seeds in of_arms.items()
        for seed in seeds
        for step in (0, 1)
    ]
    standings = [standing(arm, len(seeds), NAN if len(seeds) < 3 else 0.4) for arm, seeds in of_arms.items()]
    figure = figures.arms(pd.DataFrame(rows), pd.DataFrame(standings))
    assert [text.get_text() for text in figure.axes[1].get_yticklabels()] == ["A", "B", "C (n = 6)", "other seeds"]
    caption = " ".join(figure.caption.split())
    assert "n = 10 where no other is named" in caption
    assert "left out: beside (n = 2)." in caption
    assert "not paired with the rest: other seeds." in caption


def test_outcome_with_fewer_seeds_is_marked() -> None:
    base = {"claim": 1, "unit": "accuracy", "side": "above", "threshold": 0.0, "upper": NAN, "verdict": "not decided"}
    effects_of = {
        "a less b": estimate(0.1, 0.2),
        "c less d": estimate(0.1, 0.2),
        "e less f": Estimate(0.1, NAN, NAN, 2),
    }
    rows = [base | {"outcome": f"held-out accuracy, {name}", "effect": of} for name, of in effects_of.items()]
    figure = figures.outcomes(pd.DataFrame(rows))
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == ["1  a − b", "1  c − d", "1  e − f (n = 2)"]
    marks = [line for line in figure.axes[0].get_lines() if line.get_marker() == "s" and len(line.get_xdata())]
    assert [line.get_markerfacecolor() == "white" for line in marks] == [False, False, True]


def test_only_flat_has_routers_of_another_size() -> None:
    # README and the page of claims: elsewhere a router factor of 1 is the equal relative step.
    assert [name for name in conf.names("model") if "router_scale:" in conf.text("model", name)] == ["flat"]


def test_area_of_a_constant_metric_follows_from_ranks(made: Recorded) -> None:
    # grad_norm is seed + 1 in both arms; those of A collapse, so they are the higher ones. Its seed 0 is falling when
    # it ends, too late to be judged: it is neither collapsed nor stable.
    area = effects.area(made, [A, B], "grad_norm").estimate
    collapsed, stable = [seed + 1 for seed in range(1, 10)], [seed + 1 for seed in range(10)]
    pairs = [(x > y) + (x == y) / 2 for x in collapsed for y in stable]
    assert area.mean == pytest.approx(np.mean(pairs))
    # Next to the reward itself, which tells the arms apart at once.
    reward = early_warning.auc(*made.stable_or_collapsed([A, B]), "reward", falls=True).mean
    beside = effects.announces(made, [A, B], "grad_norm")
    low, high = beside.estimate.low, beside.estimate.high
    assert beside.estimate.mean == pytest.approx(area.mean - reward)
    assert beside.seeds == ()
    assert beside.error == pytest.approx((high - low) / 2 / 2.262, rel=1e-3)
    same = effects.announces(made, [A, B], "reward").estimate
    assert (same.mean, same.low, same.high) == (0, 0, 0)


def test_warning_error_recomputes_the_horizon_per_left_out_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Areas of grad_norm: 0 of all seeds and without one of 1 to 3, 1 without seed 0, whose collapse at step 20 sets the
    # horizon; a constant reward has 0.5. So the error is √(3/4 · (0.75² + 3 · 0.25²)) = 0.75; a fixed horizon has 0.
    steps, runs = [], []
    for seed in range(4):
        runs += [("A", seed, 5.0 if seed else 20.0), ("B", seed, NAN)]
        for step in range(1, 25):
            steps += [("A", seed, step, "grad_norm", 1.0), ("B", seed, step, "grad_norm", 2.0 * (step >= 10))]
            steps += [(arm, seed, step, "reward", 0.5) for arm in "AB"]
    tables = (
        pd.DataFrame(steps, columns=["arm", "seed", "step", "metric", "value"]),
        pd.DataFrame(runs, columns=["arm", "seed", "collapsed"]),
    )
    monkeypatch.setattr(Recorded, "stable_or_collapsed", lambda self, of: tables)
    whole = effects.announces(NOWHERE, [A, B], "grad_norm")
    assert (whole.estimate.mean, whole.error, whole.degrees) == pytest.approx((-0.5, 0.75, 3))
    # Eleven steps ahead seed 0's horizon is step 9, before the jump; what collapses at step 5 cannot warn.
    assert effects.announces(NOWHERE, [A, B], "grad_norm", 11).estimate.mean == pytest.approx(0.25 - 0.125)


def test_a_page_that_is_a_link_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "claims.md").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match=r"claims.md is a link"):
        command.main(["--results", str(tmp_path), "--pages", str(tmp_path)])
    assert not (tmp_path / "elsewhere").exists()


def test_command_without_runs_says_what_to_run_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["study", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        cli.main(command.main)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "GRPO (study)" in message
    assert "python -m study run" in message
    assert list(tmp_path.iterdir()) == []


# --- gradients, from an archive made by hand -----------------------------------------------------------------------

LOSS, OTHER = Audited("loss", "made", "grpo"), Audited("other", "made", "gspo")


@pytest.fixture
def audited(tmp_path: Path) -> Recorded:
    """Two losses at three checkpoints: usefulness, clipped shares, and a reward that falls to 0.7."""
    empty = dict.fromkeys((*COLUMNS, *ADDED), "") | dict.fromkeys(("low", "high", "clip_low", "clip_high"), NAN)
    base = empty | {"start": 0, "router_scale": 1.0, "n": 8, "replicates": None, "strength": 0.0}
    rows = []
    for seed in range(3):
        place = base | {"seed": seed, "checkpoint": seed}
        for k, reward in ((0, 0.4), (16, 0.28)):
            rows.append(place | {"k": k, "routing": "fresh", "loss": "all", "quantity": "reward", "value": reward})
        for loss, routing, useful in (("grpo", "free", 0.1), ("grpo", "r2", 0.3), ("gspo", "free", 0.5 + seed)):
            of = place | {"k": 16, "routing": routing, "loss": loss, "algorithm": loss}
            for block, cut, value in (("whole", "before", useful), ("whole", "after", 9.0), ("router", "before", 8.0)):
                rows.append(of | {"block": block, "cut": cut, "quantity": "usefulness", "value": value})
            rows.append(of | {"block": "whole", "cut": "before", "quantity": "snr", "value": 3.0})
            rows.append(of | {"quantity": "clip_fraction", "value": 0.02 if loss == "grpo" else 0.8})
    folder = tmp_path / "audits" / "made"
    folder.mkdir(parents=True)
    pd.DataFrame(rows).to_parquet(folder / "audits.parquet")
    facts = {"unfinished": [], "audits": [], "checksum": record.checksum(folder / "audits.parquet")}
    (folder / "audits.json").write_text(json.dumps(facts))
    return Recorded(tmp_path)


def test_gradients_are_compared_checkpoint_by_checkpoint(audited: Recorded) -> None:
    assert effects.paired(audited, "usefulness", OTHER, LOSS).seeds == pytest.approx((0.4, 1.4, 2.4))
    assert effects.paired(audited, "usefulness", LOSS.replayed(), LOSS).seeds == pytest.approx((0.2,) * 3)
    assert effects.paired(audited, "gain", OTHER, LOSS).seeds == pytest.approx((0.2, 0.7, 1.2))  # over √(1 + SNR) = 2
    twice = effects.interaction(audited, "usefulness", (OTHER, LOSS), (LOSS, OTHER))
    assert (twice.estimate.mean, twice.error) == pytest.approx((2.8, np.sqrt(2 / 3)))  # of 0.4, 1.4 and 2.4
    assert effects.clipped(audited, OTHER, LOSS, 16).estimate.mean == pytest.approx(40)
    with pytest.raises(NotRun, match=r"other \+ R2 \(made\)"):
        audited.gradient(OTHER.replayed(), "usefulness", 16)
    with pytest.raises(NotRun, match=r"C \(absent\)"):
        audited.gradient(Audited("C", "absent", "grpo"), "usefulness", 16)


def test_an_audit_after_updates_that_lose_the_reward_blocks_its_leg(audited: Recorded) -> None:
    assert audited.kept("made", 16).tolist() == pytest.approx([0.7] * 3)
    lost = gates.audited(audited, "made", 16)
    assert (lost.state, str(lost.need)) == ("failed", "reward kept (made)")
    assert gates.audited(audited, "absent", 16).state == "not measured"


# --- exploratory numbers ----------------------------------------------------------------------------------------------


def test_effect_of_r2_is_paired_by_seed_in_rollout_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def curves(study: Recorded, arms: list[Arm]) -> dict[str, pd.DataFrame]:
        (arm,) = arms
        times, moved = (0.25, 3.0) if "R2" in arm.label else (1.0, 1.0)
        rows = []
        for seed in range(10):
            rows += [("reward", 1, seed, 0.5), ("reward", 2, seed, 0.5 - 0.1 * (times < 1) + 0.01 * seed)]
            rows += [("expert_change_rate", 1, seed, 0.4), ("expert_change_rate", 2, seed, 0.1)]
            rows += [("token_ratio_variance", 1, seed, times * (1 + seed)), ("token_ratio_variance", 2, seed, 99.0)]
            rows += [("log_ratio_moment_free", step, seed, moved * step * (1 + seed)) for step in (1, 5)]
        return {"steps": pd.DataFrame(rows, columns=["metric", "step", "seed", "value"])}

    monkeypatch.setattr(Recorded, "tables", curves)
    rows = {(row.quantity, row.arm): row for row in exploratory.replay(NOWHERE).itertuples()}
    quantities = (exploratory.LEFT, exploratory.NEXT, exploratory.SEEN, exploratory.MOVED)
    for free, replayed in exploratory.PAIRS:
        left, after, seen, moved = (rows[quantity, replayed.label] for quantity in quantities)
        assert (left.number.mean, left.effect.n) == (pytest.approx(0.4), 0)
        assert (after.number.mean, after.effect.mean) == (pytest.approx(0.445), pytest.approx(-0.1))
        assert (seen.number.mean, seen.effect.mean) == (pytest.approx(0.25 * 5.5), pytest.approx(0.25))
        assert (moved.number.mean, moved.effect.mean) == (pytest.approx(9 * 5.5), pytest.approx(3))
        assert rows[exploratory.MOVED, free.label].number.mean == pytest.approx(3 * 5.5)
        assert rows[exploratory.MOVED, free.label].effect.n == 0
    monkeypatch.undo()
    assert exploratory.replay(NOWHERE).empty
    recorded = {(row.quantity, row.arm): row for row in exploratory.replay(REFERENCE).itertuples()}
    for free, replayed in exploratory.PAIRS:  # one cold start
        assert len({recorded[exploratory.START, arm.label].number for arm in (free, replayed)}) == 1


@pytest.mark.parametrize(
    ("intervals", "sign"),
    [
        ([(0.1, 0.3)], "right"),
        ([(-0.3, -0.1)], "wrong"),
        ([(-0.1, 0.1)], "open"),
        ([(0.1, 0.3), (0.1, 0.3)], "right"),
        ([(0.1, 0.3), (-0.3, -0.1)], "open"),
        ([(-0.3, -0.1), (-0.3, -0.1)], "wrong"),
    ],
)
def test_contrast_is_right_if_its_whole_interval_is_above_0(intervals: list[tuple[float, float]], sign: str) -> None:
    seen = [Measurement(estimate(low, high)) for low, high in intervals]
    contrast = claims.Contrast("", "", tuple(lambda study, each=each: each for each in seen))  # type: ignore[misc]
    assert contrast.sign(NOWHERE) == (seen, sign)


def test_frontier_contrasts_name_cells_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_reward(study: Recorded, arm: Arm) -> pd.Series:
        """Falls by 0.01 with each update, but at 4e-4; GSPO is 0.1 better at 8e-4 and 0.1 worse at other rates."""
        updates, rate = arm.axes.get("updates_per_rollout", 16), arm.axes.get("optimizer.learning_rate", 8e-4)
        worse = 0.0 if rate == 4e-4 else 0.01 * updates  # type: ignore[operator]
        better = (0.1 if rate == 8e-4 else -0.1) if arm.algorithm == "gspo" else 0.0
        return pd.Series([0.49, 0.5, 0.51]) - (worse - better) * pd.Series([0.99, 1.0, 1.01])

    monkeypatch.setattr(Recorded, "mean_reward", mean_reward)
    (staler,), sign = CONTRASTS[1].sign(NOWHERE)
    assert (sign, staler.estimate.mean, staler.estimate.n) == ("right", pytest.approx(0.28 * 2 / 3), 3)
    assert staler.note == "above 0 in 6 of 9 cells"
    seen, sign = CONTRASTS[3].sign(NOWHERE)
    assert sign == "open"
    assert {each.note: each.estimate.mean for each in seen} == pytest.approx(
        {"at 0.0002": 0.1, "at 0.0004": 0.1, "at 0.0008": -0.1}
    )


def test_the_best_setting_lies_inside_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {(arm.algorithm, axes_name(arm.axes)) for arm in (effects.best(REFERENCE, name) for name in arms.TUNED)}
    assert chosen <= {(arm.algorithm, axes_name(arm.axes)) for arm in arms.BEST.values()}  # arms that the study runs
    rewarded = {(2e-4, "3e-4/4e-4"): 0.6, (4e-4, "0.2/0.27"): 0.7}
    by_arm = {arm.label: rewarded.get(key, 0.5) for key, arm in arms.TUNED["gspo"].items()}
    monkeypatch.setattr(Recorded, "mean_reward", lambda self, arm: pd.Series([by_arm[arm.label]]))
    assert effects.best_setting(NOWHERE, "gspo") == (4e-4, "0.2/0.27")
    assert effects.best(NOWHERE, "gspo").axes == {"optimizer.learning_rate": 4e-4} | WIDE.axes
    by_arm[arms.TUNED["gspo"][4e-4, "3e-4/4e-4"].label] = 0.8
    assert effects.best(NOWHERE, "gspo").axes == {"optimizer.learning_rate": 4e-4}
    by_arm[arms.TUNED["gspo"][8e-4, "3e-4/4e-4"].label] = 0.9
    with pytest.raises(effects.NoNumber, match="an end of the grid"):
        effects.best(NOWHERE, "gspo")


def test_difference_in_mean_reward_only_is_distinguished_from_level() -> None:
    ahead, behind, unclear = estimate(0.05, 0.2), estimate(-0.2, -0.05), estimate(-0.1, 0.1)
    rows = [
        ("speed", ahead, unclear, unclear, unclear),
        ("level", ahead, ahead, unclear, unclear),
        ("accuracy", behind, unclear, behind, unclear),
        ("late", behind, unclear, unclear, behind),
        ("nothing", unclear, unclear, unclear, unclear),
        ("within", estimate(-0.1, 0.02), ahead, unclear, unclear),
    ]
    table = pd.DataFrame(rows, columns=["outcome", *effects.RUN_METRICS])
    assert exploratory.undecided_in_level(table) == ["speed"]
    assert exploratory.undecided_in_level(table, {"within": 0.06}) == ["speed", "within"]
