"""The three rollouts of an audit: D moves the weights, A is audited, R is the reference. They share no prompt.

Every loss sees the same prompts, the same responses and the same mini-batches. The drift takes k neutral updates away
from the weights that sampled A: the first k updates of a run with ``grpo_unclipped`` on D, at the config's learning
rate and mini-batch.

Shapes: B sequences of a rollout, T response positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from steadymoe.bench.audit.losses import Loss
from steadymoe.bench.support.seeding import numpy_generator, torch_generator
from steadymoe.bench.tasks import Task
from steadymoe.bench.training.learner import Learner
from steadymoe.bench.training.microbatches import MicroBatch
from steadymoe.bench.training.old_policy import OldPolicy
from steadymoe.bench.training.sampling import Decoding, Rollout, join, roll_out
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models.engine import Exact
from steadymoe.models.routing import routers

# The loss of the drift: an importance ratio without a clip, and nothing else.
NEUTRAL = "grpo_unclipped"
# Rounds of drawing prompts before a task is said to have too few.
_ROUNDS = 20


@dataclass(frozen=True)
class Frozen:
    """A rollout with everything that losses read of it, by label."""

    rollout: Rollout
    minibatches: list[list[MicroBatch]]
    """One micro-batch for each mini-batch."""
    old: Mapping[str, OldPolicy]
    advantages: Mapping[str, Tensor]
    """(B, T) each."""


def prompts(task: Task, seed: int, drift: int, audited: int) -> tuple[list[str], list[str], list[str]]:
    """Draw the prompts of D, A and R, all different: ``drift`` for D, ``audited`` each for A and R.

    Raises ValueError if the task has too few prompts.
    """
    wanted, drawn = drift + 2 * audited, dict[str, None]()
    generator = numpy_generator(seed, "audit_prompts", 0)
    for _ in range(_ROUNDS):
        drawn |= dict.fromkeys(task.sample(wanted, generator))
        if len(drawn) >= wanted:
            break
    else:
        raise ValueError(
            f"an audit needs {wanted} different prompts, and the task gave {len(drawn)} in {_ROUNDS * wanted} draws: "
            "lower audit.minibatches or rollout.prompts, or choose a task with more prompts"
        )
    every = list(drawn)[:wanted]
    return every[:drift], every[drift : drift + audited], every[drift + audited :]


def respond(trainer: Trainer, texts: Sequence[str], stage: str, top_k: int, by_engine: bool = False) -> Rollout:
    """Sample responses with the present weights or, with ``by_engine``, with the config's engine.

    ``stage`` seeds the draws. Prompts are sampled in parts as large as a rollout of the config.
    """
    config, device = trainer.config, trainer.model.device.type
    model = trainer.model
    if by_engine:
        model = trainer.sampler.model(torch_generator(config.seed, f"{stage}_engine", 0, device))
    decoding = Decoding(
        precision=config.precision,
        engine=trainer.sampler.engine if by_engine else Exact(),
        temperature=config.rollout.temperature,
        top_k=top_k,
        routes=trainer.learner.forwards.records_routes,
    )
    size, generator = config.rollout.prompts, torch_generator(config.seed, stage, 0, device)
    parts = [texts[first : first + size] for first in range(0, len(texts), size)]
    return join([roll_out(model, trainer.task, part, config.rollout.responses, generator, decoding) for part in parts])


def freeze(learner: Learner, trainer: Trainer, losses: Sequence[Loss], rollout: Rollout) -> Frozen:
    """Add the old policy (of the present weights), and each loss's own reference policy and advantages.

    Mini-batches are as large as the config's, in the order of the prompts, in one forward each.
    """
    config = trainer.config
    size = config.rollout.prompts // config.updates_per_rollout * config.rollout.responses
    rows_B = torch.arange(len(rollout.scores_B), device=trainer.model.device)
    parts = [trainer.learner.forwards.split(rows_M) for rows_M in rows_B.split(size)]
    old = learner.old_policy(rollout, parts)
    olds = {
        loss.label: replace(old, reference_logprobs_BT=loss.learner.reference_logprobs(rollout, parts))
        for loss in losses
    }
    mask_BT = rollout.sequences.response_mask_BT
    advantages = {
        loss.label: loss.trainer.advantages(loss.trainer.rewards(rollout, olds[loss.label]), mask_BT) for loss in losses
    }
    return Frozen(rollout, parts, olds, advantages)


def drifted(trainer: Trainer, rollout: Rollout, updates: Sequence[int]) -> Iterator[int]:
    """Take ``trainer`` from update to update on ``rollout``; yield each of ``updates``, in rising order.

    Raises FloatingPointError for an update that is not finite.
    """
    minibatches = trainer.minibatches(1)
    old = trainer.learner.old_policy(rollout, minibatches)
    advantages_BT = trainer.advantages(trainer.rewards(rollout, old), rollout.sequences.response_mask_BT)
    done = 0
    for wanted in sorted(updates):
        for update in range(done, wanted):
            step = trainer.learner.update(rollout, old, advantages_BT, minibatches[update], first=update == 0)
            if not step.is_finite:
                raise FloatingPointError(f"update {update + 1} of the drift has no finite gradient")
        done = wanted
        yield wanted


@contextmanager
def scaled_routers(trainer: Trainer, factor: float) -> Iterator[None]:
    """Multiply the routers' weights, and so their margins, by ``factor``; restore them afterwards."""
    weights = [weight for router in routers(trainer.model) for weight in router.parameters()]
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(factor)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, before, strict=True):
                weight.copy_(original)
