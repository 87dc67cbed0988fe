"""What papers claim: thresholds, verdicts, and the numbers they stand on."""

import functools
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from steadymoe.bench import archive, cli, compose
from steadymoe.bench.claims import arms, registry, verdict
from steadymoe.bench.claims.study import Arm, NotRun, Study, factor
from steadymoe.bench.claims.verdict import Claim, Finding, Outcome
from steadymoe.bench.identity import axes_name
from steadymoe.bench.stats import Estimate

ROOT = Path(__file__).parent.parent
NAN = float("nan")


def outcome(side: str, threshold: float, upper: float = NAN) -> Outcome:
    return Outcome("x", lambda study: Estimate(0, 0, 0, 0), side, threshold, upper)  # type: ignore[arg-type]


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
    assert outcome(side, 0).verdict(Estimate((low + high) / 2, low, high, 10)) == found


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
    assert outcome("between", 0.05, 0.2).verdict(Estimate((low + high) / 2, low, high, 10)) == found


@pytest.mark.parametrize(
    ("found", "whole"),
    [
        (["supported", "supported"], "supported"),
        (["supported", "not decided"], "not decided"),
        (["supported", "contradicted"], "not decided"),
        (["contradicted", "not decided"], "contradicted"),
        (["not decided"], "not decided"),
    ],
)
def test_a_claim_is_supported_by_all_and_contradicted_only_where_nothing_supports_it(
    found: list[verdict.Verdict], whole: str
) -> None:
    assert Claim(1, "", "", (), (), "fig01", (), "").verdict(found) == whole


def decides(mean: float, low: float, high: float, found: str = "not decided", **given: object) -> str:
    asked = replace(outcome("above", 0), **given)  # type: ignore[arg-type]
    return Finding(asked, Estimate(mean, low, high, 10), found).decides  # type: ignore[arg-type]


def test_what_would_decide_it_is_said_in_seeds() -> None:
    assert decides(0.1, -0.1, 0.3).startswith("about 40 seeds")  # half of the width is twice the distance
    assert "no affordable number" in decides(0.0, -0.1, 0.1)
    assert decides(0.2, 0.1, 0.3, "supported") == ""
    assert decides(NAN, NAN, NAN).startswith("longer runs")
    # A factor of 2 with an interval from 1/2 to 8: on the scale of logarithms twice as wide as it is far from 1.
    assert decides(2, 0.5, 8, unit="ratio", threshold=1).startswith("about 40 seeds")
    assert decides(2, 1.5, np.inf, unit="cost", threshold=3).startswith("longer runs")
    assert decides(0.6, 0.4, 0.8, unit="area", threshold=0.5).startswith("about 40 runs of the rarer kind")


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
        (run.choices["algorithm"], run.config["experiment_name"], axes_name(run.axes))
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
                | {"steps": STEPS, "updates_per_rollout": 4, "responses": 8}
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
    gain = made.gain(B, A)
    assert (gain.mean, gain.n) == (pytest.approx(0.5 + 0.045), 10)
    assert gain.low < gain.mean < gain.high
    assert factor(*(made.numbers(arm, "clip_fraction", "mean") for arm in (B, A))).mean == pytest.approx(20)
    assert made.routing_share(A).tolist() == pytest.approx([0.75] * 10)
    assert made.wins(B, A).mean == pytest.approx(0.25)
    assert made.tables([B, A])["runs"]["arm"].unique().tolist() == ["B", "A"]


def test_a_cost_that_was_never_reached_leaves_the_interval_open(made: Study) -> None:
    cost = made.cost_factor(A, B, "tokens")
    assert cost.high == np.inf
    assert cost.low > 1  # A spends twice as much a step and never gets there
    cheaper = made.cost_factor(B, A, "tokens")
    assert cheaper.low == 0
    assert cheaper.high < 1


def test_the_area_of_a_metric_that_does_not_change_is_that_of_its_ranks(made: Study) -> None:
    # grad_norm is seed + 1 in both arms; those of A but its seed 0 collapse, so they are the higher ones.
    area = made.warning_area([A, B], "grad_norm")
    collapsed, stable = [seed + 1 for seed in range(1, 10)], [1, *(seed + 1 for seed in range(10))]
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
    asked = Outcome("x", lambda study: study.gain(absent, A), "above", 0)
    (found,) = verdict.findings(made, [asked], valid=True)
    assert (found.verdict, found.decides) == ("not decided", "to be run: C (made)")


def test_whether_algorithms_learn_is_said_of_the_best_and_of_all(made: Study) -> None:
    said = verdict.learning(made, (A, B))
    assert (
        "of 2 algorithms 1 end above the mean reward that they began with; the best, B, goes from 0.60 to 0.74." in said
    )
    assert "What tells them apart" not in said
    assert "of 1 algorithms 0 end above" in verdict.learning(made, (A,))
    assert "What tells them apart there is how much they lose." in verdict.learning(made, (A,))


def test_an_invalid_testbed_decides_nothing_about_stability(made: Study) -> None:
    valid, said = verdict.testbed(made, A, (B,))
    assert valid
    assert "9 of 10" in said
    invalid, said = verdict.testbed(made, B, (A,))
    assert not invalid
    assert "not valid" in said
    better = Outcome("x", lambda study: study.gain(B, A), "above", 0)
    (found,) = verdict.findings(made, [better], invalid)
    assert (found.verdict, found.decides) == ("not decided", "a valid testbed")
    assert found.effect.n == 10
    (found,) = verdict.findings(made, [better], valid)
    assert (found.verdict, found.decides) == ("supported", "")
