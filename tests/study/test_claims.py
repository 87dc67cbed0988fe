"""What papers claim: thresholds, verdicts, and the numbers they stand on."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from steadymoe.bench import cli
from steadymoe.bench.audit.archive import ADDED
from steadymoe.bench.audit.measure import COLUMNS
from steadymoe.bench.config.identity import axes_name
from steadymoe.bench.report import archive, draw
from steadymoe.bench.report.realism import OVER_DENSE, Realism
from steadymoe.bench.score.arms import WIDE
from steadymoe.bench.score.recorded import NONE, Arm, Audited, NotRun, Recorded
from steadymoe.bench.statistics import early_warning
from steadymoe.bench.statistics.collapse import Rule
from steadymoe.bench.statistics.estimates import Estimate
from steadymoe.bench.study import arms, contrasts, doses, effects, figures, gates, realism, replay, summary
from steadymoe.bench.study.claim import Claim, Finding, Outcome, Verdict, findings
from steadymoe.bench.study.doses import Dose
from steadymoe.bench.study.effects import Measurement
from steadymoe.bench.study.gates import Gate, Need, State, blocking
from steadymoe.bench.study.verdicts import CLAIMS, REPLAY

ROOT = Path(__file__).parents[2]
NAN = float("nan")


def outcome(side: str, threshold: float, upper: float = NAN) -> Outcome:
    return Outcome("x", lambda study: Measurement(NONE), side, threshold, upper)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("side", "low", "high", "found"),
    [
        ("above", 0.1, 0.3, "supported"),
        ("above", -0.3, -0.1, "contradicted"),
        ("above", -0.1, 0.1, "not decided"),
        ("above", 0.0, 0.1, "not decided"),  # the threshold itself is on neither side
        ("above", NAN, NAN, "not decided"),
        ("above", 0.1, np.inf, "supported"),  # a cost that was never reached
        ("below", -0.3, -0.1, "supported"),
        ("below", 0.1, 0.3, "contradicted"),
        ("below", -0.1, 0.3, "not decided"),
    ],
)
def test_an_outcome_is_decided_by_its_whole_interval(side: str, low: float, high: float, found: str) -> None:
    assert outcome(side, 0).verdict(seen := Measurement(Estimate((low + high) / 2, low, high, 10)), 0.05) == found
    assert outcome(side, 0).verdict(seen, NAN) == "not decided"  # without a p
    assert outcome(side, 0).verdict(seen, 0.0501) == "not decided"


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0.06, 0.1, "supported"),
        (0.01, 0.04, "contradicted"),
        (0.3, 0.4, "contradicted"),
        (0.04, 0.1, "not decided"),
        (0.1, 0.3, "not decided"),
        (0.01, 0.3, "not decided"),
    ],
)
def test_between_has_two_ends(low: float, high: float, found: str) -> None:
    assert outcome("between", 0.05, 0.2).verdict(Measurement(Estimate((low + high) / 2, low, high, 10)), 0.01) == found


@pytest.mark.parametrize(
    ("found", "whole"),
    [
        (["supported", "supported"], "supported"),
        (["supported", "not decided"], "not decided"),
        (["supported", "contradicted"], "mixed"),
        (["supported", "contradicted", "not decided"], "mixed"),
        (["contradicted", "not decided"], "contradicted"),
        (["not decided"], "not decided"),
        (["not testable here", "not testable here"], "not testable here"),
        (["not run", "not run"], "not run"),
        (["not run", "supported"], "not decided"),
        (["not run", "contradicted"], "contradicted"),
    ],
)
def test_a_leg_is_supported_by_all_contradicted_by_one_and_mixed_by_both(found: list[Verdict], whole: str) -> None:
    asked = Claim(1, "", "", (), (), "", (), "")
    of_runs = [Finding(outcome("above", 0), Measurement(NONE), NAN, NAN, each) for each in found]
    other = Finding(replace(outcome("above", 0), leg="mechanism"), Measurement(NONE), NAN, NAN, "contradicted")
    assert asked.verdict([*of_runs, other], "trajectory") == whole
    assert asked.verdict([*of_runs, other], "mechanism") == "contradicted"
    assert asked.verdict(of_runs, "mechanism") is None


@pytest.mark.parametrize("state", ["failed", "not measured"])
def test_runs_without_the_moe_effect_answer_under_stress_only_and_keep_their_outcomes(state: State) -> None:
    asked = Claim(1, "", "", (), (), "", (), "")
    _, absent = gate("R5 or R8", state)
    _, present = gate("R5 or R8", "passed")

    def runs(*found: Verdict) -> list[Finding]:
        return [Finding(outcome("above", 0), Measurement(NONE), NAN, NAN, each) for each in found]

    for each in (runs("supported"), runs("supported", "contradicted"), runs("not decided"), runs("contradicted")):
        assert asked.verdict(each, "trajectory", absent) == "under stress only"
        assert asked.verdict(each, "trajectory", present) == asked.verdict(each, "trajectory")
    assert asked.verdict(runs("not testable here"), "trajectory", absent) == "not testable here"
    assert asked.verdict(runs("not run"), "trajectory", absent) == "not run"
    gradients = [replace(each, outcome=replace(each.outcome, leg="mechanism")) for each in runs("supported")]
    assert asked.verdict(gradients, "mechanism", absent) == "supported"
    assert asked.verdict(gradients, "trajectory", absent) is None


@pytest.mark.parametrize(
    ("numbers", "state"),
    [
        ({"R5": 1.08, "R8": 0.3}, "failed"),
        ({"R5": 2.04, "R8": 0.3}, "passed"),
        ({"R5": NAN, "R8": 0.554}, "passed"),
        ({"R5": NAN, "R8": 0.3}, "failed"),
        ({"R5": NAN, "R8": NAN}, "not measured"),
        ({}, "not measured"),
    ],
)
def test_the_moe_effect_is_present_by_either_realism_gate_of_the_setting(
    numbers: dict[str, float], state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(name: str, setting: gates.Setting, number: float) -> Realism:
        return Realism(
            replace(OVER_DENSE, gate=name), setting, "", Estimate(number, NAN, NAN, 0 if np.isnan(number) else 5)
        )

    rows = [row(name, "stale", number) for name, number in numbers.items()]
    rows += [row("R8", "learning", 0.9), row("R1", "stale", 9.0)]  # another setting's, another gate
    monkeypatch.setattr(realism, "realism", lambda study: rows)
    assert realism.moe_effect(Recorded(Path("nowhere")), "stale").state == state


def test_the_claims_about_moe_are_asked_where_the_moe_effect_is_looked_for() -> None:
    about = {claim.number: claim.moe_effect_at for claim in CLAIMS if claim.moe_effect_at}
    assert about == dict.fromkeys((1, 3, 5, 7, 10, 15), "stale")


TEN = tuple(0.5 + np.sqrt(0.9) * np.array([1, -1] * 5))  # mean 0.5, standard deviation 1


def finding(seen: Measurement, found: str = "not decided", **given: object) -> Finding:
    return Finding(replace(outcome("above", 0), **given), seen, NAN, NAN, found)  # type: ignore[arg-type]


def test_what_is_detectable_follows_from_the_spread_and_not_from_the_effect() -> None:
    # With n = 34 a paired t test finds half of a standard deviation (Cohen 1988, table 2.4.1).
    paired = outcome("above", 0)
    seeds = tuple(0.5 + np.sqrt(33 / 34) * np.array([1, -1] * 17))  # a standard deviation of 1
    half = paired.detectable(Measurement(NONE, seeds), 0.05)
    assert half == pytest.approx(0.5, abs=0.01)
    assert paired.detectable(Measurement(NONE, tuple(x + 9 for x in seeds)), 0.05) == pytest.approx(half)
    assert replace(paired, unit="ratio").detectable(Measurement(NONE, seeds), 0.05) == pytest.approx(np.exp(half))
    welch = Measurement(NONE, error=1 / np.sqrt(34), degrees=33)  # an effect with a standard error alone
    assert paired.detectable(welch, 0.05) == pytest.approx(half)
    assert np.isnan(paired.detectable(Measurement(NONE), 0.05))
    # With five seeds the exact p is at least 1/16, so nothing is.
    assert np.isnan(paired.detectable(Measurement(NONE, seeds[:5]), 0.05))
    assert not np.isnan(paired.detectable(Measurement(NONE, seeds[:6]), 0.05))
    # More outcomes, a stricter level: the protocol's table has 0.041 for one and 0.057 for six.
    ten = Measurement(Estimate(0.5, 0.1, 0.9, 10), TEN)
    there = replace(paired, effect=lambda study: ten)
    one, six = (findings(Recorded(Path("nowhere")), [there] * n)[0].detectable for n in (1, 6))
    assert six / one == pytest.approx(0.057 / 0.041, abs=0.02)


def test_an_outcome_that_is_not_decided_takes_more_seeds_and_a_decided_one_nothing() -> None:
    def finding(found: Verdict, lacks: str = "") -> Finding:
        return Finding(outcome("above", 0), Measurement(NONE), NAN, NAN, found, lacks=lacks)

    assert finding("not decided").decides == "more seeds"
    assert finding("not decided", "no number").decides == "no number"
    assert finding("supported").decides == finding("contradicted").decides == ""


def test_p_is_exact_and_about_the_threshold() -> None:
    ten = Measurement(NONE, tuple(np.arange(1.0, 11.0)))
    least = 2 / 2**10
    assert outcome("above", 0).p(ten) == outcome("above", 11).p(ten) == least  # all of ten on one side
    assert outcome("above", 5.5).p(ten) == 1  # the mean itself
    assert outcome("between", 0, 20).p(ten) == least
    assert outcome("between", 0, 5.5).p(ten) == 1  # the end that is not rejected
    ratio = replace(outcome("above", np.exp(5.5)), unit="ratio")
    assert ratio.p(ten) == 1  # seeds are logarithms
    assert np.isnan(outcome("above", 0).p(Measurement(NONE)))
    # An effect with a standard error alone has Student's p: t = 2.262 with 9 degrees of freedom is 5 % (Student 1908).
    nine = Measurement(Estimate(2.262, 0, 4.5, 10), error=1.0, degrees=9)
    assert outcome("above", 0).p(nine) == pytest.approx(0.05, abs=1e-4)
    assert outcome("above", 0).p(replace(nine, degrees=18)) == pytest.approx(0.0363, abs=1e-4)  # two samples of ten


def test_p_is_corrected_by_holm_for_the_outcomes_of_one_claim() -> None:
    # Nine of ten on one side, all of one size: 22 of 1024 patterns are as far off, twice and thrice that is 4 and 6 %.
    nine = Measurement(Estimate(0.8, 0.1, 1.2, 10), (1.0,) * 9 + (-1.0,))
    one = replace(outcome("above", 0), effect=lambda study: nine)
    study = Recorded(Path("nowhere"))
    assert [each.verdict for each in findings(study, [one])] == ["supported"]
    assert [each.verdict for each in findings(study, [one] * 2)] == ["supported"] * 2
    thrice = findings(study, [one] * 3)
    assert [each.verdict for each in thrice] == ["not decided"] * 3
    assert [(each.p, each.corrected) for each in thrice] == [pytest.approx((22 / 1024, 66 / 1024))] * 3


def test_an_outcome_that_has_not_run_counts_in_the_correction() -> None:
    ten = Measurement(Estimate(0.5, 0.1, 0.9, 10), TEN)
    there = replace(outcome("above", 0), effect=lambda study: ten)

    def missing(study: Recorded) -> Measurement:
        raise NotRun("C (made)")

    absent = replace(outcome("above", 0), effect=missing)
    alone, one, two = (findings(Recorded(Path("nowhere")), [there, *[absent] * n])[0] for n in (0, 1, 2))
    assert [each.corrected / alone.p for each in (alone, one, two)] == pytest.approx([1, 2, 3])
    assert one.p == alone.p


def gate(id: str, state: State) -> tuple[Need, Gate]:
    return (need := Need(id, "stale")), Gate(need, state, "measured")


def test_a_claim_is_answered_where_every_gate_that_it_needs_is_passed() -> None:
    known = dict(gate(id, state) for id, state in (("A", "passed"), ("B", "not measured"), ("C", "failed")))  # type: ignore[arg-type]
    a, b, c = known
    assert blocking([a], known) == []
    assert [each.need for each in blocking([a, b, c], known)] == [c, b]
    with pytest.raises(KeyError):
        blocking([Need("A", "learning")], known)


@pytest.mark.parametrize("state", ["failed", "not measured"])
def test_a_gate_that_is_not_passed_takes_the_verdict_of_its_leg_and_leaves_what_was_seen(state: State) -> None:
    seen = Measurement(Estimate(0.8, 0.1, 1.2, 10), (1.0,) * 10)
    of_runs = replace(outcome("above", 0), effect=lambda study: seen)
    of_gradients = replace(of_runs, leg="mechanism")
    _, standing = gate("B", state)
    for blocked, lost, found in (
        ([], [], ("supported", "supported")),
        ([standing], [], ("not testable here", "supported")),
        ([], [standing], ("supported", "not testable here")),
    ):
        each = findings(Recorded(Path("nowhere")), [of_runs, of_gradients], blocked, lost)
        assert tuple(one.verdict for one in each) == found
        assert all(one.measured == seen and one.p == 2 / 2**10 for one in each)
        assert [one.decides for one in each if one.verdict == "not testable here"] == [
            "a testbed that passes B (stale)"
        ] * len([*blocked, *lost])


def test_every_gate_that_a_claim_needs_is_measured_somewhere() -> None:
    measured = gates.gates(Recorded(Path("nowhere")))
    assert {need for claim in CLAIMS for need in claim.needs} <= measured.keys()


def test_a_share_of_0_makes_no_ratio_infinite_in_silence() -> None:
    shares, zero = pd.Series({0: 0.1, 1: 0.2, 2: 0.4}), pd.Series({0: 0.1, 1: 0.0, 2: 0.0})
    whole = effects.factor(shares, shares * 2)
    assert (whole.estimate.mean, whole.seeds, whole.note) == (pytest.approx(0.5), pytest.approx([np.log(0.5)] * 3), "")
    for above, below, mean in ((shares, zero, 7), (zero, shares, 1 / 7)):
        found = effects.factor(above, below)
        assert found.estimate.mean == pytest.approx(mean)
        assert (found.seeds, found.note) == ((), "ratio of means, a share is 0 in 2 of 3 seeds")
    asked = replace(outcome("above", 1), effect=lambda study: effects.factor(shares, zero * 0), unit="ratio")
    (each,) = findings(Recorded(Path("nowhere")), [asked])
    assert (each.verdict, each.measured.estimate.n) == ("not decided", 0)
    assert each.decides == each.measured.note == "no ratio: every share in its denominator is 0"


def test_the_figure_of_all_claims_marks_what_is_not_testable() -> None:
    row = {"claim": 1, "outcome": "mean reward, x less y", "unit": "reward", "side": "above", "threshold": 0.0}
    row |= {"upper": NAN, "effect": Estimate(0.1, 0.0, 0.2, 10), "verdict": "not testable here"}
    sheet = figures.outcomes(pd.DataFrame([row]))
    labels = [text.get_text() for legend in sheet.figure.legends for text in legend.get_texts()]
    labels += [text.get_text() for axis in sheet.figure.axes if axis.legend_ for text in axis.legend_.get_texts()]
    assert labels == ["not testable here"]


def test_the_registry_is_the_table_of_the_protocol() -> None:
    rows = {}
    for line in (ROOT / "docs" / "protocol.md").read_text().splitlines():
        if found := re.match(r"\| (\d+) (.*?) \| .*? \| (.*?) \| (.*) \|$", line):
            rows[int(found[1])] = (f"{found[2]}.", set(re.findall(r"`(\w+)`", found[3])), found[4])
    assert rows.keys() == {claim.number for claim in CLAIMS}
    for claim in CLAIMS:
        statement, experiments, outcomes = rows[claim.number]
        assert claim.statement == statement
        assert experiments == set(claim.experiments)
        letters = [
            letter for group in re.findall(r"\(([a-em-o](?:, [m-o])*)\)", outcomes) for letter in group.split(", ")
        ]
        assert len(claim.outcomes) == max(1, len(letters)), claim.number
        of_gradients = [each for each in claim.outcomes if each.leg == "mechanism"]
        if claim.number != 2:  # clipped shares have the letters of runs
            assert len(of_gradients) == len([letter for letter in letters if letter >= "m"])
        for each in claim.outcomes:
            for number in (each.threshold, each.upper):
                assert np.isnan(number) or re.search(rf"(?<![\d.]){abs(number):g}(?![\d])", outcomes), each.what


def test_the_gates_that_a_claim_needs_are_those_of_the_protocol() -> None:
    gates_part = (ROOT / "docs" / "protocol.md").read_text().partition("\n## Gates\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([\d, ]+) \| (.*?) \|$", gates_part, re.MULTILINE))
    numbers = {claim.number: claim for claim in CLAIMS}
    needs = {words: {numbers[int(n)].needs for n in of.split(", ")} for of, words in rows.items()}
    assert needs == {
        "V1; V2, V3, V5, V7 at *stale*": {gates.STRESS},
        "the same, and V2 dense": {gates.STRESS_AND_TWIN},
        "V1; V4, V7 at *mismatch*": {gates.MISMATCH},
        next(words for words in rows.values() if words.startswith("none")): {(), gates.STRESS},
    }
    assert numbers[16].needs == gates.STRESS
    assert sorted(int(n) for of in rows for n in of.split(", ")) == sorted(numbers)


def test_the_tuning_chose_arms_that_the_study_runs() -> None:
    best = [effects.best(Recorded(ROOT / "results" / "reference"), name) for name in arms.TUNED]
    assert {(arm.algorithm, axes_name(arm.axes)) for arm in best} <= {
        (arm.algorithm, axes_name(arm.axes)) for arm in arms.BEST.values()
    }


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
            curves |= {f"{stage}_seconds": [1.0] * STEPS for stage in ("rollout", "old_policy", "update")}
            curves |= {"log_ratio_moment_free": [4.0] * STEPS, "log_ratio_moment_pinned": [1.0] * STEPS}
            for metric, values in curves.items():
                for step, value in enumerate(values, 1):
                    steps.append((arm.label.lower(), seed, step, metric, value))
            answers += [(arm.label.lower(), seed, f"{prompt}", float(arm is B or prompt < 3)) for prompt in range(4)]
    tables = {
        "runs": pd.DataFrame(runs),
        "steps": pd.DataFrame(steps, columns=["arm", "seed", "step", "metric", "value"]),
        "histograms": pd.DataFrame({"arm": []}),
        "evaluations": pd.DataFrame(answers, columns=["arm", "seed", "prompt", "score"]),
    }
    archive.keep(tables, "made", tmp_path)
    folder = tmp_path / "data" / "made"
    tables["steps"].to_parquet(folder / "steps.parquet")  # what archive keeps leaves some out
    return Recorded(tmp_path)


def test_doses_are_levels_of_arms_in_a_table_and_a_figure(made: Recorded) -> None:
    never = Arm("C", "made", "cispo")
    clipped = [effects.level(arm, "clip_fraction") for arm in (A, B)]
    asked = [Dose("clipped", dial, value, clipped[value]) for dial in ("layers", "experts") for value in (0, 1)]
    asked += [Dose("share", "layers", 1, effects.routed((B,))), Dose("share", "layers", 2, effects.routed((A, never)))]
    rows = doses.table(made, asked)
    assert [each.mean for each in rows["number"]] == pytest.approx([0.055, 1.1, 0.055, 1.1, 0.75])
    shown = doses.shown(rows)
    assert (shown["dial"] + " " + shown["value"]).tolist() == ["layers 0", "layers 1", "experts 0", "experts 1"]
    assert shown["share"].map(str).tolist() == ["–", "0.75 [0.75, 0.75]", "–", "–"]
    assert shown["n"].tolist() == [10] * 4
    numbers = figures.dose(rows).numbers
    assert numbers.loc[numbers["series"] == "clipped", "mean"].tolist() == pytest.approx([0.055, 1.1, 0.055, 1.1])


def test_the_numbers_of_arms_are_those_of_their_runs(made: Recorded) -> None:
    assert made.final(A).tolist() == pytest.approx([0.2] * 10)
    assert made.first(B).tolist() == pytest.approx([0.6] * 10)
    assert made.collapsed(A) == (9, 10)
    counted = [np.mean(rewards(B, seed)[:11]) - np.mean(rewards(A, seed)[:11]) for seed in SEEDS]
    gain = effects.mean_reward(B, A)(made)
    assert gain.seeds == pytest.approx(counted)  # the last nine of 20 steps only confirm
    assert gain.estimate.low < gain.estimate.mean < gain.estimate.high
    twice = effects.interaction((B, A), (A, B))(made)
    assert twice.estimate.mean == pytest.approx(2 * np.mean(counted))
    assert twice.error == pytest.approx(np.sqrt(2 * np.var(counted, ddof=1) / 10))  # the variances add
    assert (twice.seeds, twice.degrees) == ((), pytest.approx(18))
    assert made.routing_share(A).tolist() == pytest.approx([0.75] * 10)
    assert effects.routed((A, B))(made).estimate.mean == pytest.approx(0.75)
    assert effects.routed((A,), (B,))(made).estimate.mean == pytest.approx(0)
    assert made.tables([B, A])["runs"]["arm"].unique().tolist() == ["B", "A"]


def test_the_area_of_a_metric_that_does_not_change_is_that_of_its_ranks(made: Recorded) -> None:
    # grad_norm is seed + 1 in both arms; those of A collapse, so they are the higher ones. Its seed 0 is falling when
    # it ends, too late to be judged: it is neither collapsed nor stable.
    area = early_warning.auc(*made.stable_or_collapsed([A, B]), "grad_norm")
    collapsed, stable = [seed + 1 for seed in range(1, 10)], [seed + 1 for seed in range(10)]
    pairs = [(x > y) + (x == y) / 2 for x in collapsed for y in stable]
    assert area.mean == pytest.approx(np.mean(pairs))
    # Beside the reward itself, which tells the arms apart at once.
    reward = early_warning.auc(*made.stable_or_collapsed([A, B]), "reward", falls=True).mean
    beside = effects.announces([A, B], "grad_norm")(made)
    assert beside.estimate.mean == pytest.approx(area.mean - reward)
    assert beside.estimate.low < beside.estimate.mean < beside.estimate.high
    assert beside.seeds == ()
    low, high = beside.estimate.low, beside.estimate.high
    assert beside.error == pytest.approx((high - low) / 2 / 2.262, rel=1e-3)
    same = effects.announces([A, B], "reward")(made).estimate
    assert (same.mean, same.low, same.high) == (0, 0, 0)


def test_announcing_a_collapse_has_the_error_of_runs_whose_horizon_the_left_out_seed_had_set(
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
    found = effects.announces([A, B], "grad_norm")(Recorded(Path("nowhere")))
    assert (found.estimate.mean, found.error, found.degrees) == pytest.approx((-0.5, 0.75, 3))
    # Eleven steps ahead seed 0's horizon is step 9, before the jump; what collapses at step 5 cannot warn.
    far = effects.announces([A, B], "grad_norm", 11)(Recorded(Path("nowhere"))).estimate
    assert far.mean == pytest.approx(0.25 - 0.125)


def test_without_runs_the_command_says_what_to_run_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["steadymoe", "study", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "GRPO (study)" in (said := capsys.readouterr().err)
    assert "steadymoe study run" in said
    assert list(tmp_path.iterdir()) == []


def test_an_arm_that_was_not_run_is_named_and_decides_nothing(made: Recorded) -> None:
    absent = Arm("C", "made", "cispo")
    assert not made.has(absent)
    with pytest.raises(NotRun, match=r"C \(made\)"):
        made.final(absent)
    (found,) = findings(made, [Outcome("x", effects.mean_reward(absent, A), "above", 0)])
    assert (found.verdict, found.decides) == ("not run", "to be run: C (made)")


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
    (folder / "audits.json").write_text('{"unfinished": [], "audits": []}')
    return Recorded(tmp_path)


def test_gradients_are_compared_checkpoint_by_checkpoint(audited: Recorded) -> None:
    assert effects.useful(OTHER, LOSS)(audited).seeds == pytest.approx((0.4, 1.4, 2.4))
    assert effects.useful(LOSS.replayed(), LOSS)(audited).seeds == pytest.approx((0.2,) * 3)
    assert effects.useful(OTHER, LOSS, "gain")(audited).seeds == pytest.approx((0.2, 0.7, 1.2))  # over √(1 + SNR) = 2
    twice = effects.useful_interaction((OTHER, LOSS), (LOSS, OTHER))(audited)
    assert (twice.estimate.mean, twice.error) == pytest.approx((2.8, np.sqrt(2 / 3)))  # of 0.4, 1.4 and 2.4
    assert effects.clipped(OTHER, LOSS, 16)(audited).estimate.mean == pytest.approx(40)
    with pytest.raises(NotRun, match=r"other \+ R2 \(made\)"):
        audited.gradient(OTHER.replayed(), "usefulness", 16)
    with pytest.raises(NotRun, match=r"C \(absent\)"):
        audited.gradient(Audited("C", "absent", "grpo"), "usefulness", 16)


def test_an_audit_after_updates_that_lose_the_reward_blocks_its_leg(audited: Recorded) -> None:
    assert audited.kept("made", 16).tolist() == pytest.approx([0.7] * 3)
    lost = gates.audited(audited, "made", 16)
    assert (lost.state, str(lost.need)) == ("failed", "reward kept (made)")
    assert gates.audited(audited, "absent", 16).state == "not measured"


# --- what R2 does ---------------------------------------------------------------------------------------------------


def test_what_r2_does_is_compared_seed_by_seed_in_rollout_1(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = range(10)

    def curves(study: Recorded, of: list[Arm]) -> dict[str, pd.DataFrame]:
        (arm,) = of
        times, moved = (0.25, 3.0) if "R2" in arm.label else (1.0, 1.0)
        rows = []
        for seed in seeds:
            rows += [("reward", 1, seed, 0.5), ("reward", 2, seed, 0.5 - 0.1 * (times < 1) + 0.01 * seed)]
            rows += [("expert_change_rate", 1, seed, 0.4), ("expert_change_rate", 2, seed, 0.1)]
            rows += [("token_ratio_variance", 1, seed, times * (1 + seed)), ("token_ratio_variance", 2, seed, 99.0)]
            rows += [("log_ratio_moment_free", step, seed, moved * step * (1 + seed)) for step in (1, 5)]
        return {"steps": pd.DataFrame(rows, columns=["metric", "step", "seed", "value"])}

    monkeypatch.setattr(Recorded, "tables", curves)
    found = replay.table(Recorded(Path("nowhere")))
    rows = {(row.quantity, row.arm): row for row in found.itertuples()}
    for free, replayed in replay.PAIRS:
        left, after, seen, moved = (
            rows[each.name, replayed.label] for each in (replay.LEFT, replay.NEXT, replay.SEEN, replay.MOVED)
        )
        assert (left.number.mean, left.effect.n) == (pytest.approx(0.4), 0)
        assert (after.number.mean, after.effect.mean) == (pytest.approx(0.445), pytest.approx(-0.1))
        assert (seen.number.mean, seen.effect.mean) == (pytest.approx(0.25 * 5.5), pytest.approx(0.25))
        assert (moved.number.mean, moved.effect.mean) == (pytest.approx(9 * 5.5), pytest.approx(3))
        assert rows[replay.MOVED.name, free.label].number.mean == pytest.approx(3 * 5.5)
        assert rows[replay.MOVED.name, free.label].effect.n == 0


def test_r2_quiets_the_ratio_of_the_loss_and_not_the_sampled_policy() -> None:
    found = replay.table(Recorded(ROOT / "results" / "reference"))
    committed = ROOT / "results" / "reference" / "tables" / f"{draw.stem(REPLAY, 'claim03')}.csv"
    assert REPLAY.figure({"replay": found}).numbers.to_csv(index=False) == committed.read_text()
    rows = {(row.quantity, row.arm): row for row in found.itertuples()}
    section = (ROOT / "docs" / "models.md").read_text().partition("\n### What R2 does\n")[2].partition("\n##")[0]
    told = [str(rows[replay.MOVED.name, replayed.label].effect) for _, replayed in replay.PAIRS]
    of_grpo = [(replay.SEEN, 1), (replay.SEEN, 0), (replay.START, 0), (replay.NEXT, 1), (replay.NEXT, 0)]
    told += [f"{rows[quantity.name, replay.PAIRS[0][place].label].number.mean:.3g}" for quantity, place in of_grpo]
    assert all(number in section for number in told)
    for free, replayed in replay.PAIRS:
        effects_of = {each.name: rows[each.name, replayed.label].effect for each in replay.QUANTITIES}
        assert effects_of[replay.SEEN.name].high < 1 < effects_of[replay.MOVED.name].mean
        assert effects_of[replay.NEXT.name].high < 0
        of_start = [rows[replay.START.name, arm.label].number for arm in (free, replayed)]
        assert of_start[0] == of_start[1]  # one cold start
    assert replay.table(Recorded(Path("nowhere"))).empty


# --- published contrasts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("intervals", "said"),
    [
        ([(0.1, 0.3)], "right"),
        ([(-0.3, -0.1)], "wrong"),
        ([(-0.1, 0.1)], "open"),
        ([(0.1, 0.3), (0.1, 0.3)], "right"),
        ([(0.1, 0.3), (-0.3, -0.1)], "open"),
        ([(-0.3, -0.1), (-0.3, -0.1)], "wrong"),
    ],
)
def test_a_contrast_is_right_where_all_of_it_lies_above_0(intervals: list[tuple[float, float]], said: str) -> None:
    seen = [Measurement(Estimate((low + high) / 2, low, high, 10)) for low, high in intervals]
    asked = contrasts.Contrast(1, "", "", "", tuple(lambda study, each=each: each for each in seen))  # type: ignore[misc]
    assert asked.sign(Recorded(Path("nowhere"))) == (seen, said)


def test_the_twelve_contrasts_are_there_and_say_what_has_not_run() -> None:
    assert [each.number for each in contrasts.CONTRASTS] == list(range(1, 13))
    assert {each.sign(Recorded(Path("nowhere")))[1] for each in contrasts.CONTRASTS} == {"not run"}


def test_contrasts_over_the_frontier_say_in_how_many_cells_and_at_which_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_reward(study: Recorded, arm: Arm) -> pd.Series:
        """Falls by 0.01 with each update, but at 4e-4; GSPO is 0.1 better at 8e-4 and 0.1 worse at other rates."""
        updates, rate = arm.axes.get("updates_per_rollout", 16), arm.axes.get("optimizer.learning_rate", 8e-4)
        worse = 0.0 if rate == 4e-4 else 0.01 * updates  # type: ignore[operator]
        better = (0.1 if rate == 8e-4 else -0.1) if arm.algorithm == "gspo" else 0.0
        return pd.Series([0.49, 0.5, 0.51]) - worse + better

    monkeypatch.setattr(Recorded, "mean_reward", mean_reward)
    numbers = {each.number: each for each in contrasts.CONTRASTS}
    (staler,), said = numbers[2].sign(Recorded(Path("nowhere")))
    assert (said, staler.estimate.mean, staler.estimate.n) == ("right", pytest.approx(0.28 * 2 / 3), 3)
    assert staler.note == "above 0 in 6 of 9 cells"
    seen, said = numbers[4].sign(Recorded(Path("nowhere")))
    assert said == "open"
    assert {each.note: each.estimate.mean for each in seen} == pytest.approx(
        {"at 0.0002": 0.1, "at 0.0004": 0.1, "at 0.0008": -0.1}
    )


def test_the_cells_of_the_frontier_are_those_that_ran() -> None:
    study = Recorded(ROOT / "results" / "reference")
    for (algorithm, rate, updates), arm in contrasts.FRONTIER.items():
        runs = study.tables([arm])["runs"]
        assert set(runs["algorithm"]) == {algorithm}
        assert set(runs["learning_rate"]) == {rate}
        assert set(runs["updates_per_rollout"]) == {updates}


# --- tuning ---------------------------------------------------------------------------------------------------------


def test_the_best_setting_lies_inside_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    rewarded = {(2e-4, "3e-4/4e-4"): 0.6, (4e-4, "0.2/0.27"): 0.7}
    by_arm = {arm.label: rewarded.get(key, 0.5) for key, arm in arms.TUNED["gspo"].items()}
    monkeypatch.setattr(Recorded, "mean_reward", lambda self, arm: pd.Series([by_arm[arm.label]]))
    study = Recorded(Path("nowhere"))
    assert effects.best_setting(study, "gspo") == (4e-4, "0.2/0.27")
    best = effects.best(study, "gspo")
    assert best.axes == {"optimizer.learning_rate": 4e-4} | WIDE.axes
    by_arm[arms.TUNED["gspo"][4e-4, "3e-4/4e-4"].label] = 0.8
    assert effects.best(study, "gspo").axes == {"optimizer.learning_rate": 4e-4}
    by_arm[arms.TUNED["gspo"][8e-4, "3e-4/4e-4"].label] = 0.9
    with pytest.raises(effects.NoNumber, match="an end of the grid"):
        effects.best(study, "gspo")


# --- what was found ------------------------------------------------------------------------------------------------


def test_an_outcome_that_differs_in_mean_reward_alone_is_told_from_a_difference_in_level() -> None:
    ahead, behind, unclear = Estimate(0.1, 0.05, 0.2, 10), Estimate(-0.1, -0.2, -0.05, 10), Estimate(0.0, -0.1, 0.1, 10)
    columns = ["outcome", "mean reward", "final reward", "held-out accuracy"]
    rows = [
        ("speed", ahead, unclear, unclear),
        ("level", ahead, ahead, unclear),
        ("accuracy", behind, unclear, behind),
        ("nothing", unclear, unclear, unclear),
        ("within", Estimate(0.0, -0.1, 0.02, 10), ahead, unclear),
    ]
    table = pd.DataFrame(rows, columns=columns)
    assert summary.undecided_in_level(table) == ["speed"]
    assert summary.undecided_in_level(table, {"within": 0.06}) == ["speed", "within"]


def test_the_lead_of_gspo_is_counted_in_the_cells_of_the_frontier() -> None:
    study = Recorded(ROOT / "results" / "reference")
    lead = {
        (rate, updates): effects.mean_reward(
            contrasts.FRONTIER["gspo", rate, updates], contrasts.FRONTIER["grpo", rate, updates]
        )(study)
        for _, rate, updates in contrasts.FRONTIER
    }
    ahead = {cell for cell, each in lead.items() if each.estimate.low > 0}
    assert ahead == {(8e-4, 16), (8e-4, 32)}
    assert f"in {len(ahead)} of {len(lead)} cells" in summary.bullets(study)[0]
