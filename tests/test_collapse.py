"""The collapse detector on runs made by hand, and on runs that only learn."""

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from steadymoe.bench import collapse, compose, identity
from steadymoe.bench.check import ConfigError
from steadymoe.bench.collapse import Collapse

NUMBERS = yaml.safe_load((compose.CONF / "config.yaml").read_text())["collapse"]
STEPS = 40


def run(**columns: object) -> pd.DataFrame:
    """A run that stays at half its prompts, with the columns given instead."""
    usual = {"reward": 0.5, "loss": 0.0, "entropy": 0.7, "grad_norm": 1.0}
    return pd.DataFrame({"step": range(1, STEPS + 1)} | usual | columns)


def then(first: float, later: float, at: int) -> list[float]:
    """``first`` before step ``at`` and ``later`` from it on."""
    return [first] * (at - 1) + [later] * (STEPS - at + 1)


def test_a_run_that_learns_or_stays_is_none() -> None:
    assert collapse.detect(run(), **NUMBERS) is None
    learned = run(reward=np.linspace(0.5, 1.0, STEPS), entropy=np.geomspace(0.7, 1e-4, STEPS))
    assert collapse.detect(learned, **NUMBERS) is None
    assert collapse.detect(run()[:0], **NUMBERS) is None


def test_a_fallen_reward_collapses_where_it_did_before_there_were_other_rules() -> None:
    reward = then(0.8, 0.0, 11)
    assert collapse.detect(run(reward=reward), **NUMBERS) == Collapse(13, "reward")
    old = {key: NUMBERS[key] for key in ("window", "reward_fraction", "patience", "least_reward")}
    assert collapse.collapsed_at(reward, **old) == 13


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
def test_entropy_that_goes_is_a_collapse_only_where_reward_has_not_gained(
    reward: list[float], found: Collapse | None
) -> None:
    assert collapse.detect(run(reward=reward, entropy=then(0.7, 0.03, 20)), **NUMBERS) == found
    off = NUMBERS | {"entropy_fraction": 0.0}
    assert collapse.detect(run(reward=reward, entropy=then(0.7, 0.03, 20)), **off) is None


def test_entropy_must_stay_gone() -> None:
    entropy = then(0.7, 0.03, 20)
    entropy[20 + 8 :] = [0.7] * (STEPS - 28)  # nine steps
    assert collapse.detect(run(reward=then(0.5, 0.4, 2), entropy=entropy), **NUMBERS) is None


def test_a_gradient_norm_must_stay_above_its_usual_in_a_run_that_gains_nothing() -> None:
    lost = then(0.5, 0.4, 2)
    assert collapse.detect(run(reward=lost, grad_norm=then(1.0, 101.0, 25)), **NUMBERS) == Collapse(25, "gradient norm")
    # Right at the earliest step: the usual norm is that of what came before, not of the explosion itself.
    assert collapse.detect(run(reward=lost, grad_norm=then(1.0, 101.0, 11)), **NUMBERS) == Collapse(11, "gradient norm")
    assert collapse.detect(run(reward=lost, grad_norm=then(1.0, 99.0, 25)), **NUMBERS) is None
    assert collapse.detect(run(reward=then(0.5, 0.6, 2), grad_norm=then(1.0, 101.0, 25)), **NUMBERS) is None
    spike = [1.0] * STEPS
    spike[20] = 1e6
    assert collapse.detect(run(reward=lost, grad_norm=spike), **NUMBERS) is None
    assert collapse.detect(run(reward=lost, grad_norm=then(0.0, 1.0, 25)), **NUMBERS) is None  # no signal until then


@pytest.mark.parametrize("column", collapse.FINITE)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_a_collapse_at_its_step(column: str, value: float) -> None:
    usual = run()[column].tolist()
    broken = run(**{column: [*usual[:17], value, *usual[18:]]})
    assert collapse.detect(broken, **NUMBERS) == Collapse(18, "not finite")


def test_the_earliest_rule_is_the_one_that_is_named() -> None:
    both = run(reward=then(0.8, 0.0, 11), entropy=then(0.7, 0.0, 20), loss=then(0.0, np.nan, 30))
    assert collapse.detect(both, **NUMBERS) == Collapse(13, "reward")
    # A reward too short below its height when the run breaks is not counted.
    assert collapse.detect(run(reward=then(0.8, 0.0, 25), loss=then(0.0, np.nan, 30)), **NUMBERS) == Collapse(
        30, "not finite"
    )
    assert collapse.detect(both.sample(frac=1, random_state=0), **NUMBERS) == Collapse(13, "reward")


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 1.0))
@settings(max_examples=60, deadline=None)
def test_the_noise_of_256_answers_is_no_collapse(seed: int, accuracy: float) -> None:
    generator = np.random.default_rng(seed)
    noise = generator.lognormal(0, 0.5, size=(2, STEPS))
    still = run(reward=generator.binomial(256, accuracy, STEPS) / 256, entropy=0.7 * noise[0], grad_norm=noise[1])
    assert collapse.detect(still, **NUMBERS) is None


def test_the_rate_of_false_alarms_is_that_of_the_runs_given() -> None:
    falling = run(reward=then(0.8, 0.0, 11))
    found = collapse.false_alarm_rate([run(), falling, run(), run()], **NUMBERS)
    assert (found.mean, found.n) == (0.25, 4)
    assert found.low < 0.25 < found.high
    assert collapse.false_alarm_rate([], **NUMBERS).n == 0


@pytest.mark.parametrize(
    "word", ["collapse.entropy_fraction=1.5", "collapse.solved_reward=-0.1", "collapse.grad_norm_factor=0.0"]
)
def test_thresholds_that_mean_nothing_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        compose.plan([word])


def test_the_thresholds_leave_the_hashes_of_older_runs_as_they_were() -> None:
    (made,) = compose.plan(["model=micro"])
    older = {key: value for key, value in NUMBERS.items() if f"collapse.{key}" not in identity.NEUTRAL}
    assert set(older) == {"window", "reward_fraction", "patience", "least_reward"}
    assert identity.config_hash(made.config | {"collapse": older}) == made.config_hash
    (other,) = compose.plan(["model=micro", "collapse.entropy_fraction=0.1"])
    assert other.config_hash != made.config_hash
