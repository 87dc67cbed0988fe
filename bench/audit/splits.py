"""The three rollouts of an audit: D moves the weights, A is audited, R is the reference. No prompt is in two of them.

Every algorithm sees the same prompts, the same responses and the same mini-batches. Shapes: B sequences of a rollout, G
responses to a prompt, T response positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from steadymoe.bench.support.seeding import numpy_generator, torch_generator
from steadymoe.bench.tasks import Task
from steadymoe.bench.training.microbatches import MicroBatch
from steadymoe.bench.training.sampling import Decoding, Rollout, join, roll_out
from steadymoe.bench.training.trainer import Trainer

# Prompts are drawn in rounds; so many rounds without a new prompt, and the task has no more.
_ROUNDS = 20


@dataclass(frozen=True)
class Splits:
    """The prompts of the three rollouts."""

    drift: list[str]
    audited: list[str]
    reference: list[str]


def split(task: Task, seed: int, step: int, drift: int, audited: int) -> Splits:
    """Disjoint prompts of the training stream: ``drift`` to move the weights, ``audited`` for A and as many for R.

    ``step``: the step at which a mid-run checkpoint begins; 0 at a start. Raises ValueError if the task has too few.
    """
    wanted, found = drift + 2 * audited, dict[str, None]()
    generator = numpy_generator(seed, "audit_prompts", step)
    for _ in range(_ROUNDS):
        found |= dict.fromkeys(task.sample(wanted, generator))
        if len(found) >= wanted:
            break
    else:
        raise ValueError(
            f"an audit needs {wanted} different prompts, and the task gave {len(found)} in {_ROUNDS * wanted} draws: "
            "lower audit.minibatches or rollout.prompts, or choose a task with more prompts"
        )
    drawn = list(found)[:wanted]
    return Splits(drawn[:drift], drawn[drift : drift + audited], drawn[drift + audited :])


def respond(
    trainer: Trainer, prompts: Sequence[str], stage: str, step: int, top_k: int, by_engine: bool = False
) -> Rollout:
    """Responses to ``prompts`` by the trained weights as they are or, with ``by_engine``, by the config's engine.

    The draws belong to ``stage`` and ``step``. Prompts are sampled in parts as large as a rollout of the config.
    """
    config, device = trainer.config, trainer.model.device.type
    model = trainer.model
    if by_engine:
        model = trainer.sampler.model(torch_generator(config.seed, f"{stage}_engine", step, device))
    decoding = Decoding(
        precision=config.precision,
        temperature=trainer.sampler.engine.temperature if by_engine else 1.0,
        top_k=top_k,
        routes=trainer.learner.forwards.records_routes,
    )
    size, generator = config.rollout.prompts, torch_generator(config.seed, stage, step, device)
    parts = [prompts[first : first + size] for first in range(0, len(prompts), size)]
    return join([roll_out(model, trainer.task, part, config.rollout.responses, generator, decoding) for part in parts])


def minibatches(trainer: Trainer, rollout: Rollout) -> list[list[MicroBatch]]:
    """The mini-batches of a rollout in the order of its prompts, each as large as the config's, in one forward each."""
    config = trainer.config
    size = config.rollout.prompts // config.updates_per_rollout * config.rollout.responses
    rows_B = torch.arange(len(rollout.scores_B), device=trainer.model.device)
    return [trainer.learner.forwards.split(rows_M) for rows_M in rows_B.split(size)]
