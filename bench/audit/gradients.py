"""The gradients of many losses on one mini-batch: one forward for all of them, and one backward for each.

Every loss here is a function of the log-probabilities of the sampled tokens (and of the entropy, under a bonus). Its
slope with respect to these numbers costs next to nothing; the slope is then sent back through the graph of the shared
forward, which is kept until the last loss has used it. Only sums over groups of mini-batches stay in memory.

Shapes: M rows of a mini-batch, T response positions, P weights, G groups of mini-batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.algorithms import Batch, LossOutput
from steadymoe.bench.audit.estimators import Gradients, Pair
from steadymoe.bench.audit.losses import Loss
from steadymoe.bench.audit.rollouts import Frozen
from steadymoe.bench.training.forward import Forward
from steadymoe.bench.training.microbatches import MicroBatch
from steadymoe.models.routing import routers

WHOLE = "whole"
# Norms, and whatever else is no feed-forward part, stand with the attention. The feed-forward parts of a dense model
# are its "experts".
BLOCKS = ("router", "experts", "attention", "embeddings")
_FEED_FORWARD = (".mlp.", ".feed_forward.", ".block_sparse_moe.", ".moe.")
# Derivatives that differ by less, relative to their largest, are multiples of each other: float32 rounds at 6e-8, and a
# loss sums up to some hundred terms.
_ROUNDING = 2e-6
# Weights whose products are taken at once.
_AT_ONCE = 8192


class Weights:
    """The trained weights of a model as one vector, block by block."""

    def __init__(self, model: PreTrainedModel) -> None:
        in_routers = {id(weight) for router in routers(model) for weight in router.parameters()}
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        in_ends = {id(weight) for layer in ends if layer is not None for weight in layer.parameters()}
        blocks: dict[str, list[Tensor]] = {name: [] for name in BLOCKS}
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            block = "experts" if any(part in name for part in _FEED_FORWARD) else "attention"
            block = "router" if id(weight) in in_routers else "embeddings" if id(weight) in in_ends else block
            blocks[block].append(weight)
        self.ordered = [weight for name in BLOCKS for weight in blocks[name]]
        self.slices: dict[str, slice] = {}
        self.count = 0
        for name, weights in blocks.items():
            first, self.count = self.count, self.count + sum(weight.numel() for weight in weights)
            if self.count > first:
                self.slices[name] = slice(first, self.count)

    def vector(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the gradients of ``ordered`` as one vector, (P,); 0 for a weight without one."""
        pairs = zip(self.ordered, gradients, strict=True)
        return torch.cat([(torch.zeros_like(weight) if slope is None else slope).flatten() for weight, slope in pairs])


@dataclass(frozen=True)
class Slopes:
    """A loss's batch and output on a mini-batch, and its derivatives."""

    by_logprobs_MT: Tensor
    by_entropy_MT: Tensor | None
    """None without an entropy bonus."""
    batch: Batch
    output: LossOutput

    def times(self, other: "Slopes") -> float | None:
        """Return the factor f with which these derivatives are f times the other's, up to rounding; None without one.

        The gradients then have the same factor. On the samples of the present policy every ratio is 1, and most losses
        differ by their scale alone.
        """
        if self.by_entropy_MT is not None or other.by_entropy_MT is not None:
            return None
        mine_MT, others_MT = self.by_logprobs_MT, other.by_logprobs_MT
        square = float(others_MT.square().sum())
        factor = float((mine_MT * others_MT).sum()) / square if square > 0 else 0.0
        apart = (mine_MT - factor * others_MT).abs().max()
        return factor if bool(apart <= _ROUNDING * mine_MT.abs().max()) else None


def slopes(loss: Loss, frozen: Frozen, rows_M: Tensor, now: Forward) -> Slopes:
    """Differentiate a loss with respect to the log-probabilities and the entropy of ``now``."""
    logprobs_MT = now.logprobs_BT.detach().requires_grad_()
    entropy_MT = now.entropy_BT.detach().requires_grad_()
    leaves = replace(now, logprobs_BT=logprobs_MT, entropy_BT=entropy_MT)
    mask_MT = frozen.rollout.sequences.response_mask_BT[rows_M]
    counts = int(mask_MT.any(-1).sum()), int(mask_MT.sum())
    old, advantages_BT = frozen.old[loss.label], frozen.advantages[loss.label]
    batch = loss.learner.batch(frozen.rollout, old, advantages_BT, rows_M, leaves, counts)
    output = loss.learner.objective(batch)
    pulled: Sequence[Tensor | None] = (None, None)
    if output.loss.requires_grad:
        pulled = torch.autograd.grad(output.loss, (logprobs_MT, entropy_MT), allow_unused=True)
    return Slopes(torch.zeros_like(logprobs_MT) if pulled[0] is None else pulled[0], pulled[1], batch, output)


def vectors(weights: Weights, now: Forward, every: Sequence[Slopes]) -> Iterator[Tensor]:
    """Yield the gradient of each loss with respect to the weights, (P,), in order; multiples share one backward."""
    known: list[tuple[Slopes, Tensor]] = []
    for own in every:
        factors = ((own.times(other), vector_P) for other, vector_P in known)
        shared = next(((factor, vector_P) for factor, vector_P in factors if factor is not None), None)
        if shared is not None:
            yield shared[0] * shared[1]
            continue
        outputs, given = [now.logprobs_BT], [own.by_logprobs_MT]
        if own.by_entropy_MT is not None and now.entropy_BT.requires_grad:
            outputs, given = [*outputs, now.entropy_BT], [*given, own.by_entropy_MT]
        pulled = torch.autograd.grad(outputs, weights.ordered, given, retain_graph=True, allow_unused=True)
        vector_P = weights.vector(pulled)
        known.append((own, vector_P))
        yield vector_P


class Sums:
    """Sums of one loss's gradients over groups of mini-batches, and of their squared norms by block."""

    def __init__(self, weights: Weights, groups: int) -> None:
        self._slices = weights.slices
        self._sums_GP = torch.zeros(groups, weights.count, device=weights.ordered[0].device)
        self._squares = {name: np.zeros(groups) for name in weights.slices}
        self._counts_G = np.zeros(groups)

    def add(self, group: int, gradient_P: Tensor) -> None:
        """Add one mini-batch's gradient, (P,)."""
        norms = [torch.linalg.vector_norm(gradient_P[place], dtype=torch.float64) for place in self._slices.values()]
        for squares_G, square in zip(self._squares.values(), torch.stack(norms).square().tolist(), strict=True):
            squares_G[group] += square
        self._sums_GP[group] += gradient_P
        self._counts_G[group] += 1

    @cached_property
    def by_block(self) -> dict[str, Gradients]:
        """What the estimators need of the whole and of each block; to be read once everything is added."""
        squares = {WHOLE: np.sum(list(self._squares.values()), 0), **self._squares}
        products = self._products(self)
        return {name: Gradients(products[name], squares[name], self._counts_G) for name in squares}

    @property
    def is_finite(self) -> bool:
        """Whether every gradient so far was finite."""
        return all(bool(np.isfinite(squares).all()) for squares in self._squares.values())

    def paired(self, reference: "Sums") -> dict[str, Pair]:
        """Pair this loss with a reference that has the same groups: the whole and each block."""
        products = self._products(reference)
        return {name: Pair(own, reference.by_block[name], products[name]) for name, own in self.by_block.items()}

    def _products(self, other: "Sums") -> dict[str, np.ndarray]:
        """Return the inner products of the groups' sums, (G, G) each, of the whole and of each block, in float64."""
        products, groups = {}, len(self._counts_G)
        for name, place in self._slices.items():
            product_GG = torch.zeros(groups, groups, dtype=torch.float64, device=self._sums_GP.device)
            for first in range(place.start, place.stop, _AT_ONCE):  # all sums in float64 would not fit a cache
                part = slice(first, min(first + _AT_ONCE, place.stop))
                mine = self._sums_GP[:, part].double()
                others = mine if other is self else other._sums_GP[:, part].double()
                product_GG += mine @ others.T
            products[name] = product_GG.cpu().numpy()
        return {WHOLE: np.sum(list(products.values()), 0), **products}


# Called with every mini-batch: its rows, the shared forward, and the slopes by label.
Watch = Callable[[MicroBatch, Forward, Mapping[str, Slopes]], None]


def collect(
    losses: Sequence[Loss], frozen: Frozen, forced_LBFK: Tensor | None, groups: int, watch: Watch | None = None
) -> dict[str, Sums]:
    """Sum every loss's gradients on a frozen rollout at the model's present weights, by label.

    ``forced_LBFK`` are routes to replay, None for free routes. Groups are consecutive and of one size.
    """
    model = losses[0].trainer.model
    weights = Weights(model)
    forwards = next((loss for loss in losses if loss.learner.objective.entropy_bonus > 0), losses[0]).learner.forwards
    sums = {loss.label: Sums(weights, groups) for loss in losses}
    for number, (part,) in enumerate(frozen.minibatches):
        now = forwards(model, frozen.rollout, part, forced_LBFK)
        every = {loss.label: slopes(loss, frozen, part.rows_M, now) for loss in losses}
        if watch is not None:
            watch(part, now, every)
        group = number * groups // len(frozen.minibatches)
        for label, gradient_P in zip(every, vectors(weights, now, list(every.values())), strict=True):
            sums[label].add(group, gradient_P)
    return sums
