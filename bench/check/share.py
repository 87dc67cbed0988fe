"""The share of a loss in the time of an update: forward and backward of the loss beside the whole update."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from hydra.utils import instantiate

from steadymoe.bench.config.schema import RunConfig
from steadymoe.bench.support.seeding import derive
from steadymoe.bench.training.microbatches import MicroBatch
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models import build


def shares(configs: Mapping[str, RunConfig], rounds: int) -> dict[str, float]:
    """Name → the share of the loss of a config in the processor time of an update, the median of some rounds.

    The models are untrained. The configs take turns, so that other work on the machine meets all of them.
    """
    trainers = {}
    for name, config in configs.items():
        task = instantiate(config.task)
        model = build.build(config.model["config"], task.tokenizer, derive(0, "speed"), config.device)
        trainers[name] = Trainer(model, task, config)
    prepared = {}
    for name, trainer in trainers.items():
        rollout, _, _ = trainer.sample(1)
        minibatches = trainer.minibatches(1)
        prepared[name] = rollout, trainer.learner.old_policy(rollout, minibatches), minibatches[0]
    found: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(rounds + 1):
        for name, (rollout, old, parts) in prepared.items():
            learner, rows = trainers[name].learner, torch.cat([part.rows_M for part in parts])
            advantages_BT = torch.ones_like(rollout.logprobs_BT)
            begun = time.process_time()
            learner.update(rollout, old, advantages_BT, parts)
            update = time.process_time() - begun
            now = learner.forwards(learner.model, rollout, MicroBatch(rows))
            whole = len(rows), int(rollout.sequences.response_mask_BT[rows].sum())
            batch = learner.batch(rollout, old, advantages_BT, rows, now, whole)
            batch = replace(batch, logprobs_BT=batch.logprobs_BT.detach().requires_grad_())
            begun = time.process_time()
            loss = learner.objective(batch).loss
            if loss.requires_grad:
                loss.backward()
            if number:  # the first round warms up
                found[name].append((time.process_time() - begun) / update)
    return {name: statistics.median(values) for name, values in found.items()}
