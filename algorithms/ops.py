"""The three parts of a loss: ratio, shaper (it bounds the effect of the ratio), aggregation.

Shapes: B responses, T response positions; ``mask_BT`` is 1 on response tokens. Every quantity, sequence ratios too, has
a value for each token until it is aggregated.
"""

import math

import torch
from torch import Tensor

from steadymoe.algorithms.batch import Surrogate

# e^±20 is far outside any band and still finite when squared in fp32. So a ratio that ran away is reported as a huge
# number (the column token_ratio_max) and not as inf - inf. A token whose own log-ratio is beyond the bound has no
# gradient. A product or a prefix beyond the bound keeps the gradient of its tokens, each with the weight e^±20.
MAX_LOG_RATIO = 20.0

# --- ratio -------------------------------------------------------------------------------------------

RATIOS = ("token", "sequence", "product")


def log_ratio(logprobs_BT: Tensor, anchor_logprobs_BT: Tensor) -> Tensor:
    """Return the log of each token's importance ratio, (B, T), within ±``MAX_LOG_RATIO``; 0 on a batch's padding."""
    return (logprobs_BT - anchor_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio(log_ratio_BT: Tensor, mask_BT: Tensor, unit: str) -> Tensor:
    """Return the importance ratio on every token, (B, T), with the gradient of that token's own log-probability.

    token: r_t. sequence: the geometric mean s of a response's ratios. product: Π_t r_t over the response.
    prefix: Π_{u ≤ t} r_u. In the last three units a token has the value of the whole and its own gradient,
    sg[value] · r_t/sg[r_t], as in GSPO-token (2507.18071, eq. 14). The mean of these gradients over a response is the
    gradient of s itself.
    """
    if unit == "token":
        return log_ratio_BT.exp()
    detached_BT = log_ratio_BT.detach()
    if unit == "prefix":
        value_BT = (detached_BT * mask_BT).cumsum(-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    else:
        value_BT = {"sequence": sequence_log_ratio, "product": product_log_ratio}[unit](detached_BT, mask_BT)[:, None]
    return with_token_gradient((value_BT * mask_BT).exp(), log_ratio_BT)


def sequence_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log s_i, the mean of the token log-ratios of each response, (B,) (GSPO, 2507.18071, eq. 7)."""
    return masked_mean_T(log_ratio_BT, mask_BT)


def product_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log Π_t r_t of each response, (B,), clamped to ±``MAX_LOG_RATIO``."""
    return (log_ratio_BT * mask_BT).sum(-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# --- shaper ------------------------------------------------------------------------------------------


def clipped_surrogate(
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    dual_clip: float | None = None,
) -> Surrogate:
    """min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), elementwise (PPO, 1707.06347, eq. 7).

    With ``dual_clip`` = c, where A < 0: the larger of this minimum and c A (1912.09729, eq. 5). The edges may be
    tensors that broadcast to (B, T). The tokens that lose their gradient are marked as clipped: at the lower edge
    (A < 0 and r below the band), at the upper edge (A > 0 and r above the band), and by the dual clip, which counts
    as the upper edge.
    """
    low, high = (
        torch.as_tensor(edge, dtype=ratio_BT.dtype, device=ratio_BT.device) for edge in (1 - clip_low, 1 + clip_high)
    )
    surrogate_BT = torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(low, high) * advantages_BT)
    clipped_low_BT, clipped_high_BT = beyond(ratio_BT, advantages_BT, low, high)
    if dual_clip is not None:
        cut_BT = (advantages_BT < 0) & (ratio_BT > dual_clip)
        surrogate_BT = torch.where(cut_BT, dual_clip * advantages_BT, surrogate_BT)
        clipped_high_BT = clipped_high_BT | cut_BT
    return Surrogate(surrogate_BT, clipped_low_BT, clipped_high_BT)


def beyond(
    values_BT: Tensor, advantages_BT: Tensor, low: float | Tensor, high: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Mark updates that lead further out of a band, (B, T) bool each: below it with A < 0, above it with A > 0."""
    return (values_BT < low) & (advantages_BT < 0), (values_BT > high) & (advantages_BT > 0)


def with_token_gradient(values_BT: Tensor, log_ratio_BT: Tensor) -> Tensor:
    """sg[values] · r_t/sg[r_t], (B, T): the same values, with a derivative in log π_t that equals the value."""
    return values_BT.detach() * (log_ratio_BT - log_ratio_BT.detach()).exp()


def weighted_logprobs(
    weights_BT: Tensor, logprobs_BT: Tensor, advantages_BT: Tensor, low_BT: Tensor | None, high_BT: Tensor | None
) -> Surrogate:
    """sg[weight] · A · log π, elementwise: a policy gradient with a clipped, capped or masked weight.

    ``low_BT`` and ``high_BT`` mark the tokens that count as clipped; None for a loss without a clip.
    """
    return Surrogate(weights_BT.detach() * advantages_BT * logprobs_BT, low_BT, high_BT)


def spread(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Terms of a response's tokens, (B, T), whose sum is the response's objective.

    ``values_BT`` repeats the objective on every token. A term keeps the whole gradient of its token.
    """
    length_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return values_BT.detach() / length_B1 + (values_BT - values_BT.detach())


def by_sign(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """Return a number for each advantage: ``positive`` for an advantage above 0, else ``negative``."""
    return torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)


def divergence(logprobs_K: Tensor, other_logprobs_K: Tensor, kind: str) -> Tensor:
    """Return a divergence of two distributions over K listed outcomes (the last dimension) and the rest as one more
    outcome.

    ``kind`` tv: ½ Σ|p − q|. kl: D(p‖q) = Σ p log p/q, with p = e^``logprobs`` and q = e^``other_logprobs``. An
    outcome of log-probability −inf counts nothing. With one outcome, the sampled token, it is DPPO's binary
    divergence, |p − q| or the binary KL. It is a lower bound of the divergence over the whole vocabulary, in nats for
    kl, and has no gradient.
    """
    p_K, q_K = (logprobs.detach().double().exp() for logprobs in (logprobs_K, other_logprobs_K))
    p_K, q_K = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1).clamp(min=0) for each in (p_K, q_K))
    if kind == "tv":
        return (p_K - q_K).abs().sum(-1).to(logprobs_K.dtype) / 2
    # The logarithm of a probability that rounds to 0 must stay finite.
    kl_K = p_K * (p_K.clamp(min=1e-12).log() - q_K.clamp(min=1e-12).log())
    return kl_K.sum(-1).clamp(min=0).to(logprobs_K.dtype)


def kl_estimate(logprobs_BT: Tensor, reference_logprobs_BT: Tensor, estimator: str) -> Tensor:
    """Return an estimate of KL(π‖π_ref) on each token drawn from π, (B, T), in nats.

    k1 = log π/π_ref; k2 = ½ (log π/π_ref)²; k3 = π_ref/π − 1 − log π_ref/π. Source: Schulman, "Approximating KL
    divergence", 2020.
    """
    log_BT = log_ratio(logprobs_BT, reference_logprobs_BT)
    if estimator == "k1":
        return log_BT
    return log_BT.square() / 2 if estimator == "k2" else (-log_BT).expm1() + log_BT


# --- aggregation -------------------------------------------------------------------------------------

# token-mean Σ_i Σ_t / Σ_i T_i over the mini-batch: every token weighs the same (DAPO and CISPO as trainers implement
# them; their papers divide by the tokens of one prompt's responses).
# seq-mean-token-mean mean_i (1/T_i) Σ_t: every response weighs the same (GRPO, GSPO).
# seq-mean-token-sum mean_i Σ_t: the weight of a response is its length (MiniRL).
# constant mean_i Σ_t / L with a constant L (Dr. GRPO).
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")


def aggregate(
    values_BT: Tensor,
    mask_BT: Tensor,
    mode: str,
    constant_length: int | None = None,
    responses: int | None = None,
    tokens: int | None = None,
) -> Tensor:
    """One scalar from the values of all response tokens, by a mode of ``AGGREGATIONS``.

    ``responses`` and ``tokens`` are the denominators. For a part of a mini-batch they are the counts of the whole
    mini-batch, so that the parts add up to the whole; None counts responses and tokens in ``mask_BT``.
    """
    if mode == "token-mean":
        count = mask_BT.sum() if tokens is None else tokens
        return (values_BT * mask_BT).sum() / max(int(count), 1)
    rows_B = masked_mean_T(values_BT, mask_BT) if mode == "seq-mean-token-mean" else (values_BT * mask_BT).sum(-1)
    if mode == "constant":
        rows_B = rows_B / (constant_length or math.nan)
    count = mask_BT.any(-1).sum() if responses is None else responses
    return rows_B.sum() / max(int(count), 1)


def masked_mean_T(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean over the response tokens of each row, (B,); 0 for a row without response tokens."""
    return (values_BT * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)
