"""Corrections of the mismatch between the policy that sampled, μ, and the training forward at the same weights, π_old.

A correction is a weight on each token of the loss's objective, made from ρ = π_old/μ, without gradient. It is applied
after the loss's min or mask; the weight 0 rejects the token. With a sequence ratio it weighs the gradient of each
token, as in GSPO-token. All weights are 1 where the two policies agree. The denominators do not change: a rejected
token still counts.

Shapes: B responses, T response positions.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch
from steadymoe.algorithms.loss import check_cap, check_positive, one_of


class Correction(ABC):
    """A weight for every response token."""

    @abstractmethod
    def weights(self, batch: Batch) -> Tensor | None:
        """Return the weights, (B, T), without gradient; None for 1 everywhere.

        Raises ValueError if the batch does not hold π_old and μ.
        """


@dataclass(frozen=True)
class Uncorrected(Correction):
    """No correction: the sampler's own log-probabilities are not read."""

    def weights(self, batch: Batch) -> Tensor | None:
        """None."""
        return None


@dataclass(frozen=True, kw_only=True)
class TruncatedIS(Correction):
    """TIS: min(ρ, C) (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025).

    Attributes:
        unit: the unit of ρ: ``token``, ``product`` over the response (verl's sequence level) or ``sequence``, the
            geometric mean over the response (ms-swift's sequence level).
        ratio_cap: C; None for plain importance sampling (log ρ is still clamped to ±``ops.MAX_LOG_RATIO``).
    """

    unit: str = "token"
    ratio_cap: float | None = 2.0

    def __post_init__(self) -> None:
        one_of("unit", self.unit, ("token", "sequence", "product"))
        check_cap(self.ratio_cap)

    def weights(self, batch: Batch) -> Tensor:
        """min(ρ, C)."""
        rho_BT = _rho(batch, self.unit)
        return rho_BT if self.ratio_cap is None else rho_BT.clamp(max=self.ratio_cap)


@dataclass(frozen=True, kw_only=True)
class MaskedIS(Correction):
    """ρ where ρ_low ≤ ρ ≤ ρ_high, else 0: MIS (Liu & Li, 2025; no lower edge) and IcePop (Ring-1T, 2510.18855).

    ``unit`` is as in ``TruncatedIS``; with ``product`` and ``sequence`` a whole response is kept or rejected.
    """

    unit: str = "token"
    ratio_low: float = 0.0
    ratio_high: float = 2.0

    def __post_init__(self) -> None:
        one_of("unit", self.unit, ("token", "sequence", "product"))
        _check_band("ratio", self.ratio_low, self.ratio_high)

    def weights(self, batch: Batch) -> Tensor:
        """ρ inside the band, 0 outside."""
        rho_BT = _rho(batch, self.unit)
        return rho_BT * ((rho_BT >= self.ratio_low) & (rho_BT <= self.ratio_high))


@dataclass(frozen=True, kw_only=True)
class GeometricRejection(Correction):
    """Keep a response if the geometric mean of its ρ lies in [ratio_low, ratio_high]; else reject the whole response.

    A kept token has the weight 1 (Geo-RS, as in verl and slime), or with ``weighted`` its own ρ, not truncated
    (seq-mask-tis, in NeMo-RL's guide to ProRL v2.1).
    """

    ratio_low: float = 0.9999
    ratio_high: float = 1.0001
    weighted: bool = False

    def __post_init__(self) -> None:
        _check_band("geometric mean", self.ratio_low, self.ratio_high)

    def weights(self, batch: Batch) -> Tensor:
        """1 or ρ in kept responses, 0 in rejected ones."""
        mean_BT = _rho(batch, "sequence")
        kept_BT = (mean_BT >= self.ratio_low) & (mean_BT <= self.ratio_high)
        return kept_BT * (_rho(batch, "token") if self.weighted else torch.ones_like(mean_BT))


@dataclass(frozen=True, kw_only=True)
class BinaryKL(Correction):
    """KPop: keep a token if the binary KL between π_old and μ is at most ``max_kl`` (nats) in both directions.

    Ant Group, 2026. The equation was read in the descriptions of pull requests to prime-rl (3283) and AReaL (1405),
    not in the source. A kept token has the weight 1, or with ``weighted`` its ρ, as in AReaL.
    """

    max_kl: float = 0.1
    weighted: bool = False

    def __post_init__(self) -> None:
        check_positive(max_kl=self.max_kl)

    def weights(self, batch: Batch) -> Tensor:
        """1 or ρ for a kept token, else 0."""
        old_BT1, rollout_BT1 = batch.get("old_logprobs_BT")[..., None], batch.get("rollout_logprobs_BT")[..., None]
        both = [ops.divergence(*pair, "kl") for pair in ((old_BT1, rollout_BT1), (rollout_BT1, old_BT1))]
        kept_BT = torch.maximum(*both) <= self.max_kl
        return kept_BT * (_rho(batch, "token") if self.weighted else torch.ones_like(both[0]))


def _check_band(of: str, low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"ratio_low and ratio_high are a band on the {of}, 0 <= ratio_low <= 1 <= ratio_high; got {low} and {high}"
        )


def _rho(batch: Batch, unit: str) -> Tensor:
    """ρ of every token in a unit, (B, T), without gradient."""
    log_BT = ops.log_ratio(batch.get("old_logprobs_BT"), batch.get("rollout_logprobs_BT")).detach()
    return ops.ratio(log_BT, batch.mask_BT, unit)
