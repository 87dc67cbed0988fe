"""Advantages from the rewards of a rollout. Shapes: P prompts, G responses to each prompt.

An advantage is a class. Its object is called with the rewards of the responses and with their lengths in tokens, both
(P, G), and returns the advantages of the responses, (P, G).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupMean:
    """Â_i = r_i − mean_G, without the standard deviation: Dr. GRPO (2503.20783), MiniRL (2512.01374)."""

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Exactly 0 in a group of equal rewards."""
        return _centred(rewards_PG)


@dataclass(frozen=True)
class LeaveOneOut:
    """Â_i = r_i − mean of the other G − 1 rewards: RLOO (2402.14740); G/(G − 1) times ``GroupMean``."""

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Exactly 0 in a group of equal rewards; G must be at least 2."""
        responses = rewards_PG.shape[1]
        return _centred(rewards_PG) * responses / (responses - 1)


@dataclass(frozen=True)
class _Divided:
    """An advantage that is divided by a deviation; ``epsilon`` keeps the quotient finite."""

    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon keeps a group of equal rewards finite, epsilon > 0; got {self.epsilon}")


@dataclass(frozen=True)
class GroupMeanStd(_Divided):
    """Â_i = (r_i − mean_G) / (std_G + ε): GRPO (2402.03300, section 4.1.2), GSPO (2507.18071, eq. 6).

    The standard deviation is the sample standard deviation (divisor G − 1), as in TRL and verl; neither paper names a
    divisor. A group whose rewards are all equal has advantage 0: it carries no signal.
    """

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Exactly 0 in a group of equal rewards; G must be at least 2."""
        return _centred(rewards_PG) / (rewards_PG.std(-1, keepdim=True) + self.epsilon)


@dataclass(frozen=True)
class LeaveOneOutStd(_Divided):
    """Â_i = (r_i − b_i) / (std_i + ε): NeMo-RL's default.

    b_i and std_i are the mean and the standard deviation of the other G − 1 rewards. If the other rewards are all
    equal, the difference is not divided, as in NeMo-RL.
    """

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Raises ValueError for fewer than 3 responses: a single other reward has no standard deviation."""
        others = rewards_PG.shape[1] - 1
        if others < 2:
            raise ValueError("LeaveOneOutStd needs at least 3 responses to a prompt")
        differences_PGG = rewards_PG[:, None, :] - rewards_PG[:, :, None]  # every other reward less one's own
        mean_PG = differences_PGG.sum(-1) / others
        own_GG = torch.eye(others + 1, dtype=torch.bool, device=rewards_PG.device)
        squares_PG = (differences_PGG - mean_PG[..., None]).square().masked_fill(own_GG, 0.0).sum(-1)
        std_PG = (squares_PG / (others - 1)).sqrt()
        # The mean of equal rewards can miss them by a rounding error, so the bound is not 0.
        return torch.where(std_PG > 1e-6, -mean_PG / (std_PG + self.epsilon), -mean_PG)


@dataclass(frozen=True)
class GroupMeanBatchStd(_Divided):
    """Â_i = (r_i − mean_G) / (std + ε), std over all rewards of the rollout: LitePPO (2508.08221)."""

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Exactly 0 in a group of equal rewards."""
        return _centred(rewards_PG) / (rewards_PG.std() + self.epsilon)


@dataclass(frozen=True)
class BatchWhitened(_Divided):
    """Â = (x − mean) / √(var + ε), over all response tokens of the rollout: REINFORCE++ (2501.03262).

    x is the reward, or with ``subtract_group_mean`` the reward minus the mean of its group (REINFORCE++-baseline).
    Mean and variance count a response once for each of its tokens, as in verl and NeMo-RL; the variance is the
    sample variance, as in verl. The equation was read in the code of verl and NeMo-RL, not in the paper.
    """

    subtract_group_mean: bool = False
    epsilon: float = 1e-8

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Exactly 0 if all rewards of the rollout are equal; a group of equal rewards may have an advantage."""
        values_PG = _centred(rewards_PG) if self.subtract_group_mean else rewards_PG
        tokens = lengths_PG.sum()
        centred_PG = values_PG - (values_PG * lengths_PG).sum() / tokens
        # As in ``_centred``: the mean of equal values can miss them by a rounding error, and 1/√ε magnifies it.
        centred_PG = centred_PG.masked_fill((values_PG == values_PG[0, 0]).all(), 0.0)
        return centred_PG * self._square((centred_PG.square() * lengths_PG).sum(), tokens).rsqrt()

    def _square(self, squares: Tensor, tokens: Tensor) -> Tensor:
        """Return the square of the divisor, from the sum of the squared deviations of all tokens."""
        return squares / (tokens - 1) + self.epsilon


@dataclass(frozen=True)
class BatchWhitenedPopulation(BatchWhitened):
    """Â = (x − mean) / √max(var, ε), where var is the population variance: ``BatchWhitened`` as NeMo-RL computes it.

    NeMo-RL 0.7, nemo_rl/algorithms/advantage_estimator.py, ReinforcePlusPlusAdvantageEstimator.
    """

    def _square(self, squares: Tensor, tokens: Tensor) -> Tensor:
        return (squares / tokens).clamp(min=self.epsilon)


@dataclass(frozen=True)
class PlusMinus:
    """Â = 2 r − 1, without a baseline: turns a score of 0 or 1 into TOPR's reward of ±1 (2503.14286)."""

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """A group of equal rewards has an advantage here."""
        return 2 * rewards_PG - 1


def _centred(rewards_PG: Tensor) -> Tensor:
    """r_i − mean_G; exactly 0 for equal rewards, whose mean can miss them by a rounding error, and 1/ε magnifies it."""
    equal_P1 = (rewards_PG == rewards_PG[:, :1]).all(-1, keepdim=True)
    return (rewards_PG - rewards_PG.mean(-1, keepdim=True)).masked_fill(equal_P1, 0.0)
