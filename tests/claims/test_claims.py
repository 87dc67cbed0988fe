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
from steadymoe.bench.claims import arms, effects, registry, verdict
from steadymoe.bench.claims import gates as testbeds
from steadymoe.bench.claims.effects import NoNumber, Seen
from steadymoe.bench.claims.gates import Gate, State, blocking
from steadymoe.bench.claims.study import NONE, Arm, NotRun, Study
from steadymoe.bench.claims.verdict import NOT_TESTABLE, Claim, Finding, Outcome
from steadymoe.bench.config import compose
from steadymoe.bench.config.identity import axes_name
from steadymoe.bench.report import archive
from steadymoe.bench.report.figures import points
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
    assert outcome(side, 0).verdict(seen, NAN) == found  # areas have no p
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
        ([NOT_TESTABLE, NOT_TESTABLE], NOT_TESTABLE),
    ],
)
def test_a_claim_is_supported_by_all_and_contradicted_only_where_nothing_supports_it(
    found: list[verdict.Verdict], whole: str
) -> None:
    assert Claim(1, "", "", (), (), "fig01", (), "", ()).verdict(found) == whole


TEN = tuple(0.5 + np.sqrt(0.9) * np.array([1, -1] * 5))  # mean 0.5, standard deviation 1


def finding(seen: Seen, found: str = "not decided", **given: object) -> Finding:
    return Finding(replace(outcome("above", 0), **given), seen, NAN, NAN, found)  # type: ignore[arg-type]


def test_what_would_decide_it_is_said_in_seeds_that_have_80_percent_power() -> None:
    # A paired t test with an effect of half of a standard deviation needs 34 seeds (Cohen 1988, table 2.4.1).
    half = Seen(Estimate(0.5, -0.2, 1.2, 10), TEN)
    assert finding(half).power == "34"
    assert finding(half).decides == "about 34 seeds for 80 % power, if the effect is what it seems"
    assert finding(half, threshold=-0.5).power == "10"  # a whole one
    assert "no affordable number" in finding(half, threshold=0.5).decides
    assert finding(half, "supported").decides == ""
    assert finding(Seen(NONE)).decides.startswith("longer runs")
    # Ratios are compared by their logarithms, areas by their interval.
    assert finding(Seen(Estimate(np.exp(0.5), 0.8, 3.4, 10), TEN), unit="ratio", threshold=1).power == "34"
    assert finding(Seen(Estimate(2, 1.5, np.inf, 10)), unit="cost", threshold=3).decides.startswith("longer runs")
    area = finding(Seen(Estimate(0.6, 0.4, 0.8, 10)), unit="area", threshold=0.5)
    assert area.power == "82"  # 10 ((1.96 + 0.84) / 1.96 × 0.2 / 0.1)²
    assert "82 seeds" in area.decides


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


def gate(id: str, state: State) -> Gate:
    return Gate(id, "it holds", state, f"{id} is {state}", "nowhere")


def test_a_claim_is_answered_where_every_gate_that_it_needs_is_passed() -> None:
    testbed = {id: gate(id, state) for id, state in (("A", "passed"), ("B", "not measured"), ("C", "failed"))}  # type: ignore[arg-type]
    assert blocking(["A"], testbed) == []
    assert [each.id for each in blocking(["A", "B", "C"], testbed)] == ["C", "B"]
    assert testbeds.told(blocking(["A", "B", "C"], testbed)) == "C failed; B not measured"
    with pytest.raises(KeyError):
        blocking(["D"], testbed)


@pytest.mark.parametrize("state", ["failed", "not measured"])
def test_a_gate_that_is_not_passed_takes_the_verdict_and_leaves_what_was_seen(state: State) -> None:
    seen = Seen(Estimate(0.8, 0.1, 1.2, 10), (1.0,) * 10)
    asked = replace(outcome("above", 0), effect=lambda study: seen)
    for states, found, lacks in (
        (("passed", "passed"), "supported", ""),
        (("passed", state), NOT_TESTABLE, "a testbed that passes B"),
    ):
        testbed = {id: gate(id, each) for id, each in zip("AB", states, strict=True)}  # type: ignore[arg-type]
        (each,) = verdict.findings(Study(Path("nowhere")), [asked], blocking(["A", "B"], testbed))
        assert (each.verdict, each.decides, each.seen, each.p) == (found, lacks, seen, 2 / 2**10)


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
    row = {"claim": 1, "outcome": "x", "side": "above", "threshold": 0.0, "effect": Estimate(0.1, 0.0, 0.2, 10)}
    sheet = points.outcomes(pd.DataFrame([row | {"verdict": NOT_TESTABLE}]))
    labels = [text.get_text() for legend in sheet.figure.legends for text in legend.get_texts()]
    labels += [text.get_text() for axis in sheet.figure.axes if axis.legend_ for text in axis.legend_.get_texts()]
    assert labels == [NOT_TESTABLE]


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
        assert len(claim.outcomes) == max(1, len(re.findall(r"\([a-d]\)", outcomes)))
        for each in claim.outcomes:
            shares = {f"{number * 100:g}" for number in (each.threshold, each.upper)}
            assert re.search(rf"(?<![\d.]){abs(each.threshold):g}(?![\d.])", outcomes) or any(
                share in outcomes for share in shares
            )


def test_the_gates_that_a_claim_needs_are_those_of_the_protocol() -> None:
    rows = {}
    for line in (ROOT / "docs" / "protocol.md").read_text().partition("## Changes after the runs")[2].splitlines():
        if found := re.match(r"\| ([\d, ]+) \| ([^|]*) \|$", line.strip()):
            rows |= dict.fromkeys(map(int, found[1].split(",")), tuple(found[2].split(", ")))
    assert rows == {claim.number: claim.needs for claim in registry.CLAIMS if not claim.moved}


@functools.cache
def planned() -> set[tuple[str, str, str]]:
    """Algorithm, experiment and axes of every run that ``make reference`` asks for."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    recipe = makefile.partition("\nreference:")[2].partition("\n\n")[0]
    tuning = re.search(r"^TUNING := (.*)$", makefile, re.MULTILINE)[1]  # type: ignore[index]
    listed = re.search(r"for experiment in (.*?);", recipe)[1].replace("$(TUNING)", tuning)  # type: ignore[index]
    commands = [f"experiment={words}".split() for words in shlex.split(listed)]
    assert len(commands) == 16
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
    assert len(known) > 40
    absent = [arm for arm in known if (arm.algorithm, arm.experiment, axes_name(arm.axes)) not in planned()]
    assert absent == []


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


def test_the_numbers_of_arms_are_those_of_their_runs(made: Study) -> None:
    assert made.final(A).tolist() == pytest.approx([0.2] * 10)
    assert made.first(B).tolist() == pytest.approx([0.6] * 10)
    assert made.collapsed(A) == (9, 10)
    gain = effects.gain(B, A)(made).estimate
    assert (gain.mean, gain.n) == (pytest.approx(0.5 + 0.045), 10)
    assert gain.low < gain.mean < gain.high
    assert effects.clipped(B, A)(made).estimate.mean == pytest.approx(20)
    assert made.routing_share(A).tolist() == pytest.approx([0.75] * 10)
    assert made.wins(B, A).mean == pytest.approx(0.25)
    assert made.tables([B, A])["runs"]["arm"].unique().tolist() == ["B", "A"]


def test_a_cost_that_was_never_reached_leaves_the_interval_open(made: Study) -> None:
    cost = effects.cost(A, B, "tokens")(made)
    assert cost.estimate.high == np.inf
    assert cost.estimate.low > 1  # A spends twice as much a step and never gets there
    assert cost.note == "median, 6 of 6 seeds censored, at least this"  # in the other four B did not get there either
    cheaper = effects.cost(B, A, "tokens")(made)
    assert cheaper.estimate.low == 0
    assert cheaper.estimate.high < 1
    with pytest.raises(NoNumber, match="neither arm gains"):
        effects.cost(A, A, "tokens")(made)


def test_the_area_of_a_metric_that_does_not_change_is_that_of_its_ranks(made: Study) -> None:
    # grad_norm is seed + 1 in both arms; those of A collapse, so they are the higher ones. Its seed 0 is falling when
    # it ends, too late to be judged: it is neither collapsed nor stable.
    area = made.warning_area([A, B], "grad_norm")
    collapsed, stable = [seed + 1 for seed in range(1, 10)], [seed + 1 for seed in range(10)]
    pairs = [(x > y) + (x == y) / 2 for x in collapsed for y in stable]
    assert area.mean == pytest.approx(np.mean(pairs))


def test_without_runs_the_command_says_what_to_run_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["steadymoe", "claims", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "GRPO unclipped (study)" in (said := capsys.readouterr().err)
    assert "make reference" in said
    assert list(tmp_path.iterdir()) == []


def test_an_arm_that_was_not_run_is_named_and_decides_nothing(made: Study) -> None:
    absent = Arm("C", "made", "cispo")
    assert not made.has(absent)
    with pytest.raises(NotRun, match=r"C \(made\)"):
        made.final(absent)
    (found,) = verdict.findings(made, [Outcome("x", effects.gain(absent, A), "above", 0)])
    assert (found.verdict, found.decides) == ("not decided", "to be run: C (made)")


def test_whether_algorithms_learn_is_said_of_the_best_and_of_all(made: Study) -> None:
    said = verdict.learning(made, (A, B))
    assert (
        "of 2 algorithms 1 end above the mean reward that they began with; the best, B, goes from 0.60 to 0.74." in said
    )
    assert "What tells them apart" not in said
    assert "of 1 algorithms 0 end above" in verdict.learning(made, (A,))
    assert "What tells them apart there is how much they lose." in verdict.learning(made, (A,))
