"""Gates of the standard settings: what passes, what fails, and what was not measured."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from steadymoe.bench.report.realism import to_table
from steadymoe.bench.runs import compose
from steadymoe.bench.statistics.collapse import Rule
from steadymoe.bench.statistics.estimates import Estimate
from study import command, experiments, gates, page
from study.arms import GSPO_R2, LONG, LONG_ON_POLICY, LONGER, PAPERS, PAPERS_R2, SLOW
from study.gates import (
    DENSE,
    DENSE_TWIN,
    DISTURBED,
    EXACT,
    FP8,
    LEARNING,
    NOISY,
    QUIET,
    STALE,
    TWIN,
    Need,
)
from study.recorded import Arm, NotRun, Recorded

LONG_STALE = LONG["grpo_unclipped", "slow routers"]
STEPS, PATIENCE, UPDATES, RESPONSES = 30, 96, 16, 8
RATES = sorted(LEARNING)


class Made(Recorded):
    """A study of made-up runs: for each arm a curve of rewards and of held-out accuracies for each seed."""

    def __init__(self) -> None:
        self.arms: dict[Arm, tuple[np.ndarray, np.ndarray]] = {}
        self.fallen: dict[Arm, Sequence[int]] = {}
        self.wall_seconds: dict[Arm, float] = {}
        self._calibration = Path("nowhere")
        self.metrics: dict[Arm, dict[str, np.ndarray]] = {}

    def add(self, arm: Arm, start: float, end: float, seeds: int = 10, spread: float = 0.01) -> None:
        """Rewards that go from ``start`` to ``end`` at once; seeds differ by ``spread`` around it."""
        shifts = spread * np.linspace(-1, 1, seeds)[:, None]
        # Or paired differences would all be equal, and have no interval.
        shifts = shifts + 1e-10 * np.random.default_rng(len(self.arms)).normal(size=(seeds, 1))
        rewards = np.concatenate([np.full((seeds, 1), start), np.full((seeds, STEPS - 1), end) + shifts], axis=1)
        accuracies = np.concatenate([np.full((seeds, 1), start), np.full((seeds, 5), end) + shifts], axis=1)
        self.arms[self.key(arm)] = rewards, accuracies

    @staticmethod
    def key(arm: Arm) -> Arm:
        return arm._replace(axes=tuple(sorted(arm.axes.items())))  # type: ignore[arg-type]

    def tables(self, arms: Sequence[Arm]) -> dict[str, pd.DataFrame]:
        steps, runs = [], []
        for arm in arms:
            if self.key(arm) not in self.arms:
                raise NotRun(f"{arm.label} ({arm.experiment})")
            for seed, (rewards, accuracies) in enumerate(zip(*self.arms[self.key(arm)], strict=True)):
                values = [("reward", step, reward) for step, reward in enumerate(rewards, 1)]
                values += [("eval_accuracy", step, accuracy) for step, accuracy in enumerate(accuracies)]
                values += [(metric, 1, each[seed]) for metric, each in self.metrics.get(self.key(arm), {}).items()]
                steps += [(arm.label, seed, *each) for each in values]
                fell = seed in self.fallen.get(self.key(arm), ())
                runs.append(
                    {"arm": arm.label, "seed": seed, "steps": STEPS, "updates_per_rollout": UPDATES}
                    | {"wall_seconds": self.wall_seconds.get(self.key(arm), 100.0)}
                    | {"judged_until": STEPS - PATIENCE // UPDATES + 1}
                    | {"collapse_rule": Rule(patience_updates=PATIENCE).text()}
                    | {"collapsed_step": 9.0 if fell else np.nan, "falling_since": np.nan}
                )
        curves = pd.DataFrame(steps, columns=["arm", "seed", "metric", "step", "value"])
        curves = curves.assign(updates_per_rollout=UPDATES, responses=RESPONSES)
        return {"steps": curves, "runs": pd.DataFrame(runs)}


@pytest.fixture
def sound() -> Made:
    """A testbed that passes every gate."""
    made = Made()
    for rate, arm in LEARNING.items():
        made.add(arm, 0.4, 0.9 if rate == RATES[2] else 0.6, 5)
    made.add(STALE["grpo_unclipped"], 0.4, 0.2)
    made.add(STALE["grpo"], 0.4, 0.6)
    made.add(STALE["gspo"], 0.4, 0.7)
    for twin in (TWIN, DENSE_TWIN):
        made.add(twin, 0.4, 0.8)
    made.add(EXACT, 0.4, 0.8)
    made.add(FP8, 0.4, 0.7)
    made.add(QUIET, 0.4, 0.8)
    made.add(NOISY, 0.4, 0.7)
    for on_policy, stale in gates.GRADED.values():
        made.add(on_policy, 0.4, 0.8)
        made.add(stale, 0.4, 0.6)
    made.add(LONG_ON_POLICY["dense"], 0.4, 0.8)
    return made


def states(study: Recorded) -> dict[tuple[str, str], str]:
    return {(need.gate, need.setting): each.state for need, each in gates.gates(study).items()}


def test_sound_testbed_passes_every_gate_with_the_planted_numbers(sound: Made) -> None:
    assert set(states(sound).values()) == {"passed"}
    numbers = {need: each.number for need, each in gates.gates(sound).items()}
    expected = {("V1", "learning"): 0.5, ("V2", "stale"): 0.4, ("V3", "stale"): 1.0, ("V4", "mismatch"): 0.1}
    expected |= {("V5", "stale"): 1.5, ("V7", "stale"): 0.0}
    assert {key: pytest.approx(numbers[key].mean, abs=1e-9) for key in expected} == expected
    assert numbers[Need("V1", "learning")].n == 5


@pytest.mark.parametrize(
    ("arm", "start", "end", "failed"),
    [
        (LEARNING[RATES[0]], 0.4, 0.95, {("V1", "learning")}),  # the best rate is at the end of the grid
        (LEARNING[RATES[-1]], 0.4, 0.95, {("V1", "learning")}),
        (TWIN, 0.4, 0.49, {("V2", "stale")}),
        (DENSE_TWIN, 0.4, 0.3, {("V2 dense", "stale")}),
        (STALE["grpo_unclipped"], 0.4, 0.5, {("V3", "stale")}),
        (LONG_ON_POLICY["slow routers"], 0.4, 0.65, {("V3", "long")}),
        (LONG_ON_POLICY["dense"], 0.4, 0.45, {("V2 dense", "long")}),
        (LONG_STALE, 0.4, 0.75, {("V3", "long")}),
        (LONGER["on policy"], 0.4, 0.45, {("V2", "longer"), ("V3", "longer")}),
        (SLOW["grpo_unclipped"], 0.4, 0.75, {("V3", "slow")}),
        (QUIET, 0.4, 0.74, {("V4", "mismatch")}),
        (EXACT, 0.4, 0.74, {("V4", "mismatch fp8")}),
        (NOISY, 0.4, 0.76, {("V4", "mismatch")}),
        (FP8, 0.4, 0.76, {("V4", "mismatch fp8")}),
        (STALE["gspo"], 0.4, 0.3, {("V5", "stale")}),
    ],
)
def test_gates_fail_independently(
    sound: Made, arm: Arm, start: float, end: float, failed: set[tuple[str, str]]
) -> None:
    sound.add(arm, start, end)
    assert {key for key, state in states(sound).items() if state == "failed"} == failed


def test_v2_limits_and_v3_requires_collapses(sound: Made) -> None:
    sound.fallen[Made.key(TWIN)] = [3]
    assert states(sound)["V2", "stale"] == "passed"
    sound.fallen[Made.key(TWIN)] = [3, 4]
    assert states(sound)["V2", "stale"] == "failed"
    sound.add(STALE["grpo_unclipped"], 0.4, 0.5)
    sound.fallen[Made.key(STALE["grpo_unclipped"])] = range(9)
    assert states(sound)["V3", "stale"] == "passed"
    sound.fallen[Made.key(STALE["grpo_unclipped"])] = range(8)
    assert states(sound)["V3", "stale"] == "failed"


def test_resolution_needs_a_small_spread_or_enough_seeds(sound: Made) -> None:
    sound.add(STALE["gspo"], 0.4, 0.7, seeds=10, spread=0.2)
    assert states(sound)["V7", "stale"] == "failed"
    sound.add(STALE["gspo"], 0.4, 0.7, seeds=200, spread=0.2)
    sound.add(STALE["grpo"], 0.4, 0.6, seeds=200)
    assert states(sound)["V7", "stale"] == "passed"


def test_primary_outcome_excludes_confirmation_steps(sound: Made) -> None:
    rewards, accuracies = sound.arms[Made.key(STALE["grpo"])]
    last = STEPS - PATIENCE // UPDATES + 1
    rewards = np.concatenate([np.ones((10, last)), np.zeros((10, STEPS - last))], axis=1)
    sound.arms[Made.key(STALE["grpo"])] = rewards, accuracies
    assert sound.mean_reward(STALE["grpo"]).tolist() == [1.0] * 10


def test_a_design_says_how_many_seeds_and_minutes_a_difference_takes(sound: Made) -> None:
    sound.add(DISTURBED, 0.4, 0.6, 5, spread=0.05)
    sound.wall_seconds |= {Made.key(STALE["grpo"]): 60.0, Made.key(DISTURBED): 30.0}
    rows = gates.designs(sound).set_index(["design", "outcome"])
    assert set(rows.index.get_level_values(0)) == {"whole runs", "floor of chaos"}  # branches have not run
    floor = rows.loc[("floor of chaos", "held-out accuracy")]
    # Ten seeds of GRPO differ by 0.01 · linspace(−1, 1, 10), five of the disturbed run by 0.05 · linspace(−1, 1, 5).
    expected = 0.05 * np.linspace(-1, 1, 5) - 0.01 * np.linspace(-1, 1, 10)[:5]
    assert floor["standard deviation"] == pytest.approx(np.std(expected, ddof=1))
    assert (floor["difference"].mean, floor["n"]) == (pytest.approx(expected.mean()), 5)
    assert floor["seeds for 0.05"] > rows.loc[("whole runs", "held-out accuracy"), "seeds for 0.05"] >= 3
    # Two arms, and each makes the same updates, at the pace of the quickest arm.
    assert floor["updates"] == floor["seeds for 0.05"] * 2 * STEPS * UPDATES
    assert gates.seconds_an_update(sound) == 30.0 / (STEPS * UPDATES)
    minutes = page.shown_designs(sound).set_index(["design", "outcome"])["core minutes"]
    assert minutes["floor of chaos", "held-out accuracy"] == f"{floor['seeds for 0.05'] * 2 * 30.0 / 60:.0f}"
    assert gates.designs(Made()).empty
    assert gates.seconds_an_update(Made()) is None


def test_a_gate_without_runs_is_not_measured_and_says_what_to_run(tmp_path: Path) -> None:
    found = gates.gates(Made())
    assert {each.state for each in found.values()} == {"not measured"}
    assert all(each.number.n == 0 and each.measured.startswith("to be run: ") for each in found.values())
    with pytest.raises(NotRun):
        command.report(tmp_path, tmp_path, ["png"])
    assert list(tmp_path.iterdir()) == []


def test_realism_has_a_row_per_setting_and_names_unrecorded_numbers(sound: Made) -> None:
    assert gates.realism(Made()) == []
    sound.metrics[Made.key(STALE["grpo_unclipped"])] = {"token_ratio_variance": np.linspace(2, 4, 10)}
    sound.add(DENSE, 0.4, 0.2)
    sound.metrics[Made.key(DENSE)] = {"token_ratio_variance": np.linspace(1, 2, 10)[::-1]}
    moments = {"log_ratio_moment_free": np.full(10, 4.0), "log_ratio_moment_pinned": np.linspace(1, 2, 10)}
    sound.metrics[Made.key(NOISY)] = moments
    tokens = {"tokens_sampled": np.linspace(300, 500, 10), "prompts_sampled": np.full(10, 4.0)}
    sound.metrics[Made.key(STALE["grpo"])] = tokens
    found = {(each.row.gate, each.setting): each for each in gates.realism(sound)}
    assert {f"R{number}" for number in range(1, 11)} == {gate for gate, _ in found}
    assert found["R7", "stale"].number.mean == pytest.approx(400 / (4 * RESPONSES))
    settings = ("stale", "long", "longer", "slow", "learning", "mismatch", "mismatch fp8")
    assert {(gate, setting) for gate in ("R5", "R8") for setting in settings} <= set(found)
    assert found["R5", "stale"].number.mean == pytest.approx(2.0)
    assert found["R8", "mismatch"].number.mean == pytest.approx(1 - 1.5 / 4)
    rows = to_table(list(found.values())).set_index(["gate", "setting"])
    for key in (("R5", "learning"), ("R8", "stale"), ("R1", "stale"), ("R6", "stale")):
        assert found[key].number.n == 0
        assert rows.loc[key, ["here", "factor"]].tolist() == ["not recorded", "–"]
    # An MoE and its dense twin share no cold start: which seed stands beside which does not matter.
    sound.metrics[Made.key(DENSE)] = {"token_ratio_variance": np.linspace(1, 2, 10)}
    again = next(each for each in gates.realism(sound) if (each.row.gate, each.setting) == ("R5", "stale"))
    assert vars(again.number) == pytest.approx(vars(found["R5", "stale"].number))


def test_numbers_missing_from_archives_come_from_the_calibration(sound: Made, tmp_path: Path) -> None:
    sound._calibration = tmp_path / "calibration.csv"
    lines = ["key,of,mean,low,high,n,unit", "margin_over_spread,,0.1,0.08,0.12,256,prompts"]
    lines += [f"set_disagreement,{engine},{mean},,,64,prompts" for engine, mean in (("exact", 0.0), ("fp8", 0.2))]
    sound._calibration.write_text("\n".join(lines))
    found = {(each.row.gate, each.setting, each.row.what): each for each in gates.realism(sound)}
    routers = "routers whose set differs"
    margin, fp8 = found["R6", "stale", "margin over spread of the router logits"], found["R3", "mismatch fp8", routers]
    assert (margin.number, margin.factor) == (Estimate(0.1, 0.08, 0.12, 256), pytest.approx(0.1 / 0.02))
    assert (fp8.number.mean, fp8.factor) == (0.2, pytest.approx(0.2 / 0.15))
    assert np.isnan(fp8.number.low)
    assert found["R3", "mismatch", routers].number.n == 0  # another noise than the calibration's
    shown = to_table([margin, fp8])
    assert shown["n"].tolist() == ["256 prompts", "64 prompts"]


def test_arm_that_loses_its_reward_in_one_rollout_is_named(sound: Made) -> None:
    sound.add(PAPERS, 0.4, 0.36)
    sound.add(PAPERS_R2, 0.4, 0.28)
    kept = gates.kept(sound)
    assert [kept[arm.label].mean for arm in (PAPERS, PAPERS_R2)] == pytest.approx([0.9, 0.7])
    assert kept[GSPO_R2.label].n == 0
    text = page.text(sound, None, list(gates.gates(sound).values()), "")
    assert f": {PAPERS_R2.label}." in text
    assert "What a seed buys" in text
    assert "## Answers" not in text  # the gates alone
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {GSPO_R2.label} "))
    assert "not recorded" in row
    assert states(sound)["V5", "stale"] == "passed"  # as fixed before the study: GRPO and GSPO


def test_settings_run_beyond_the_last_counted_step() -> None:
    experiments.register()
    for name in ("gates_stale", "gates_mismatch", "gates_noise", "gates_learning"):
        config = compose.plan([f"experiment={name}"], multirun=True)[0].config
        assert config.total_updates is not None
        assert config.total_updates > 2 * config.collapse.patience_updates
        assert config.evaluation.prompts >= 1024
