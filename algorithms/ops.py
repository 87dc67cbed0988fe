"""The three small vocabularies that a loss is composed of: ratio, shaper, aggregation.

Shapes: B responses, T response positions; ``mask_BT`` is 1 on response tokens. Everything stays on tokens
until it is aggregated, sequence ratios too.
"""

import math

import torch
from torch import Tensor

from steadymoe.algorithms.batch import Surrogate

# e^±20 is far outside any band and still finite when squared in fp32, so a ratio that ran away is
# reported as a huge number (the column token_ratio_max) and not as inf - inf. A token whose own log-ratio is beyond
# it has no gradient. A product beyond it keeps the gradient of its tokens, each with the weight e^±20.
MAX_LOG_RATIO = 20.0

# --- ratio -------------------------------------------------------------------------------------------

RATIOS = ("token", "sequence", "product")


def log_ratio(logprobs_BT: Tensor, anchor_logprobs_BT: Tensor) -> Tensor:
    """log of the per-token importance ratio, (B, T), clamped to ±``MAX_LOG_RATIO``; 0 on a batch's padding."""
    return (logprobs_BT - anchor_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio(log_ratio_BT: Tensor, mask_BT: Tensor, unit: str) -> Tensor:
    """The importance ratio on every token, (B, T), with the gradient of that token's own log-probability.

    token: r_t. sequence: the geometric mean s of a response's ratios. product: Π_t r_t over the response.
    All but the first have the value of the whole and the gradient of one token,
    sg[value] · r_t/sg[r_t], as in GSPO-token (2507.18071, eq. 14): averaged over a response, that is the
    gradient of s itself.
    """
    if unit == "token":
        return log_ratio_BT.exp()
    detached_BT = log_ratio_BT.detach()
    value_BT = {"sequence": _sequence, "product": _product}[unit](detached_BT, mask_BT)
    return with_token_gradient(value_BT.exp(), log_ratio_BT)


def sequence_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log s_i: the mean of the token log-ratios of each response, (B,) (GSPO, 2507.18071, eq. 7)."""
    return masked_mean_T(log_ratio_BT, mask_BT)


def product_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log Π_t r_t of each response, (B,), clamped to ±``MAX_LOG_RATIO``."""
    return (log_ratio_BT * mask_BT).sum(-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sequence(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return sequence_log_ratio(log_ratio_BT, mask_BT)[:, None] * mask_BT


def _product(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return product_log_ratio(log_ratio_BT, mask_BT)[:, None] * mask_BT


# --- shaper ------------------------------------------------------------------------------------------


def clipped_surrogate(
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    dual_clip: float | None = None,
) -> Surrogate:
    """min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), elementwise (PPO, 1707.06347, eq. 7).

    With ``dual_clip`` = c, where A < 0: max(that, c A) (1912.09729, eq. 5). Marked as clipped are the tokens
    whose gradient was cut: at the lower edge (A < 0 and r below the band), at the upper one (A > 0 and r
    above it), and by the dual clip, which counts as the upper edge.
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
    """Where an update would lead further out of a band: below ``low`` with A < 0, above ``high`` with A > 0."""
    return (values_BT < low) & (advantages_BT < 0), (values_BT > high) & (advantages_BT > 0)


def with_token_gradient(values_BT: Tensor, log_ratio_BT: Tensor) -> Tensor:
    """sg[values] · r_t/sg[r_t]: the values as they are, with ∂/∂log π_t equal to the value itself."""
    return values_BT.detach() * (log_ratio_BT - log_ratio_BT.detach()).exp()


def weighted_logprobs(
    weights_BT: Tensor, logprobs_BT: Tensor, advantages_BT: Tensor, low_BT: Tensor | None, high_BT: Tensor | None
) -> Surrogate:
    """sg[weight] · A · log π, elementwise: a policy gradient whose weight has been clipped, capped or masked."""
    return Surrogate(weights_BT.detach() * advantages_BT * logprobs_BT, low_BT, high_BT)


def spread(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """An objective of a response, repeated on its tokens, as terms that add up to it, each with its whole gradient."""
    length_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return values_BT.detach() / length_B1 + (values_BT - values_BT.detach())


def by_sign(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """A number for each advantage: ``positive`` where it is above 0, else ``negative``."""
    return torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)


def divergence(logprobs_K: Tensor, other_logprobs_K: Tensor, kind: str) -> Tensor:
    """Divergence of two distributions over the listed outcomes (last dimension) and everything else, summed over them.

    ``kind`` tv: ½ Σ|p − q|. kl: D(p‖q) = Σ p log p/q, with p = e^``logprobs`` and q = e^``other_logprobs``; an
    outcome of log-probability −inf counts nothing. With one outcome, the sampled token, it is DPPO's binary
    divergence, |p − q| or the binary KL. A lower bound of that over the whole vocabulary. Not differentiated.
    """
    p_K, q_K = (logprobs.detach().double().exp() for logprobs in (logprobs_K, other_logprobs_K))
    p_K, q_K = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1).clamp(min=0) for each in (p_K, q_K))
    if kind == "tv":
        return (p_K - q_K).abs().sum(-1).to(logprobs_K.dtype) / 2
    # A probability that rounds to 0 must not make a logarithm infinite.
    kl_K = p_K * (p_K.clamp(min=1e-12).log() - q_K.clamp(min=1e-12).log())
    return kl_K.sum(-1).clamp(min=0).to(logprobs_K.dtype)


def kl_estimate(logprobs_BT: Tensor, reference_logprobs_BT: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(π‖π_ref) on each token drawn from π, (B, T) (Schulman, "Approximating KL divergence", 2020).

    k1 = log π/π_ref; k2 = ½ (log π/π_ref)²; k3 = π_ref/π − 1 − log π_ref/π.
    """
    log_BT = log_ratio(logprobs_BT, reference_logprobs_BT)
    if estimator == "k1":
        return log_BT
    return log_BT.square() / 2 if estimator == "k2" else (-log_BT).expm1() + log_BT


# --- aggregation -------------------------------------------------------------------------------------

# token-mean Σ_i Σ_t / Σ_i T_i over the mini-batch: every token weighs the same (DAPO and CISPO as trainers have them;
# their papers divide by the tokens of one prompt's responses).
# seq-mean-token-mean mean_i (1/T_i) Σ_t: every response weighs the same (GRPO, GSPO).
# seq-mean-token-sum mean_i Σ_t: a response weighs as much as it is long (MiniRL).
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
    """The values of all response tokens as one scalar, by a mode of ``AGGREGATIONS``.

    ``responses`` and ``tokens`` are the denominators: those of the whole mini-batch where this is a part
    of one, so that parts add up to the whole; None counts those of ``mask_BT``.
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
    """Mean over the response tokens of each row, (B,); 0 for a row without any."""
    return (values_BT * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)
