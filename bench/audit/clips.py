"""Clip shares over the width of a band: of token ratios and of sequence ratios.

The ratio is the present policy over an *anchor*: the old policy (the trainer's forward at the weights that sampled) or
the sampler. A ratio is clipped below the band with a negative advantage, and above it with a positive one (PPO,
1707.06347, eq. 7).

Shapes: P prompts, R responses to each, B sequences, M rows of a mini-batch, T response positions, N ratios.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.algorithms.advantages import GroupMean
from steadymoe.bench.audit.losses import Loss
from steadymoe.bench.audit.rollouts import Frozen
from steadymoe.bench.statistics.estimates import Estimate, mean_over_seeds, ratio_of_sums

# Half the width of a symmetric band; at 1 and above the lower edge would clip nothing.
BANDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 2e-2, 3e-2, 5e-2, 0.1, 0.2, 0.3, 0.5, 0.9)
UNITS, ANCHORS = ("token ratio", "sequence ratio"), ("old policy", "sampler")
SIDES = ("low", "high")


def name(unit: str, anchor: str) -> str:
    """Return the label in the column ``loss``."""
    return f"{unit} to {anchor}"


def quantity(side: str, band: float) -> str:
    """Return the label in the column ``quantity``: ``clip_share_low 0.2``."""
    return f"clip_share_{side} {band:g}"


@torch.no_grad()
def estimates(loss: Loss, frozen: Frozen, forced_LBFK: Tensor | None) -> Iterator[tuple[str, str, Estimate]]:
    """Yield (``name``, ``quantity``, estimate) at the model's present weights.

    ``loss`` only makes the forwards and has the old policy. Signs are those of a response's score minus its group's
    mean. Shares are of all tokens (of all responses, for the sequence ratio), with intervals over mini-batches, whose
    responses share no prompt.
    """
    rollout, old = frozen.rollout, frozen.old[loss.label]
    mask_BT = rollout.sequences.response_mask_BT.bool()
    scores_PR = rollout.scores_B.view(-1, loss.trainer.config.rollout.responses)
    sign_B = GroupMean()(scores_PR, mask_BT.sum(-1).view_as(scores_PR)).sign().flatten()
    anchors = dict(zip(ANCHORS, (old.logprobs_BT, rollout.logprobs_BT), strict=True))
    ratios: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {
        (unit, anchor): [] for unit in UNITS for anchor in ANCHORS
    }
    for (part,) in frozen.minibatches:
        now = loss.learner.forwards(loss.trainer.model, rollout, part, forced_LBFK)
        mask_MT, sign_M = mask_BT[part.rows_M], sign_B[part.rows_M]
        for anchor, logprobs_BT in anchors.items():
            log_MT = (now.logprobs_BT - logprobs_BT[part.rows_M]).double().masked_fill(~mask_MT, 0.0)
            sign_MT = sign_M[:, None].expand_as(log_MT)
            ratios[UNITS[0], anchor].append((log_MT[mask_MT].cpu().numpy(), sign_MT[mask_MT].cpu().numpy()))
            mean_M, has_M = ops.sequence_log_ratio(log_MT, mask_MT), mask_MT.any(-1)
            ratios[UNITS[1], anchor].append((mean_M[has_M].cpu().numpy(), sign_M[has_M].cpu().numpy()))
    for (unit, anchor), parts in ratios.items():
        for kind, estimate in _shares(parts):
            yield name(unit, anchor), kind, estimate
    yield "all", "response_length", mean_over_seeds(mask_BT.sum(-1)[mask_BT.any(-1)].double().tolist())


def _shares(parts: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[str, Estimate]]:
    """Yield the shares of one unit and anchor; ``parts`` are log-ratios and signs, (N,) each, of every mini-batch."""
    sizes = [len(log) for log, _ in parts]
    for band in BANDS:
        clipped = {
            "low": [int(((log < np.log1p(-band)) & (sign < 0)).sum()) for log, sign in parts],
            "high": [int(((log > np.log1p(band)) & (sign > 0)).sum()) for log, sign in parts],
        }
        for side in SIDES:
            yield quantity(side, band), ratio_of_sums(clipped[side], sizes, bounds=(0.0, 1.0))
