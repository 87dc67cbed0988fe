"""The share of a loss in the time of an update."""

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from hydra.utils import instantiate

from steadymoe.bench.check.derivatives import OF_POLICY
from steadymoe.bench.schema import RunConfig
from steadymoe.bench.support.seeding import derive
from steadymoe.bench.training.microbatches import MicroBatch
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models import build


def share(config: RunConfig, rounds: int) -> float:
    """Return the processor time of the loss, forward and backward, over that of an update: the median of ``rounds``.

    The model is untrained.
    """
    task = instantiate(config.task)
    model = build.build(config.model["config"], task.tokenizer, derive(0, "speed"), config.device)
    trainer = Trainer(model, task, config)
    learner, (rollout, _, _) = trainer.learner, trainer.sample(1)
    minibatches = trainer.minibatches(1)
    old, parts = learner.old_policy(rollout, minibatches), minibatches[0]
    rows = torch.cat([part.rows_M for part in parts])
    advantages_BT = torch.ones_like(rollout.logprobs_BT)
    whole = len(rows), int(rollout.sequences.response_mask_BT[rows].sum())
    shares = []
    for _ in range(rounds + 1):
        start = time.process_time()
        learner.update(rollout, old, advantages_BT, parts)
        update = time.process_time() - start
        outputs = learner.forwards(learner.model, rollout, MicroBatch(rows))
        batch = learner.batch(rollout, old, advantages_BT, rows, outputs, whole)
        leaves: dict[str, Any] = {  # the loss's own backward ends here
            name: values.detach().requires_grad_() for name in OF_POLICY if (values := getattr(batch, name)) is not None
        }
        batch = replace(batch, **leaves)
        start = time.process_time()
        loss = learner.objective(batch).loss
        if loss.requires_grad:
            loss.backward()
        shares.append((time.process_time() - start) / update)
    return statistics.median(shares[1:])  # the first round warms up
