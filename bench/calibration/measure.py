"""The thermometer: from a checked config to all readings of its model at the cold start and over a few rollouts."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from steadymoe.bench.calibration import at_rest, engines
from steadymoe.bench.calibration.readings import Reading
from steadymoe.bench.calibration.updates import Updates
from steadymoe.bench.config import compose
from steadymoe.bench.config.schema import RunConfig
from steadymoe.bench.measurement.published import EXACT
from steadymoe.bench.runs import execute
from steadymoe.bench.training import checkpoint
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models import build

# Rollouts that are trained on, the first ones of a run with this config.
ROLLOUTS = 3
# An engine samples at most so many prompts.
_PROMPTS_OF_ENGINES = 64
# Lines on a cold start that is trained now are at least so many seconds apart.
_SECONDS_BETWEEN_LINES = 10

Say = Callable[[str], None]


@dataclass(frozen=True)
class Calibration:
    """All that was measured of one config."""

    readings: list[Reading]
    cold_start: dict[str, Any]
    """What is known of the start: accuracy and updates, or a path."""
    size: dict[str, int]
    """The model's parameters, layers and experts (``build.size``)."""
    reward: float
    """Mean score of the first rollout."""


def calibrate(run: compose.Run, say: Say) -> Calibration:
    """Measure the model of ``run``, which has routers; ``say`` is told of the progress.

    Raises ColdStartError if the cold start misses its band, and FloatingPointError where a policy or a gradient is not
    finite.
    """
    config = run.config
    torch.set_num_threads(config.threads)
    task, model, made = execute.at_start(config, _Checks(say))
    checkpoint.disturb(model, config.weight_noise, config.seed)
    known = engines.chosen(config, run.choices["engine"])
    say(f"the model is at its start ({', '.join(f'{key} {value}' for key, value in made.items())})")

    readings = []
    for name, engine in known.items():
        readings += engines.measure(model, task, _for_engines(config), name, engine)
        say(f"engine {name} beside the trainer")

    trainer = Trainer(model, task, _with(config, engine=known[EXACT]))
    updates, first = Updates(trainer), []
    for step in range(1, ROLLOUTS + 1):
        rollout, scores_PG, _ = trainer.sample(step)
        old, _ = trainer.old_policy(rollout, trainer.minibatches(step), step)
        rewards_B = trainer.rewards(rollout, old)
        advantages_BT = trainer.advantages(rewards_B, rollout.sequences.response_mask_BT)
        if step == 1:
            reward = scores_PG.mean().item()
            first += at_rest.routers(trainer, rollout, old)
            first += at_rest.gradient(trainer, rollout, old, advantages_BT)
            say("routers and gradient at the cold start")
        updates.rollout(step, rollout, old, advantages_BT, say)
    return Calibration([*updates.readings(), *first, *readings], made, build.size(model), reward)


def _with(config: RunConfig, **changed: Any) -> RunConfig:
    """``config`` where everything is measured and the old policy has a forward of its own."""
    savings = replace(config.savings, sampler_as_old=None)
    return replace(config, measure="all", savings=savings, **changed)


def _for_engines(config: RunConfig) -> RunConfig:
    """``config`` with few prompts in one mini-batch, no replay, and every sampled group kept."""
    return _with(
        config,
        updates_per_rollout=1,
        rollout=replace(config.rollout, prompts=min(config.rollout.prompts, _PROMPTS_OF_ENGINES)),
        routing=replace(config.routing, replay="none", predictor_learning_rate=None),
        algorithm=replace(config.algorithm, sampling=replace(config.algorithm.sampling, max_rollouts=1)),
    )


class _Checks:
    """Tells of the checks of a cold start, not too often."""

    def __init__(self, say: Say) -> None:
        self._say, self._last = say, 0.0

    def __call__(self, update: int, accuracy: float, seconds_left: float) -> None:
        if time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            self._say(f"cold start: update {update}, accuracy {accuracy:.2f}, about {seconds_left:.0f} s left")
