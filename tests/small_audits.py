"""Audits of small runs."""

from dataclasses import dataclass
from pathlib import Path

from hydra.utils import instantiate
from small_runs import SMALL, planned

from steadymoe.algorithms import Batch
from steadymoe.bench.audit import losses, rollouts
from steadymoe.bench.audit.losses import Loss
from steadymoe.bench.audit.rollouts import Frozen
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.microbatches import MicroBatch
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models import build

NARROW = "algorithm=grpo algorithm.loss.clip_low=3e-4 algorithm.loss.clip_high=4e-4"

WORDS = [
    *SMALL,
    "task.modulus=7",
    "experiment_name=tiny",
    "optimizer.learning_rate=3e-3",
    "audit.drift=[0,2]",
    "audit.minibatches=8",
    "audit.groups=4",
    "audit.algorithms=[grpo]",
    f'+audit.arms.narrow="{NARROW}"',
]


@dataclass
class FirstSymbol(Chain):
    """A response is right if its first symbol has an odd code: a reward that a fresh model can learn at once."""

    def score(self, prompt: str, response: str, finished: bool) -> float:
        return float(ord(response[0]) % 2) if response else 0.0


@dataclass(frozen=True)
class Scene:
    """A model, its losses and the frozen rollout."""

    trainer: Trainer
    losses: list[Loss]
    truth: Loss
    of_drift: list[str]
    """The prompts to drift on."""
    audited: Frozen


def scene(results: Path, algorithms: dict[str, list[str]]) -> Scene:
    """Everything before the drift, on a fresh model and a reward that it can learn, with eight mini-batches."""
    small = ["rollout.prompts=8", "updates_per_rollout=4"]
    config = planned(results, *small, "algorithm=grpo_unclipped").config
    made = instantiate(config.task)
    task = FirstSymbol(made.min_operands, made.max_operands, made.modulus, made.spare_tokens)
    model = build.build(config.model["config"], task.tokenizer, 0, "cpu", config.experts)
    trainer = Trainer(model, task, config)
    configs = {label: planned(results, *small, *own).config for label, own in algorithms.items()}
    every, truth = losses.on_model(model, task, configs), losses.truth(model, task, config)
    of_drift, of_audited, _ = rollouts.prompts(task, 0, 8, 16)
    rollout = rollouts.respond(trainer, of_audited, "audited", 0)
    frozen = rollouts.freeze(trainer.learner, trainer, [*every, truth], rollout)
    return Scene(trainer, every, truth, of_drift, frozen)


def batch_of(made: Scene, loss: Loss, part: MicroBatch) -> Batch:
    """What the loss is called on in an update on this mini-batch."""
    learner, rollout = loss.learner, made.audited.rollout
    now = learner.forwards(learner.model, rollout, part)
    mask_MT = rollout.sequences.response_mask_BT[part.rows_M]
    counts = int(mask_MT.any(-1).sum()), int(mask_MT.sum())
    old, advantages_BT = made.audited.old[loss.label], made.audited.advantages[loss.label]
    return learner.batch(rollout, old, advantages_BT, part.rows_M, now, counts)


def moved(scene: Scene, updates: int) -> None:
    rollout = rollouts.respond(scene.trainer, scene.of_drift, "drift", 0)
    for _ in rollouts.drifted(scene.trainer, rollout, [updates]):
        pass
