"""The three small vocabularies that a loss is composed of: ratio, shaper, aggregation.

Shapes: B responses, T response positions; ``mask_BT`` is 1 on response tokens.
"""

import torch
from torch import Tensor

# e^±20 is far outside any band and still finite when squared in fp32, so a ratio that ran away is
# reported as a huge number and not as inf - inf. Beyond it a token has no gradient, whatever its advantage.
MAX_LOG_RATIO = 20.0


# --- ratio -------------------------------------------------------------------------------------------


def log_ratio(logprobs_BT: Tensor, anchor_logprobs_BT: Tensor) -> Tensor:
    """log of the per-token importance ratio, (B, T), clamped to ±``MAX_LOG_RATIO``; 0 on a batch's padding."""
    return (logprobs_BT - anchor_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log s_i: the mean of the token log-ratios of each response, (B,) (GSPO, 2507.18071, eq. 7)."""
    return masked_mean_T(log_ratio_BT, mask_BT)


# --- shaper ------------------------------------------------------------------------------------------


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float | Tensor, clip_high: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), elementwise.

    Returns the surrogate and two bool tensors of the same shape: where the gradient was cut at the lower
    edge (A < 0 and r below the band) and at the upper one (A > 0 and r above it).
    """
    low, high = (
        torch.as_tensor(edge, dtype=ratio.dtype, device=ratio.device) for edge in (1 - clip_low, 1 + clip_high)
    )
    clipped = torch.clamp(ratio, low, high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    clipped_low = (ratio < low) & (advantages < 0)
    clipped_high = (ratio > high) & (advantages > 0)
    return surrogate, clipped_low, clipped_high


def by_sign(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """A number for each advantage: ``positive`` where it is above 0, else ``negative``."""
    return torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)


def check_band(clip_low: float, clip_high: float) -> None:
    """Raise ValueError for a clip band [1 − clip_low, 1 + clip_high] that is empty or reaches below 0."""
    if not 0 <= clip_low < 1:
        raise ValueError(f"clip_low is an ε on the ratio, 0 <= clip_low < 1; got {clip_low}")
    if not clip_high >= 0:
        raise ValueError(f"clip_high is an ε on the ratio, clip_high >= 0; got {clip_high}")


# --- aggregation -------------------------------------------------------------------------------------


def masked_mean_T(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the response tokens of each row, (B,); 0 for a row without any."""
    return (values_BT * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)


def seq_mean_token_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """mean_i (1/T_i) Σ_t, a scalar: every response weighs the same (GRPO, GSPO)."""
    return sequence_mean(masked_mean_T(values_BT, mask_BT), mask_BT)


def seq_mean_token_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """mean_i Σ_t, a scalar: a response weighs as much as it is long (MiniRL; Dr. GRPO over a constant)."""
    return sequence_mean((values_BT * mask_BT).sum(-1), mask_BT)


def token_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Σ_i Σ_t / Σ_i T_i, a scalar: every token of the mini-batch weighs the same (DAPO, CISPO)."""
    return (values_BT * mask_BT).sum() / mask_BT.sum().clamp(min=1)


def sequence_mean(values_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the responses that have a token, a scalar."""
    real_B = mask_BT.any(-1).to(values_B.dtype)
    return (values_B * real_B).sum() / real_B.sum().clamp(min=1)
