"""What is minimised: a loss, under a correction, with a KL term to the cold start and an entropy bonus.

    −J + β · aggregate(KL_t) − η · aggregate(H_t),   J with the correction's weight on each token

The KL term and the bonus are aggregated as the loss is, and not weighted by the correction (as TRL does).
"""

import math
from dataclasses import dataclass, replace

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput
from steadymoe.algorithms.corrections import Correction, Uncorrected
from steadymoe.algorithms.loss import PolicyLoss, Traits, one_of


@dataclass(frozen=True, kw_only=True)
class KL:
    """The pull to the cold start: β, its estimator, and whether it is in the ``loss`` or in the ``reward``.

    ``k1``, ``k2`` and ``k3`` are those of ``ops.kl_estimate``. In the loss they are differentiated as they
    stand: on policy the gradient of k2 is that of KL(π‖π_ref), that of k1 vanishes in the mean, and that of k3
    is the gradient of KL(π_ref‖π). In the reward, β times the sum over a response is subtracted before advantages.
    """

    coefficient: float = 0.0
    estimator: str = "k3"
    place: str = "loss"

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient < math.inf:
            raise ValueError(f"kl.coefficient must be at least 0 and finite; got {self.coefficient}")
        one_of("kl.estimator", self.estimator, ("k1", "k2", "k3"))
        one_of("kl.place", self.place, ("loss", "reward"))


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss and what can be added to any loss."""

    loss: PolicyLoss
    correction: Correction
    kl: KL
    entropy_bonus: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.loss, PolicyLoss):
            raise ValueError(f"a loss is a steadymoe.algorithms.PolicyLoss; got {type(self.loss).__name__}")
        if self.loss.initial_state() and not self.loss.traits.whole_minibatch:
            raise ValueError(
                f"{type(self.loss).__name__} has a state, which follows a whole mini-batch: its traits must say so"
            )
        if not 0 <= self.entropy_bonus < math.inf:
            raise ValueError(f"entropy_bonus must be at least 0 and finite; got {self.entropy_bonus}")
        if self.loss.traits.corrects_for_sampler and not isinstance(self.correction, Uncorrected):
            raise ValueError(
                f"{type(self.loss).__name__} already has its ratio to the sampling policy: another correction would "
                "count the discrepancy twice; use correction=none"
            )

    @property
    def traits(self) -> Traits:
        """Those of the loss, but that KL and entropy give a gradient where the advantage gives none."""
        added = self.entropy_bonus > 0 or (self.kl.coefficient > 0 and self.kl.place == "loss")
        traits = self.loss.traits
        return replace(traits, zero_advantage_is_free=traits.zero_advantage_is_free and not added)

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss on one mini-batch or a part of one; ``metrics`` also has the correction's ``weights_BT``."""
        weights_BT = self.correction.weights(batch)
        output = self.loss(batch if weights_BT is None else replace(batch, weights_BT=weights_BT))
        loss, metrics = output.loss, dict(output.metrics)
        if weights_BT is not None:
            metrics["weights_BT"] = weights_BT
        if self.kl.coefficient > 0 and self.kl.place == "loss":
            kl_BT = ops.kl_estimate(batch.logprobs_BT, batch.get("reference_logprobs_BT"), self.kl.estimator)
            loss = loss + self.kl.coefficient * self.loss.aggregate(kl_BT, batch)
        if self.entropy_bonus > 0:
            loss = loss - self.entropy_bonus * self.loss.aggregate(batch.get("entropy_BT"), batch)
        return LossOutput(loss, metrics, output.state)
