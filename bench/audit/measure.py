"""An audit from a checked config to its tables: one for each number of updates of drift, written when it is whole.

Shapes: B sequences of a rollout, T response positions, L layers, F positions fed, K experts a token.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from steadymoe.bench.audit import arms, clips, drift, estimators, gradients, splits
from steadymoe.bench.audit.estimators import Jackknifed
from steadymoe.bench.audit.gradients import WHOLE, Arm, Frozen, Sums
from steadymoe.bench.audit.tokens import ALL, Tokens
from steadymoe.bench.config import branch
from steadymoe.bench.config.schema import RunConfig
from steadymoe.bench.runs import execute
from steadymoe.bench.statistics.estimates import Estimate, mean_over_seeds
from steadymoe.bench.support import atomic_files
from steadymoe.bench.training.learner import Learner
from steadymoe.bench.training.trainer import Trainer

COLUMNS = (
    *("seed", "start", "k", "router_scale", "routing", "loss", "block", "cut"),
    *("quantity", "value", "low", "high", "n", "replicates"),
)
# The sums of the arms that share a forward take at most so many bytes.
_MOST_BYTES = 640 * 2**20
# Fresh samples have no old routes to replay.
_FRESH = "fresh"
# The quantity of a loss that has no finite gradient here, in place of all estimates.
NOT_FINITE = "not_finite"
Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Study:
    """What all units of an audit share."""

    config: RunConfig
    trainer: Trainer
    """It samples, and it is moved by the drift."""
    arms: list[Arm]
    truth: Arm
    prompts: splits.Splits
    audited: dict[str, Frozen]
    """The audited rollout, by routing."""
    start: int
    """The step of the checkpoint; 0 for a cold start."""

    @property
    def at_once(self) -> int:
        """How many arms share a forward: three sets of sums each, over weights and groups, must fit into memory."""
        size = 4 * gradients.Weights(self.trainer.model).count * self.config.audit.groups
        return max(1, _MOST_BYTES // (3 * size))


def unit_path(folder: Path, k: int) -> Path:
    """The file of the table after ``k`` updates of drift."""
    return folder / f"k={k}.parquet"


def audit(config: RunConfig, configs: Mapping[str, RunConfig], folder: Path, say: Say) -> dict[str, Any]:
    """Write the tables that are missing in ``folder``; returns what is known of the start.

    ``configs`` are the arms' own. Raises ColdStartError if the cold start misses its band, FloatingPointError where the
    policy of the drift is not finite, and ValueError if the task has too few prompts.
    """
    torch.set_num_threads(config.threads)
    task, model, made = execute.at_start(config, lambda *_: None)
    trainer = execute.trainer_at_start(model, task, config)
    say(f"the model is at its start ({', '.join(f'{key} {value}' for key, value in made.items())})")
    start = 0 if config.start_from is None else branch.read(config.start_from).step
    audited = config.rollout.prompts // config.updates_per_rollout * config.audit.minibatches
    prompts = splits.split(task, config.seed, start, config.rollout.prompts, audited)
    every_arm = arms.on(model, task, configs)
    truth = arms.truth(model, task, config)
    top_k = arms.top_k(every_arm)
    moves = splits.respond(trainer, prompts.drift, "audit_drift", start, top_k)
    frozen = _audited(trainer, [*every_arm, truth], prompts.audited, start, top_k)
    study = Study(config, trainer, every_arm, truth, prompts, frozen, start)
    say(f"sampled {len(prompts.drift)} prompts to drift on and {len(prompts.audited)} to audit")
    for k in drift.weights_after(trainer, moves, config.audit.drift):
        path = unit_path(folder, k)
        if path.exists():
            continue
        table = pd.DataFrame(list(_unit(study, k, say)), columns=list(COLUMNS))
        atomic_files.write(path, partial(table.to_parquet, index=False))
        say(f"wrote {path.name}")
    return made


def _audited(
    trainer: Trainer, every_arm: Sequence[Arm], prompts: Sequence[str], start: int, top_k: int
) -> dict[str, Frozen]:
    """The audited rollout at the weights that sampled it, by routing; r3 has the old policy of the sampler's routes."""
    rollout = splits.respond(trainer, prompts, "audit_audited", start, top_k, by_engine=True)
    found: dict[str, Frozen] = {}
    for routing in trainer.config.audit.routing:
        replay = "r3" if routing == "r3" else "none"
        replayed = replace(trainer.config, routing=replace(trainer.config.routing, replay=replay))
        found[routing] = _freeze(Learner(trainer.model, replayed), trainer, every_arm, rollout)
    return found


def _freeze(learner: Learner, trainer: Trainer, every_arm: Sequence[Arm], rollout: splits.Rollout) -> Frozen:
    """A rollout with its old policy, the present weights, and every arm's own reference policy and advantages."""
    parts = splits.minibatches(trainer, rollout)
    old = learner.old_policy(rollout, parts)
    olds = {
        arm.label: replace(old, reference_logprobs_BT=arm.learner.reference_logprobs(rollout, parts))
        for arm in every_arm
    }
    mask_BT = rollout.sequences.response_mask_BT
    advantages = {
        arm.label: arm.trainer.advantages(arm.trainer.rewards(rollout, olds[arm.label]), mask_BT) for arm in every_arm
    }
    return Frozen(rollout, parts, olds, advantages)


def _unit(study: Study, k: int, say: Say) -> Iterator[Row]:
    """The rows after ``k`` updates of drift, at every scale of the routers."""
    for scale in study.config.audit.router_scale:
        with drift.scaled_routers(study.trainer, scale):
            for row in _at_weights(study, k, say):
                yield {"seed": study.config.seed, "start": study.start, "k": k, "router_scale": scale} | row


def _at_weights(study: Study, k: int, say: Say) -> Iterator[Row]:
    """The rows at the present weights: fresh samples first, then the audited rollout by routing."""
    trainer = study.trainer
    top_k = arms.top_k(study.arms)
    rollout = splits.respond(trainer, study.prompts.reference, f"audit_reference_{k}", study.start, top_k)
    rewards_P = rollout.scores_B.view(-1, study.config.rollout.responses).mean(-1)
    yield _of_data(_FRESH, ALL, "reward", mean_over_seeds(rewards_P.tolist(), bounds=(0.0, 1.0)))
    if study.config.audit.clips:
        for routing, frozen in study.audited.items():
            for loss, quantity, estimate in clips.estimates(study.truth, frozen, _forced(routing, frozen)):
                yield _of_data(routing, loss, quantity, estimate)
        say(f"k={k}: clip shares")
    if study.arms:
        fresh = _freeze(trainer.learner, trainer, [*study.arms, study.truth], rollout)
        yield from _of_losses(study, k, fresh, say)


def _of_losses(study: Study, k: int, fresh: Frozen, say: Say) -> Iterator[Row]:
    """The rows of all losses at the present weights, which sampled ``fresh``."""
    groups = study.config.audit.groups
    truth: Sums | None = None
    for first in range(0, len(study.arms), study.at_once):
        chunk = study.arms[first : first + study.at_once]
        on_policy = gradients.collect([*chunk, *([] if truth else [study.truth])], fresh, None, groups)
        truth = truth or on_policy[arms.TRUTH, None]
        say(f"k={k}: gradients of {len(chunk)} losses on fresh samples")
        if first == 0:
            yield from _of_gradients(_FRESH, arms.TRUTH, "before", truth)
        for routing, frozen in study.audited.items():
            yield from _of_routing(study, chunk, routing, frozen, truth, on_policy)
            say(f"k={k}: gradients of {len(chunk)} losses, routing {routing}")


def _of_routing(
    study: Study,
    chunk: Sequence[Arm],
    routing: str,
    frozen: Frozen,
    truth: Sums,
    on_policy: Mapping[tuple[str, float | None], Sums],
) -> Iterator[Row]:
    """The rows of some arms on the audited rollout."""
    cut, groups = study.config.optimizer.max_grad_norm, study.config.audit.groups
    tokens = Tokens(frozen, study.arms[0], routing == "free")
    forced_LBFK = _forced(routing, frozen)
    found = gradients.collect(chunk, frozen, forced_LBFK, groups, (None, cut), tokens)
    for arm in chunk:
        before, after = found[arm.label, None], found[arm.label, cut]
        if not before.is_finite:
            yield _of_data(routing, arm.label, NOT_FINITE, Estimate(1.0, math.nan, math.nan, 1))
            continue
        yield from _of_gradients(routing, arm.label, "before", before, truth, on_policy[arm.label, None])
        yield from _of_gradients(routing, arm.label, "after", after, truth)
    for (loss, quantity), estimate in tokens.estimates().items():
        yield _of_data(routing, loss, quantity, estimate)


def _forced(routing: str, frozen: Frozen) -> Tensor | None:
    """The routes that a routing replays, (L, B, F, K); None for the routers' own choice."""
    old = next(iter(frozen.old.values()))
    return {"free": None, "r2": old.routes_LBFK, "r3": frozen.rollout.routes_LBFK}[routing]


def _of_gradients(
    routing: str, loss: str, cut: str, own: Sums, truth: Sums | None = None, on_policy: Sums | None = None
) -> Iterator[Row]:
    """The rows of one arm's gradient, whole and by block, beside the references that are given."""
    by_block = own.by_block()
    shares = estimators.shares({name: each for name, each in by_block.items() if name != WHOLE}, by_block[WHOLE])
    beside_truth = {} if truth is None else own.beside(truth)
    beside_itself = {} if on_policy is None else own.beside(on_policy)
    for block, each_block in by_block.items():
        found: dict[str, Jackknifed] = estimators.of_gradients(each_block)
        if block != WHOLE:
            found["share"] = shares[block]
        if truth is not None:
            found |= estimators.beside_truth(beside_truth[block])
        if on_policy is not None:
            found |= estimators.beside_itself(beside_itself[block])
        for quantity, each in found.items():
            place = {"routing": routing, "loss": loss, "block": block, "cut": cut, "quantity": quantity}
            numbers = {"value": each.value, "low": each.low, "high": each.high, "n": len(each.replicates)}
            kept = list(each.replicates) if block == WHOLE and math.isfinite(each.value) else None
            yield place | numbers | {"replicates": kept}


def _of_data(routing: str, loss: str, quantity: str, estimate: Estimate) -> Row:
    """The row of a number that is no gradient's."""
    place = {"routing": routing, "loss": loss, "block": "", "cut": "", "quantity": quantity}
    numbers = {"value": estimate.mean, "low": estimate.low, "high": estimate.high, "n": estimate.n}
    return place | numbers | {"replicates": None}
