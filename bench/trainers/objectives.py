"""The objective of a run in another trainer: from names to objects, and whether the trainer can compute it.

Shapes: B responses, T response positions, L MoE layers, K experts a token.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
import yaml

from steadymoe.algorithms import Batch, PolicyLoss, build, load, names
from steadymoe.algorithms.corrections import Correction, Uncorrected
from steadymoe.algorithms.objective import KL, Objective
from steadymoe.bench.config.compose import CONF
from steadymoe.bench.config.validate import ConfigError


def chosen(loss: "str | PolicyLoss | Objective", correction: "str | Correction", beta: float) -> Objective:
    """The objective that a user asks for; ``beta`` is the coefficient of the trainer's own KL term.

    ``loss`` is the name of an algorithm or a preset, a loss, or a whole objective; ``correction`` is a name of
    ``conf/correction`` or a correction. A loss gets the trainer's KL term, k3 in the loss. Raises ConfigError for an
    unknown name, for two corrections, and for an objective whose KL term is not the trainer's.
    """
    corrects = _correction(correction)
    try:
        if isinstance(loss, Objective):
            objective = loss if isinstance(corrects, Uncorrected) else _with_correction(loss, corrects)
        else:
            made = load(loss) if isinstance(loss, str) else loss
            objective = Objective(loss=made, correction=corrects, kl=KL(coefficient=beta))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss: {error}") from error
    if objective.kl.place == "reward":
        raise ConfigError("kl.place=reward: rewards are the trainer's own here; use kl.place=loss")
    if objective.kl.coefficient != beta:
        raise ConfigError(
            f"the objective's kl.coefficient is {objective.kl.coefficient} and the trainer's beta {beta}: the trainer "
            "keeps the reference model, so the two must be equal"
        )
    return objective


def name_of(loss: "str | PolicyLoss | Objective") -> str:
    """The name of a run's algorithm: the name that was given, else the module of the loss's class."""
    if isinstance(loss, str):
        return loss
    loss = loss.loss if isinstance(loss, Objective) else loss
    module = type(loss).__module__.rpartition(".")[2]
    return module if module in names() else type(loss).__name__


def check(objective: Objective, holds: Collection[str], is_split: bool) -> None:
    """Raise ConfigError unless a trainer can compute the objective.

    ``holds`` names the fields of ``Batch`` that the trainer fills, besides log-probabilities, mask and advantages.
    ``is_split`` says whether a mini-batch is split over micro-batches or processes. The objective is asked on two
    tokens, so a user's own loss is checked as the suite's are.
    """
    name, traits = type(objective.loss).__name__, objective.loss.traits
    if is_split and traits.whole_minibatch:
        raise ConfigError(
            f"{name} needs the whole mini-batch at once: use one process and gradient_accumulation_steps=1"
        )
    if traits.top_k:
        raise ConfigError(f"{name} reads the sampler's {traits.top_k} most likely tokens, which no trainer hands over")
    one_BT, optional = (
        torch.zeros(2, 1),
        {"groups_B": torch.arange(2), "router_log_ratio_LBTK": torch.zeros(1, 2, 1, 1)},
    )
    values: dict[str, Any] = {field: optional.get(field, one_BT) for field in holds}
    batch = Batch(logprobs_BT=one_BT, mask_BT=one_BT + 1, advantages_BT=one_BT, **values)
    try:
        objective(replace(batch, state=objective.loss.initial_state()))
    except ValueError as error:
        raise ConfigError(f"{name} cannot be computed by this trainer: {error}") from error


def _with_correction(objective: Objective, correction: Correction) -> Objective:
    if not isinstance(objective.correction, Uncorrected):
        raise ConfigError("correction: the objective already has a correction; leave one of the two out")
    return replace(objective, correction=correction)


def _correction(correction: "str | Correction") -> Correction:
    if isinstance(correction, Correction):
        return correction
    known = sorted(path.stem for path in (CONF / "correction").glob("*.yaml"))
    if correction not in known:
        raise ConfigError(f"unknown correction {correction!r}; choose from {', '.join(known)}")
    made: Correction = build(yaml.safe_load((CONF / "correction" / f"{correction}.yaml").read_text()))
    return made
