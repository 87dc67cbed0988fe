"""The bases of all policy losses: any loss, a loss with an aggregation, with a ratio, with a clip, and a plug-in.

A loss says what each token contributes (its ``surrogate``). Weights, aggregation and sign are the same for all losses
and are applied here, once. Choices that other trainers fix in the code of a loss are fields here: the unit of the
ratio, its anchor, the aggregation, the clip. Shapes: B responses, T response positions.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput, Surrogate, summed


@dataclass(frozen=True)
class Traits:
    """The requirements of a loss on its caller."""

    whole_minibatch: bool = False
    """The term of a token depends on other responses too: a mini-batch must not be split into micro-batches."""
    zero_advantage_is_free: bool = True
    """A response with advantage 0 has gradient 0 and changes no other gradient: it may be left out."""
    corrects_for_sampler: bool = False
    """The loss's ratio already divides by the sampling policy: a correction would count the mismatch twice."""
    routes: bool = False
    """The loss reads ``Batch.router_log_ratio_LBTK``."""
    top_k: int = 0
    """The loss reads the three ``…top_logprobs_BTK`` fields, with this many most likely tokens; 0: it reads none."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(ABC):
    """A loss of a policy on one mini-batch. Subclasses are frozen dataclasses; most are a ``RatioLoss``."""

    @property
    def traits(self) -> Traits:
        """The requirements of this loss on its caller."""
        return Traits()

    @abstractmethod
    def surrogate(self, batch: Batch) -> Surrogate:
        """Return the objective of every token, before weights and aggregation.

        Raises ValueError for a missing field.
        """

    @abstractmethod
    def aggregate(self, values_BT: Tensor, batch: Batch) -> Tensor:
        """One scalar from a value for each token, (B, T), by this loss's aggregation."""

    @property
    def place(self) -> str:
        """Return the file and the line of this loss's surrogate, for messages."""
        code = type(self).surrogate.__code__
        return f"{code.co_filename}, line {code.co_firstlineno}"

    def initial_state(self) -> dict[str, Tensor]:
        """Return the ``Batch.state of the first update; empty for a loss that keeps no state."""
        return {}

    def __call__(self, batch: Batch) -> LossOutput:
        """Return the loss of a mini-batch, or of a part with the ``responses`` and ``tokens`` of the whole."""
        before = batch.changes()
        made = self.surrogate(batch)
        if not isinstance(made, Surrogate) or not isinstance(made.values_BT, Tensor):
            raise TypeError(f"{type(self).__name__}.surrogate must return a Surrogate of a tensor ({self.place})")
        if made.values_BT.shape != batch.mask_BT.shape:
            raise ValueError(
                f"{type(self).__name__}.surrogate must return a value for each token, {tuple(batch.mask_BT.shape)}, "
                f"got {tuple(made.values_BT.shape)} ({self.place})"
            )
        if changed := [name for name, count in batch.changes().items() if count != before[name]]:
            raise ValueError(f"{type(self).__name__}.surrogate changed the batch in place: {changed[0]} ({self.place})")
        values_BT, metrics = made.values_BT, {} if made.number is None else {"loss_number": made.number}
        if batch.weights_BT is not None:
            values_BT = values_BT * batch.weights_BT
        if made.clipped_low_BT is not None and made.clipped_high_BT is not None:
            mask_BT = batch.mask_BT.bool()
            metrics["clipped_low_BT"] = made.clipped_low_BT & mask_BT
            metrics["clipped_high_BT"] = made.clipped_high_BT & mask_BT
        return LossOutput(-self.aggregate(values_BT, batch), metrics, made.state, summed(made.numbers, batch.mask_BT))


@dataclass(frozen=True, kw_only=True)
class TokenLoss(PolicyLoss):
    """A loss with an aggregation of its tokens.

    Attributes:
        aggregation: one of ``ops.AGGREGATIONS``.
        constant_length: the L of ``aggregation`` constant, in tokens; None for the other aggregations.
    """

    aggregation: str = "seq-mean-token-mean"
    constant_length: int | None = None

    # A sum over tokens would undo the factor 1/T_i of a sequence ratio. A loss with such a ratio refuses the sum and
    # names here the algorithm that sums on purpose.
    TOKEN_SUM_IS: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        one_of("aggregation", self.aggregation, ops.AGGREGATIONS)
        if self.TOKEN_SUM_IS and self.aggregation in ("seq-mean-token-sum", "constant"):
            raise ValueError(
                f"aggregation={self.aggregation} weighs each response by its length, which a sequence ratio's "
                f"1/T_i is there to prevent; the algorithm that does so on purpose is {self.TOKEN_SUM_IS}"
            )
        if (self.aggregation == "constant") != (self.constant_length is not None):
            raise ValueError(
                "constant_length is the L of aggregation=constant, set there and null elsewhere; got "
                f"aggregation={self.aggregation} and constant_length={self.constant_length}"
            )
        if self.constant_length is not None and not self.constant_length >= 1:
            raise ValueError(f"constant_length is a number of tokens, >= 1; got {self.constant_length}")

    def aggregate(self, values_BT: Tensor, batch: Batch) -> Tensor:
        """One scalar from a value for each token, (B, T), by ``aggregation``."""
        return ops.aggregate(
            values_BT, batch.mask_BT, self.aggregation, self.constant_length, batch.responses, batch.tokens
        )


@dataclass(frozen=True, kw_only=True)
class RatioLoss(TokenLoss):
    """A loss with an importance ratio.

    Attributes:
        ratio: the unit of the ratio, one of ``ops.RATIOS``.
        anchor: the policy in the ratio's denominator: ``old`` (the trainer's forward at the weights that sampled) or
            ``rollout`` (the sampling engine's own log-probabilities; the batch must then hold them).
    """

    ratio: str = "token"
    anchor: str = "old"

    # The units that a loss allows.
    UNITS: ClassVar[tuple[str, ...]] = ops.RATIOS

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("ratio", self.ratio, self.UNITS)
        one_of("anchor", self.anchor, ("old", "rollout"))

    @property
    def traits(self) -> Traits:
        """The ratio divides by the sampling policy if the anchor is ``rollout``."""
        return Traits(corrects_for_sampler=self.anchor == "rollout")

    def anchor_logprobs(self, batch: Batch) -> Tensor:
        """Return log-probabilities under the anchor, (B, T). Raises ValueError if the batch does not hold them."""
        return batch.get(f"{self.anchor}_logprobs_BT")

    def log_ratio(self, batch: Batch) -> Tensor:
        """Return the log of the token ratio, (B, T), for every value of ``ratio``."""
        return ops.log_ratio(batch.logprobs_BT, self.anchor_logprobs(batch))

    @property
    def unit(self) -> str:
        """The unit in which the objective is formed: ``ratio``, unless a loss averages after its clip."""
        return self.ratio

    def ratio_of(self, batch: Batch) -> Tensor:
        """Return the ratio of every token in the unit ``ratio``, (B, T)."""
        return ops.ratio(self.log_ratio(batch), batch.mask_BT, self.ratio)


@dataclass(frozen=True, kw_only=True)
class ClippedLoss(RatioLoss):
    """PPO's clipped surrogate: a band [1 − clip_low, 1 + clip_high] on the ratio, with an optional dual clip.

    Its subclasses differ in their defaults: the unit of the ratio, the aggregation and the band.

    Attributes:
        clip_low: the distance of the band's lower edge from a ratio of 1.
        clip_high: the distance of the band's upper edge from a ratio of 1.
        dual_clip: a ratio above the band; a token of negative advantage loses its gradient beyond it; None for no
            such bound.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_band(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1 + self.clip_high:
            raise ValueError(f"dual_clip is a ratio above the band, or null for none; got {self.dual_clip}")

    def surrogate(self, batch: Batch) -> Surrogate:
        """min(r A, clip(r) A) with this loss's ratio and band."""
        return self.clipped(self.ratio_of(batch), batch.advantages_BT)

    def clipped(self, ratio_BT: Tensor, advantages_BT: Tensor) -> Surrogate:
        """min(r A, clip(r) A) with this loss's band; both are (B, T), or the advantages (B, 1)."""
        return ops.clipped_surrogate(ratio_BT, advantages_BT, self.clip_low, self.clip_high, self.dual_clip)


@dataclass(frozen=True, kw_only=True)
class HostedLoss(PolicyLoss):
    """A plug-in: it changes the batch or the surrogate of another loss, its ``host``."""

    host: RatioLoss

    def __post_init__(self) -> None:
        if not isinstance(self.host, RatioLoss):
            raise ValueError(f"host must be a loss with a ratio of its own; got {type(self.host).__name__}")

    @property
    def traits(self) -> Traits:
        """The traits of the host."""
        return self.host.traits

    def aggregate(self, values_BT: Tensor, batch: Batch) -> Tensor:
        """Return the aggregation of the host."""
        return self.host.aggregate(values_BT, batch)

    def initial_state(self) -> dict[str, Tensor]:
        """Return the initial state of the host."""
        return self.host.initial_state()


def drop(made: Surrogate, dropped_BT: Tensor) -> Surrogate:
    """Return the surrogate ``made`` without the tokens ``dropped_BT`` (bool): their objective is 0.

    They count as clipped at the lower edge.
    """
    low_BT, high_BT = (
        torch.zeros_like(dropped_BT) if marks_BT is None else marks_BT
        for marks_BT in (made.clipped_low_BT, made.clipped_high_BT)
    )
    return replace(
        made,
        values_BT=made.values_BT.masked_fill(dropped_BT, 0.0),
        clipped_low_BT=low_BT | dropped_BT,
        clipped_high_BT=high_BT & ~dropped_BT,
    )


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def check_band(clip_low: float, clip_high: float) -> None:
    """Raise ValueError for a clip band [1 − clip_low, 1 + clip_high] that is empty or reaches below 0."""
    if not 0 <= clip_low < 1:
        raise ValueError(f"clip_low is an ε on the ratio, 0 <= clip_low < 1; got {clip_low}")
    if not clip_high >= 0:
        raise ValueError(f"clip_high is an ε on the ratio, clip_high >= 0; got {clip_high}")


def check_cap(ratio_cap: float | None) -> None:
    """Raise ValueError for a cap on a ratio that is not above 1; None is no cap."""
    if ratio_cap is not None and not ratio_cap > 1:
        raise ValueError(f"ratio_cap bounds a ratio from above, > 1, or null for none; got {ratio_cap}")


def check_positive(**numbers: float) -> None:
    """Raise ValueError for the first number that is not above 0 and finite."""
    for name, value in numbers.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be above 0 and finite; got {value}")
