"""What is measured before any update: routers' decisions, the load of experts, and the noise of the gradient.

Shapes: P prompts, M responses of one prompt, T response positions.
"""

import math

import torch
from torch import Tensor

from steadymoe.bench.calibration.engines import groups
from steadymoe.bench.calibration.readings import Reading, Sums
from steadymoe.bench.measurement import gradient_noise, router_certainty, routing_drift
from steadymoe.bench.statistics.estimates import POSITIVE, Estimate
from steadymoe.bench.training.old_policy import OldPolicy
from steadymoe.bench.training.sampling import Rollout
from steadymoe.bench.training.trainer import Trainer

# The gradients of single prompts are kept together: at most so many prompts, and so many bytes but for three prompts.
_MOST_PROMPTS, _MOST_BYTES = 64, 2**28


def routers(trainer: Trainer, rollout: Rollout, old: OldPolicy) -> list[Reading]:
    """Margins, certainty and load of the routers on a rollout, and the length of its responses."""
    assert old.routes_LBFK is not None  # of a model with routers
    assert old.router_logprobs_LBTE is not None
    sums, mask_BT, sequences = Sums(), rollout.sequences.response_mask_BT, rollout.sequences
    for prompt, rows_M in enumerate(groups(rollout, trainer.config.rollout.responses)):
        logprobs_LMTE, routes_LMFK = old.router_logprobs_LBTE[:, rows_M], old.routes_LBFK[:, rows_M]
        mask_MT = mask_BT[rows_M]
        decision = routing_drift.decision(logprobs_LMTE, routes_LMFK, mask_MT)
        certainty = router_certainty.certainty(logprobs_LMTE, routes_LMFK.shape[-1], mask_MT)
        means = {
            "router_margin": decision.margin_L,
            "margin_over_spread": certainty.margin_over_spread_L,
            "margin_over_spread_of_probabilities": certainty.margin_over_spread_of_probabilities_L,
            "top1_probability": certainty.top1_probability_L,
            "router_entropy": certainty.entropy_L,
            "router_confidence": decision.confidence_L,
        }
        sums.add_all({key: mean_L.mean().item() for key, mean_L in means.items()}, prompt, int(mask_MT.sum()))
        sums.add("response_length", prompt, mask_MT.sum().item() / len(rows_M), len(rows_M))
    load = routing_drift.load(old.routes_LBFK, mask_BT, trainer.learner.experts)
    tokens = int(sequences.response_mask_BT.sum())
    of_load = {"load_entropy": load.entropy_L.mean(), "load_max_violation": load.max_violation_L.max()}
    section = "routers at rest"
    return [
        *sums.readings(section, "prompts", {"router_margin": None, "response_length": POSITIVE}),
        *(Reading(section, key, _alone(value.item(), tokens), "tokens") for key, value in of_load.items()),
    ]


def _alone(value: float, n: int) -> Estimate:
    return Estimate(value, math.nan, math.nan, n)


def gradient(trainer: Trainer, rollout: Rollout, old: OldPolicy, advantages_BT: Tensor) -> list[Reading]:
    """The noise scale of the algorithm's gradient at the cold start, and noise over signal of one mini-batch.

    Without a reading for a loss that needs its whole mini-batch: such a loss has no gradient of a single prompt.
    """
    learner, config = trainer.learner, trainer.config
    if learner.objective.traits.whole_minibatch:
        return []
    weights = [weight for weight in learner.model.parameters() if weight.requires_grad]
    size = 4 * sum(weight.numel() for weight in weights)
    prompts = groups(rollout, config.rollout.responses)[: max(3, min(_MOST_PROMPTS, _MOST_BYTES // size))]
    tokens = int(rollout.sequences.response_mask_BT[torch.cat(prompts)].sum())
    counts = config.rollout.responses * len(prompts), tokens
    gradients_NP = []
    for rows_M in prompts:
        parts = []
        for part in learner.forwards.split(rows_M):
            now = learner.forwards(learner.model, rollout, part, learner.replayed(rollout, old))
            loss = learner.objective(learner.batch(rollout, old, advantages_BT, part.rows_M, now, counts)).loss
            parts.append(_flat(loss * len(prompts), weights))
        gradients_NP.append(torch.stack(parts).sum(0))
    scale = gradient_noise.noise_scale(gradient_noise.gram(gradients_NP))
    minibatch = config.rollout.prompts / config.updates_per_rollout
    of_minibatch = Estimate(scale.mean / minibatch, scale.low / minibatch, scale.high / minibatch, scale.n)
    section, of = "gradient at the cold start", f"{minibatch:g} prompts"
    return [
        Reading(section, "noise_scale", scale, "prompts"),
        Reading(section, "noise_over_signal", of_minibatch, "prompts", of),
    ]


def _flat(loss: Tensor, weights: list[torch.nn.Parameter]) -> Tensor:
    """The gradient of ``loss`` as one vector; 0 for a weight that it does not reach."""
    found = torch.autograd.grad(loss, weights, allow_unused=True) if loss.requires_grad else [None] * len(weights)
    return torch.cat(
        [
            (torch.zeros_like(weight) if each is None else each).flatten()
            for weight, each in zip(weights, found, strict=True)
        ]
    )
