"""Moments of the ratios that add up over micro-batches; used by the adapters to TRL and to verl.

Shapes: B responses, T response positions, N response tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch

from steadymoe.algorithms import Batch, ops


@torch.no_grad()
def ratio_sums(batch: Batch) -> dict[str, torch.Tensor]:
    """Return what a micro-batch adds to the moments of the token ratio r and the sequence ratio s, fp64 scalars.

    ``ratio_1`` and ``ratio_2`` are Σ (r − 1) and Σ (r − 1)² over response tokens, which lose no digit where r is 1;
    ``sequence_ratio_1`` and ``sequence_ratio_2`` are the same sums of s over responses that have tokens.
    """
    mask_BT = batch.mask_BT.bool()
    has_token_B = mask_BT.any(-1)
    log_ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.get("old_logprobs_BT")).double()
    ratio_N = log_ratio_BT[mask_BT].expm1()
    ratio_B = ops.sequence_log_ratio(log_ratio_BT, mask_BT)[has_token_B].expm1()
    return {
        "tokens": mask_BT.sum().double(),
        "responses": has_token_B.sum().double(),
        "ratio_1": ratio_N.sum(),
        "ratio_2": ratio_N.square().sum(),
        "sequence_ratio_1": ratio_B.sum(),
        "sequence_ratio_2": ratio_B.square().sum(),
    }


def ratio_columns(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the suite's columns of ratios (docs/metrics.md) from sums or means of ``ratio_sums``, floats or scalars.

    Raises KeyError for a sum that is missing.
    """
    mean, square = sums["ratio_1"] / sums["tokens"], sums["ratio_2"] / sums["tokens"]
    sequence_mean, sequence_square = (sums[f"sequence_ratio_{power}"] / sums["responses"] for power in (1, 2))
    return {
        "token_ratio_mean": 1 + mean,
        "token_ratio_variance": _variance(mean, square),
        "sequence_ratio_variance": _variance(sequence_mean, sequence_square),
        "ess": (1 + mean) ** 2 / (1 + 2 * mean + square),
    }


def _variance(mean: Any, square: Any) -> Any:
    """Return the variance (without Bessel's correction) from the first and second moment; never below 0."""
    return max(square - mean**2, 0 * square)
