"""An audit from a checked config to its tables: one per number of updates of drift, each written when it is complete.

Shapes: B sequences of a rollout, T response positions, L layers, F positions fed, K experts a token.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from steadymoe.bench.audit import clips, estimators, gradients, losses, rollouts
from steadymoe.bench.audit.gradients import WHOLE, Sums
from steadymoe.bench.audit.losses import TRUTH, Loss
from steadymoe.bench.audit.rollouts import Frozen
from steadymoe.bench.audit.tokens import ALL, Tokens
from steadymoe.bench.runs import execute
from steadymoe.bench.schema import RunConfig
from steadymoe.bench.statistics.estimates import Estimate, mean_over_seeds
from steadymoe.bench.support import atomic_files
from steadymoe.bench.tasks import Task
from steadymoe.bench.training.learner import Learner
from steadymoe.bench.training.trainer import Trainer

COLUMNS = (
    *("seed", "k", "router_scale", "routing", "loss", "block", "cut"),
    *("quantity", "value", "low", "high", "n", "replicates"),
)
# The most bytes of the sums of the losses that share a forward.
_MAX_BYTES = 640 * 2**20
# Fresh samples have no old routes to replay.
_FRESH = "fresh"
# The quantity of a loss without a finite gradient, instead of all estimates.
NOT_FINITE = "not_finite"
Row = dict[str, Any]
Log = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """Everything that the tables of an audit share."""

    trainer: Trainer
    """It samples, and the drift moves its weights, which all losses share."""
    losses: list[Loss]
    truth: Loss
    audited: dict[str, Frozen]
    """The audited rollout, by routing."""
    reference: list[str]
    """The prompts of the fresh samples."""
    top_k: int
    """How many most likely tokens the losses read."""

    @property
    def config(self) -> RunConfig:
        """The config of the audit."""
        return self.trainer.config

    @property
    def at_once(self) -> int:
        """How many losses share a forward: two sets of sums each, over weights and groups, must fit into memory."""
        size = 4 * gradients.Weights(self.trainer.model).count * self.config.audit.groups
        return max(1, _MAX_BYTES // (2 * size))


def table_path(folder: Path, k: int) -> Path:
    """Return the file of the table after ``k`` updates of drift."""
    return folder / f"k={k}.parquet"


def prompts(task: Task, config: RunConfig) -> tuple[list[str], list[str], list[str]]:
    """Return the prompts of ``rollouts.prompts``. Raises ValueError if the task has too few."""
    audited = config.rollout.prompts // config.updates_per_rollout * config.audit.minibatches
    return rollouts.prompts(task, config.seed, config.rollout.prompts, audited)


def audit(config: RunConfig, configs: Mapping[str, RunConfig], folder: Path, log: Log) -> dict[str, Any]:
    """Write the tables that are missing in ``folder``; return facts about the cold start.

    ``configs`` are those of the losses, by label. Raises ColdStartError if the cold start misses its band,
    FloatingPointError where the policy of the drift is not finite, and ValueError if the task has too few prompts.
    """
    task, model, facts = execute.at_start(config, lambda *_: None)
    trainer = Trainer(model, task, config)
    log(f"the model is at its start ({', '.join(f'{key} {value}' for key, value in facts.items())})")
    of_drift, of_audited, reference = prompts(task, config)
    every, truth = losses.on_model(model, task, configs), losses.truth(model, task, config)
    top_k = max((loss.learner.objective.traits.top_k for loss in every), default=0)
    moves = rollouts.respond(trainer, of_drift, "audit_drift", top_k)
    rollout = rollouts.respond(trainer, of_audited, "audit_audited", top_k, by_engine=True)
    frozen: dict[str, Frozen] = {}
    for routing in config.audit.routing:  # the old policy of r3 is under the sampler's routes
        replayed = replace(config, routing=replace(config.routing, replay="r3" if routing == "r3" else "none"))
        frozen[routing] = rollouts.freeze(Learner(model, replayed), trainer, [*every, truth], rollout)
    setup = Setup(trainer, every, truth, frozen, reference, top_k)
    log(f"sampled {len(of_drift)} prompts to drift on and {len(of_audited)} to audit")
    for k in rollouts.drifted(trainer, moves, config.audit.drift):
        path = table_path(folder, k)
        if path.exists():
            continue
        rows: list[Row] = []
        for scale in config.audit.router_scale:
            place = {"seed": config.seed, "k": k, "router_scale": scale}
            with rollouts.scaled_routers(trainer, scale):
                rows += [place | row for row in _at_weights(setup, k, log)]
        atomic_files.write(path, partial(pd.DataFrame(rows, columns=list(COLUMNS)).to_parquet, index=False))
        log(f"wrote {path.name}")
    return facts


def _at_weights(setup: Setup, k: int, log: Log) -> Iterator[Row]:
    """Yield the rows at the present weights: fresh samples first, then the audited rollout by routing."""
    trainer, groups = setup.trainer, setup.config.audit.groups
    rollout = rollouts.respond(trainer, setup.reference, f"audit_reference_{k}", setup.top_k)
    rewards_P = rollout.scores_B.view(-1, setup.config.rollout.responses).mean(-1)
    yield _row(_FRESH, ALL, "reward", mean_over_seeds(rewards_P.tolist(), bounds=(0.0, 1.0)))
    if setup.config.audit.clips:
        for routing, frozen in setup.audited.items():
            for ratio, quantity, estimate in clips.estimates(setup.truth, frozen, _forced(routing, frozen)):
                yield _row(routing, ratio, quantity, estimate)
        log(f"k={k}: clip shares")
    if not setup.losses:
        return
    fresh = rollouts.freeze(trainer.learner, trainer, [*setup.losses, setup.truth], rollout)
    truth: Sums | None = None
    for first in range(0, len(setup.losses), setup.at_once):
        chunk = setup.losses[first : first + setup.at_once]
        on_policy = gradients.collect([*chunk, *([] if truth else [setup.truth])], fresh, None, groups)
        log(f"k={k}: gradients of {len(chunk)} losses on fresh samples")
        if truth is None:
            truth = on_policy[TRUTH]
            yield from _gradient_rows(_FRESH, TRUTH, truth)
        for routing, frozen in setup.audited.items():
            tokens = Tokens(frozen, setup.losses[0], routing == "free")
            sums = gradients.collect(chunk, frozen, _forced(routing, frozen), groups, tokens)
            for label, own in sums.items():
                if own.is_finite:
                    yield from _gradient_rows(routing, label, own, truth, on_policy[label])
                else:
                    yield _row(routing, label, NOT_FINITE, Estimate(1.0, math.nan, math.nan, 1))
            for (label, quantity), estimate in tokens.estimates().items():
                yield _row(routing, label, quantity, estimate)
            log(f"k={k}: gradients of {len(chunk)} losses, routing {routing}")


def _forced(routing: str, frozen: Frozen) -> Tensor | None:
    """Return the routes that a routing replays, (L, B, F, K); None for free routes."""
    old = next(iter(frozen.old.values()))
    return {"free": None, "r2": old.routes_LBFK, "r3": frozen.rollout.routes_LBFK}[routing]


def _gradient_rows(
    routing: str, label: str, own: Sums, truth: Sums | None = None, on_policy: Sums | None = None
) -> Iterator[Row]:
    """Yield the rows of one loss's gradient, whole and by block, next to the references that are given."""
    with_truth = {} if truth is None else own.paired(truth)
    with_itself = {} if on_policy is None else own.paired(on_policy)
    for block, sums in own.by_block.items():
        estimates = estimators.signal(sums)
        if block != WHOLE:
            estimates["share"] = estimators.share(sums, own.by_block[WHOLE])
        if truth is not None:
            estimates |= estimators.against_truth(with_truth[block])
        if on_policy is not None:
            estimates |= estimators.against_itself(with_itself[block])
        for quantity, estimate in estimates.items():
            place = {"routing": routing, "loss": label, "block": block, "cut": "before", "quantity": quantity}
            recorded = vars(estimate) | {"n": len(estimate.replicates), "replicates": None}
            if block == WHOLE and math.isfinite(estimate.value):
                recorded["replicates"] = list(estimate.replicates)
            yield place | recorded


def _row(routing: str, label: str, quantity: str, estimate: Estimate) -> Row:
    """Return the row of a number that is not a gradient's."""
    place = {"routing": routing, "loss": label, "block": "", "cut": "", "quantity": quantity}
    numbers = {"value": estimate.mean, "low": estimate.low, "high": estimate.high, "n": estimate.n}
    return place | numbers | {"replicates": None}
