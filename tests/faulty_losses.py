"""Losses of users as they go wrong: random, in place, of another shape. A config names them by this module."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from steadymoe.algorithms import Batch, ClippedLoss, Surrogate


@dataclass(frozen=True, kw_only=True)
class TokenDropout(ClippedLoss):
    """Leaves out half of the tokens, by draws of all three global generators."""

    def surrogate(self, batch: Batch) -> Surrogate:
        factor = (random.random() < 0.9) * (np.random.rand() < 0.9)  # noqa: NPY002
        keeps_BT = (torch.rand(batch.mask_BT.shape) < 0.5) * float(factor)
        return Surrogate(self.ratio_of(batch) * batch.advantages_BT * keeps_BT)


@dataclass(frozen=True, kw_only=True)
class InPlace(ClippedLoss):
    """Changes the batch."""

    def surrogate(self, batch: Batch) -> Surrogate:
        return Surrogate(self.ratio_of(batch) * batch.advantages_BT.mul_(0.5))


@dataclass(frozen=True, kw_only=True)
class Bare(ClippedLoss):
    """Forgets to wrap its values."""

    def surrogate(self, batch: Batch) -> Any:
        return self.ratio_of(batch) * batch.advantages_BT


@dataclass(frozen=True, kw_only=True)
class InPlaceOfTheGraph(ClippedLoss):
    """Changes what its gradient needs."""

    def surrogate(self, batch: Batch) -> Surrogate:
        ratio_BT = self.ratio_of(batch).exp()
        values_BT = ratio_BT * batch.advantages_BT
        ratio_BT += 1
        return Surrogate(values_BT)


@dataclass(frozen=True, kw_only=True)
class OneValueARow(ClippedLoss):
    """Would be broadcast."""

    def surrogate(self, batch: Batch) -> Surrogate:
        return Surrogate((self.ratio_of(batch) * batch.advantages_BT).mean(-1, keepdim=True))


@dataclass(frozen=True, kw_only=True)
class NotANumber(ClippedLoss):
    """Divides by zero."""

    def surrogate(self, batch: Batch) -> Surrogate:
        return Surrogate(self.ratio_of(batch) * batch.advantages_BT / 0 * 0)
