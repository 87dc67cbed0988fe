"""Columns from tensors with a value for each token, over the response tokens of a mini-batch or of a rollout.

Shapes: B responses, T response positions, N response tokens, P prompts, K of them kept, G responses to each prompt.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from steadymoe.algorithms import Batch, LossOutput
from steadymoe.algorithms.ops import log_ratio, product_log_ratio, sequence_log_ratio
from steadymoe.bench.training import columns
from steadymoe.bench.training.columns import names

TOKEN_RATIO_MEAN, TOKEN_RATIO_MAX, ESS, LOSS_NUMBER = names("token_ratio_mean", "token_ratio_max", "ess", "loss_number")
TOKEN_RATIO_VARIANCE, SEQUENCE_RATIO_VARIANCE = names("token_ratio_variance", "sequence_ratio_variance")
CLIP_FRACTION, CLIP_FRACTION_LOW, CLIP_FRACTION_HIGH = names("clip_fraction", "clip_fraction_low", "clip_fraction_high")
CORRECTION_WEIGHT, CORRECTION_REJECTED, ROLLOUT_ESS = names("correction_weight", "correction_rejected", "rollout_ess")
TOKEN_RATIO_HISTOGRAM, ROLLOUT_KL_K1, ROLLOUT_KL_K3 = names("token_ratio_histogram", "rollout_kl_k1", "rollout_kl_k3")
SEQUENCE_LOG_RATIO_VARIANCE_HISTOGRAM, REWARD = names("sequence_log_ratio_variance_histogram", "reward")
ROLLOUT_CHI2_TOKEN, ROLLOUT_CHI2_SEQUENCE = names("rollout_chi2_token", "rollout_chi2_sequence")
ROLLOUT_RATIO_MEAN, ROLLOUT_OUTSIDE_SHARE = names("rollout_ratio_mean", "rollout_outside_share")
ROLLOUT_EXTREME_SHARE, ROLLOUT_LOGPROB_GAP_MAX = names("rollout_extreme_share", "rollout_logprob_gap_max")
ROLLOUT_PROBABILITY_CORRELATION, PROMPTS_SAMPLED = names("rollout_probability_correlation", "prompts_sampled")
GROUPS_WITHOUT_SIGNAL, LOG_RATIO_MOMENT_FREE = names("groups_without_signal", "log_ratio_moment_free")
ROUTING_SHARE, LOG_RATIO_MOMENT_PINNED = names("routing_share", "log_ratio_moment_pinned")

# The edges of histograms in fp32, as values are.
_LOG_RATIO_EDGES = torch.tensor(columns.LOG_RATIO_EDGES, dtype=torch.float32)
_VARIANCE_EDGES = torch.tensor(columns.VARIANCE_EDGES, dtype=torch.float32)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# How a step reduces the numbers of its updates, by ``Column.over_updates``; a share of moments: ``of_step``.
_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": _mean,
    "largest": max,
    "least": min,
    "from the mean moments": _mean,
}


def of_update(batch: Batch, output: LossOutput) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The ratio and clip columns of one gradient update, as scalars, and its histograms, as counts (``columns``).

    A loss without a clip has no clip fractions. The histogram of variances is SAPO's (2511.20347, figures 2 and 3).
    Raises ValueError for a batch without ``old_logprobs_BT``.
    """
    mask_BT = batch.mask_BT.bool()
    with torch.no_grad():
        log_ratio_BT = log_ratio(batch.logprobs_BT, batch.get("old_logprobs_BT"))
        log_ratio_N = log_ratio_BT[mask_BT]
        ratio_N = log_ratio_N.exp()
        has_token_B = mask_BT.any(-1)
        mean_B = sequence_log_ratio(log_ratio_BT, mask_BT)
        ratio_B = mean_B[has_token_B].exp()
        square_BT = torch.where(mask_BT, (log_ratio_BT - mean_B[:, None]).square(), 0.0)
        variance_B = (square_BT.sum(-1) / mask_BT.sum(-1))[has_token_B]
        numbers = {
            TOKEN_RATIO_MEAN: ratio_N.mean(),
            TOKEN_RATIO_MAX: ratio_N.max(),
            TOKEN_RATIO_VARIANCE: ratio_N.var(correction=0),
            SEQUENCE_RATIO_VARIANCE: ratio_B.var(correction=0),
            ESS: ratio_N.sum().square() / (ratio_N.square().sum() * ratio_N.numel()),
        }
        if "clipped_low_BT" in output.metrics:
            low = output.metrics["clipped_low_BT"][mask_BT].float().mean()
            high = output.metrics["clipped_high_BT"][mask_BT].float().mean()
            numbers |= {CLIP_FRACTION: low + high, CLIP_FRACTION_LOW: low, CLIP_FRACTION_HIGH: high}
        if "weights_BT" in output.metrics:
            weights_N = output.metrics["weights_BT"][mask_BT]
            numbers |= {CORRECTION_WEIGHT: weights_N.mean(), CORRECTION_REJECTED: (weights_N == 0).float().mean()}
        if "loss_number" in output.metrics:
            numbers[LOSS_NUMBER] = output.metrics["loss_number"]
        return numbers, {
            TOKEN_RATIO_HISTOGRAM: _counts(log_ratio_N, _LOG_RATIO_EDGES),
            SEQUENCE_LOG_RATIO_VARIANCE_HISTOGRAM: _counts(variance_B, _VARIANCE_EDGES),
        }


def _counts(values_N: Tensor, edges: Tensor) -> Tensor:
    """The number of finite values below the first edge, between two neighbouring edges, and above the last edge."""
    finite_N = values_N[values_N.isfinite()]
    bins_N = torch.bucketize(finite_N, edges.to(values_N.device))
    return torch.bincount(bins_N, minlength=len(edges) + 1)


def of_mismatch(rollout_logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    """The columns of a rollout that compare the sampling policy μ with the training forward π_old on the same tokens.

    With Δ = log π_old − log μ and ρ = e^Δ: k1 = −E_μ[Δ] and k3 = E_μ[ρ − 1 − Δ] (Schulman, "Approximating KL
    divergence", 2020), χ² = E_μ[ρ²] − 1. The mean of ρ and the share outside [0.9, 1.1] are TRL's (pull request 7269).
    """
    mask = mask_BT.bool()
    delta_BT = torch.where(mask, log_ratio(old_logprobs_BT, rollout_logprobs_BT), 0.0)
    delta_N, rho_N = delta_BT[mask], delta_BT[mask].exp()
    probabilities_2N = torch.stack([old_logprobs_BT[mask], rollout_logprobs_BT[mask]]).exp()
    return {
        ROLLOUT_KL_K1: -delta_N.mean(),
        ROLLOUT_KL_K3: (delta_N.expm1() - delta_N).mean(),
        ROLLOUT_CHI2_TOKEN: rho_N.square().mean() - 1,
        ROLLOUT_CHI2_SEQUENCE: (2 * product_log_ratio(delta_BT, mask_BT)[mask.any(-1)]).exp().mean() - 1,
        ROLLOUT_ESS: rho_N.sum().square() / (rho_N.square().sum() * rho_N.numel()),
        ROLLOUT_RATIO_MEAN: rho_N.mean(),
        ROLLOUT_OUTSIDE_SHARE: ((rho_N < 0.9) | (rho_N > 1.1)).float().mean(),
        ROLLOUT_EXTREME_SHARE: (delta_N.abs() > math.log(2)).float().mean(),
        ROLLOUT_LOGPROB_GAP_MAX: delta_N.abs().max(),
        ROLLOUT_PROBABILITY_CORRELATION: torch.corrcoef(probabilities_2N)[0, 1],
    }


def of_rewards(scores_PG: Tensor, rewards_KG: Tensor) -> dict[str, float]:
    """The score columns of all responses sampled in a step.

    ``rewards_KG`` are what the advantages of the K kept groups are formed from, and these groups are the first of
    ``scores_PG``. In a group without signal all rewards are equal, or all scores if it was dropped.
    """
    rewards_PG = torch.cat([rewards_KG, scores_PG[len(rewards_KG) :]])
    return {
        REWARD: scores_PG.mean().item(),
        GROUPS_WITHOUT_SIGNAL: (rewards_PG == rewards_PG[:, :1]).all(-1).float().mean().item(),
        PROMPTS_SAMPLED: len(scores_PG),
    }


def of_step(updates: list[dict[str, float]]) -> dict[str, float]:
    """The columns of a step from the columns of its updates that have them, reduced as ``Column.over_updates`` says.

    ``routing_share`` is 1 − the mean pinned moment over the mean free moment: a mean of ratios would follow the updates
    that moved least.
    """
    row = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        if name not in ("step", "update"):
            values = [update[name] for update in updates if name in update]
            row[name] = _REDUCTIONS[columns.of_metric(name).over_updates](values)
    if row.get(LOG_RATIO_MOMENT_FREE, 0) > 0:
        row[ROUTING_SHARE] = 1 - row[LOG_RATIO_MOMENT_PINNED] / row[LOG_RATIO_MOMENT_FREE]
    return row


def mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the response tokens of a mini-batch, a scalar."""
    return values_BT[mask_BT.bool()].mean()


def of_numbers(numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns of what ``algorithms.batch.summed`` gave: ``loss/name`` → mean over tokens, nan of none."""
    means = {f"loss/{name}": sums[0] / sums[1] for name, sums in numbers.items()}
    # Beyond float32 it is infinite, as every other column: ``record`` takes a larger number for damage.
    return {name: torch.where(mean.float().isinf(), mean.float().double(), mean) for name, mean in means.items()}


def to_floats(scalars: dict[str, Tensor]) -> dict[str, float]:
    """Scalars of one device to Python numbers, in one transfer."""
    if not scalars:
        return {}
    return dict(zip(scalars, torch.stack([each.double() for each in scalars.values()]).tolist(), strict=True))
