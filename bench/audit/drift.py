"""The drift: weights that are k neutral updates away from the weights that sampled the audited rollout.

The updates are on a rollout of their own, D, with ``grpo_unclipped`` at the config's learning rate and mini-batch: the
first k updates of a run with that loss. Every algorithm is then audited at the same weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from steadymoe.bench.training.sampling import Rollout
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models.routing import routers

# The loss of the updates: an importance ratio without a clip is the algorithm that does nothing else.
NEUTRAL = "grpo_unclipped"


def weights_after(trainer: Trainer, rollout: Rollout, updates: Sequence[int]) -> Iterator[int]:
    """Take ``trainer`` from update to update on ``rollout``, and stop at each of ``updates``, in rising order.

    The trainer's model has the drifted weights while a number is yielded. Raises FloatingPointError for an update that
    is not finite.
    """
    minibatches = trainer.minibatches(1)
    old = trainer.learner.old_policy(rollout, minibatches)
    advantages_BT = trainer.advantages(trainer.rewards(rollout, old), rollout.sequences.response_mask_BT)
    done = 0
    for wanted in sorted(updates):
        for update in range(done, wanted):
            found = trainer.learner.update(rollout, old, advantages_BT, minibatches[update], first=update == 0)
            if not found.is_finite:
                raise FloatingPointError(f"update {update + 1} of the drift has no finite gradient")
        done = wanted
        yield wanted


@contextmanager
def scaled_routers(trainer: Trainer, factor: float) -> Iterator[None]:
    """The routers' weights times ``factor``, which scales their logits and so their margins; put back afterwards."""
    weights = [weight for router in routers(trainer.model) for weight in router.parameters()]
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(factor)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, kept in zip(weights, before, strict=True):
                weight.copy_(kept)
