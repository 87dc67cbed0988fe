"""What papers claim: thresholds, verdicts, and the numbers they stand on."""

import functools
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from steadymoe.bench import cli
from steadymoe.bench.audit.archive import ADDED
from steadymoe.bench.audit.measure import COLUMNS
from steadymoe.bench.claims import arms, contrasts, doses, effects, figures, gates, registry, testbed, verdict
from steadymoe.bench.claims.doses import Dose
from steadymoe.bench.claims.effects import Seen
from steadymoe.bench.claims.gates import Need, Standing, blocking
from steadymoe.bench.claims.study import NONE, Arm, Audited, NotRun, Study
from steadymoe.bench.claims.testbed import State
from steadymoe.bench.claims.verdict import Claim, Finding, Outcome
from steadymoe.bench.config import compose
from steadymoe.bench.config.identity import axes_name
from steadymoe.bench.report import archive
from steadymoe.bench.statistics import early_warning
from steadymoe.bench.statistics.estimates import Estimate

ROOT = Path(__file__).parents[2]
NAN = float("nan")


def outcome(side: str, threshold: float, upper: float = NAN) -> Outcome:
    return Outcome("x", lambda study: Seen(NONE), side, threshold, upper)  # type: ignore[arg-type]


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
    assert outcome(side, 0).verdict(seen := Seen(Estimate((low + high) / 2, low, high, 10)), 0.05) == found
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
    assert outcome("between", 0.05, 0.2).verdict(Seen(Estimate((low + high) / 2, low, high, 10)), 0.01) == found


@pytest.mark.parametrize(
    ("found", "whole"),
    [
        (["supported", "supported"], "supported"),
        (["supported", "not decided"], "not decided"),
        (["supported", "contradicted"], "not decided"),
        (["contradicted", "not decided"], "contradicted"),
        (["not decided"], "not decided"),
        (["not testable here", "not testable here"], "not testable here"),
        (["not run", "not run"], "not run"),
        (["not run", "supported"], "not decided"),
        (["not run", "contradicted"], "contradicted"),
    ],
)
def test_a_leg_is_supported_by_all_and_contradicted_only_where_nothing_supports_it(
    found: list[verdict.Verdict], whole: str
) -> None:
    claim = Claim(1, "", "", (), (), "", (), "")
    of_runs = [Finding(outcome("above", 0), Seen(NONE), NAN, NAN, each) for each in found]
    other = Finding(replace(outcome("above", 0), leg="mechanism"), Seen(NONE), NAN, NAN, "contradicted")
    assert claim.verdict([*of_runs, other], "trajectory") == whole
    assert claim.verdict([*of_runs, other], "mechanism") == "contradicted"
    assert claim.verdict(of_runs, "mechanism") is None


TEN = tuple(0.5 + np.sqrt(0.9) * np.array([1, -1] * 5))  # mean 0.5, standard deviation 1


def finding(seen: Seen, found: str = "not decided", **given: object) -> Finding:
    return Finding(replace(outcome("above", 0), **given), seen, NAN, NAN, found)  # type: ignore[arg-type]


def test_what_would_decide_it_is_said_in_seeds_that_have_80_percent_power() -> None:
    # A paired t test with an effect of half of a standard deviation needs 34 seeds (Cohen 1988, table 2.4.1).
    half = Seen(Estimate(0.5, -0.2, 1.2, 10), TEN)
    assert finding(half).power == "34"
    assert finding(half).decides == "about 34 seeds for 80 % power, if the effect is what it seems"
    assert finding(half, threshold=-0.5).power == "10"  # a whole one
    assert finding(half, threshold=-9).power == "6"  # with five the exact p is at least 1/16
    assert "no affordable number" in finding(half, threshold=0.5).decides
    assert finding(half, "supported").decides == ""
    # Ratios are compared by their logarithms; an area has no number for each seed.
    assert finding(Seen(Estimate(np.exp(0.5), 0.8, 3.4, 10), TEN), unit="ratio", threshold=1).power == "34"
    area = finding(Seen(Estimate(0.1, -0.2, 0.4, 10)), unit="area")
    assert (area.power, area.decides) == ("–", "more seeds")


def test_p_is_exact_and_about_the_threshold() -> None:
    ten = Seen(NONE, tuple(np.arange(1.0, 11.0)))
    least = 2 / 2**10
    assert outcome("above", 0).p(ten) == outcome("above", 11).p(ten) == least  # all of ten on one side
    assert outcome("above", 5.5).p(ten) == 1  # the mean itself
    assert outcome("between", 0, 20).p(ten) == least
    assert outcome("between", 0, 5.5).p(ten) == 1  # the end that is not rejected
    ratio = replace(outcome("above", np.exp(5.5)), unit="ratio")
    assert ratio.p(ten) == 1  # seeds are logarithms
    assert np.isnan(outcome("above", 0).p(Seen(NONE)))
    # An effect with a standard error alone has Student's p: t = 2.262 with 9 degrees of freedom is 5 % (Student 1908).
    assert outcome("above", 0).p(Seen(Estimate(2.262, 0, 4.5, 10), error=1.0)) == pytest.approx(0.05, abs=1e-4)


def test_p_is_corrected_by_holm_for_the_outcomes_of_one_claim() -> None:
    # Nine of ten on one side, all of one size: 22 of 1024 patterns are as far off, twice and thrice that is 4 and 6 %.
    nine = Seen(Estimate(0.8, 0.1, 1.2, 10), (1.0,) * 9 + (-1.0,))
    one = replace(outcome("above", 0), effect=lambda study: nine)
    study = Study(Path("nowhere"))
    assert [each.verdict for each in verdict.findings(study, [one])] == ["supported"]
    assert [each.verdict for each in verdict.findings(study, [one] * 2)] == ["supported"] * 2
    thrice = verdict.findings(study, [one] * 3)
    assert [each.verdict for each in thrice] == ["not decided"] * 3
    assert [(each.p, each.corrected) for each in thrice] == [pytest.approx((22 / 1024, 66 / 1024))] * 3


def test_an_outcome_that_has_not_run_counts_in_the_correction() -> None:
    ten = Seen(Estimate(0.5, 0.1, 0.9, 10), TEN)
    there = replace(outcome("above", 0), effect=lambda study: ten)

    def missing(study: Study) -> Seen:
        raise NotRun("C (made)")

    absent = replace(outcome("above", 0), effect=missing)
    alone, one, two = (verdict.findings(Study(Path("nowhere")), [there, *[absent] * n])[0] for n in (0, 1, 2))
    assert [each.corrected / alone.p for each in (alone, one, two)] == pytest.approx([1, 2, 3])
    assert one.p == alone.p


def gate(id: str, state: State) -> tuple[Need, Standing]:
    return (need := Need(id, "stale")), Standing(need, state, "seen")


def test_a_claim_is_answered_where_every_gate_that_it_needs_is_passed() -> None:
    known = dict(gate(id, state) for id, state in (("A", "passed"), ("B", "not measured"), ("C", "failed")))  # type: ignore[arg-type]
    a, b, c = known
    assert blocking([a], known) == []
    assert [each.need for each in blocking([a, b, c], known)] == [c, b]
    with pytest.raises(KeyError):
        blocking([Need("A", "learning")], known)


@pytest.mark.parametrize("state", ["failed", "not measured"])
def test_a_gate_that_is_not_passed_takes_the_verdict_of_its_leg_and_leaves_what_was_seen(state: State) -> None:
    seen = Seen(Estimate(0.8, 0.1, 1.2, 10), (1.0,) * 10)
    of_runs = replace(outcome("above", 0), effect=lambda study: seen)
    of_gradients = replace(of_runs, leg="mechanism")
    _, standing = gate("B", state)
    for blocked, lost, found in (
        ([], [], ("supported", "supported")),
        ([standing], [], ("not testable here", "supported")),
        ([], [standing], ("supported", "not testable here")),
    ):
        each = verdict.findings(Study(Path("nowhere")), [of_runs, of_gradients], blocked, lost)
        assert tuple(one.verdict for one in each) == found
        assert all(one.seen == seen and one.p == 2 / 2**10 for one in each)
        assert [one.decides for one in each if one.verdict == "not testable here"] == [
            "a testbed that passes B (stale)"
        ] * len([*blocked, *lost])


def test_every_gate_that_a_claim_needs_is_measured_somewhere() -> None:
    measured = {Need(each.gate, each.setting) for each in testbed.results(Study(Path("nowhere")))}
    assert {need for claim in registry.CLAIMS for need in claim.needs} <= measured


def test_a_share_of_0_makes_no_ratio_infinite_in_silence() -> None:
    shares, zero = pd.Series({0: 0.1, 1: 0.2, 2: 0.4}), pd.Series({0: 0.1, 1: 0.0, 2: 0.0})
    whole = effects.factor(shares, shares * 2)
    assert (whole.estimate.mean, whole.seeds, whole.note) == (pytest.approx(0.5), pytest.approx([np.log(0.5)] * 3), "")
    for above, below, mean in ((shares, zero, 7), (zero, shares, 1 / 7)):
        found = effects.factor(above, below)
        assert found.estimate.mean == pytest.approx(mean)
        assert (found.seeds, found.note) == ((), "ratio of means, a share is 0 in 2 of 3 seeds")
    asked = replace(outcome("above", 1), effect=lambda study: effects.factor(shares, zero * 0), unit="ratio")
    (each,) = verdict.findings(Study(Path("nowhere")), [asked])
    assert (each.verdict, each.seen.estimate.n) == ("not decided", 0)
    assert each.decides == each.seen.note == "no ratio: every share in its denominator is 0"


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
    assert rows.keys() == {claim.number for claim in registry.CLAIMS}
    for claim in registry.CLAIMS:
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
    numbers = {claim.number: claim for claim in registry.CLAIMS}
    needs = {words: {numbers[int(n)].needs for n in of.split(", ")} for of, words in rows.items()}
    assert needs == {
        "V1; V2, V3, V5, V6, V7 at *stale*": {gates.STRESS},
        "the same, and V2 dense": {gates.STRESS_AND_TWIN},
        "V1; V4, V6, V7 at *mismatch*": {gates.MISMATCH},
        next(words for words in rows.values() if words.startswith("none")): {(), gates.STRESS},
    }
    assert numbers[16].needs == gates.STRESS
    assert sorted(int(n) for of in rows for n in of.split(", ")) == sorted(numbers)


@functools.cache
def planned() -> set[tuple[str, str, str]]:
    """Algorithm, experiment and axes of every run that ``make reference`` asks for."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    recipe = makefile.partition("\nreference:")[2].partition("\n\n")[0]
    given = dict(re.findall(r"^(\w+) := (.*)$", makefile, re.MULTILINE))
    listed = re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], re.search(r"for experiment in (.*?);", recipe)[1])  # type: ignore[index]
    commands = [f"experiment={words}".split() for words in shlex.split(listed)]
    assert len(commands) == 26
    return {
        (run.choices["algorithm"], run.config.experiment_name, axes_name(run.axes))
        for command in commands
        for run in compose.plan([*command, "seed=0"])  # of the seeds one, for time
    }


def every_arm(found: object) -> list[Arm]:
    if isinstance(found, Arm):
        return [found]
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else ()
    return [arm for part in parts for arm in every_arm(part)]


def test_make_reference_runs_every_arm_under_the_name_it_is_looked_for_by() -> None:
    known = [arm for name, found in vars(arms).items() if name.isupper() for arm in every_arm(found)]
    known = [arm for arm in known if arm.experiment != "gates_twin"]  # `make gates` runs it
    assert len(known) > 50
    absent = [arm for arm in known if (arm.algorithm, arm.experiment, axes_name(arm.axes)) not in planned()]
    assert absent == []


def test_make_reference_runs_what_the_recorded_tuning_found_best() -> None:
    best = [effects.best(Study(ROOT / "results" / "reference"), name) for name in arms.TUNED]
    run = {(arm.algorithm, arm.experiment, axes_name(arm.axes)) for arm in best}
    assert run <= planned()
    assert run <= {(arm.algorithm, arm.experiment, axes_name(arm.axes)) for arm in arms.BEST.values()}


# --- numbers, from runs made by hand -------------------------------------------------------------------------------

SEEDS, STEPS = range(10), 20
A, B = Arm("A", "made", "grpo"), Arm("B", "made", "gspo", {"optimizer.learning_rate": 0.001})


def rewards(arm: Arm, seed: int) -> np.ndarray:
    """A falls from 0.6 to 0.2; B rises to 0.7 and a bit by seed."""
    end = 0.2 if arm is A else 0.7 + seed / 100
    return np.linspace(0.6, end, STEPS - 4).tolist() + [end] * 4  # type: ignore[return-value]


@pytest.fixture
def made(tmp_path: Path) -> Study:
    runs, steps, answers = [], [], []
    for arm in (A, B):
        for seed in SEEDS:
            collapsed = arm is A and seed > 0
            runs.append(
                {"arm": arm.label.lower(), "algorithm": arm.algorithm, "axes": axes_name(arm.axes), "seed": seed}
                | {"status": "diverged" if collapsed else "finished", "diverged_step": 15 if collapsed else None}
                | {"diverged_reason": "not finite" if collapsed else None}
                | {"steps": STEPS, "updates_per_rollout": 16, "responses": 8}
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
    return Study(tmp_path)


def test_doses_are_levels_of_arms_in_a_table_and_a_figure(made: Study) -> None:
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


def test_the_numbers_of_arms_are_those_of_their_runs(made: Study) -> None:
    assert made.final(A).tolist() == pytest.approx([0.2] * 10)
    assert made.first(B).tolist() == pytest.approx([0.6] * 10)
    assert made.collapsed(A) == (9, 10)
    counted = [np.mean(rewards(B, seed)[:11]) - np.mean(rewards(A, seed)[:11]) for seed in SEEDS]
    gain = effects.mean_reward(B, A)(made)
    assert gain.seeds == pytest.approx(counted)  # the last nine of 20 steps only confirm
    assert gain.estimate.low < gain.estimate.mean < gain.estimate.high
    twice = effects.interaction(((B, A), (A, B)))(made)
    assert twice.seeds == pytest.approx([2 * each for each in counted])
    assert made.routing_share(A).tolist() == pytest.approx([0.75] * 10)
    assert effects.routed((A, B))(made).estimate.mean == pytest.approx(0.75)
    assert effects.routed((A,), (B,))(made).estimate.mean == pytest.approx(0)
    assert made.tables([B, A])["runs"]["arm"].unique().tolist() == ["B", "A"]


def test_the_area_of_a_metric_that_does_not_change_is_that_of_its_ranks(made: Study) -> None:
    # grad_norm is seed + 1 in both arms; those of A collapse, so they are the higher ones. Its seed 0 is falling when
    # it ends, too late to be judged: it is neither collapsed nor stable.
    area = early_warning.auc(made.extremes([A, B], "grad_norm"))
    collapsed, stable = [seed + 1 for seed in range(1, 10)], [seed + 1 for seed in range(10)]
    pairs = [(x > y) + (x == y) / 2 for x in collapsed for y in stable]
    assert area.mean == pytest.approx(np.mean(pairs))
    # Beside the reward itself, which tells the arms apart at once.
    reward = early_warning.auc(made.extremes([A, B], "reward")).mean
    beside = effects.announces([A, B], "grad_norm")(made)
    assert beside.estimate.mean == pytest.approx(area.mean - reward)
    assert beside.estimate.low < beside.estimate.mean < beside.estimate.high
    assert beside.seeds == ()
    low, high = beside.estimate.low, beside.estimate.high
    assert beside.error == pytest.approx((high - low) / 2 / 2.262, rel=1e-3)
    same = effects.announces([A, B], "reward")(made).estimate
    assert (same.mean, same.low, same.high) == (0, 0, 0)


def test_without_runs_the_command_says_what_to_run_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["steadymoe", "claims", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "GRPO (study)" in (said := capsys.readouterr().err)
    assert "make reference" in said
    assert list(tmp_path.iterdir()) == []


def test_an_arm_that_was_not_run_is_named_and_decides_nothing(made: Study) -> None:
    absent = Arm("C", "made", "cispo")
    assert not made.has(absent)
    with pytest.raises(NotRun, match=r"C \(made\)"):
        made.final(absent)
    (found,) = verdict.findings(made, [Outcome("x", effects.mean_reward(absent, A), "above", 0)])
    assert (found.verdict, found.decides) == ("not run", "to be run: C (made)")


# --- gradients, from an archive made by hand -----------------------------------------------------------------------

LOSS, OTHER = Audited("loss", "made", "grpo"), Audited("other", "made", "gspo")


@pytest.fixture
def audited(tmp_path: Path) -> Study:
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
    return Study(tmp_path)


def test_gradients_are_compared_checkpoint_by_checkpoint(audited: Study) -> None:
    assert effects.useful(OTHER, LOSS)(audited).seeds == pytest.approx((0.4, 1.4, 2.4))
    assert effects.useful(LOSS.replayed(), LOSS)(audited).seeds == pytest.approx((0.2,) * 3)
    assert effects.gain(OTHER, LOSS)(audited).seeds == pytest.approx((0.2, 0.7, 1.2))  # over √(1 + SNR) = 2
    twice = effects.useful_interaction(((OTHER, LOSS), (LOSS, OTHER)))(audited)
    assert twice.seeds == pytest.approx((0.8, 2.8, 4.8))
    assert effects.clipped(OTHER, LOSS, 16)(audited).estimate.mean == pytest.approx(40)
    with pytest.raises(NotRun, match=r"other \+ R2 \(made\)"):
        audited.gradient(OTHER.replayed(), "usefulness", 16)
    with pytest.raises(NotRun, match=r"C \(absent\)"):
        audited.gradient(Audited("C", "absent", "grpo"), "usefulness", 16)


def test_an_audit_after_updates_that_lose_the_reward_blocks_its_leg(audited: Study) -> None:
    assert audited.kept("made", 16).tolist() == pytest.approx([0.7] * 3)
    lost = gates.keeps(audited, "made", 16)
    assert (lost.state, str(lost.need)) == ("failed", "reward kept (made)")
    assert gates.keeps(audited, "absent", 16).state == "not measured"


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
    seen = [Seen(Estimate((low + high) / 2, low, high, 10)) for low, high in intervals]
    asked = contrasts.Contrast(1, "", "", "", tuple(lambda study, each=each: each for each in seen))  # type: ignore[misc]
    assert asked.answer(Study(Path("nowhere"))) == (seen, said)


def test_the_twelve_contrasts_are_there_and_say_what_has_not_run() -> None:
    assert [each.number for each in contrasts.CONTRASTS] == list(range(1, 13))
    assert {each.answer(Study(Path("nowhere")))[1] for each in contrasts.CONTRASTS} == {"not run"}


# --- tuning ---------------------------------------------------------------------------------------------------------


def test_the_best_setting_lies_inside_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    rewarded = {(2e-4, "3e-4/4e-4"): 0.6, (4e-4, "0.2/0.27"): 0.7}
    by_arm = {arm.label: rewarded.get(key, 0.5) for key, arm in arms.TUNED["gspo"].items()}
    monkeypatch.setattr(Study, "mean_reward", lambda self, arm: pd.Series([by_arm[arm.label]]))
    study = Study(Path("nowhere"))
    assert effects.best_setting(study, "gspo") == (4e-4, "0.2/0.27")
    best = effects.best(study, "gspo")
    assert best.axes == {"optimizer.learning_rate": 4e-4} | arms.WIDE.axes
    by_arm[arms.TUNED["gspo"][4e-4, "3e-4/4e-4"].label] = 0.8
    assert effects.best(study, "gspo").axes == {"optimizer.learning_rate": 4e-4}
    by_arm[arms.TUNED["gspo"][8e-4, "3e-4/4e-4"].label] = 0.9
    with pytest.raises(effects.NoNumber, match="an end of the grid"):
        effects.best(study, "gspo")
