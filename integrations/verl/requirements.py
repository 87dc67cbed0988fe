"""Refuse a loss that a trainer cannot feed; used by the adapters to TRL and to verl."""

from collections.abc import Collection
from typing import Any

import torch

from steadymoe.algorithms import Batch, PolicyLoss
from steadymoe.algorithms.objective import Objective


def missing(objective: PolicyLoss | Objective, fields: Collection[str], is_split: bool) -> str | None:
    """Return what an objective needs and a trainer does not provide, as the end of a sentence; None if nothing.

    ``fields`` names the fields of ``Batch`` that the trainer fills, besides log-probabilities, mask and advantages.
    ``is_split`` says whether it splits a mini-batch over processes or micro-batches. The objective is computed on two
    responses of one token, so this covers a user's own loss too.
    """
    traits = objective.traits
    if is_split and traits.whole_minibatch:
        return "needs the whole mini-batch at once, and the trainer splits it over processes or micro-batches"
    if traits.top_k:
        return f"reads the sampler's {traits.top_k} most likely tokens, which the trainer does not provide"
    if traits.routes and "router_log_ratio_LBTK" not in fields:
        return "reads the routers' probabilities (router_log_ratio_LBTK), which the trainer does not provide"
    zeros_BT = torch.zeros(2, 1)
    shapes = {"groups_B": torch.arange(2), "router_log_ratio_LBTK": torch.zeros(1, 2, 1, 1)}
    values: dict[str, Any] = {name: shapes.get(name, zeros_BT) for name in fields}
    try:
        objective(Batch(logprobs_BT=zeros_BT, mask_BT=zeros_BT + 1, advantages_BT=zeros_BT, **values))
    except ValueError as error:
        return f"cannot be computed from what the trainer provides: {error}"
    return None
