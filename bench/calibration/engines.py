"""How much every rollout engine disagrees with the trainer, at the weights of the cold start.

An engine samples responses as in a run, and the trainer's own forward of the same tokens is compared with it by the
functions that runs use (``columns_of_step.rollout_columns``). Shapes: B sequences of a rollout, M of one prompt.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.bench.calibration import readings
from steadymoe.bench.calibration.readings import Reading, Sums
from steadymoe.bench.config import compose
from steadymoe.bench.config.schema import RunConfig
from steadymoe.bench.measurement import token_metrics
from steadymoe.bench.measurement.published import EXACT
from steadymoe.bench.statistics.estimates import POSITIVE
from steadymoe.bench.tasks import Task
from steadymoe.bench.training.columns_of_step import rollout_columns
from steadymoe.bench.training.old_policy import OldPolicy
from steadymoe.bench.training.sampling import Rollout
from steadymoe.bench.training.trainer import Trainer

# Every one of these is measured, at the numbers of its YAML.
ENGINES = (EXACT, "bf16", "fp8", "int8", "router_noise")
# What a run calls it → the key of the reading.
_KEYS = {
    "rollout_set_disagreement": "set_disagreement",
    "rollout_any_layer_disagreement": "token_disagreement",
    "rollout_top1_disagreement": "top1_disagreement",
    "rollout_kl_k3": "kl_k3",
    "rollout_extreme_share": "f2",
}


def chosen(config: RunConfig, name: str) -> dict[str, Mapping[str, Any]]:
    """The engines to measure, by name: all of ``ENGINES``, and the config's own where it is none of these.

    ``name`` is the config's own. An engine of old weights is left out: at the cold start no weights are older.
    """
    found = {each: yaml.safe_load((compose.CONF / "engine" / f"{each}.yaml").read_text()) for each in ENGINES}
    if dict(config.engine) not in found.values() and name != "stale":
        found[name if name not in found else f"{name} of this config"] = config.engine
    return found


def measure(
    model: PreTrainedModel, task: Task, config: RunConfig, name: str, engine: Mapping[str, Any]
) -> list[Reading]:
    """The disagreement of one engine with the trainer; ``config`` has one update a rollout and no replay.

    Raises FloatingPointError if the engine's distribution is not finite.
    """
    trainer = Trainer(model, task, replace(config, engine=engine))
    rollout, _, _ = trainer.sample(1)
    old, _ = trainer.old_policy(rollout, trainer.minibatches(1), 1)
    sums = Sums()
    for prompt, rows_M in enumerate(groups(rollout, config.rollout.responses)):
        part, experts = rollout.rows(rows_M), trainer.learner.experts
        found = token_metrics.to_floats(
            rollout_columns(part, _rows(old, rows_M), _rows(old, rows_M), None, experts).overall
        )
        means = {key: found[column] for column, key in _KEYS.items()}
        sums.add_all(means, prompt, int(part.sequences.response_mask_BT.sum()), name)
    return sums.readings(readings.ENGINES, "prompts", {"kl_k3": POSITIVE})


def groups(rollout: Rollout, responses: int) -> list[Tensor]:
    """The rows of each prompt's responses, (M,) each."""
    return list(torch.arange(len(rollout.scores_B), device=rollout.scores_B.device).split(responses))


def _rows(old: OldPolicy, rows_M: Tensor) -> OldPolicy:
    """A part of the old policy, with what a comparison of routes reads."""
    assert old.routes_LBFK is not None  # of a model with routers
    assert old.router_logprobs_LBTE is not None
    routes_LMFK = old.routes_LBFK[:, rows_M]
    return OldPolicy(
        logprobs_BT=old.logprobs_BT[rows_M],
        routes_LBFK=routes_LMFK,
        executed_LBFK=routes_LMFK,
        router_logprobs_LBTE=old.router_logprobs_LBTE[:, rows_M],
        router_inputs_LBTH=None,
        top_logprobs_BTK=None,
        reference_logprobs_BT=None,
    )
