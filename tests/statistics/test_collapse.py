"""The collapse detector on runs made by hand, and on runs that only learn."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadymoe.bench.statistics import collapse
from steadymoe.bench.statistics.collapse import Collapse, Rule

RULE, UPDATES = Rule(window_updates=80, patience_updates=160), 16  # a window of 5 rollouts and a patience of 10
STEPS = 40


def run(steps: int = STEPS, **columns: object) -> pd.DataFrame:
    """A run that stays at half its prompts, with the columns given instead."""
    usual = {"reward": 0.5, "loss": 0.0, "entropy": 0.7, "grad_norm": 1.0}
    return pd.DataFrame({"step": range(1, steps + 1)} | usual | columns)


def then(first: float, later: float, at: int) -> list[float]:
    """``first`` before step ``at`` and ``later`` from it on."""
    return [first] * (at - 1) + [later] * (STEPS - at + 1)


def detect(steps: pd.DataFrame, rule: Rule, updates: int) -> Collapse | None:
    return collapse.judge(steps, rule, updates).collapse


def test_learning_or_steady_run_has_no_collapse() -> None:
    assert detect(run(), RULE, UPDATES) is None
    learned = run(reward=np.linspace(0.5, 1.0, STEPS), entropy=np.geomspace(0.7, 1e-4, STEPS))
    assert detect(learned, RULE, UPDATES) is None
    assert detect(run()[:0], RULE, UPDATES) is None


@pytest.mark.parametrize(
    ("reward", "found"),
    [
        (then(0.5, 0.45, 5), Collapse(20, "entropy")),  # gone, and nothing gained
        (then(0.5, 0.55, 5), None),  # gone, and reward above where it began
        (then(0.96, 0.95, 5), None),  # solved from the start
        (then(0.5, 0.45, 25), Collapse(25, "entropy")),  # lost only later
        ([0.5, *([0.9] * 19), *([0.48] * 20)], Collapse(25, "entropy")),  # gained and lost: averages from 25 on
    ],
)
def test_falling_entropy_is_a_collapse_only_without_gain_in_reward(reward: list[float], found: Collapse | None) -> None:
    assert detect(run(reward=reward, entropy=then(0.7, 0.03, 20)), RULE, UPDATES) == found
    off = dataclasses.replace(RULE, entropy_fraction=0.0)
    assert detect(run(reward=reward, entropy=then(0.7, 0.03, 20)), off, UPDATES) is None
    for_nine_steps = [*then(0.7, 0.03, 20)[:28], *([0.7] * (STEPS - 28))]
    assert detect(run(reward=reward, entropy=for_nine_steps), RULE, UPDATES) is None


def test_gradient_norm_must_stay_high_in_a_run_without_gain() -> None:
    lost = then(0.5, 0.4, 2)
    assert detect(run(reward=lost, grad_norm=then(1.0, 101.0, 25)), RULE, UPDATES) == Collapse(25, "gradient norm")
    # Right at the earliest step: the usual norm is that of what came before, not of the explosion itself.
    assert detect(run(reward=lost, grad_norm=then(1.0, 101.0, 11)), RULE, UPDATES) == Collapse(11, "gradient norm")
    assert detect(run(reward=lost, grad_norm=then(1.0, 99.0, 25)), RULE, UPDATES) is None
    assert detect(run(reward=then(0.5, 0.6, 2), grad_norm=then(1.0, 101.0, 25)), RULE, UPDATES) is None
    spike = [1.0] * STEPS
    spike[20] = 1e6
    assert detect(run(reward=lost, grad_norm=spike), RULE, UPDATES) is None
    assert detect(run(reward=lost, grad_norm=then(0.0, 1.0, 25)), RULE, UPDATES) is None  # no signal until then


@pytest.mark.parametrize("column", collapse.FINITE)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_number_is_a_collapse_at_its_step(column: str, value: float) -> None:
    usual = run()[column].tolist()
    broken = run(**{column: [*usual[:17], value, *usual[18:]]})
    assert detect(broken, RULE, UPDATES) == Collapse(18, "not finite")


def test_earliest_reason_is_reported() -> None:
    both = run(reward=then(0.8, 0.0, 11), entropy=then(0.7, 0.0, 20), loss=then(0.0, np.nan, 30))
    assert detect(both, RULE, UPDATES) == Collapse(13, "reward")
    # A reward too short below its height when the run breaks is not counted.
    assert detect(run(reward=then(0.8, 0.0, 25), loss=then(0.0, np.nan, 30)), RULE, UPDATES) == Collapse(
        30, "not finite"
    )
    assert detect(both.sample(frac=1, random_state=0), RULE, UPDATES) == Collapse(13, "reward")


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 1.0))
@settings(max_examples=60, deadline=None)
def test_noise_of_256_answers_is_not_a_collapse(seed: int, accuracy: float) -> None:
    generator = np.random.default_rng(seed)
    noise = generator.lognormal(0, 0.5, size=(2, STEPS))
    still = run(reward=generator.binomial(256, accuracy, STEPS) / 256, entropy=0.7 * noise[0], grad_norm=noise[1])
    assert detect(still, RULE, UPDATES) is None


def test_rule_survives_the_round_trip() -> None:
    assert Rule.from_text(dataclasses.replace(RULE, least_reward=0.3).text()).least_reward == 0.3


def collapsed_at(rewards: list[float], **rule: float) -> int | None:
    """The step at which a reward collapses, with one update a rollout."""
    found = detect(run(len(rewards), reward=rewards), dataclasses.replace(RULE, **rule), 1)  # type: ignore[arg-type]
    return None if found is None else found.step


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.4] * 30, None),  # never
        ([0.0] * 30, None),  # nothing to fall from
        ([0.2] * 10 + [0.8] * 10, None),  # low before, not after
        ([0.8] * 10 + [0.0] * 10, 12),  # averages of 3: 0.53 at 11, 0.27 at 12
        ([0.8] * 10 + [0.0] * 5, 12),  # below at 12, 13, 14, 15: as long as the patience
        ([0.8] * 10 + [0.0] * 4, None),  # one step too short
        ([0.8] * 10 + [0.0] * 3 + [0.8] * 9, None),  # recovers: below at 12, 13 and 14 alone
        ([0.8] * 10 + [0.0] * 3 + [0.8] * 9 + [0.0] * 9, 24),  # recovers once, then does not
        ([0.2] * 5 + [0.8] * 5 + [0.3] * 10, 13),  # the highest average so far is what counts
        ([0.8] + [0.3] * 9, 4),  # fallen before there is an average: the first step counts as it is
        ([0.8] + [0.5] * 9, None),
        ([0.8, 0.1], None),  # shorter than the window
        ([], None),
    ],
)
def test_collapse_is_found_on_a_hand_made_curve(rewards: list[float], step: int | None) -> None:
    assert collapsed_at(rewards, window_updates=3, patience_updates=4, least_reward=0.0) == step


def test_run_that_never_reached_least_reward_cannot_collapse() -> None:
    luck = [0.02, 0.02, 0.0, 0.0, 0.0, 0.0]
    assert collapsed_at(luck, window_updates=2, patience_updates=2, least_reward=0.0) == 4
    assert collapsed_at(luck, window_updates=2, patience_updates=2, least_reward=0.1) is None


# --- counted in gradient updates ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "window", "patience"), [(16, 5, 10), (8, 10, 20), (3, 27, 54), (1, 80, 160), (64, 2, 3), (640, 2, 2)]
)
def test_window_and_patience_span_equal_training_at_every_staleness(updates: int, window: int, patience: int) -> None:
    assert RULE.rollouts(updates) == (window, patience)


@pytest.mark.parametrize("updates", [1, 4, 16, 64])
def test_collapse_does_not_depend_on_updates_per_rollout(updates: int) -> None:
    """An on-policy twin of 640 steps and a run of 10 long steps are judged after as much training."""
    steps = 640 // updates
    reward = np.where(np.arange(steps) < steps // 4, 0.8, 0.0)  # falls after 160 updates
    table = run(steps, reward=reward)
    found = collapse.judge(table, RULE, updates)
    assert found.collapse is not None
    assert found.collapse.reason == "reward"
    assert abs(found.collapse.step * updates - (160 + 40)) <= max(16, updates)  # where half of the window has fallen
    assert abs(found.until * updates - 480) <= 2 * updates
    short = collapse.judge(table.assign(reward=0.8 * (np.arange(steps) < 0.8 * steps)), RULE, updates)
    assert short.collapse is None
    assert short.falling_since is not None
    assert short.falling_since > short.until


def test_late_fall_is_falling_and_short_run_is_not_judged() -> None:
    late = collapse.judge(run(reward=then(0.8, 0.0, 31)), RULE, UPDATES)
    assert (late.collapse, late.until, late.falling_since) == (None, 31, 33)
    seen = collapse.judge(run(reward=then(0.8, 0.0, 29)), RULE, UPDATES)
    assert (seen.collapse, seen.falling_since) == (Collapse(31, "reward"), None)
    late = collapse.judge(run(reward=then(0.5, 0.4, 2), entropy=then(0.7, 0.0, 36)), RULE, UPDATES)
    assert late.falling_since == 36
    assert collapse.judge(run(), RULE, UPDATES) == collapse.Judgement(None, 31, None)
    assert collapse.judge(run()[:14], RULE, UPDATES).until == 5
    assert collapse.judge(run()[:13], RULE, UPDATES).until == 0  # no average could stay low for long enough
    assert collapse.judge(run(), RULE, updates_per_rollout=1).until == 0


def test_recorded_runs_are_judged_again() -> None:
    """Tables of kept runs: no loss among their columns, and a status by a patience of ten rollouts."""
    rewards = {0: then(0.8, 0.0, 11), 1: [0.8] * 40, 2: then(0.8, 0.0, 35), 3: [*([0.8] * 20), *([0.0] * 20)]}
    steps = pd.DataFrame(
        [
            {"run": seed, "step": step, "metric": metric, "value": value}
            for seed, curve in rewards.items()
            for step, reward in enumerate(curve, 1)
            for metric, value in (("reward", reward), ("entropy", 0.7), ("grad_norm", 1.0), ("clip_fraction", 0.1))
        ]
    )
    runs = pd.DataFrame({"arm": "a", "seed": list(rewards), "updates_per_rollout": 16, "status": "finished"})
    runs["collapse_rule"] = RULE.text()
    runs["diverged_reason"], runs["diverged_step"] = [None, None, None, "not finite"], [np.nan, np.nan, np.nan, 21.0]
    found = collapse.judged(runs, steps)
    assert found["collapsed_step"].tolist()[::3] == [13, 21]
    assert found["collapsed_reason"].tolist() == ["reward", "", "", "not finite"]
    assert found["judged_until"].tolist() == [31] * 4
    assert found["falling_since"].tolist()[2] == 37
    assert found[["status", "diverged_step"]].equals(runs[["status", "diverged_step"]])
    pd.testing.assert_frame_equal(collapse.judged(found, steps), found)  # judged again, also of what was kept
    strict = found.assign(collapse_rule=dataclasses.replace(RULE, patience_updates=48).text())
    assert collapse.judged(strict, steps)["collapsed_step"].tolist()[2] == 37
    assert collapse.judged(runs.assign(updates_per_rollout=1), steps)["judged_until"].tolist() == [0] * 4
